# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs beside copies from pageable memory.

A copy from memory that is not page-locked blocks the host, so it can't be part of a captured graph. The copy is an op
of its own (`expert_offload::fill`, in `staging`), called only by layers that have something to fetch: where the
release compiles in pieces, that op becomes a border between two graphs, and everything else stays captured.

A release cuts its graph at attention anyway. `join_cuts` moves each copy back to the cut before it, so that there is no
cut of our own: the pieces, and the rounding that the compiler's fusions give them, are those of the resident model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import Graph, Node

from .staging import Staging

FILL_OP = "expert_offload::fill"


class GraphPlan(NamedTuple):
    """`mode` is the name of the release's CUDAGraphMode to use, `splitting_ops` its list of border ops, `line` what to
    tell the user, or None when nothing was lowered."""

    mode: str
    splitting_ops: list[str]
    line: str | None


def plan_graphs(*, mode: str, splitting_ops: list[str], piecewise: bool) -> GraphPlan:
    """The graphs that a start may capture whose offloaded weights are not all in page-locked memory.

    Args:
        mode: name of the CUDAGraphMode that the release resolved (NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, ...).
        splitting_ops: ops at which the release cuts the graph.
        piecewise: whether the release compiles in pieces at `splitting_ops`.
    """
    if mode == "NONE" or (mode == "PIECEWISE" and FILL_OP in splitting_ops):  # cut already, when configured
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


def dense_places(layers: Iterable[tuple[bool, bool]]) -> int:
    """Places that dense weights need in the staging buffer so that every fill can move to a cut of the release's own.

    Between two cuts run the end of the layer that holds the first, the layers without a cut, and the beginning of the
    layer that holds the second: all their weights must be there at once. Where a layer without dense weights begins
    cannot be seen in the graph, so those fetched last count as read until the next are fetched.

    Args:
        layers: for each layer in order, whether dense weights of it are fetched, and whether the graph is cut in it.
    """
    together = most = 0
    for fetched, cut in layers:
        together += fetched
        most = max(most, together)
        if cut:
            together = min(together, 1)
    return max(1, most)


def join_cuts(graph: Graph, is_cut: Callable[[Node], bool], staging: Staging) -> int:
    """Move each fill of `graph` behind the nearest cut before it, where that is safe; returns how many were moved.

    A group's place in the staging buffer is free once its last reader has run. Experts share one place, which the next
    op after their own fill reads: theirs may move back to any cut behind the fill of experts before it. Dense weights
    are read until the next layer's are fetched, and have `staging.places` in turn: behind a cut there is room for as
    many, less the one that is being read there. The beginning of the graph counts as a cut.

    Args:
        graph: one forward pass, as traced; changed in place.
        is_cut: whether the release cuts at a node; true for fills themselves.
        staging: where the fills write.
    """
    fills = (torch.ops.expert_offload.fill, torch.ops.expert_offload.fill.default)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    cut = inputs[-1] if inputs else None
    anchor = next((node for node in inputs if _is_activation(node)), None)
    room = {True: 1, False: staging.places}  # fills of experts, and of dense weights, that may still move to `cut`
    reading = moved = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target not in fills:
            if is_cut(node):
                cut, room = node, {True: 1, False: staging.places - reading}
                anchor = next((a for a in cut.all_input_nodes if _is_activation(a)), None)
            continue
        experts, _ = staging.groups[int(node.args[1])]
        if is_cut(node) and room[experts] > 0 and cut is not None and anchor is not None:
            node.args = (anchor, node.args[1])
            cut.append(node)
            moved += 1
        room[experts] -= 1
        reading |= not experts
    return moved


def _is_activation(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
