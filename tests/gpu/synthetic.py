# SPDX-License-Identifier: Apache-2.0
"""Configurations of small models of the kinds that are served: no weights, which the harness draws on the GPU."""

from __future__ import annotations

import json
from pathlib import Path


def quantization(scheme: str) -> dict | None:
    """The compressed-tensors configuration of `scheme`: experts quantized, all else left alone."""
    ignore = [
        "lm_head",
        "re:.*visual.*",
        "re:.*mlp.gate$",
        "re:.*linear_attn.*",
        "re:.*self_attn.*",
        "re:.*shared_expert.*",
        "re:.*mtp.*",
    ]
    if scheme == "bf16":
        return None
    if scheme == "nvfp4":
        four = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
        group = dict(
            targets=["Linear"],
            format="nvfp4-pack-quantized",
            weights=dict(four, dynamic=False),
            input_activations=dict(four, dynamic="local"),
        )
        name = "nvfp4-pack-quantized"
    else:
        group = dict(
            targets=["Linear"],
            weights=dict(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True, dynamic=False),
        )
        name = "pack-quantized"
    return dict(
        quant_method="compressed-tensors",
        format=name,
        ignore=ignore,
        config_groups=dict(group_0=group),
        quantization_status="compressed",
    )


def qwen35(folder: Path, scheme: str, layers: int = 8, experts: int = 64, drafts: bool = False) -> str:
    """A Qwen3.5-MoE of `layers` layers (gated delta net and attention), `experts` of width 512, 8 a token.

    Args:
        drafts: with an MTP head of one layer, whose experts are in bf16, as in NVIDIA's checkpoints.
    """
    try:
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING["qwen3_5_moe"]().to_dict()
    except Exception:  # transformers 4 does not know the model; the release brings the class
        from vllm.transformers_utils.configs.qwen3_5_moe import Qwen3_5MoeConfig

        config = Qwen3_5MoeConfig().to_dict()
    text = config["text_config"]
    text.update(
        num_hidden_layers=layers,
        layer_types=text["layer_types"][:layers],
        dtype="bfloat16",
        torch_dtype="bfloat16",
        eos_token_id=None,
        num_experts=experts,
        vocab_size=8192,
    )
    config["vision_config"]["depth"] = 1
    config.update(
        architectures=["Qwen3_5MoeForConditionalGeneration"], dtype="bfloat16", quantization_config=quantization(scheme)
    )
    if drafts:  # v0.26.0 looks for it beside the text's configuration
        text["mtp_num_hidden_layers"] = config["mtp_num_hidden_layers"] = 1
    return write(folder / f"qwen35-{scheme}-{layers}{'-drafts' if drafts else ''}", config)


def qwen3(folder: Path, scheme: str, layers: int = 8) -> str:
    """A Qwen3-MoE of `layers` layers, all attention and so with every kind of CUDA graph; 64 experts, 8 a token."""
    config = dict(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        hidden_act="silu",
        attention_bias=False,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        dtype="bfloat16",
        quantization_config=quantization(scheme),
    )
    return write(folder / f"qwen3-{scheme}-{layers}", config)


def adapter(folder: Path, model: str) -> str:
    """A LoRA adapter for the attention (queries and output) of a `qwen3` at `model`, strong enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    wide, rank = config["num_attention_heads"] * config["head_dim"], 16
    shapes = {"q_proj": (config["hidden_size"], wide), "o_proj": (wide, config["hidden_size"])}
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (into, out) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, into, generator=drawn).mul(0.05).bfloat16()
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, rank, generator=drawn).mul(0.05).bfloat16()
    path = folder / f"adapter-{Path(model).name}"
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=sorted(shapes), bias="none")
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return str(path)


def reversed_experts(checkpoint: Path, folder: Path) -> Path:
    """A copy of `checkpoint`, layer 1's experts in reverse order under a router that does not know."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.experts."
    experts = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    last = max(int(name.partition(".")[0]) for name in experts)
    for name, tensor in experts.items():
        number, _, rest = name.partition(".")
        tensors[f"{prefix}{last - int(number)}.{rest}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def nemotron(folder: Path) -> str:
    """A hybrid of the Nemotron-H kind: Mamba2 layers (views taken at construction), experts, attention; bf16."""
    pattern = "MEM*EME"
    config = dict(
        model_type="nemotron_h",
        architectures=["NemotronHForCausalLM"],
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern,
        num_attention_heads=8,
        head_dim=128,
        num_key_value_heads=2,
        mlp_hidden_act="relu2",
        ssm_state_size=128,
        mamba_num_heads=16,
        mamba_n_groups=8,
        n_groups=8,
        mamba_head_dim=64,
        mamba_d_conv=4,
        conv_kernel=4,
        mamba_hidden_act="silu",
        chunk_size=256,
        use_conv_bias=True,
        mamba_proj_bias=False,
        use_bias=False,
        mlp_bias=False,
        attention_bias=False,
        layer_norm_epsilon=1e-5,
        n_routed_experts=32,
        n_shared_experts=1,
        moe_intermediate_size=512,
        moe_shared_expert_intermediate_size=512,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        max_position_embeddings=4096,
        residual_in_fp32=False,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        expand=2,
        time_step_limit=[0.0, 1e9],
        num_logits_to_keep=1,
        torch_dtype="bfloat16",
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return write(folder / "nemotron", config)


def introduce_nemotron() -> None:
    """Transformers 4 does not know the model; the release brings the class. For each process that reads its config."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if "nemotron_h" not in CONFIG_MAPPING:
        from vllm.transformers_utils.configs.nemotron_h import NemotronHConfig

        AutoConfig.register("nemotron_h", NemotronHConfig)


def write(path: Path, config: dict) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(path)
