# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs a start may capture beside blocking copies."""

import re

import pytest
from expert_offload.graphs import FILL_OP, plan_graphs
from hypothesis import given
from hypothesis import strategies as st

OPS = ["vllm::unified_attention", "vllm::gdn_attention_core"]
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.mark.parametrize("piecewise", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_page_locked_memory_changes_nothing(mode, piecewise):
    plan = plan_graphs(pinned=True, mode=mode, splitting_ops=OPS, piecewise=piecewise)
    assert plan == (mode, OPS, None)


@pytest.mark.parametrize(
    "mode, piecewise, want, cut, said",
    [
        ("NONE", True, "NONE", False, []),
        ("NONE", False, "NONE", False, []),
        ("PIECEWISE", True, "PIECEWISE", True, ["fetched between graphs", "pageable"]),
        ("FULL", True, "PIECEWISE", True, ["from FULL to PIECEWISE", "pageable"]),
        ("FULL_DECODE_ONLY", True, "PIECEWISE", True, ["from FULL_DECODE_ONLY to PIECEWISE", "pageable"]),
        ("FULL_AND_PIECEWISE", True, "PIECEWISE", True, ["from FULL_AND_PIECEWISE to PIECEWISE", "pageable"]),
        ("PIECEWISE", False, "NONE", False, ["from PIECEWISE to NONE", "pageable"]),
        ("FULL", False, "NONE", False, ["from FULL to NONE", "pageable"]),
        ("FULL_DECODE_ONLY", False, "NONE", False, ["from FULL_DECODE_ONLY to NONE", "pageable"]),
    ],
)
def test_pageable_memory(mode, piecewise, want, cut, said):
    given = list(OPS)
    plan = plan_graphs(pinned=False, mode=mode, splitting_ops=given, piecewise=piecewise)
    assert plan.mode == want
    assert plan.splitting_ops == ([*OPS, FILL_OP] if cut else OPS)
    assert given == OPS, "the release's own list was changed"
    assert (plan.line is not None) is bool(said)
    for words in said:
        assert words in plan.line
    assert ("lowered" in (plan.line or "")) is (want != mode), "a lowered mode must be said, and only that"


def test_the_op_is_listed_once():
    """Configurations are built more than once in a start."""
    first = plan_graphs(pinned=False, mode="FULL", splitting_ops=OPS, piecewise=True)
    again = plan_graphs(pinned=False, mode=first.mode, splitting_ops=first.splitting_ops, piecewise=True)
    assert again.splitting_ops == first.splitting_ops and again.splitting_ops.count(FILL_OP) == 1


def test_the_op_that_graphs_are_cut_at_exists():
    import torch
    from expert_offload import staging

    namespace, name = FILL_OP.split("::")
    assert getattr(getattr(torch.ops, namespace), name).default._schema.name == FILL_OP
    assert staging._library.ns == namespace


# -- where fills stand in a graph ------------------------------------------------------------------------------------


def layers_graph(order: str):
    """A graph of calls: "a" attention (a cut), "e"/"d" the fill of the next group of experts or dense weights,
    "x" an expert op, "." anything else. Returns it and the kinds of its groups."""
    import torch
    from expert_offload import staging  # noqa: F401  registers the op

    graph = torch.fx.Graph()
    last = graph.placeholder("hidden_states")
    last.meta["example_value"] = torch.empty(1)
    kinds: dict[int, bool] = {}
    for letter in order:
        if letter in "ed":
            kinds[len(kinds)] = letter == "e"
            graph.call_function(torch.ops.expert_offload.fill.default, (last, len(kinds) - 1))
            continue
        function = {"a": torch.sin, "x": torch.exp, ".": torch.neg}[letter]
        last = graph.call_function(function, (last,))
        last.meta["example_value"] = torch.empty(1)
    graph.output(last)
    return graph, kinds


def written(graph, kinds) -> str:
    import torch

    letters = {torch.sin: "a", torch.exp: "x", torch.neg: "."}
    out = ""
    for node in graph.nodes:
        if node.op == "call_function":
            out += letters.get(node.target) or ("e" if kinds[node.args[1]] else "d")
    return out


def joined(order: str, cut_at_fills: bool = True) -> tuple[str, int]:
    import torch
    from expert_offload.graphs import join_cuts

    graph, kinds = layers_graph(order)
    fill = torch.ops.expert_offload.fill.default
    cuts = {torch.sin, fill} if cut_at_fills else {torch.sin}
    moved = join_cuts(graph, lambda node: node.target in cuts, kinds.__getitem__)
    graph.lint()
    return written(graph, kinds), moved


@pytest.mark.parametrize(
    "order, want",
    [
        (".a..ex.a..ex", ".ae..x.ae..x"),  # each layer's experts behind its own attention
        ("d.a..exd.a..ex", "d.ade..x.ae..x"),  # the first layer's dense weights have no cut before them
        (".a.ex.ex", ".ae.x.ex"),  # two expert layers behind one attention: the second's place is still being read
        ("ex.a.ex", "ex.ae.x"),
        (".ex", ".ex"),
    ],
)
def test_fills_move_to_the_cut_before_them(order, want):
    got, moved = joined(order)
    assert sorted(got) == sorted(order)
    assert got == want
    assert moved == sum(a != b for a, b in zip(order, want) if a in "ed")


def test_fills_that_are_no_cuts_stay():
    """Where copies can be captured nothing is cut, and nothing moves."""
    assert joined(".a..ex.a..ex", cut_at_fills=False) == (".a..ex.a..ex", 0)


def pieces(order: str) -> int:
    """Pieces between cuts, consecutive cuts taken together, as releases do."""
    return len([p for p in re.split("[aed]+", order) if p])


def needs(order: str) -> list[tuple[int, int]]:
    """What each call but the fills reads: (group of experts or -1, latest group of dense weights or -1)."""
    experts = dense = -1
    found = []
    for letter in order:
        experts, dense = experts + (letter == "e"), dense + (letter == "d")
        if letter not in "ed":
            found.append((experts if letter == "x" else -1, dense))
    return found


def finds(order: str, wanted: list[tuple[int, int]]) -> bool:
    """Play the graph, experts in one place, dense weights in two in turn: does each call find what it needs?"""
    experts = dense = -1
    places: list[int] = [-1, -1]
    calls = iter(wanted)
    for letter in order:
        if letter == "e":
            experts += 1
        elif letter == "d":
            dense += 1
            places[dense % 2] = dense
        else:
            of_experts, of_dense = next(calls)
            if of_experts not in (-1, experts) or (of_dense >= 0 and places[of_dense % 2] != of_dense):
                return False
    return True


def test_the_game_can_be_lost():
    assert not finds("aeexx", needs("aexex"))
    assert not finds("ddd.", needs("d.dd"))


@given(st.lists(st.sampled_from(["d.a..ex.", ".a..ex.", ".ex.", "d.a..", "da.ex", ".a."]), min_size=1, max_size=8))
def test_moving_adds_no_piece_and_keeps_every_reader_right(layers):
    order = "".join(layers)
    got, _ = joined(order)
    wanted = needs(order)
    assert finds(order, wanted) and finds(got, wanted)
    assert pieces(got) <= pieces(order)
    resident = pieces(order.replace("e", "").replace("d", ""))
    if all("a" in layer for layer in layers):  # every layer has attention: no cut of our own, but one at the start
        assert pieces(got) <= resident + 1
