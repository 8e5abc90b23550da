# SPDX-License-Identifier: Apache-2.0
"""What each tensor of a mixture-of-experts layer is, and which of them may leave the GPU.

A release registers the tensors of its experts under names that depend on the quantization method. The table below
lists every name of every method of the pins, exactly. There is no default: a name that is not listed stays on the
GPU and the start-up report says so, and `tests/release/test_roles.py` (sources) and `test_roles_run.py` (layers, as
they are built and processed) fail for it by name, which is the warning that a new release needs.

Only the routed experts' weights leave. Scales, zero points, indices and biases are small, and the kernels' configs keep
references to them from the moment that `captured` names, so they must stay where they are.
"""

from __future__ import annotations

import enum
import re
from typing import Any, NamedTuple


class Role(enum.Enum):
    """What a tensor of an expert layer is for."""

    WEIGHT = "routed expert weight"
    BLOCK_SCALE = "scale per block, group or channel"
    GLOBAL_SCALE = "scale per expert or tensor"
    INPUT_SCALE = "scale of the activations"
    ZERO_POINT = "zero point"
    INDEX = "index of groups or columns"
    BIAS = "bias"
    SHAPE = "shape or type of the checkpoint's tensor"
    WORKSPACE = "workspace of a kernel"
    ACTIVATION = "number of the activation function"
    STRIDES = "strides of a grouped kernel's operands"


class Method(NamedTuple):
    """One quantization method: the suffixes behind `w13_` and `w2_`, and when its kernels take hold of the scales.

    `captured` names the moment: "load" while weights are processed, "first" at the first forward pass, "call" read
    anew at every call; where the pins differ, the older one's stands first.
    """

    suffixes: tuple[str, ...]
    captured: str
    others: tuple[str, ...] = ()


# A suffix means the same in every method that uses it.
SUFFIXES: dict[str, Role] = {
    "weight": Role.WEIGHT,
    "weight_packed": Role.WEIGHT,
    "qweight": Role.WEIGHT,
    "weight_scale": Role.BLOCK_SCALE,
    "weight_scale_inv": Role.BLOCK_SCALE,
    "weight_chan_scale": Role.BLOCK_SCALE,
    "scale": Role.BLOCK_SCALE,
    "scales": Role.BLOCK_SCALE,
    "weight_scale_2": Role.GLOBAL_SCALE,
    "weight_global_scale": Role.GLOBAL_SCALE,
    "global_scale": Role.GLOBAL_SCALE,
    "input_scale": Role.INPUT_SCALE,
    "input_scale_2": Role.INPUT_SCALE,
    "input_global_scale": Role.INPUT_SCALE,
    "input_zero_point": Role.ZERO_POINT,
    "weight_zero_point": Role.ZERO_POINT,
    "zero_point": Role.ZERO_POINT,
    "qzeros": Role.ZERO_POINT,
    "g_idx": Role.INDEX,
    "weight_g_idx": Role.INDEX,
    "g_idx_sort_indices": Role.INDEX,
    "bias": Role.BIAS,
    "weight_shape": Role.SHAPE,
    "qweight_type": Role.SHAPE,
}
OTHERS: dict[str, Role] = {
    "workspace": Role.WORKSPACE,
    "locks": Role.WORKSPACE,
    "a1_gscale": Role.INPUT_SCALE,
    "g1_alphas": Role.GLOBAL_SCALE,
    "g2_alphas": Role.GLOBAL_SCALE,
    "g1_scale_c": Role.GLOBAL_SCALE,
    "gemm1_alpha": Role.ACTIVATION,
    "gemm1_beta": Role.ACTIVATION,
    "gemm1_clamp_limit": Role.ACTIVATION,
}
# Their first dimension does not count experts.
_OF_ALL = ("qweight_type", "workspace", "locks")
# What methods, configs and kernels make for themselves of a layer's tensors and keep, by the last names on the way
# there. Each is small, one entry an expert, and stays where it was made. "_a1" and "_a2" are the two inputs of an
# expert, "_w1" and "_w2" its weights.
CAPTURED: dict[str, Role] = {
    "_a1.alpha_or_gscale": Role.INPUT_SCALE,
    "_a2.alpha_or_gscale": Role.INPUT_SCALE,
    "_w1.alpha_or_gscale": Role.GLOBAL_SCALE,
    "_w2.alpha_or_gscale": Role.GLOBAL_SCALE,
    "g1_scale_c": Role.GLOBAL_SCALE,
    "_gemm1_beta_unfolded": Role.ACTIVATION,
    "_gemm1_clamp_limit_unfolded": Role.ACTIVATION,
    **dict.fromkeys(("a_strides1", "a_strides2", "b_strides1", "b_strides2"), Role.STRIDES),
    **dict.fromkeys(("ab_strides1", "ab_strides2", "c_strides1", "s_strides1", "s_strides2"), Role.STRIDES),
}

_WNA16 = "weight_packed weight weight_scale weight_shape weight_g_idx g_idx_sort_indices"
_FP8 = "weight weight_scale weight_scale_inv input_scale bias"
_NVFP4 = "weight weight_scale weight_scale_2 input_scale"


def _method(suffixes: str, captured: str, others: str = "") -> Method:
    return Method(tuple(suffixes.split()), captured, tuple(others.split()))


# Class name of the method -> its tensors. Read in v0.17.1, v0.18.0, v0.26.0, v0.32.0 and v0.33.0.
# v0.17.1 has v0.18.0's methods but for ModelOptMxFp8FusedMoE, and captures at the same moments. Of NVFP4 its configs
# keep products of the global scales; v0.18.0's keep the scales themselves, which its kernels multiply in place.
METHODS: dict[str, Method] = {
    "AWQMarlinMoEMethod": _method(
        "qweight scales qzeros input_global_scale g_idx_sort_indices weight", "call", "workspace"
    ),
    "AutoAWQMoEMethod": _method("qweight scales qzeros g_idx_sort_indices weight bias", "load", "workspace"),
    "AutoGPTQMoEMethod": _method(
        "qweight scales qzeros g_idx g_idx_sort_indices bias input_global_scale weight", "load", "workspace"
    ),
    "BitsAndBytesMoEMethod": _method("weight", "first"),
    "CompressedTensorsW4A16FlydslMoEMethod": _method(_WNA16, "first"),
    "CompressedTensorsW4A4Mxfp4MoEMethod": _method("weight_packed weight weight_scale bias", "load"),
    "CompressedTensorsW4A4Nvfp4MoEMethod": _method(
        "weight_packed weight weight_scale weight_scale_2 weight_global_scale input_scale input_global_scale bias",
        "load",
    ),
    "CompressedTensorsW4A8Fp8MoEMethod": _method(
        "weight_packed weight_scale weight_chan_scale weight_shape input_scale", "first; load from v0.26.0"
    ),
    "CompressedTensorsW4A8Int8MoEMethod": _method("weight_packed weight weight_scale bias", "first"),
    "CompressedTensorsW8A8Fp8MoEMethod": _method("weight weight_scale input_scale bias", "load"),
    "CompressedTensorsW4A8Mxfp4MoEMethod": _method("weight_packed weight weight_scale bias", "load"),
    "CompressedTensorsW8A8Int8MoEMethod": _method("weight weight_scale input_scale bias", "first; load from v0.26.0"),
    "CompressedTensorsW8A8Mxfp8MoEMethod": _method("weight weight_scale input_scale", "load"),
    "CompressedTensorsWNA16MarlinMoEMethod": _method(
        f"{_WNA16} weight_zero_point input_global_scale", "call; load from v0.26.0", "workspace"
    ),
    "CompressedTensorsWNA16MoEMethod": _method(
        f"{_WNA16} weight_zero_point input_global_scale bias", "first; load from v0.32.0"
    ),
    "CompressedTensorsWNA16RDNA3MoEMethod": _method(f"{_WNA16} qzeros", "first"),
    "ExpertsInt8MoEMethod": _method("weight scale", "first"),
    "Fp8MoEMethod": _method(_FP8, "load"),
    "Fp8OnlineMoEMethod": _method(_FP8, "load"),
    "Fp8PerBlockOnlineMoEMethod": _method(_FP8, "load"),
    "Fp8PerTensorOnlineMoEMethod": _method(_FP8, "load"),
    "Fp8PtpcOnlineMoEMethod": _method(_FP8, "load"),
    "GGUFMoEMethod": _method("qweight qweight_type", "first"),
    "GPTQMarlinMoEMethod": _method(
        "qweight scales qzeros g_idx g_idx_sort_indices input_global_scale weight bias", "call", "workspace"
    ),
    "GptOssMxfp4MoEMethod": _method("weight weight_scale bias", "load"),
    "HummingMoEMethod": _method("weight weight_scale zero_point global_scale bias", "load", "locks"),
    "INCARKWNA16MoEMethod": _method("qweight scales qzeros g_idx input_global_scale weight", "load"),
    "INCMxfp4MoEMethod": _method("weight_packed weight weight_scale", "load"),
    "INCMxfp8MoEMethod": _method("weight weight_scale", "load"),
    "Int8OnlineMoEMethod": _method("weight scale weight_scale bias input_scale", "load"),
    "ModelOptBlockQuantMoEMethod": _method("weight", "load"),
    "ModelOptFp8MoEMethod": _method("weight weight_scale input_scale", "load"),
    "ModelOptMxFp8FusedMoE": _method("weight weight_scale", "call; load from v0.26.0"),
    "ModelOptNvFp4FusedMoE": _method(_NVFP4, "load"),
    "MoeWNA16Method": _method("qweight scales qzeros g_idx input_global_scale", "first; load from v0.32.0"),
    "Mxfp4MoEMethod": _method("weight weight_scale bias", "load"),
    "Mxfp4OnlineMoEMethod": _method("weight weight_scale bias input_scale", "load"),
    "Mxfp8OnlineMoEMethod": _method("weight weight_scale weight_scale_inv bias input_scale", "load"),
    "Nvfp4OnlineMoEMethod": _method(f"{_NVFP4} bias", "load"),
    "QuarkNvfp4MoEMethod": _method("weight weight_scale weight_scale_2 input_scale_2", "load"),
    "QuarkOCP_MX_MoEMethod": _method("weight weight_scale input_scale bias", "first; load from v0.26.0"),
    "QuarkOCP_MX_MoEMethod_OSS": _method("weight weight_scale input_scale bias", "first"),
    "QuarkW4A16Int4MoEMethod": _method("weight weight_scale weight_zero_point", "load"),
    "QuarkW4A8Fp8MoEMethod": _method("weight weight_scale weight_scale_2", "first"),
    "QuarkW8A8Fp8MoEMethod": _method("weight weight_scale input_scale bias", "call; load from v0.26.0"),
    "QuarkW8A8Int8MoEMethod": _method(
        "weight weight_scale input_scale weight_zero_point input_zero_point bias", "first; load from v0.32.0"
    ),
    "QuarkW8A8Mxfp8MoEMethod": _method("weight weight_scale", "load"),
    "UnquantizedFusedMoEMethod": _method("weight bias", "load"),
    "XpuMxfp4MoEMethod": _method("weight weight_scale bias", "load"),
}

# Methods whose layers the humming library may run (before Marlin on Hopper, or when asked for), and the names that it
# leaves of their tensors: read in humming-kernels 0.1.19.
_ON_HUMMING = """
    AutoAWQMoEMethod AutoGPTQMoEMethod CompressedTensorsW4A4Mxfp4MoEMethod CompressedTensorsW4A4Nvfp4MoEMethod
    CompressedTensorsW4A8Fp8MoEMethod CompressedTensorsW4A8Mxfp4MoEMethod CompressedTensorsW8A8Fp8MoEMethod
    CompressedTensorsW8A8Int8MoEMethod CompressedTensorsW8A8Mxfp8MoEMethod CompressedTensorsWNA16MarlinMoEMethod
    CompressedTensorsWNA16MoEMethod Fp8MoEMethod Fp8PerBlockOnlineMoEMethod Fp8PerTensorOnlineMoEMethod
    Fp8PtpcOnlineMoEMethod GptOssMxfp4MoEMethod HummingMoEMethod INCARKWNA16MoEMethod INCMxfp8MoEMethod
    Int8OnlineMoEMethod ModelOptFp8MoEMethod ModelOptMxFp8FusedMoE ModelOptNvFp4FusedMoE MoeWNA16Method Mxfp4MoEMethod
    Mxfp4OnlineMoEMethod Mxfp8OnlineMoEMethod Nvfp4OnlineMoEMethod QuarkNvfp4MoEMethod QuarkOCP_MX_MoEMethod
    QuarkW4A16Int4MoEMethod QuarkW8A8Fp8MoEMethod QuarkW8A8Int8MoEMethod QuarkW8A8Mxfp8MoEMethod
"""
_OF_HUMMING = "weight weight_scale weight_scale_2 zero_point bias input_scale input_scale_2"
# Methods that, from v0.33.0 on, may quantize a checkpoint's NVFP4 anew, and the names that its tensors come under.
_REQUANTIZING = """
    Fp8PerBlockOnlineMoEMethod Fp8PerTensorOnlineMoEMethod Fp8PtpcOnlineMoEMethod Int8OnlineMoEMethod
    Mxfp4OnlineMoEMethod Mxfp8OnlineMoEMethod Nvfp4OnlineMoEMethod
"""
_REQUANTIZED = "weight_packed weight_scale_2 weight_global_scale input_scale_2 input_global_scale"
for _names, _more in ((_ON_HUMMING, _OF_HUMMING), (_REQUANTIZING, _REQUANTIZED)):
    for _name in _names.split():
        _suffixes = (*METHODS[_name].suffixes, *_more.split())
        METHODS[_name] = METHODS[_name]._replace(suffixes=tuple(dict.fromkeys(_suffixes)))
# Methods whose layers Marlin runs, under some names of the table above, with a workspace that is an attribute of the
# layer up to v0.26.0.
_ON_MARLIN = """
    CompressedTensorsW4A4Mxfp4MoEMethod CompressedTensorsW4A4Nvfp4MoEMethod CompressedTensorsW8A8Fp8MoEMethod
    CompressedTensorsW8A8Mxfp8MoEMethod Fp8MoEMethod Fp8OnlineMoEMethod Fp8PerBlockOnlineMoEMethod
    Fp8PerTensorOnlineMoEMethod Fp8PtpcOnlineMoEMethod GptOssMxfp4MoEMethod ModelOptFp8MoEMethod ModelOptMxFp8FusedMoE
    ModelOptNvFp4FusedMoE Mxfp4MoEMethod Mxfp8OnlineMoEMethod QuarkNvfp4MoEMethod QuarkOCP_MX_MoEMethod
    QuarkW8A8Fp8MoEMethod
"""
# What FlashInfer's kernels have on a layer: CUTLASS for FP8 per tensor, TRTLLM for NVFP4 (and, up to v0.18.0, MXFP4).
_ON_CUTLASS = """
    CompressedTensorsW8A8Fp8MoEMethod Fp8MoEMethod Fp8PerTensorOnlineMoEMethod ModelOptFp8MoEMethod
    QuarkW8A8Fp8MoEMethod
"""
_ON_TRTLLM = """
    CompressedTensorsW4A4Nvfp4MoEMethod ModelOptNvFp4FusedMoE Nvfp4OnlineMoEMethod QuarkNvfp4MoEMethod
"""
_OF_SWIGLU = "gemm1_alpha gemm1_beta gemm1_clamp_limit"
for _names, _more in (
    (_ON_MARLIN, "workspace"),
    (_ON_CUTLASS, "g1_alphas g2_alphas"),
    (_ON_TRTLLM, f"a1_gscale g1_alphas g2_alphas g1_scale_c {_OF_SWIGLU}"),
    ("Mxfp4MoEMethod XpuMxfp4MoEMethod", _OF_SWIGLU),
):
    for _name in _names.split():
        METHODS[_name] = METHODS[_name]._replace(others=(*METHODS[_name].others, *_more.split()))
# Methods of single models, which register what the method does that they extend; none of them is processed apart.
METHODS |= {
    "DeepseekV4HeterogeneousMxfp4MoEMethod": METHODS["Mxfp4MoEMethod"],
    "MuseSparkModelOptNvFp4FusedMoE": METHODS["ModelOptNvFp4FusedMoE"],
    "MuseSparkOnlineMXFP4FusedMoE": METHODS["QuarkOCP_MX_MoEMethod"],
    "MuseSparkQuarkOCPMXFusedMoE": METHODS["QuarkOCP_MX_MoEMethod"],
    "MuseSparkQuarkW8A8Fp8FusedMoE": METHODS["QuarkW8A8Fp8MoEMethod"],
    "MuseSparkUnquantizedFusedMoE": METHODS["UnquantizedFusedMoEMethod"],
}

# Methods whose weights are processed by torch operations and Marlin's repack alone, which `deferred` can write down.
# The others are processed a whole layer at a time.
_PROCESSED_APART = {
    "AWQMarlinMoEMethod",
    "AutoAWQMoEMethod",
    "AutoGPTQMoEMethod",
    "CompressedTensorsW4A4Mxfp4MoEMethod",
    "CompressedTensorsW4A4Nvfp4MoEMethod",
    "CompressedTensorsWNA16MarlinMoEMethod",
    "CompressedTensorsWNA16MoEMethod",
    "GPTQMarlinMoEMethod",
    "GptOssMxfp4MoEMethod",
    "INCMxfp4MoEMethod",
    "ModelOptNvFp4FusedMoE",
    "Mxfp4MoEMethod",
    "UnquantizedFusedMoEMethod",
}

_PROJECTION = re.compile(r"(w13|w2)_(\w+)")
# Names of a dense layer's own matrix. Its scales and biases stay, as those of experts do.
_DENSE_WEIGHTS = ("weight", "weight_packed", "qweight")


def method_of(module: object) -> str | None:
    """Class name of the expert quantization method that `module` holds, or None when it is no expert layer."""
    method = getattr(module, "quant_method", None)
    for cls in type(method).__mro__ if method is not None else ():
        if cls.__name__ in METHODS:
            return cls.__name__
    return None


def processed_apart(module: object) -> bool:
    """Whether post-load processing of the expert layer `module` may be done to a few experts at a time."""
    return method_of(module) in _PROCESSED_APART


def is_scale(module: object, leaf: str) -> bool:
    """Whether `leaf` is a scale of the weights of the expert layer `module`."""
    method = method_of(module)
    return method is not None and role_of(method, leaf) in (Role.BLOCK_SCALE, Role.GLOBAL_SCALE)


def block_scales(module: Any) -> list[str]:
    """The attributes of the expert layer `module` that are scales of parts of a weight, not of all of it."""
    method = method_of(module)
    return [] if method is None else [n for n in module._parameters if role_of(method, n) is Role.BLOCK_SCALE]


def role_of(method: str, leaf: str) -> Role | None:
    """Role of the tensor `leaf` (such as `w13_weight_packed`) under `method`; None when the table does not list it."""
    entry = METHODS[method]
    if leaf in entry.others:
        return OTHERS[leaf]
    found = _PROJECTION.fullmatch(leaf)
    return SUFFIXES[found[2]] if found and found[2] in entry.suffixes else None


def captured_role(path: str) -> Role | None:
    """Role of a tensor that is no attribute of its layer, by the dotted way to it; None when the table has it not."""
    names = path.split(".")
    return CAPTURED.get(names[-1]) or CAPTURED.get(".".join(names[-2:]))


def per_expert(leaf: str, role: Role, ndim: int) -> bool:
    """Whether the first dimension of the tensor `leaf`, which has `ndim` of them, counts experts.

    It does not in a scale of the activations that has become a scalar: the largest of all experts.
    """
    found = _PROJECTION.fullmatch(leaf)
    return (found[2] if found else leaf) not in _OF_ALL and (ndim > 0 or role is not Role.INPUT_SCALE)


def may_leave(module: object, leaf: str, ndim: int) -> bool:
    """Whether the parameter `leaf` of `module`, with `ndim` dimensions, may lie in host memory."""
    method = method_of(module)
    if method is not None:
        return role_of(method, leaf) is Role.WEIGHT
    return leaf in _DENSE_WEIGHTS and ndim >= 2


def unknown(module: object, leaf: str) -> str | None:
    """Class name of the method under which `leaf` should have a role and has none; None when all is in order."""
    method = method_of(module)
    if method is not None:
        return method if role_of(method, leaf) is None else None
    stranger = getattr(module, "quant_method", None)
    return type(stranger).__name__ if stranger is not None and _PROJECTION.fullmatch(leaf) else None


def expert_layer(path: str) -> str:
    """Path of the module that a model calls, from the path of the one that owns the experts' weights.

    From v0.26.0 on the owner is `experts.routed_experts`, which runs inside the expert op, and `experts` is called.
    """
    return path.removesuffix(".routed_experts")


def canonical(name: str, of_experts: bool) -> str:
    """The name that a user's pattern is matched against, the same in every pin and before and after processing.

    `name` is dotted, as `named_parameters` gives it; `of_experts` tells whether its owner is an expert layer. The
    weights of experts are `experts.w13_weight` and `experts.w2_weight` whatever their packing. What a release hangs
    below the expert layer without being a routed expert (shared experts, the router's gate) loses that segment, so
    that `experts` names the routed experts alone.
    """
    parts = [p for p in name.split(".") if p != "routed_experts"]
    if of_experts:
        parts[-1] = re.sub(r"(w13|w2)_(?:weight_packed|qweight)", r"\1_weight", parts[-1])
    else:
        parts = [p.lstrip("_") for p, after in zip(parts, [*parts[1:], ""]) if p != "experts" or after.isdigit()]
        parts[-1] = re.sub(r"(?:weight_packed|qweight)", "weight", parts[-1])
    return ".".join(parts)
