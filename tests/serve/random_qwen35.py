# SPDX-License-Identifier: Apache-2.0
"""A random Qwen3.5-MoE (gated delta net and attention, shared experts), its expert weights large enough to matter.

    PYTHON tests/serve/random_qwen35.py OUT      with a transformers that knows the model

With the usual small ones, zeroing every expert hardly changes a token, and no test could see an expert's fault.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

EXPERT_SCALE = 8
TOKENIZER = Path(__file__).parents[1] / "models" / "tiny-moe"


def main(out: Path) -> None:
    config = Qwen3_5MoeTextConfig(
        vocab_size=320,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        max_position_embeddings=1024,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    save(Qwen3_5MoeForCausalLM(config), out)


def save(model: PreTrainedModel, out: Path) -> None:
    """The random model in bf16 with its experts scaled up, and the trained model's tokenizer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(EXPERT_SCALE)
    model.to(torch.bfloat16).save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
