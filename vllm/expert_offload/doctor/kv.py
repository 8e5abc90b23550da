# SPDX-License-Identifier: Apache-2.0
"""Bytes of the KV cache, from config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Cache(NamedTuple):
    """Bytes per rank: `per_token` of each layer that keeps all tokens, `fixed` per sequence (windows, linear state)."""

    per_token: int
    fixed: int

    def nbytes(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens."""
        return self.per_token * tokens + self.fixed


def kinds(config: Mapping[str, Any]) -> dict[str, int]:
    """How many layers are "full" (all tokens are kept), "window" (a few are) and "linear" (a state of fixed size)."""
    layers = int(config.get("num_hidden_layers") or 0)
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(config.get("hybrid_override_pattern"), str):  # Nemotron-H: a letter per layer
        types = [{"*": "attention", "M": "mamba"}.get(letter, "mlp") for letter in config["hybrid_override_pattern"]]
    if not types:
        every = int(config.get("full_attention_interval") or config.get("attn_layer_period") or 1)
        return {"full": layers // every, "window": 0, "linear": layers - layers // every}
    window = sum(bool(re.search("sliding|chunked|window", kind)) for kind in types)
    linear = sum(bool(re.search("linear|mamba|recurrent|conv", kind)) for kind in types)
    none = sum(kind in ("mlp", "moe") for kind in types)
    return {"full": len(types) - window - linear - none, "window": window, "linear": linear}


def element_bytes(dtype: str) -> int:
    """Bytes of one number of the cache under `--kv-cache-dtype`; "auto" counts as 16 bits, the most that it gives."""
    return 1 if dtype.startswith(("fp8", "int8", "nvfp4")) else 4 if dtype == "float32" else 2


def cache(config: Mapping[str, Any], ranks: int, dtype: str = "auto") -> Cache | None:
    """Bytes per rank for the decoder that `config` describes; None when it does not say enough."""
    layers, size = kinds(config), element_bytes(dtype)
    heads = int(config.get("num_attention_heads") or 0)
    if not heads or not config.get("num_hidden_layers"):
        return None
    if latent := int(config.get("kv_lora_rank") or 0):  # MLA: one vector for all heads, on every rank
        row = (latent + int(config.get("qk_rope_head_dim") or 0)) * size
    else:
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
        row = 2 * -(-kv_heads // ranks) * head * size  # keys and values; a rank has one head at the least
    window = int(config.get("sliding_window") or config.get("attention_chunk_size") or 0)
    return Cache(layers["full"] * row, layers["window"] * window * row + layers["linear"] * _state(config) // ranks)


def _state(config: Mapping[str, Any]) -> int:
    """Bytes of a linear layer's state, in 32 bits: a gated delta net's, or Mamba2's."""
    for names in (
        ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ):
        sizes = [int(config.get(name) or 0) for name in names]
        if all(sizes):
            return 4 * sizes[0] * sizes[1] * sizes[2]
    return 0
