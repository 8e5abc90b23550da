# SPDX-License-Identifier: Apache-2.0
"""The release's own processing functions of experts, with weights to give them: random ones, and extreme scales."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

EXPERTS, HIDDEN, INNER = 6, 256, 128


class Case(NamedTuple):
    """`run` takes the weights (all experts first) and gives everything that the release makes of them."""

    weights: tuple[torch.Tensor, ...]
    run: Callable[..., list[torch.Tensor]]


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8, device: str, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=g)
    return raw.view(dtype).to(device)


def scales(*shape: int, device: str, seed: int) -> torch.Tensor:
    """fp8 block scales between the smallest and the largest that there are, and zero."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=g)  # 0x7F would be NaN
    return found.view(torch.float8_e4m3fn).to(device)


def gptq(device: str, act_order: bool) -> Case:
    from vllm import _custom_ops as ops

    w13 = random_bytes(EXPERTS, HIDDEN // 8, 2 * INNER, dtype=torch.int32, device=device, seed=1)
    w2 = random_bytes(EXPERTS, INNER // 8, HIDDEN, dtype=torch.int32, device=device, seed=2)

    def order(k: int) -> torch.Tensor:
        if not act_order:
            return torch.empty((EXPERTS, 0), dtype=torch.int32, device=device)
        g = torch.Generator().manual_seed(k)
        return torch.stack([torch.randperm(k, generator=g) for _ in range(EXPERTS)]).to(torch.int32).to(device)

    if act_order and not takes_order():
        pytest.skip("this release knows no act-order")

    def run(w13, w2):
        return [
            ops.gptq_marlin_moe_repack(w13, *[order(HIDDEN)] * takes_order(), HIDDEN, 2 * INNER, 4),
            ops.gptq_marlin_moe_repack(w2, *[order(INNER)] * takes_order(), INNER, HIDDEN, 4),
        ]

    return Case((w13, w2), run)


def takes_order() -> bool:
    """Whether the release's repack takes the order of columns (v0.32.0 has dropped it)."""
    from vllm import _custom_ops as ops

    return "perm" in inspect.signature(ops.gptq_marlin_moe_repack).parameters


def awq(device: str) -> Case:
    from vllm import _custom_ops as ops

    w13 = random_bytes(EXPERTS, HIDDEN, 2 * INNER // 8, dtype=torch.int32, device=device, seed=3)
    w2 = random_bytes(EXPERTS, INNER, HIDDEN // 8, dtype=torch.int32, device=device, seed=4)
    none = [torch.empty((EXPERTS, 0), dtype=torch.int32, device=device)] * takes_order()

    def run(w13, w2):
        return [
            ops.awq_marlin_moe_repack(w13, *none, HIDDEN, 2 * INNER, 4),
            ops.awq_marlin_moe_repack(w2, *none, INNER, HIDDEN, 4),
        ]

    return Case((w13, w2), run)


def fp4_weights(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        random_bytes(EXPERTS, 2 * INNER, HIDDEN // 2, device=device, seed=5),
        random_bytes(EXPERTS, HIDDEN, INNER // 2, device=device, seed=6),
    )


def layer(**more: object) -> torch.nn.Module:
    """What the release's functions ask of a layer."""
    made = torch.nn.Module()
    sizes = dict(num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=INNER)
    moe = SimpleNamespace(
        num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_dim=HIDDEN, intermediate_size_per_partition=INNER
    )
    for name, value in {**sizes, "params_dtype": torch.bfloat16, "moe_config": moe, **more}.items():
        setattr(made, name, value)
    return made


def nvfp4(device: str) -> Case:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin

    s13 = scales(EXPERTS, 2 * INNER, HIDDEN // 16, device=device, seed=7)
    s2 = scales(EXPERTS, HIDDEN, INNER // 16, device=device, seed=8)
    of_expert = torch.tensor([1e-4, 3.0, 1.0, 2e-2, 7e-3, 0.5], device=device)

    def run(w13, w2):
        out = prepare_nvfp4_moe_layer_for_marlin(
            layer(), w13, s13.clone(), of_expert.clone(), w2, s2.clone(), of_expert.clone(), True
        )
        return list(out)

    return Case(fp4_weights(device), run)


def mxfp4(device: str) -> Case:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_fp4_layer_for_marlin

    s13 = random_bytes(EXPERTS, 2 * INNER, HIDDEN // 32, device=device, seed=9) % 200 + 20
    s2 = random_bytes(EXPERTS, HIDDEN, INNER // 32, device=device, seed=10) % 200 + 20
    bias = torch.linspace(-1, 1, EXPERTS * 2 * INNER, device=device, dtype=torch.bfloat16).view(EXPERTS, -1)

    def run(w13, w2):
        held = layer()
        for name, value in {"w13_weight": w13, "w2_weight": w2, "w13_weight_scale": s13, "w2_weight_scale": s2}.items():
            held.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        held.w13_bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
        prepare_moe_fp4_layer_for_marlin(held)
        return [held.w13_weight, held.w2_weight, held.w13_weight_scale, held.w2_weight_scale, held.w13_bias]

    return Case(fp4_weights(device), run)


def reordered(device: str) -> Case:
    """FlashInfer CUTLASS wants [w3, w1] where checkpoints hold [w1, w3]."""
    import vllm.model_executor.layers.fused_moe  # noqa: F401  v0.18.0 imports these in a circle, and only so round
    from vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe import reorder_w1w3_to_w3w1

    s13 = scales(EXPERTS, 2 * INNER, HIDDEN // 16, device=device, seed=7)

    def run(w13, w2):
        w13, s = reorder_w1w3_to_w3w1(w13, s13.clone())
        return [w13, w2, s]

    return Case(fp4_weights(device), run)


def swapped(device: str) -> Case:
    import vllm.model_executor.layers.fused_moe  # noqa: F401  as above
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

    return Case(fp4_weights(device), lambda w13, w2: [swap_w13_to_w31(w13), w2])


PLAIN = {"FlashInfer CUTLASS": reordered, "w13 to w31": swapped}
MARLIN = {
    "GPTQ and WNA16": lambda device: gptq(device, act_order=False),
    "GPTQ, act-order": lambda device: gptq(device, act_order=True),
    "AWQ": awq,
    "NVFP4": nvfp4,
    "MXFP4 with biases": mxfp4,
}


def in_chunks(case: Case, device: str, limit: int) -> list[torch.Tensor]:
    """What `case` makes of its weights, these in host memory, processed at most `limit` bytes of them at a time."""
    from vllm.expert_offload.deferred import Deferred, Tape
    from vllm.expert_offload.repack import chunks

    tape = Tape(EXPERTS, torch.device(device))
    most = 0

    def reader(host: torch.Tensor):
        def read(first: int, last: int) -> torch.Tensor:
            nonlocal most
            part = host[first:last].to(device, copy=True)
            most = max(most, part.nbytes)
            return part

        return read

    with tape.writing():
        found = case.run(*(tape.source(w, reader(w.cpu())) for w in case.weights))
    assert tape.why is None, tape.why
    out = []
    for made in found:
        if isinstance(made, Deferred):
            program, row = tape.program(made), made.nbytes // EXPERTS
            parts = [tape.play(a, b, program)[made.number] for a, b in chunks(EXPERTS, row, limit)]
            assert len(parts) > 1
            made = torch.cat(parts)
        out.append(made)
    assert 0 < most <= limit
    return out


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself, minus zero is not zero."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
