#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quantize the routed experts of a small Qwen3-MoE checkpoint, or give it its plain weights back.

    tools/quantize.py w4a16 SRC OUT    4-bit integers, a scale per 128 inputs; activations stay bf16
    tools/quantize.py nvfp4 SRC OUT    4-bit floats, an fp8 scale per 16 inputs; activations quantized at run time
    tools/quantize.py bf16  SRC OUT    plain bf16, as any machine can serve it
    tools/quantize.py nats  SRC TEXT   nats per byte of the model on a text file (needs transformers)

SRC may hold any of the three forms. The quantized ones are compressed-tensors checkpoints (`pack-quantized` and
`nvfp4-pack-quantized`) that vLLM loads as they are. Attention, router, norms and embeddings, a tenth of the weights,
are never quantized. Needs torch and safetensors; the checkpoint is held in memory whole.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

EXPERT = re.compile(r"(?P<expert>.*\.experts\.\d+)\.(?P<matrix>gate|up|down)_proj\.weight(?P<packed>_packed)?")
# What is not quantized; vLLM matches these against its own module names.
IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]

W4_GROUP = 128
# The largest weight of a group need not be the end of its range: clipping a little often costs less than it gains.
W4_CLIPPING = [1.0 - 0.02 * step for step in range(21)]

FP4_GROUP = 16
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_MAX, FP8_MAX = 6.0, 448.0
# The kernel scales each group of 16 activations by itself; the one global scale only says where fp8's range for those
# scales lies. Nothing is clipped up to this value, and groups down to a 28,000th of it keep their precision: tiny-moe's
# reach from 0.05 to 180.
ACTIVATION_LIMIT = 512.0


class Unsuitable(Exception):
    """The checkpoint can't be converted; the text says why."""


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes (0 to 15) a byte, the first in the low half. Read as int32 this is compressed-tensors' int4 layout."""
    codes = codes.to(torch.uint8)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    flat = packed.contiguous().view(torch.uint8)
    return torch.stack((flat & 15, flat >> 4), dim=-1).flatten(1)


# -- W4A16 -----------------------------------------------------------------------------------------------------------


def quantize_w4(weight: torch.Tensor) -> Tensors:
    """Symmetric int4 with a bf16 scale per group; for each group, of several scales the one with the least error."""
    groups = weight.float().unflatten(1, (-1, W4_GROUP))
    widest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7
    scale, codes, least = widest, groups, torch.full_like(widest, torch.inf)
    for ratio in W4_CLIPPING:
        tried = (widest * ratio).bfloat16().float()
        rounded = (groups / tried).round().clamp(-8, 7)
        error = (rounded * tried - groups).square().sum(-1, keepdim=True)
        better = error < least
        scale, codes = torch.where(better, tried, scale), torch.where(better, rounded, codes)
        least = torch.where(better, error, least)
    return {
        "weight_packed": pack_nibbles(codes.flatten(1) + 8).view(torch.int32),
        "weight_scale": scale.squeeze(-1).bfloat16(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def dequantize_w4(parts: Tensors) -> torch.Tensor:
    codes = unpack_nibbles(parts["weight_packed"]).float() - 8
    return (codes.unflatten(1, (-1, W4_GROUP)) * parts["weight_scale"].float().unsqueeze(-1)).flatten(1)


# -- NVFP4 -----------------------------------------------------------------------------------------------------------


def quantize_fp4(weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """E2M1 with an fp8 scale per group, those scaled by one number so that `largest` meets the end of both ranges."""
    global_scale = FP8_MAX * FP4_MAX / largest.float()
    groups = weight.float().unflatten(1, (-1, FP4_GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / FP4_MAX * global_scale).clamp(min=2**-9, max=FP8_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    reduced = (groups / (scale.float() / global_scale)).flatten(1)
    codes = torch.bucketize(reduced.abs(), (FP4_VALUES[1:] + FP4_VALUES[:-1]) / 2)
    return {
        "weight_packed": pack_nibbles(codes + 8 * (reduced < 0)),
        "weight_scale": scale.squeeze(-1),
        "weight_global_scale": global_scale.reshape(1),
        "input_global_scale": torch.tensor([FP8_MAX * FP4_MAX / ACTIVATION_LIMIT]),
    }


def dequantize_fp4(parts: Tensors) -> torch.Tensor:
    codes = unpack_nibbles(parts["weight_packed"])
    values = FP4_VALUES[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    return (values.unflatten(1, (-1, FP4_GROUP)) * scale.unsqueeze(-1)).flatten(1)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def form_of(config: dict) -> str:
    """Which of the three forms a checkpoint is in, by its configuration."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return "bf16"
    forms = {"pack-quantized": "w4a16", "nvfp4-pack-quantized": "nvfp4"}
    if quantization.get("format") not in forms:
        raise Unsuitable(f"it is quantized as {quantization.get('format') or quantization.get('quant_method')}")
    return forms[quantization["format"]]


def plain(tensors: Tensors, form: str) -> Tensors:
    """The same checkpoint with every expert matrix in bf16."""
    if form == "bf16":
        return dict(tensors)
    dequantize = dequantize_w4 if form == "w4a16" else dequantize_fp4
    out: Tensors = {}
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found and found["packed"]:
            matrix = name.removesuffix("weight_packed")
            parts = {key.removeprefix(matrix): t for key, t in tensors.items() if key.startswith(matrix)}
            out[f"{matrix}weight"] = dequantize(parts).bfloat16()
        elif not re.search(r"\.experts\.\d+\.", name):
            out[name] = tensor
    return out


def quantized(tensors: Tensors, form: str) -> Tensors:
    """A plain checkpoint with every expert matrix in `form`."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not (found := EXPERT.fullmatch(name)):
            out[name] = tensor
            continue
        if tensor.shape[1] % W4_GROUP:
            raise Unsuitable(f"{name} has {tensor.shape[1]} inputs, which is no multiple of {W4_GROUP}")
        if form == "w4a16":
            parts = quantize_w4(tensor)
        else:
            # Kernels run gate and up as one matrix with one global scale: the two must agree on it.
            fused = ("gate", "up") if found["matrix"] != "down" else ("down",)
            largest = torch.stack([tensors[f"{found['expert']}.{m}_proj.weight"].abs().amax() for m in fused]).amax()
            parts = quantize_fp4(tensor, largest.clamp(min=1e-6))
        out |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
    return out


def quantization_config(form: str) -> dict:
    """compressed-tensors' description of what `quantized` wrote."""
    weights: dict = {"num_bits": 4, "symmetric": True, "dynamic": False, "observer": "minmax"}
    if form == "w4a16":
        layout, activations = "pack-quantized", None
        weights |= {"type": "int", "strategy": "group", "group_size": W4_GROUP}
    else:
        layout = "nvfp4-pack-quantized"
        weights |= {"type": "float", "strategy": "tensor_group", "group_size": FP4_GROUP}
        activations = weights | {"dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": layout}},
        "ignore": IGNORE,
    }


def load(source: Path) -> tuple[dict, Tensors]:
    """(config.json, all tensors) of a checkpoint folder."""
    files = sorted(source.glob("*.safetensors"))
    if not files or not (source / "config.json").is_file():
        raise Unsuitable("it holds no config.json with *.safetensors beside it")
    return json.loads((source / "config.json").read_text()), {k: t for f in files for k, t in load_file(f).items()}


def convert(source: Path, out: Path, form: str) -> None:
    """Write `source` in `form` to `out`; its other files (tokenizer, templates) are copied."""
    if source.resolve() == out.resolve():
        raise Unsuitable("SRC and OUT are the same folder")
    config, tensors = load(source)
    if (before := form_of(config)) != form:
        config.pop("quantization_config", None)
        tensors = plain(tensors, before)
    if form not in ("bf16", before):
        config["quantization_config"] = quantization_config(form)
        tensors = quantized(tensors, form)
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copyfile(file, out / file.name)
    weights = out / "model.safetensors"
    save_file({name: t.contiguous() for name, t in tensors.items()}, weights, {"format": "pt"})
    weights.chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{source} ({before}) -> {out} ({form}): {len(tensors)} tensors, {size / 1e6:.1f} MB")


@torch.inference_mode()
def nats_per_byte(source: Path, text: Path) -> float:
    """Cross-entropy of the text under the model, in windows of 512 tokens; a token must be a byte, as in tiny-moe."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(source)(text.read_text())["input_ids"]
    total = 0.0
    for start in range(0, len(tokens) - 1, 512):
        window = torch.tensor(tokens[start : start + 513])
        logits = model(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total / (len(tokens) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=["w4a16", "nvfp4", "bf16", "nats"])
    parser.add_argument("source", metavar="SRC", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, or for nats the text to read")
    a = parser.parse_args()
    try:
        if a.form == "nats":
            print(f"{nats_per_byte(a.source, a.out):.4f} nats per byte on {a.out}")
        else:
            convert(a.source, a.out, a.form)
    except (Unsuitable, OSError) as error:
        print(f"quantize: {a.source}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
