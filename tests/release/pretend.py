# SPDX-License-Identifier: Apache-2.0
"""The CPU backend of a release, taken for a CUDA device: what it asks of the device is answered, kernels stand in.

Only what is not Python is replaced: the platform's answers, and ops of the release's compiled library by functions
that return what they would in shape and type. Tensors stay on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

UNITS = 4  # processors of the device


def _like(x, *_, **__):
    return torch.empty_like(x)


def _marlin_repack(b_q_weight, *rest, **named):
    """[K, N] packed anyhow -> Marlin's [K / 16, N * bits / 2]; of every expert, where the first dimension is theirs."""
    sizes = [int(r) for r in rest if not isinstance(r, torch.Tensor)]
    size_k, size_n, bits = (named[n] if n in named else sizes.pop(0) for n in ("size_k", "size_n", "num_bits"))
    return torch.zeros((*b_q_weight.shape[:-2], size_k // 16, size_n * bits // 2), dtype=torch.int32)


def _scaled_fp8_quant(input, scale=None, *_, **more):
    per_token = more.get("use_per_token_if_dynamic")
    made = torch.ones((input.shape[0], 1) if per_token else 1, dtype=torch.float32)
    return input.to(torch.float8_e4m3fn), made if scale is None else scale


def _scaled_fp4_quant(input, input_global_scale, *_, **__):
    rows, columns = input.reshape(-1, input.shape[-1]).shape
    padded = (-(-rows // 128) * 128, -(-columns // 64) * 4)
    return torch.zeros((rows, columns // 2), dtype=torch.uint8), torch.zeros(padded, dtype=torch.float8_e4m3fn)


# By name in `vllm._custom_ops`: the boundary between the release's Python and its library.
KERNELS: dict[str, Callable] = {
    "gptq_marlin_repack": _marlin_repack,
    "awq_marlin_repack": _marlin_repack,
    "gptq_marlin_moe_repack": _marlin_repack,
    "awq_marlin_moe_repack": _marlin_repack,
    "marlin_int4_fp8_preprocess": _like,
    "scaled_fp8_quant": _scaled_fp8_quant,
    "scaled_fp4_quant": _scaled_fp4_quant,
    "cutlass_encode_and_reorder_int4b_grouped": lambda packed: (
        torch.empty_like(packed),
        torch.zeros((packed.shape[0], 3), dtype=torch.int64),
    ),
    "cutlass_pack_scale_fp8": lambda scales: scales.unsqueeze(-1).repeat(*[1] * scales.dim(), 8),
    "cutlass_scaled_mm_supports_fp4": lambda capability: True,
    "cutlass_scaled_mm_supports_fp8": lambda capability: True,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: True,
    "cutlass_group_gemm_supported": lambda capability: True,
}


class OnDevice(TorchFunctionMode):
    """What is asked to be on CUDA is made on the CPU, and says that it is on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*[torch.device("cpu") if _names_cuda(a) else a for a in args], **kwargs)


def _names_cuda(argument: object) -> bool:
    return isinstance(argument, (str, torch.device)) and str(argument).startswith("cuda")


# Of FlashInfer, which is not installed: what is imported from it to lay out weights. Each keeps shape and type.
FLASHINFER = (
    "reorder_rows_for_gated_act_gemm",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
)
# Of its part for TRTLLM: the order of rows.
FLASHINFER_CORE = ("_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache")


class Launched:
    """A Triton kernel: what it would have written stays as it is."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


def import_below(package: str, wanted: Callable[[str], bool]) -> None:
    """Import the modules below `package` that `wanted` takes by name, as far as what they need is installed here."""
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if wanted(found.name):
            with contextlib.suppress(ImportError, AssertionError, RuntimeError):
                importlib.import_module(found.name)


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """The platform says that it is `device`: `cpu` as it is, `arm`, `xpu`, `rocm`, `sm90`, `sm120 with FlashInfer`.

    Not all of a release may be imported within; `import_below` comes first.
    """
    from vllm.platforms import current_platform
    from vllm.platforms.interface import CpuArchEnum, DeviceCapability, PlatformEnum

    device, _, library = device.partition(" with ")
    kind = "cuda" if device.startswith("sm") else device
    answers: dict[str, object] = {}
    if kind == "arm":
        answers = dict(get_cpu_architecture=classmethod(lambda cls: CpuArchEnum.ARM))
    elif kind != "cpu":
        capability = DeviceCapability(*divmod(int(device[2:]), 10)) if kind == "cuda" else DeviceCapability(9, 5)
        answers = dict(
            _enum=PlatformEnum[kind.upper()],
            device_name=kind,
            get_device_capability=classmethod(lambda cls, device_id=0: capability),
            get_device_name=classmethod(lambda cls, device_id=0: "stand-in"),
            get_device_total_memory=classmethod(lambda cls, device_id=0: 32 << 30),
            num_compute_units=classmethod(lambda cls, device_id=0: UNITS),
            supports_mx=classmethod(lambda cls: kind == "rocm"),
            supports_fp8=classmethod(lambda cls: capability >= (8, 9)),
        )
    real = type(current_platform)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as within:
        if kind in ("cuda", "rocm"):
            _stand_in(patch)
            if kind == "rocm":
                _with_aiter(patch)
            if library == "FlashInfer":
                _with_flashinfer(patch)
            within.enter_context(OnDevice())
            within.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            current_platform.__class__ = type("Pretended", (real,), answers)
            yield
        finally:
            current_platform.__class__ = real


def _stand_in(patch: pytest.MonkeyPatch) -> None:
    """For kernels, for the device as torch tells of it, and for libraries that lay out weights."""
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils

    from vllm import _custom_ops

    # Some modules have taken a kernel by its name when they were imported.
    kernels = {id(getattr(_custom_ops, name)): name for name in KERNELS if hasattr(_custom_ops, name)}
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.")]:
        for name, value in list(vars(module).items()):
            if id(value) in kernels:
                patch.setattr(module, name, KERNELS[kernels[id(value)]])
    patch.setattr(mxfp4_utils, "_downcast_to_mxfp", Launched(), raising=False)
    triton = getattr(fused_moe.fused_moe, "TritonExperts", None)
    if triton is not None and not hasattr(fused_moe, "TritonExperts"):  # exported only beside Triton
        patch.setattr(fused_moe, "TritonExperts", triton, raising=False)
    properties = SimpleNamespace(multi_processor_count=UNITS)
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for module in (torch.cuda, torch.accelerator):
        for name in ("synchronize", "empty_cache"):
            patch.setattr(module, name, lambda *_: None, raising=False)
    patch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    laying_out = dict.fromkeys(FLASHINFER, _like) | {"nvfp4_block_scale_interleave": torch.flatten}
    patch.setitem(sys.modules, "flashinfer", SimpleNamespace(**laying_out))
    rows = SimpleNamespace(**dict.fromkeys(FLASHINFER_CORE, lambda cache, x, *_, **__: torch.arange(x.shape[0])))
    patch.setitem(sys.modules, "flashinfer.fused_moe.core", rows)
    patch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__version__="0.49"))


def _with_aiter(patch: pytest.MonkeyPatch) -> None:
    from vllm._aiter_ops import rocm_aiter_ops

    patch.setattr(rocm_aiter_ops, "is_fused_moe_enabled", lambda: True)
    patch.setattr(rocm_aiter_ops, "shuffle_weights", lambda *tensors, **_: tensors)


def _with_flashinfer(patch: pytest.MonkeyPatch) -> None:
    """The release finds the library wherever it asks for it."""
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm.")]:
        for name in list(vars(module)):
            if name.startswith("has_flashinfer"):
                patch.setattr(module, name, lambda: True)
