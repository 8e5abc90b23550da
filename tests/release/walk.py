# SPDX-License-Identifier: Apache-2.0
"""One expert layer of a release, built from a checkpoint's quantization config and processed, and what it holds."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace

import moe
import torch
from schemes import Scheme
from torch import nn

EXPERTS, HIDDEN, WIDTH = 6, 512, 256  # no other dimension of a tensor is 6
VERSION = tuple(int(part) for part in importlib.metadata.version("vllm").split("+")[0].split("."))
ABSTRACT = "FusedMoEMethodBase"


def classes() -> dict[str, type]:
    """Every class of a release that quantizes experts, by name, whatever module it is in."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    found, todo = {}, [FusedMoEMethodBase]
    while todo:
        for cls in todo.pop().__subclasses__():
            found[cls.__name__] = cls
            todo.append(cls)
    return found


def config_of(scheme: Scheme) -> object | None:
    """The release's quantization config of a checkpoint; None: not quantized."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    if scheme.quantization is None:
        return None
    if scheme.quantization == "online":
        from vllm.config.quantization import QuantizationConfigArgs
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        return OnlineQuantizationConfig(args=QuantizationConfigArgs(**scheme.config))
    return get_quantization_config(scheme.quantization).from_config(scheme.config)


@contextlib.contextmanager
def engine() -> Iterator[object]:
    """The release's configuration as a worker has it, for a model of bfloat16."""
    dtype = torch.get_default_dtype()
    with moe.engine() as config:
        of_checkpoint = SimpleNamespace(model_type="none")
        config.model_config = SimpleNamespace(
            dtype=torch.bfloat16,
            hf_config=of_checkpoint,
            hf_text_config=of_checkpoint,
            quantization=None,
            quantization_config=None,
            enforce_eager=True,
            is_moe=True,
            model="none",
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield config
        finally:
            torch.set_default_dtype(dtype)
            config.model_config = None


def build(config, scheme: Scheme) -> tuple[nn.Module, nn.Module]:
    """The layer that a model calls, and the module in it that owns the experts' weights."""
    import vllm.model_executor.layers.fused_moe as fused_moe

    config.compilation_config.static_forward_context.clear()
    getattr(config.compilation_config, "static_all_moe_layers", []).clear()
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    layer = make(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        params_dtype=torch.bfloat16,
        renormalize=True,
        prefix="model.layers.0.experts",
        quant_config=config_of(scheme),
        **(scheme.layer or {}),
    )
    owner = next(m for m in layer.modules() if hasattr(m, "quant_method") and m._parameters)
    return layer, owner


def fill(owner: nn.Module) -> None:
    """Weights and scales that are all one, as if they had been loaded."""
    for name, parameter in owner._parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            parameter.materialize((EXPERTS, HIDDEN, WIDTH))
        if parameter.device.type == "meta":  # quantized while loading, a layer at a time
            real = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
            owner._parameters[name] = parameter = real
        parameter.data.fill_(1)


def process(owner: nn.Module) -> None:
    """The release's own processing after loading."""
    owner.quant_method.process_weights_after_loading(owner)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Within, `tensors` finds those alone that are made from now on, and quickly."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def tensors() -> list[torch.Tensor]:
    """All that the interpreter knows."""
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


PLAIN = (str, bytes, int, float, bool, complex, type(None), type, ModuleType, torch.dtype, torch.device)


def held(root: object) -> dict[str, torch.Tensor]:
    """Each tensor that can be reached from `root` by attributes and entries, once, by the shortest path there."""
    found: dict[str, torch.Tensor] = {}
    todo, seen = [("", root)], set()
    for path, value in todo:  # grows
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), torch.Tensor):
            found[path] = value
        todo += [(f"{path}.{name}".lstrip("."), below) for name, below in _below(value)]
    return found


def _below(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(index), entry) for index, entry in enumerate(value))
    elif issubclass(type(value), torch.Tensor):
        yield "_base", value._base
        yield from list(getattr(value, "__dict__", {}).items())
    elif isinstance(value, functools.partial):
        yield from _below({**dict(enumerate(value.args)), **value.keywords})
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells):
            with contextlib.suppress(ValueError):  # not filled yet
                yield name, cell.cell_contents
    elif not isinstance(value, BuiltinFunctionType):
        yield from list(getattr(value, "__dict__", {}).items())
        for cls in type(value).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if hasattr(value, name):
                    yield name, getattr(value, name)
