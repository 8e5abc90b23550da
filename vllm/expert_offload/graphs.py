# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs beside copies from pageable memory.

A copy from memory that is not page-locked blocks the host, so it can't be part of a captured graph. The copy is an op
of its own (`expert_offload::fill`, in `staging`), called only by layers that have something to fetch: where the
release compiles in pieces, that op becomes a border between two graphs, and everything else stays captured.
"""

from __future__ import annotations

from typing import NamedTuple

FILL_OP = "expert_offload::fill"


class GraphPlan(NamedTuple):
    """`mode` is the name of the release's CUDAGraphMode to use, `splitting_ops` its list of border ops, `line` what to
    tell the user, or None when nothing was lowered."""

    mode: str
    splitting_ops: list[str]
    line: str | None


def plan_graphs(*, pinned: bool, mode: str, splitting_ops: list[str], piecewise: bool) -> GraphPlan:
    """The graphs that a start with offloaded weights may capture.

    Args:
        pinned: whether their host memory will be page-locked; if so copies can be captured and nothing changes.
        mode: name of the CUDAGraphMode that the release resolved (NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, ...).
        splitting_ops: ops at which the release cuts the graph.
        piecewise: whether the release compiles in pieces at `splitting_ops`.
    """
    if pinned or mode == "NONE":
        return GraphPlan(mode, splitting_ops, None)
    why = "offloaded weights lie in pageable memory, and copies from it cannot be captured"
    if not piecewise:
        return GraphPlan("NONE", splitting_ops, f"CUDA graphs lowered from {mode} to NONE: {why}, nor is this mode compiled in pieces")
    ops = splitting_ops if FILL_OP in splitting_ops else [*splitting_ops, FILL_OP]
    line = f"graphs are cut before each layer that has offloaded weights: {why}"
    if mode != "PIECEWISE":
        line = f"CUDA graphs lowered from {mode} to PIECEWISE, and {line}"
    return GraphPlan("PIECEWISE", ops, line)
