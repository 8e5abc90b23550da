# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts decoder of a few kilobytes, built the way vLLM builds one, for CPU tests of the offloader.

What it has of the real thing: an expert op that is opaque to the compiler and finds its layer by name when it runs,
quantization methods known by class name, weights that processing renames and repacks, scales that kernels read, a
Mamba mixer that registers a view of its weight at construction, residual pairs between layers, and norms.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import weakref

import torch
from expert_offload import Memory, Offloader
from torch import nn

torch.set_num_threads(1)
CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS = 16, 8, 4
# Bytes of the parameters of a layer, and of a model of three layers.
W13, W2 = EXPERTS * 2 * INNER * HIDDEN * 4, EXPERTS * INNER * HIDDEN * 4
QKV, GATE = HIDDEN * HIDDEN * 4, HIDDEN * EXPERTS * 4
ALL_EXPERTS = 3 * (W13 + W2)
EVERYTHING = 3 * (W13 + W2 + QKV + GATE)
NVFP4 = "CompressedTensorsW4A4Nvfp4MoEMethod"
PLAIN = "UnquantizedFusedMoEMethod"

# vLLM's static_forward_context: the op gets a name, never a tensor that the compiler could move. One engine has a name
# once; here several models of the same names live side by side.
_LAYERS: weakref.WeakValueDictionary[str, Experts] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("unit_tests::moe_forward", mutates_args=())
def moe_forward(x: torch.Tensor, logits: torch.Tensor, name: str) -> torch.Tensor:
    return _LAYERS[name].kernel(x, logits)


@moe_forward.register_fake
def _(x: torch.Tensor, logits: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


def seeded(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that depend on nothing but the name."""
    g = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
    if dtype is torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=g)
    return (torch.randn(shape, generator=g) * 0.3).to(dtype)


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Experts(nn.Module):
    """Routed experts, top two. `quant_method` decides which tensors there are."""

    def __init__(self, name: str, method: str) -> None:
        super().__init__()
        self.name, self.quant_method = f"{name}#{next(_numbers)}", type(method, (), {})()
        _LAYERS[self.name] = self
        self.shapes = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
        for projection, shape in self.shapes.items():
            path = f"{name}.{projection}"
            if method == NVFP4:
                self.register_parameter(f"{projection}_weight_packed", parameter(seeded(path, shape, torch.uint8)))
                self.register_parameter(f"{projection}_weight_scale", parameter(seeded(f"{path}.s", (*shape[:2], 1))))
            else:
                self.register_parameter(f"{projection}_weight", parameter(seeded(path, shape)))

    def process(self) -> None:
        """As compressed-tensors does: another name, another type and size, a new Parameter, the old one deleted."""
        for projection in self.shapes:
            packed = getattr(self, f"{projection}_weight_packed", None)
            if packed is not None:
                delattr(self, f"{projection}_weight_packed")
                self.register_parameter(f"{projection}_weight", parameter((packed.data.to(torch.bfloat16) - 128) / 256))

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return torch.ops.unit_tests.moe_forward(hidden_states, router_logits, self.name)

    def kernel(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(logits.softmax(-1), 2)
        w13, w2 = (getattr(self, f"{p}_weight").float() for p in self.shapes)
        if hasattr(self, "w13_weight_scale"):
            w13, w2 = w13 * self.w13_weight_scale, w2 * self.w2_weight_scale
        out = torch.zeros_like(x)
        for k in range(2):
            gate, up = torch.einsum("th,tih->ti", x, w13[chosen[:, k]]).chunk(2, -1)
            out += weights[:, k, None] * torch.einsum("ti,thi->th", torch.relu(gate) * up, w2[chosen[:, k]])
        return out


class Linear(nn.Module):
    def __init__(self, name: str, n: int, m: int) -> None:
        super().__init__()
        self.weight = parameter(seeded(name, (m, n)))
        self.quant_method = type("UnquantizedLinearMethod", (), {})()

    def process(self) -> None:
        """Nothing to do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Norm(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = parameter(seeded(name, (HIDDEN,)) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (HIDDEN,), self.weight)


class Mixer(nn.Module):
    """As `MambaMixer2`: the kernel reads a buffer that is a view of the convolution's weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.conv1d = Linear(f"{name}.conv1d", 1, HIDDEN)
        self.conv1d.weight.data = self.conv1d.weight.data.unsqueeze(1)
        self.register_buffer("conv_weights", self.conv1d.weight.data.view(HIDDEN, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.conv_weights.view(HIDDEN)


class Layer(nn.Module):
    """A decoder layer; `mixer`, and `experts`: None for a dense layer, else the method's name."""

    def __init__(self, name: str, *, experts: str | None = PLAIN, mixer: bool = False) -> None:
        super().__init__()
        self.norm = Norm(f"{name}.norm")
        self.qkv = Linear(f"{name}.qkv", HIDDEN, HIDDEN)
        self.mixer = Mixer(f"{name}.mixer") if mixer else None
        self.gate = Linear(f"{name}.gate", HIDDEN, EXPERTS)
        self.experts = Experts(f"{name}.experts", experts) if experts else None

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None = None):
        residual = hidden_states if residual is None else residual + hidden_states
        x = self.qkv(self.norm(residual)) + positions[:, None]
        x = self.mixer(x) if self.mixer is not None else x
        logits = self.gate(x)
        if self.experts is None:
            return x * logits.sum(-1, keepdim=True), residual
        return self.experts(hidden_states=x, router_logits=logits), residual


class Model(nn.Module):
    """Layers made one after another through the offloader, where one is given, as `make_layers` does."""

    def __init__(self, offloader=None, *, layers: int = 3, make=Layer, prefix: str = "model.layers", **kw) -> None:
        super().__init__()
        made = (make(f"{prefix}.{i}", **kw) for i in range(layers))
        if offloader is not None:
            offloader.name_layers(prefix, 0)
            made = offloader.wrap_modules(made)
        self.layers = nn.ModuleList(made)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return hidden_states + residual


def load(model: nn.Module, offloader=None) -> None:
    """The release's loop after loading: process every module that has a method, within `loading` where there is one."""
    for module in model.modules():
        if hasattr(module, "process"):
            if offloader is None:
                module.process()
            else:
                with offloader.loading(module, CPU):
                    module.process()
    if offloader is not None:
        offloader.finish(CPU)


def tokens(model, count: int = 5) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(count) * 0.1, seeded("input", (count, HIDDEN)))


def has_attention(module: nn.Module) -> bool:
    """Every layer here stands for one whose attention cuts the graph."""
    return isinstance(module, Layer)


def pageable(budget: int, *patterns: str, said: list | None = None) -> Offloader:
    memory = Memory(0, "this is a test", None, lambda t: t)
    return Offloader(budget, set(patterns), memory, (said if said is not None else []).append, has_attention)


def started(budget: int, *patterns: str, said: list | None = None, **kw) -> tuple[Model, Offloader]:
    made = pageable(budget, *patterns, said=said)
    model = Model(made, **kw)
    made.built(torch.device("cpu"))
    load(model, made)
    return model, made


def resident(**kw) -> torch.Tensor:
    model = Model(**kw)
    load(model)
    out = tokens(model)
    assert out.isfinite().all() and out.std() > 0.01
    return out


def out_names(made: Offloader) -> list[str]:
    return sorted(i.name for i in made.items.values() if i.out)


def kept(made: Offloader) -> dict[str, str]:
    return {i.name: i.kept for i in made.items.values() if i.kept}


def view_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """What a release makes of page-locked memory: another tensor with another storage on the same bytes."""
    raw = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    raw.keeps = tensor
    return torch.frombuffer(raw, dtype=torch.uint8)


def mapped_start(budget: int, *patterns: str, said: list | None = None, **kw) -> tuple[Model, Offloader]:
    made = Offloader(
        budget,
        set(patterns),
        Memory(None, None, None, view_elsewhere),
        (said if said is not None else []).append,
        has_attention,
    )
    model = Model(made, **kw)
    load(model, made)
    return model, made


def shares_across_layers(offloader):
    """As Zamba2's shared block: the second layer calls a module of the first."""
    model = Model(layers=2)
    model.layers[1].qkv = model.layers[0].qkv
    if offloader is not None:
        offloader.wrap_modules(model.layers, prefix="l")
    return model
