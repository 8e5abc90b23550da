# SPDX-License-Identifier: Apache-2.0
"""Slots in GPU memory for the experts of one layer that lie in host memory, planned and filled on the device.

Per step two kernels and no word from the host: `Pool.plan` reads the router's choice, finds the distinct experts,
gives each one that has no slot that of the least recently used expert which this batch does not need, and writes down
what to copy; `Pool.fill` copies it. Both can be captured in a CUDA graph. Needs Triton: import it where it is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import pool_kernels

# "1" has a third kernel look at every plan, and stop the device where one is wrong.
CHECK_SWITCH = "EXPERT_OFFLOAD_CHECK"
# `Pool.counters`: calls of `plan`, distinct experts that they needed, those found in slots, copied into slots, and left
# to be read elsewhere; bytes that `fill` took over the link.
COUNTERS = ("steps", "needed", "hits", "filled", "rest", "bytes")
MOST_EXPERTS = 4096  # of a layer: one program plans, a lane for each
_WARPS = 8
_IDS = 256  # router's choices that are read at once
_CHUNK = 8192  # bytes that a program copies at once
_PROGRAMS = 264  # at once; on an H200 half and twice as many were as good
_FIELDS = 6  # of a chunk: addresses of source and target, their steps from expert to expert, bytes, alignment


class Part(NamedTuple):
    """One per-expert tensor of a layer: weights, block scales, a global scale.

    `source`: [E, ...] at addresses that the device reads, host memory that is mapped or its own; `slots`: [S, ...] in
    the device's memory, with the same dtype, shape and strides of an expert. `link`: whether `source` lies in host
    memory, so that what is copied counts as bytes over the link.
    """

    source: torch.Tensor
    slots: torch.Tensor
    link: bool = True


class Pool:
    """The slots of one layer: which expert lies where, and the kernels that keep it so.

    After `plan`, and once `fill` has run behind it on the same stream, both on the device and at addresses that stay:

    - `expert_map` [E] int32: the slot of each expert that the batch needs and that has one, -1 for every other expert
    - `rest_map` [E] int32: e for each needed expert e that found no slot, -1 for every other one. Where a batch may
      need more than S experts, a second pass reads these from `source`, by the layer's own tensors
    - `counters` [6] int64, as `COUNTERS` says, only ever growing. To read them, copy them on a stream of one's own

    Bytes that change under the pool (weights that are reloaded) need a `reset`; tensors that move need a new pool.
    The first call of each method compiles and may not be captured. Kernels run on the current device, which must be
    that of the tensors, and its current stream. Nothing here waits for the device or allocates on it, but for the
    constructor, `table`, and `warm` with numbers.

    Args:
        parts: every per-expert tensor of the layer, all with the same E (at most MOST_EXPERTS) and S <= E.
        counters: [6] int64 on the device, zeros, for instance a row of one tensor for all layers; made if None.
        programs: how many programs of 8 warps copy at once.
        check: launch `verify` behind every plan; None: if EXPERT_OFFLOAD_CHECK is 1 in the environment.

    Raises:
        ValueError: `parts` or `counters` are not as said.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        counters: torch.Tensor | None = None,
        programs: int = _PROGRAMS,
        check: bool | None = None,
    ) -> None:
        if not parts or any(t.dim() < 1 for part in parts for t in part[:2]):
            raise ValueError("a pool needs at least one tensor, each with a first dimension of experts or slots")
        self.parts, self.programs = tuple(parts), programs
        self.experts, self.slots = (t.shape[0] for t in parts[0][:2])
        self.device = parts[0].slots.device
        if not 1 <= self.slots <= self.experts <= MOST_EXPERTS:
            raise ValueError(
                f"{self.slots} slots for {self.experts} experts: at least one slot, no more slots than experts, and no "
                f"more than {MOST_EXPERTS} experts are possible"
            )
        self.check = os.environ.get(CHECK_SWITCH) == "1" if check is None else check
        self.counters = counters
        if self.counters is None:
            self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=self.device)
        good = self.counters.dtype == torch.int64 and self.counters.shape == (len(COUNTERS),)
        if not (good and self.counters.is_contiguous() and self.counters.device == self.device):
            raise ValueError(f"counters must be {len(COUNTERS)} contiguous int64 on {self.device}")
        self.own = self.table([part.source for part in parts])
        self.bytes_each = sum(_row_bytes(part.source) for part in parts if part.link)
        self._one = torch.ones(1, dtype=torch.int32, device=self.device)
        self._lanes = max(16, 1 << (self.experts - 1).bit_length())
        self._make_state()

    def _make_state(self) -> None:
        """One tensor for all that `reset` brings back, so that one copy does it; each part begins at 128 bytes."""
        experts, slots = self.experts, self.slots
        sizes = {"clock": 1, "count": 1, "needed": experts, "slot_of": experts, "expert_map": experts}
        sizes |= {"rest_map": experts, "expert_at": slots, "order": slots, "victims": slots, "fills": slots}
        room = [-(-size // 32) * 32 for size in sizes.values()]
        self._state = torch.full((sum(room),), -1, dtype=torch.int32, device=self.device)
        part = {name: flat[:size] for (name, size), flat in zip(sizes.items(), self._state.split(room))}
        # What the kernels read and write, each int32: the clock counts plans, `needed` has its reading when an expert
        # was needed last (so nothing is cleared; it comes round after 2**32 plans); `order` has the slots, least
        # recently used first; `fills` has `count` copies to do, each expert * 65536 + slot.
        self.clock, self.count, self.needed, self.slot_of = (part[n] for n in ("clock", "count", "needed", "slot_of"))
        self.expert_at, self.order, self.fills = part["expert_at"], part["order"], part["fills"]
        self.expert_map, self.rest_map, self._victims = part["expert_map"], part["rest_map"], part["victims"]
        for start in (self.clock, self.count, self.needed):
            start.zero_()
        self.order.copy_(torch.arange(slots, dtype=torch.int32))
        self._initial = self._state.clone()

    def table(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The list of chunks that `fill` copies, with `sources` in the place of the parts' own, in their order.

        For instance a staging buffer through which the whole layer has passed. Keep `sources` alive and in place.

        Returns:
            int64 on the device, [chunks of an expert, 6].

        Raises:
            ValueError: a source does not fit its slots.
        """
        if len(sources) != len(self.parts):
            raise ValueError(f"{len(sources)} tensors for a pool of {len(self.parts)}")
        rows: list[tuple[int, ...]] = []
        for number, (source, part) in enumerate(zip(sources, self.parts)):
            rows += _chunks(self._fitting(number, source, part.slots), part.slots)
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, _FIELDS).to(self.device)

    def _fitting(self, number: int, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`source`, when an expert of it can be copied into `slots` byte by byte; raises ValueError."""
        expert = tuple(slots.shape[1:])
        same = source.dtype == slots.dtype and {source.device, slots.device} == {self.device}
        if not same or source.shape != (self.experts, *expert) or slots.shape != (self.slots, *expert):
            raise ValueError(
                f"tensor {number}: experts of {source.dtype} {tuple(source.shape)} on {source.device} do not go into "
                f"slots of {slots.dtype} {tuple(slots.shape)} on {slots.device}, in a pool of {self.experts} experts "
                f"and {self.slots} slots on {self.device}"
            )
        strides = [[s for s, n in zip(t.stride()[1:], expert) if n > 1] for t in (source, slots)]
        dense = sum((n - 1) * s for n, s in zip(expert, slots.stride()[1:])) + 1 == slots[0].numel()
        apart = all(t.shape[0] == 1 or t.stride(0) >= t[0].numel() for t in (source, slots))
        if strides[0] != strides[1] or not dense or not apart:
            raise ValueError(
                f"tensor {number}: the elements of an expert must lie together, and alike in source and slot; strides "
                f"are {source.stride()} and {slots.stride()}"
            )
        return source

    def plan(self, ids: torch.Tensor, rows: torch.Tensor, slot_ids: torch.Tensor | None = None) -> None:
        """Find what a batch needs, give it slots, and set the maps, `fills` and the counters.

        Args:
            ids: [T, K] int32 or int64 on the device, contiguous: the router's choice. A number that is no expert's is
                passed over.
            rows: one int32 on the device: how many rows count, from the first; the others may hold anything.
            slot_ids: like `ids`, gets the slot of each of them, and 0 for one that has none: what a batch that all
                slots suffice for may be computed by, in the place of `ids`.

        Raises:
            ValueError: a tensor is not as said.
        """
        if slot_ids is not None and not (slot_ids.shape == ids.shape and slot_ids.is_contiguous()):
            raise ValueError(f"slot_ids must be contiguous {tuple(ids.shape)}, as ids are, not {tuple(slot_ids.shape)}")
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
            raise ValueError(f"ids must be contiguous [T, K] of int32 or int64, not {ids.dtype} {tuple(ids.shape)}")
        if rows.numel() != 1 or rows.dtype != torch.int32:
            raise ValueError(f"rows must be one int32, not {rows.dtype} {tuple(rows.shape)}")
        self._plan(ids, rows, slot_ids, self.bytes_each, True)

    def _plan(
        self, ids: torch.Tensor, rows: torch.Tensor, slot_ids: torch.Tensor | None, bytes_each: int, counted: bool
    ) -> None:
        batch, shape = (ids.numel(), ids.shape[1]), dict(E=self.experts, S=self.slots, LANES=self._lanes, BLOCK=_IDS)
        where = self.slot_of, self.expert_at, self.order
        out = self.fills, self.count, self.expert_map, self.rest_map
        pool_kernels.plan[(1,)](
            ids,
            rows,
            self.clock,
            self.needed,
            *where,
            self._victims,
            *out,
            ids if slot_ids is None else slot_ids,
            self.counters,
            *batch,
            bytes_each,
            **shape,
            COUNTED=counted,
            RENUMBERED=slot_ids is not None,
            num_warps=_WARPS,
        )
        if self.check:
            pool_kernels.verify[(1,)](ids, rows, self.clock, self.needed, *where, *out, *batch, **shape)

    def fill(self, table: torch.Tensor | None = None) -> None:
        """Copy what the last plan wrote down, by `table` if given, else from the parts' own sources."""
        table = self.own if table is None else table
        pool_kernels.fill[(self.programs,)](
            self.fills,
            self.count,
            table,
            table.shape[0],
            FIELDS=_FIELDS,
            BLOCK=_CHUNK,
            PROGRAMS=self.programs,
            num_warps=_WARPS,
        )

    def warm(self, experts: torch.Tensor | Sequence[int], table: torch.Tensor | None = None) -> None:
        """Have `experts` in slots, most recently used, and count no plan. Of more than S, the lowest missing come in.

        Args:
            experts: at least one number; a tensor on the device, contiguous, int32 or int64, of any shape, or numbers
                of the host (which go through page-locked memory, so that nothing waits).
            table: where the bytes are, as for `fill`; they count as bytes over the link when it is None. The maps are
                as after a plan, until the next one.
        """
        if not isinstance(experts, torch.Tensor):
            host = torch.tensor(experts, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            experts = host.to(self.device, non_blocking=True)
        self._plan(experts.view(1, -1), self._one, None, self.bytes_each if table is None else 0, False)
        self.fill(table)

    def reset(self) -> None:
        """Forget what the slots hold, in stream order; the counters stay."""
        self._state.copy_(self._initial)


def _chunks(source: torch.Tensor, slots: torch.Tensor) -> list[tuple[int, ...]]:
    """The rows of `Pool.table` for one tensor, each expert's bytes cut into chunks of at most `_CHUNK`."""
    nbytes = _row_bytes(source)
    starts = source.data_ptr(), slots.data_ptr()
    steps = tuple(t.stride(0) * t.element_size() for t in (source, slots))
    aligned = math.gcd(16, nbytes, *starts, *steps)
    width = 16 if aligned == 16 else 4 if aligned >= 4 else 1
    offsets = range(0, nbytes, _CHUNK)
    return [(*(start + at for start in starts), *steps, min(_CHUNK, nbytes - at), width) for at in offsets]


def _row_bytes(source: torch.Tensor) -> int:
    return source[0].numel() * source.element_size()
