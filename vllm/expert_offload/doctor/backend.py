# SPDX-License-Identifier: Apache-2.0
"""Which kernels the experts will run on, as the pins choose them.

Read in v0.17.1, v0.18.0, v0.26.0 and v0.32.0 (`fused_moe/oracle/*.py`, and each kernel's `_supports_current_device` and
`_supports_quant_scheme`), for one server without expert or data parallelism; compute capabilities 8.0 and up. What
depends on more than the card and the method is not told.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any

from .asked import Asked
from .gpu import used
from .lines import OK, WARN, Line
from .machine import Machine, version
from .model import find

NAME = "MoE backend"
_FLASHINFER_HINT = "FlashInfer's kernels can't be had (no flashinfer-cubin, no nvcc)"


def method(config: Mapping[str, Any]) -> str:
    """One of nvfp4, nvfp4a16, fp8 block, fp8, int4, mxfp4, none; empty when it can't be told."""
    if not config:
        return "none"
    name, algorithm = str(config.get("quant_method", "")), str(config.get("quant_algo", "")).upper()
    if name in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
        return "int4" if config.get("bits", config.get("w_bit", 4)) == 4 else ""
    if name == "fp8":
        return "fp8 block" if config.get("weight_block_size") else "fp8"
    if name == "mxfp4":
        return "mxfp4"
    if name.startswith("modelopt"):
        return {"NVFP4": "nvfp4", "FP8": "fp8"}.get(algorithm, "nvfp4" if name == "modelopt_fp4" else "")
    return _compressed(config) if name == "compressed-tensors" else ""


def _compressed(config: Mapping[str, Any]) -> str:
    """compressed-tensors: by the first group's weights; several different groups can't be told apart here."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
    kinds = set()
    for group in groups:
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (bits, kind) == (4, "float"):
            kinds.add("nvfp4" if inputs else "nvfp4a16")
        elif (bits, kind) == (8, "float"):
            kinds.add("fp8 block" if weights.get("strategy") == "block" else "fp8")
        elif (bits, kind) == (4, "int"):
            kinds.add("int4" if not inputs else "")
        else:
            kinds.add("")
    return kinds.pop() if len(kinds) == 1 else ""


def chosen(kind: str, capability: tuple[int, int], release: tuple[int, ...], flashinfer: bool) -> str:
    """The backend's name in vLLM's log; "" when it can't be told."""
    major, late = capability[0], release >= (0, 32)
    if capability < (8, 0) or not release:
        return ""
    if kind == "nvfp4":
        if major == 10:
            return "FLASHINFER_TRTLLM" if flashinfer else "VLLM_CUTLASS"
        if major in (11, 12):
            # From v0.26.0 on FlashInfer's is not taken on 11.0.
            return "FLASHINFER_CUTLASS" if flashinfer and (major == 12 or release < (0, 26)) else "VLLM_CUTLASS"
        return "HUMMING" if major == 9 and late else "MARLIN"
    if kind in ("int4", "nvfp4a16"):
        return "" if kind == "nvfp4a16" and major >= 9 else "MARLIN"
    if kind == "fp8 block":
        return "MARLIN" if capability < (8, 9) else "TRITON" if capability in ((8, 9), (9, 0)) or major == 12 else ""
    if kind == "fp8":
        return "MARLIN" if capability < (8, 9) else ""
    if kind == "none":
        if major in (8, 9) or (release < (0, 26) and major != 10):
            return "TRITON"
        return {10: "FLASHINFER_TRTLLM", 12: "FLASHINFER_CUTLASS"}.get(major, "") if flashinfer else "TRITON"
    return "MARLIN" if kind == "mxfp4" and major == 8 else ""


def flashinfer_usable(machine: Machine) -> bool:
    """As the pins' `has_flashinfer`: the package, and either its compiled kernels or a compiler for them."""
    there = [bool(importlib.util.find_spec(name)) for name in ("flashinfer", "flashinfer_cubin")]
    return there[0] and (there[1] or shutil.which("nvcc", path=machine.env("PATH")) is not None)


def check(machine: Machine, asked: Asked) -> Line:
    """The backend for the chosen model on the first card."""
    model, cards = find(machine, asked), used(machine, asked)
    if machine.cpu_backend:
        return Line(NAME, OK, "the CPU backend's own")
    if asked.backend != "auto":
        return Line(NAME, OK, f"{asked.backend}, as asked by --moe-backend")
    if not model.config:
        return Line(NAME, WARN, "not known: no config.json of the model is here", "Its log will say: 'MoE backend'")
    kind = method(model.quantization)
    if not cards:
        return Line(NAME, WARN, f"experts are {kind or 'of a kind not in the table'}; no GPU", "See the GPU's line")
    flashinfer = flashinfer_usable(machine)
    name = chosen(kind, cards[0].capability, version(machine.release), flashinfer)
    on = f"{kind or 'unknown quantization'} on compute capability {cards[0].capability[0]}.{cards[0].capability[1]}"
    if not name:
        step = "The server's log says it ('MoE backend'); --moe-backend chooses one"
        return Line(NAME, WARN, f"can't be told for {on}, vllm {machine.release or '(version unclear)'}", step)
    why = "" if flashinfer or cards[0].capability < (10, 0) else f"; {_FLASHINFER_HINT}"
    return Line(NAME, OK, f"{name}, for {on}{why}")
