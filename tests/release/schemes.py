# SPDX-License-Identifier: Apache-2.0
"""Quantization configs as checkpoints hold them, one and more for each method of experts that a pin has.

A scheme names the release's quantization, not the method: which class comes of it is the release's to say.
"""

from __future__ import annotations

from typing import NamedTuple

V18, V26, V32, V33 = (0, 18), (0, 26), (0, 32), (0, 33)
SM86, SM90, SM100, SM120, CPU, ARM, XPU, ROCM = "sm86", "sm90", "sm100", "sm120", "cpu", "arm", "xpu", "rocm"
FLASHINFER, TRTLLM = "sm120 with FlashInfer", "sm100 with FlashInfer"


class Scheme(NamedTuple):
    """`quantization` and its `config` as in a checkpoint; on `device`; `layer`: more for the expert layer.

    Of the releases from `since` on, and before `until`. `needs`: what is missing here, so that it must fail.
    """

    quantization: str | None
    config: dict | None = None
    device: str = SM90
    layer: dict | None = None
    since: tuple[int, ...] = (0,)
    until: tuple[int, ...] = (9,)
    needs: str | None = None


GPTQ = dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True, lm_head=False)
AWQ = dict(quant_method="awq", bits=4, group_size=128, zero_point=True)
BIAS = dict(has_bias=True)


def tensors(format: str, weights: dict, inputs: dict | None = None) -> dict:
    """A compressed-tensors config."""
    group = dict(targets=["Linear"], weights=weights, input_activations=inputs, format=format)
    return dict(quant_method="compressed-tensors", format=format, config_groups={"group_0": group}, ignore=[])


def args(bits: int, type: str, strategy: str, group: int | None = None, dynamic: bool = False, **more) -> dict:
    found = dict(num_bits=bits, type=type, strategy=strategy, dynamic=dynamic, symmetric=True, **more)
    return found | (dict(group_size=group) if group else {})


def block(bits: int, type: str, strategy: str, shape: list[int]) -> dict:
    return args(bits, type, strategy, block_structure=shape)


FP4 = args(4, "float", "tensor_group", 16)
MXFP4 = args(4, "float", "group", 32, scale_dtype="torch.uint8")
MXFP8 = args(8, "float", "group", 32, scale_dtype="torch.uint8")


def modelopt(algorithm: str, **more) -> dict:
    found = dict(quant_algo=algorithm, kv_cache_quant_algo=None, exclude_modules=[], **more)
    return dict(quant_method="modelopt", quantization=found)


def quark(weight: dict | list, inputs: dict | list | None, **export) -> dict:
    return dict(
        quant_method="quark",
        export=dict(kv_cache_group=[], pack_method="order", **export),
        layer_quant_config={},
        layer_type_quant_config={},
        global_quant_config=dict(weight=weight, input_tensors=inputs, output_tensors=None, bias=None),
        exclude=[],
    )


def q(dtype: str, qscheme: str, dynamic: bool = False, **more) -> dict:
    return dict(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, symmetric=True, **more)


BLOCKS = dict(quant_algo="iq2_xs", group_size=256, block_payload_bytes=74, packing="ggml")
OCP = dict(group_size=32, scale_format="e8m0", scale_calculation_mode="even", ch_axis=-1)

SCHEMES: dict[str, Scheme] = {
    "unquantized": Scheme(None),
    "unquantized, on a CPU": Scheme(None, device=CPU),
    "unquantized with biases": Scheme(None, layer=BIAS),
    # fp8
    "fp8 per tensor": Scheme("fp8", dict(quant_method="fp8", activation_scheme="static")),
    "fp8 per tensor, SM86": Scheme("fp8", dict(quant_method="fp8", activation_scheme="dynamic"), SM86),
    "fp8 per tensor, FlashInfer": Scheme(
        "fp8", dict(quant_method="fp8", activation_scheme="static"), "sm90 with FlashInfer"
    ),
    "fp8 per block": Scheme("fp8", dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])),
    "fp8 per block, SM86": Scheme(
        "fp8", dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]), SM86
    ),
    "fp8 while loading": Scheme("fp8", dict(quant_method="none", activation_scheme="dynamic"), until=V32),
    "int8 while loading": Scheme("experts_int8", dict(quant_method="experts_int8")),
    **{
        f"online {name}": Scheme(
            "online",
            dict(moe=name),
            TRTLLM if name.startswith("nvfp4") else SM90,
            since=V32 if name == "mxfp4" else V26,
        )
        for name in ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4", "nvfp4_per_token")
    },
    "fp8 while loading, SM86": Scheme("fp8", dict(quant_method="none", activation_scheme="dynamic"), SM86, until=V32),
    **{
        f"online {name}, SM86": Scheme("online", dict(moe=name), SM86, since=V26)
        for name in ("fp8_per_tensor", "fp8_per_block")
    },
    "online int8": Scheme("online", dict(moe="int8_per_channel_weight_only")),
    # GPTQ, AWQ
    "gptq": Scheme("gptq_marlin", GPTQ, SM86),
    "gptq with act-order": Scheme("gptq_marlin", GPTQ | dict(desc_act=True), SM86, until=V32),
    "gptq, 8 bits": Scheme("gptq_marlin", GPTQ | dict(bits=8, group_size=-1), SM86),
    "awq": Scheme("awq_marlin", AWQ, SM86),
    "gptq, Triton": Scheme("moe_wna16", GPTQ, SM86),
    "awq, Triton": Scheme("moe_wna16", AWQ, SM86),
    "gguf": Scheme("gguf", {}),
    "bitsandbytes": Scheme("bitsandbytes", dict(quant_method="bitsandbytes", load_in_4bit=True)),
    # compressed-tensors
    "ct W4A16": Scheme("compressed-tensors", tensors("pack-quantized", args(4, "int", "group", 128)), SM86),
    "ct W4A16 by channel": Scheme(
        "compressed-tensors", tensors("pack-quantized", args(4, "int", "channel")), SM86, since=V32
    ),
    "ct W8A16": Scheme("compressed-tensors", tensors("pack-quantized", args(8, "int", "group", 128)), SM86),
    "ct W4A16 with act-order": Scheme(
        "compressed-tensors", tensors("pack-quantized", args(4, "int", "group", 128, actorder="group")), SM86, until=V32
    ),
    "ct W4A16, Triton": Scheme(  # Marlin does not weigh the input
        "compressed-tensors",
        tensors("pack-quantized", args(4, "int", "group", 128)),
        SM86,
        dict(apply_router_weight_on_input=True),
    ),
    "ct NVFP4, SM86": Scheme("compressed-tensors", tensors("nvfp4-pack-quantized", FP4, FP4), SM86),
    "ct NVFP4, SM120": Scheme("compressed-tensors", tensors("nvfp4-pack-quantized", FP4, FP4), SM120),
    "ct NVFP4, FlashInfer": Scheme("compressed-tensors", tensors("nvfp4-pack-quantized", FP4, FP4), FLASHINFER),
    "ct NVFP4, TRTLLM": Scheme("compressed-tensors", tensors("nvfp4-pack-quantized", FP4, FP4), TRTLLM),
    "ct NVFP4A16": Scheme("compressed-tensors", tensors("nvfp4-pack-quantized", FP4)),
    "ct MXFP4": Scheme("compressed-tensors", tensors("mxfp4-pack-quantized", MXFP4)),
    "ct MXFP4, W4A8": Scheme(
        "compressed-tensors",
        tensors("mxfp4-pack-quantized", MXFP4, args(8, "float", "token", dynamic=True)),
    ),
    "ct MXFP8": Scheme(
        "compressed-tensors", tensors("mxfp8-quantized", MXFP8, MXFP8 | dict(dynamic=True)), SM100, since=V26
    ),
    "ct FP8": Scheme(
        "compressed-tensors",
        tensors("float-quantized", args(8, "float", "tensor"), args(8, "float", "tensor")),
    ),
    "ct FP8 by channel": Scheme(
        "compressed-tensors",
        tensors("float-quantized", args(8, "float", "channel"), args(8, "float", "token", dynamic=True)),
    ),
    "ct FP8 by channel, SM86": Scheme(
        "compressed-tensors",
        tensors("float-quantized", args(8, "float", "channel"), args(8, "float", "token", dynamic=True)),
        SM86,
    ),
    "ct FP8 by block": Scheme(
        "compressed-tensors",
        tensors(
            "float-quantized",
            block(8, "float", "block", [128, 128]),
            args(8, "float", "group", 128, dynamic=True),
        ),
    ),
    "ct int8": Scheme(
        "compressed-tensors",
        tensors("int-quantized", args(8, "int", "channel"), args(8, "int", "token", dynamic=True)),
        SM86,
    ),
    "ct W4A8 FP8": Scheme(
        "compressed-tensors",
        tensors("pack-quantized", args(4, "int", "group", 128), args(8, "float", "token", dynamic=True)),
        since=V26,
    ),
    "ct W4A8 FP8, older": Scheme(
        "compressed-tensors",
        tensors("pack-quantized", args(4, "int", "group", 128), args(8, "float", "token", dynamic=True)),
        until=V26,
        needs="CompressedTensorsW4A8Fp8MoEMethod: a release whose `convert_bf16_scales_to_fp8` calls `view` rightly",
    ),
    "ct W4A8 int8": Scheme(
        "compressed-tensors",
        tensors("int-quantized", args(4, "int", "group", 32), args(8, "int", "token", dynamic=True)),
        ARM,
    ),
    # ModelOpt
    "modelopt FP8": Scheme("modelopt", modelopt("FP8")),
    "modelopt FP8, SM86": Scheme("modelopt", modelopt("FP8"), SM86),
    "modelopt NVFP4, SM86": Scheme("modelopt_fp4", modelopt("NVFP4", group_size=16), SM86),
    "modelopt NVFP4, SM120": Scheme("modelopt_fp4", modelopt("NVFP4", group_size=16), SM120),
    "modelopt NVFP4, FlashInfer": Scheme("modelopt_fp4", modelopt("NVFP4", group_size=16), FLASHINFER),
    "modelopt NVFP4, TRTLLM": Scheme("modelopt_fp4", modelopt("NVFP4", group_size=16), TRTLLM),
    "modelopt NVFP4, TRTLLM, SwiGLU's numbers": Scheme(
        "modelopt_fp4",
        modelopt("NVFP4", group_size=16),
        TRTLLM,
        dict(swiglu_limit=7.0, swiglu_alpha=1.7, swiglu_beta=1.0),
        since=V32,
    ),
    "modelopt FP8, FlashInfer": Scheme("modelopt", modelopt("FP8"), "sm90 with FlashInfer"),
    "modelopt MXFP8": Scheme("modelopt_mxfp8", modelopt("MXFP8"), SM100, since=V18),
    "modelopt blocks": Scheme(
        "modelopt_mixed",
        dict(
            quant_method="modelopt",
            quantization=dict(
                quant_algo="MIXED_PRECISION",
                exclude_modules=[],
                quantized_layers={"model.layers.0.experts": BLOCKS},
            ),
        ),
        SM120,
        since=V32,
        needs="ModelOptBlockQuantMoEMethod: the b12x library",
    ),
    # MXFP4
    "mxfp4": Scheme("mxfp4", dict(quant_method="mxfp4"), layer=BIAS),
    "mxfp4, SM86": Scheme("mxfp4", dict(quant_method="mxfp4"), SM86, BIAS),
    "mxfp4 of gpt-oss": Scheme("gpt_oss_mxfp4", dict(quant_method="mxfp4"), layer=BIAS),
    "mxfp4 in fp8": Scheme(
        "fp8", dict(quant_method="fp8", activation_scheme="dynamic", store_dtype="mxfp4"), since=V26
    ),
    "mxfp4, XPU": Scheme("mxfp4", dict(quant_method="mxfp4"), XPU, BIAS, until=V26),
    # Quark
    "quark FP8": Scheme("quark", quark(q("fp8_e4m3", "per_tensor"), q("fp8_e4m3", "per_tensor"))),
    "quark FP8, SM86": Scheme("quark", quark(q("fp8_e4m3", "per_tensor"), q("fp8_e4m3", "per_tensor")), SM86),
    "quark FP8 by channel": Scheme(
        "quark", quark(q("fp8_e4m3", "per_channel", ch_axis=0), q("fp8_e4m3", "per_channel", True, ch_axis=1))
    ),
    "quark int8": Scheme("quark", quark(q("int8", "per_channel"), q("int8", "per_channel", True)), SM86, since=V26),
    "quark int8, static": Scheme("quark", quark(q("int8", "per_tensor"), q("int8", "per_tensor")), SM86, since=V26),
    "quark MXFP4": Scheme("quark", quark(q("fp4", "per_group", **OCP), q("fp4", "per_group", True, **OCP)), layer=BIAS),
    "quark MXFP4, static FP8": Scheme(
        "quark", quark(q("fp4", "per_group", **OCP), q("fp8_e4m3", "per_tensor")), layer=BIAS
    ),
    "quark MXFP4, static FP8, ROCm": Scheme(
        "quark",
        quark(q("fp4", "per_group", **OCP), q("fp8_e4m3", "per_tensor")),
        ROCM,
        BIAS,
        until=V26,
        needs="QuarkOCP_MX_MoEMethod_OSS: ROCm and triton_kernels",
    ),
    "quark MXFP8": Scheme(
        "quark", quark(q("fp8_e4m3", "per_group", **OCP), q("fp8_e4m3", "per_group", True, **OCP)), since=V33
    ),
    "quark NVFP4": Scheme(
        "quark",
        quark(
            [q("fp4", "per_group", group_size=16), q("fp8_e4m3", "per_tensor")],
            [q("fp4", "per_group", True, group_size=16), q("fp8_e4m3", "per_tensor")],
        ),
        SM120,
        since=V26,
    ),
    "quark NVFP4, SM86": Scheme(
        "quark",
        quark(
            [q("fp4", "per_group", group_size=16), q("fp8_e4m3", "per_tensor")],
            [q("fp4", "per_group", True, group_size=16), q("fp8_e4m3", "per_tensor")],
        ),
        SM86,
        since=V26,
    ),
    "quark W4A8": Scheme(
        "quark",
        quark([q("fp8_e4m3", "per_tensor"), q("int4", "per_channel", ch_axis=0)], q("fp8_e4m3", "per_tensor", True)),
        ROCM,
    ),
    "quark W4A16": Scheme("quark", quark(q("int4", "per_group", group_size=32), None), SM86, since=V32),
    # AutoRound
    "inc MXFP4": Scheme(
        "inc", dict(quant_method="auto-round", bits=4, group_size=32, sym=True, data_type="mx_fp"), since=V32
    ),
    "inc MXFP8": Scheme(
        "inc", dict(quant_method="auto-round", bits=8, group_size=32, sym=True, data_type="mx_fp"), SM100, since=V32
    ),
    "inc W4A16": Scheme("inc", dict(quant_method="auto-round", bits=4, group_size=128, sym=True), SM86, since=V26),
    "humming": Scheme(
        "humming", dict(quant_method="humming", dtype="int4"), since=V26, needs="HummingMoEMethod: the humming library"
    ),
}
