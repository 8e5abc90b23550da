# SPDX-License-Identifier: Apache-2.0
"""What the expert pool's kernels must do, in Python: tests/unit asks Triton's interpreter, tests/gpu a card."""

NAMES = ("steps", "needed", "hits", "filled", "rest", "bytes")  # of the pool's counters


class Reference:
    """What the kernels must do: `holds` has each slot's expert (-1: none), `order` the slots, next victim first."""

    def __init__(self, experts, slots):
        self.experts, self.holds, self.order = experts, [-1] * slots, list(range(slots))
        self.counters = dict.fromkeys(NAMES, 0)

    def plan(self, chosen, bytes_each, counted=True):
        """Returns the copies (expert, slot) and both maps."""
        need = sorted({e for e in chosen if 0 <= e < self.experts})
        missing = [e for e in need if e not in self.holds]
        fills = list(zip(missing, [s for s in self.order if self.holds[s] not in need]))
        for expert, slot in fills:
            self.holds[slot] = expert
        self.order.sort(key=lambda s: self.holds[s] in need)  # stable
        at = {e: self.holds.index(e) for e in need if e in self.holds}
        counts = 1, len(need), len(need) - len(missing), len(fills), len(missing) - len(fills)
        for name, n in zip(NAMES, counts if counted else ()):
            self.counters[name] += n
        self.counters["bytes"] += len(fills) * bytes_each
        every = range(self.experts)
        return fills, [at.get(e, -1) for e in every], [e if e in need and e not in at else -1 for e in every]


def compare(pool, reference, planned):
    """Every array of `pool` is as `reference`, which answered with `planned`, says."""
    fills, expert_map, rest_map = planned
    assert pool.count.item() == len(fills)
    assert pool.fills[: len(fills)].tolist() == [expert * 65536 + slot for expert, slot in fills]
    assert pool.expert_map.tolist() == expert_map
    assert pool.rest_map.tolist() == rest_map
    assert pool.expert_at.tolist() == reference.holds
    at = {expert: slot for slot, expert in enumerate(reference.holds)}
    assert pool.slot_of.tolist() == [at.get(e, -1) for e in range(pool.experts)]
    assert pool.order.tolist() == reference.order
    assert dict(zip(NAMES, pool.counters.tolist())) == reference.counters
