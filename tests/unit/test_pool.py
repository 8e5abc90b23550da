# SPDX-License-Identifier: Apache-2.0
"""The expert pool's kernels, in Triton's interpreter on CPU tensors, against a reference in Python.

The reference is given the same sequence of batches and every array of the pool is compared after every step.
"""

import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="tools/test.py --layer unit brings Triton along")
from expert_offload import pool as module
from expert_offload import pool_kernels
from expert_offload.pool import COUNTERS, Part, Pool

STEPS = 30
GARBAGE = (-1, -7, 2**31 - 1, -(2**31))


class Reference:
    """A pool of `slots` (-1: empty), `order` least recently used first."""

    def __init__(self, experts, slots):
        self.experts, self.slots, self.order = experts, [-1] * slots, list(range(slots))
        self.counters = dict.fromkeys(COUNTERS, 0)

    def plan(self, chosen, bytes_each=0, counted=True):
        """Returns (the copies, the two maps) of a batch that chose `chosen`."""
        need = sorted({e for e in chosen if 0 <= e < self.experts})
        missing = [e for e in need if e not in self.slots]
        free = [s for s in self.order if self.slots[s] not in need]
        fills = list(zip(missing, free))
        for expert, slot in fills:
            self.slots[slot] = expert
        self.order.sort(key=lambda s: self.slots[s] in need)  # stable
        at = {e: self.slots.index(e) for e in need if e in self.slots}
        add = 1, len(need), len(need) - len(missing), len(fills), len(missing) - len(fills)
        for name, n in zip(COUNTERS, add if counted else ()):
            self.counters[name] += n
        self.counters["bytes"] += len(fills) * bytes_each
        maps = [[at.get(e, -1) for e in range(self.experts)]]
        return fills, *maps, [e if e in need and e not in at else -1 for e in range(self.experts)]


# Shape and dtype of one expert: from a scalar to more than a chunk, aligned to 16, 4, 2 bytes and not at all.
SHAPES = [((), torch.float32), ((4, 16), torch.uint8), ((3, 7), torch.bfloat16), ((4100,), torch.float16)]
SHAPES += [((5,), torch.uint8), ((3, 3), torch.float32)]


def parts(experts, slots, shapes, seed=0, shift=0):
    """Tensors of random bytes; they start `shift` bytes behind an aligned address."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for number, (shape, dtype) in enumerate(shapes):
        item = torch.empty((), dtype=dtype).element_size()

        def tensor(n, shape=shape, dtype=dtype, item=item):
            size = n * item * torch.Size(shape).numel()
            flat = torch.randint(0, 256, (size + 16,), dtype=torch.uint8, generator=rng)
            start = -flat.data_ptr() % 16 + shift // item * item
            return flat[start : start + size].view(dtype).view(n, *shape)

        made.append(Part(tensor(experts), tensor(slots), link=number % 2 == 0))
    return made


def raw(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def assert_same(pool, reference, fills, expert_map, rest_map):
    at = [reference.slots.index(e) if e in reference.slots else -1 for e in range(pool.experts)]
    assert pool.count.item() == len(fills)
    assert pool.fills[: len(fills)].tolist() == [e * 65536 + s for e, s in fills]
    assert pool.expert_map.tolist() == expert_map
    assert pool.rest_map.tolist() == rest_map
    assert pool.expert_at.tolist() == reference.slots
    assert pool.slot_of.tolist() == at
    assert pool.order.tolist() == reference.order
    assert dict(zip(COUNTERS, pool.counters.tolist())) == reference.counters
