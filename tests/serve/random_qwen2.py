# SPDX-License-Identifier: Apache-2.0
"""A random Qwen2-MoE whose first layer is dense and whose embeddings are tied.

    PYTHON tests/serve/random_qwen2.py OUT

In a pipeline its first stage can be one without experts, which vLLM refuses of Qwen3-MoE ("No Qwen3MoE layer found").
"""

import sys
from pathlib import Path

import torch
from random_qwen35 import save
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM


def main(out: Path) -> None:
    config = Qwen2MoeConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        max_position_embeddings=1024,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    save(Qwen2MoeForCausalLM(config), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
