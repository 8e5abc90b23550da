# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs a start may capture beside blocking copies."""

import re

import pytest
from expert_offload.graphs import FILL_OP, plan_graphs
from hypothesis import given
from hypothesis import strategies as st

OPS = ["vllm::unified_attention", "vllm::gdn_attention_core"]


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
    plan = plan_graphs(mode=mode, splitting_ops=given, piecewise=piecewise)
    assert plan.mode == want
    assert plan.splitting_ops == ([*OPS, FILL_OP] if cut else OPS)
    assert given == OPS, "the release's own list was changed"
    assert (plan.line is not None) is bool(said)
    for words in said:
        assert words in plan.line
    assert ("lowered" in (plan.line or "")) is (want != mode), "a lowered mode must be said, and only that"


def test_the_op_is_listed_once():
    """Configurations are built more than once in a start."""
    first = plan_graphs(mode="FULL", splitting_ops=OPS, piecewise=True)
    again = plan_graphs(mode=first.mode, splitting_ops=first.splitting_ops, piecewise=True)
    assert again.splitting_ops == first.splitting_ops and again.splitting_ops.count(FILL_OP) == 1
    assert first.line and again.line is None, "said once"


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


def joined(order: str, places: int, cut_at_fills: bool = True) -> tuple[str, int]:
    import torch
    from expert_offload.graphs import join_cuts
    from expert_offload.staging import Staging

    graph, kinds = layers_graph(order)
    staging = Staging(torch.device("cpu"), poison=False)
    staging.places = places
    for group, experts in kinds.items():
        staging.bind(group, experts, [])
    fill = torch.ops.expert_offload.fill.default
    cuts = {torch.sin, fill} if cut_at_fills else {torch.sin}
    moved = join_cuts(graph, lambda node: node.target in cuts, staging)
    graph.lint()
    return written(graph, kinds), moved


@pytest.mark.parametrize(
    "places, order, want",
    [
        (1, ".a..ex.a..ex", ".ae..x.ae..x"),  # each layer's experts behind its own attention
        (2, "d.a..exd.a..ex", "d.ade..x.ae..x"),  # the next layer's dense weights behind this one's attention
        (2, ".d.a..ex", "d..ae..x"),  # the first layer's at the beginning
        (1, "d.a..d.a..", "d.a..d.a.."),  # one place: the layer's own are still being read
        (1, ".a..d.a..", ".ad...a.."),
        (1, ".a.ex.ex", ".ae.x.ex"),  # two expert layers behind one attention: the second's place is still being read
        (1, "ex.a.ex", "ex.ae.x"),
        (1, ".ex", "e.x"),
        (2, "d.a.d.d.a.", "d.ad..d.a."),  # the layer in the middle has no cut, and the last finds no room
        (3, "d.a.d.d.a.", "d.add...a."),
    ],
)
def test_fills_move_to_the_cut_before_them(places, order, want):
    got, moved = joined(order, places)
    assert sorted(got) == sorted(order)
    assert got == want
    assert moved >= sum(a != b for a, b in zip(order, want) if a in "ed")


def test_fills_that_are_no_cuts_stay():
    """Where copies can be captured nothing is cut, and nothing moves."""
    assert joined(".a..ex.a..ex", 2, cut_at_fills=False) == (".a..ex.a..ex", 0)


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


def finds(order: str, wanted: list[tuple[int, int]], count: int) -> bool:
    """Play the graph, experts in one place, dense weights in `count` in turn: does each call find what it needs?"""
    experts = dense = -1
    places = [-1] * count
    calls = iter(wanted)
    for letter in order:
        if letter == "e":
            experts += 1
        elif letter == "d":
            dense += 1
            places[dense % count] = dense
        else:
            of_experts, of_dense = next(calls)
            if of_experts not in (-1, experts) or (of_dense >= 0 and places[of_dense % count] != of_dense):
                return False
    return True


def test_the_game_can_be_lost():
    assert not finds("aeexx", needs("aexex"), 2)
    assert not finds("ddd.", needs("d.dd"), 2)


LAYERS = st.lists(st.sampled_from(["d.a..ex.", ".a..ex.", ".ex.", "d..ex.", "d.a..", "da.ex", ".a."]), max_size=8)


@given(LAYERS.filter(bool), st.integers(1, 4))
def test_moving_adds_no_piece_and_keeps_every_reader_right(layers, places):
    order = "".join(layers)
    got, _ = joined(order, places)
    wanted = needs(order)
    assert finds(order, wanted, places) and finds(got, wanted, places)
    assert pieces(got) <= pieces(order)


@given(LAYERS.filter(bool))
def test_enough_places_leave_the_pieces_of_the_resident_model(layers):
    """Whatever the layers: the dense weights' places suffice, and experts behind one attention alone fetch theirs."""
    from expert_offload.graphs import dense_places

    order = "".join(layers)
    got, _ = joined(order, dense_places(("d" in layer, "a" in layer) for layer in layers))
    assert finds(got, needs(order), dense_places(("d" in layer, "a" in layer) for layer in layers))
    own = [run.count("e") - 1 for run in order.split("a") if "e" in run]  # experts without an attention between them
    resident = pieces(order.replace("e", "").replace("d", ""))
    assert pieces(got) <= resident + sum(own)


def test_places_for_dense_weights():
    from expert_offload.graphs import dense_places

    assert dense_places([(True, True)] * 4) == 2  # this layer's second half, the next one's first
    assert dense_places([(True, True), (True, False), (True, True), (True, True)]) == 3
    assert dense_places([(True, False)] * 5) == 5  # no cut at all: everything is fetched before the graph
    assert dense_places([(False, True), (True, False), (False, True)]) == 1
    assert dense_places([(True, True), (False, True), (True, True)]) == 2
    assert dense_places([]) == 1
