# SPDX-License-Identifier: Apache-2.0
"""The kernels of `pool`, which says what its tensors hold. `verify` is only for looking at plans, and not fast."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_ids", "k", "bytes_each"], do_not_specialize_on_alignment=["ids", "rows", "slot_ids"])
def plan(
    ids: tl.tensor,
    rows: tl.tensor,
    clock: tl.tensor,
    needed: tl.tensor,
    slot_of: tl.tensor,
    expert_at: tl.tensor,
    order: tl.tensor,
    victims: tl.tensor,
    fills: tl.tensor,
    count: tl.tensor,
    expert_map: tl.tensor,
    rest_map: tl.tensor,
    slot_ids: tl.tensor,
    counters: tl.tensor,
    n_ids: tl.tensor,
    k: tl.tensor,
    bytes_each: tl.tensor,
    E: tl.constexpr,
    S: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    RENUMBERED: tl.constexpr,
) -> None:
    # One program. What another thread has stored is read behind a barrier, and what will be overwritten before one.
    now = tl.load(clock) + 1
    field = tl.arange(0, 8)
    counts = tl.load(counters + field, mask=field < 6, other=0)
    n = tl.minimum(tl.load(rows) * k, n_ids)
    for start in range(0, n, BLOCK):
        o = start + tl.arange(0, BLOCK)
        e = tl.load(ids + o, mask=o < n, other=-1)
        tl.store(needed + e, now, mask=(e >= 0) & (e < E))

    # Lane i stands for expert i, and for the place i in the order of the slots, least recently used first.
    i = tl.arange(0, LANES)
    slot = tl.load(slot_of + i, mask=i < E, other=0)
    s = tl.load(order + i, mask=i < S, other=0)
    was = tl.load(expert_at + s, mask=i < S, other=-1)
    tl.debug_barrier()
    used = (i < E) & (tl.load(needed + i, mask=i < E, other=0) == now)
    miss = used & (slot < 0)
    kept = (was >= 0) & (tl.load(needed + was, mask=was >= 0, other=0) == now)
    free = (i < S) & (kept == 0)
    # Both are counted in one sum, each in a half of the number.
    both = miss.to(tl.int32) + free.to(tl.int32) * 65536
    ranks = tl.cumsum(both, 0) - both
    total = tl.sum(both, 0)
    n_miss = total & 65535
    n_free = total >> 16
    m = tl.minimum(n_miss, n_free)
    rank = ranks & 65535  # misses before this expert
    before = ranks >> 16  # free slots before this place
    filled = miss & (rank < m)
    victim = free & (before < m)
    tl.store(victims + before, s, mask=victim)
    tl.store(slot_of + was, -1, mask=victim & (was >= 0))
    tl.debug_barrier()
    v = tl.load(victims + rank, mask=filled, other=0)
    tl.store(slot_of + i, v, mask=filled)
    tl.store(expert_at + v, i, mask=filled)
    tl.store(fills + rank, i * 65536 + v, mask=filled)
    at = tl.where(filled, v, slot)
    tl.store(expert_map + i, tl.where(used, at, -1), mask=i < E)
    tl.store(rest_map + i, tl.where(used & (at < 0), i, -1), mask=i < E)
    # The slots of this batch go behind the others; both groups stay as they were among themselves.
    stays = tl.maximum(before - m, 0)  # places before this one that this batch did not touch
    place = tl.where(kept | victim, n_free - m + i - stays, stays)
    tl.store(order + place, s, mask=i < S)
    tl.store(count, m)
    tl.store(clock, now)
    add = tl.where(field == 5, m.to(tl.int64) * bytes_each, 0)
    if COUNTED:
        hits = S - n_free
        add += tl.where(field == 0, 1, 0) + tl.where(field == 1, hits + n_miss, 0) + tl.where(field == 2, hits, 0)
        add += tl.where(field == 3, m, 0) + tl.where(field == 4, n_miss - m, 0)
    tl.store(counters + field, counts + add, mask=field < 6)
    if RENUMBERED:
        tl.debug_barrier()
        for start in range(0, n_ids, BLOCK):
            o = start + tl.arange(0, BLOCK)
            e = tl.load(ids + o, mask=o < n_ids, other=-1)
            there = tl.load(slot_of + e, mask=(e >= 0) & (e < E), other=0)
            tl.store(slot_ids + o, tl.maximum(there, 0), mask=o < n_ids)


@triton.jit
def _copy(source: tl.tensor, target: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    tl.store(target + o, tl.load(source + o, mask=o < n), mask=o < n)


@triton.jit(do_not_specialize=["chunks"])
def fill(
    fills: tl.tensor,
    count: tl.tensor,
    table: tl.tensor,
    chunks: tl.tensor,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    for c in range(tl.program_id(0), tl.load(count) * chunks, PROGRAMS):
        pair = tl.load(fills + c // chunks)
        row = table + (c % chunks) * FIELDS
        source = tl.load(row) + (pair >> 16).to(tl.int64) * tl.load(row + 2)
        target = tl.load(row + 1) + (pair & 65535).to(tl.int64) * tl.load(row + 3)
        nbytes = tl.load(row + 4).to(tl.int32)
        width = tl.load(row + 5)
        if width == 16:
            # Said of the mask too, else each thread moves 4 bytes at a time.
            wide_source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
            wide_target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
            _copy(wide_source, wide_target, tl.multiple_of(nbytes // 4, 4), BLOCK // 4)
        elif width == 4:
            _copy(source.to(tl.pointer_type(tl.int32)), target.to(tl.pointer_type(tl.int32)), nbytes // 4, BLOCK // 4)
        else:
            _copy(source.to(tl.pointer_type(tl.uint8)), target.to(tl.pointer_type(tl.uint8)), nbytes, BLOCK)


@triton.jit(do_not_specialize=["n_ids", "k"], do_not_specialize_on_alignment=["ids", "rows"], debug=True)
def verify(
    ids: tl.tensor,
    rows: tl.tensor,
    clock: tl.tensor,
    needed: tl.tensor,
    slot_of: tl.tensor,
    expert_at: tl.tensor,
    order: tl.tensor,
    fills: tl.tensor,
    count: tl.tensor,
    expert_map: tl.tensor,
    rest_map: tl.tensor,
    n_ids: tl.tensor,
    k: tl.tensor,
    E: tl.constexpr,
    S: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One program. What is used as an index is looked at first, so that this kernel itself reads nothing beyond.
    tl.device_assert((tl.load(rows) >= 0) & (tl.load(rows) * k <= n_ids), "expert pool: more rows than ids")
    n = tl.minimum(tl.load(rows) * k, n_ids)
    for start in range(0, n, BLOCK):
        o = start + tl.arange(0, BLOCK)
        e = tl.load(ids + o, mask=o < n, other=0)
        tl.device_assert((e >= 0) & (e < E), "expert pool: the router chose an expert that is none")
    i = tl.arange(0, LANES)
    m = tl.load(count)
    tl.device_assert((m >= 0) & (m <= S), "expert pool: more copies than slots")
    pair = tl.load(fills + i, mask=i < tl.minimum(m, S), other=0)
    tl.device_assert((pair >> 16 >= 0) & (pair >> 16 < E), "expert pool: a copy of an expert that is none")
    tl.device_assert((pair & 65535) < S, "expert pool: a copy into a slot that is none")
    s = tl.load(order + i, mask=i < S, other=0)
    tl.device_assert((s >= 0) & (s < S), "expert pool: the order names a slot that is none")
    tl.device_assert(tl.sum(s, 0) == S * (S - 1) // 2, "expert pool: the order names a slot twice")
    slot = tl.load(slot_of + i, mask=i < E, other=-1)
    tl.device_assert((slot >= -1) & (slot < S), "expert pool: an expert lies in a slot that is none")
    expert = tl.load(expert_at + i, mask=i < S, other=-1)
    tl.device_assert((expert >= -1) & (expert < E), "expert pool: a slot holds an expert that is none")
    there = tl.load(expert_at + slot, mask=(slot >= 0) & (slot < S), other=-1)
    tl.device_assert((slot < 0) | (there == i), "expert pool: a slot does not hold its expert")
    back = tl.load(slot_of + expert, mask=(expert >= 0) & (expert < E), other=-1)
    tl.device_assert((expert < 0) | (back == i), "expert pool: an expert does not lie in its slot")
    copied = tl.load(expert_at + (pair & 65535), mask=(i < m) & ((pair & 65535) < S), other=-1)
    tl.device_assert((i >= m) | (copied == pair >> 16), "expert pool: a copy of another expert than the slot's")
    used = (i < E) & (tl.load(needed + i, mask=i < E, other=0) == tl.load(clock))
    mapped = tl.load(expert_map + i, mask=i < E, other=-1)
    rest = tl.load(rest_map + i, mask=i < E, other=-1)
    tl.device_assert(mapped == tl.where(used, slot, -1), "expert pool: the map does not name the slot")
    tl.device_assert(rest == tl.where(used & (slot < 0), i, -1), "expert pool: an expert is on no map")
