# SPDX-License-Identifier: Apache-2.0
"""Routing traces with a locality that is stated: random weights route nearly uniformly, and trained models do not.

A token's experts are drawn by how long ago they were last used: the one used last has place 0, and place d is drawn
with a weight of (d + 1) ** -slope. `slope` 0 is uniform. The hit rate of a least-recently-used cache of S slots is then
simulated, not derived; `with_hits` finds the slope that gives the one asked for.
"""

from __future__ import annotations

import numpy as np


def draw(layers: int, tokens: int, k: int, experts: int, slope: float, seed: int = 0) -> np.ndarray:
    """The experts of `tokens` tokens in a row in each layer: int32 [layers, tokens, k], no expert twice in a token."""
    random = np.random.default_rng(seed)
    weight = np.arange(1, experts + 1) ** -float(slope)
    # The k largest of these are k draws without replacement (Efraimidis and Spirakis 2006).
    keys = np.log(random.random((layers, tokens, experts))) / weight
    places = np.argpartition(-keys, k - 1, axis=-1)[..., :k]
    out = np.empty((layers, tokens, k), dtype=np.int32)
    for layer in range(layers):
        recent = random.permutation(experts)
        for token in range(tokens):
            chosen = recent[places[layer, token]]
            out[layer, token] = chosen
            rest = np.delete(recent, places[layer, token])
            recent = np.concatenate([chosen, rest])
    return out


def hits(trace: np.ndarray, slots: int, streams: int = 1, stride: int = 0) -> float:
    """Share of distinct experts that a least-recently-used cache of `slots` slots has, once it is warm.

    `streams` tokens share a step, `stride` tokens of the trace apart. The first half of the trace warms up.
    """
    layers, tokens, _ = trace.shape
    found = needed = 0
    for layer in range(layers):
        cache: dict[int, None] = {}  # in the order of use
        for step in range(tokens):
            rows = [(step + stream * stride) % tokens for stream in range(streams)]
            now = dict.fromkeys(trace[layer, rows].ravel().tolist())
            if step >= tokens // 2:
                needed += len(now)
                found += sum(expert in cache for expert in now)
            for expert in now:
                cache.pop(expert, None)
            cache.update(now)
            while len(cache) > slots:
                del cache[next(iter(cache))]
    return found / needed


def with_hits(rate: float, slots: int, k: int, experts: int) -> float:
    """The slope of a trace whose single stream finds `rate` of its experts in `slots` slots, to about 0.5 %."""
    low, high = 0.0, 4.0
    for _ in range(9):
        middle = (low + high) / 2
        if hits(draw(2, 600, k, experts, middle, seed=1), slots) < rate:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 3)
