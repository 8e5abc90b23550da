# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs beside copies from pageable memory.

A copy from memory that is not page-locked blocks the host, so it can't be part of a captured graph. The copy is an op
of its own (`expert_offload::fill`, in `staging`), called only by layers that have something to fetch: where the
release compiles in pieces, that op becomes a border between two graphs, and everything else stays captured.

A release cuts its graph at attention anyway. `join_cuts` moves each copy back to the cut before it, so that there is no
cut of our own: the pieces, and the rounding that the compiler's fusions give them, are those of the resident model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

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
        line = f"CUDA graphs lowered from {mode} to NONE: {why}, nor is this mode compiled in pieces"
        return GraphPlan("NONE", splitting_ops, line)
    ops = splitting_ops if FILL_OP in splitting_ops else [*splitting_ops, FILL_OP]
    line = f"layers that have offloaded weights are fetched between graphs: {why}"
    if mode != "PIECEWISE":
        line = f"CUDA graphs lowered from {mode} to PIECEWISE, and {line}"
    return GraphPlan("PIECEWISE", ops, line)


def join_cuts(graph: Graph, is_cut: Callable[[Node], bool], holds_experts: Callable[[int], bool]) -> int:
    """Move each fill of `graph` behind the nearest cut before it, where that is safe; returns how many were moved.

    A group's place in the staging buffer is free once its last reader has run. Experts share one place, which the next
    op after their own fill reads; dense weights of a layer are read until the next layer's are fetched, and have two
    places in turn (`Staging`). Both come to the same rule: a fill may move back to any cut that stands behind the
    previous fill of its kind.

    Args:
        graph: one forward pass, as traced; changed in place.
        is_cut: whether the release cuts at a node; true for fills themselves.
        holds_experts: whether a group is one of experts, by its number.
    """
    fills = (torch.ops.expert_offload.fill, torch.ops.expert_offload.fill.default)
    cut: Node | None = None
    behind: dict[bool, bool] = {True: True, False: True}  # is `cut` behind the previous fill of that kind?
    moved = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target not in fills:
            if is_cut(node):
                cut, behind = node, {True: True, False: True}
            continue
        kind = holds_experts(int(node.args[1]))
        anchor = next((a for a in cut.all_input_nodes if _is_tensor(a)), None) if cut else None
        if is_cut(node) and behind[kind] and cut is not None and anchor is not None:
            node.args = (anchor, node.args[1])
            cut.append(node)
            moved += 1
        behind[kind] = False
    return moved


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
