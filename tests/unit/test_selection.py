# SPDX-License-Identifier: Apache-2.0
"""Which parameters leave: properties over random models, and what a user reads who misspelt a name."""

import pytest
from expert_offload.selection import Candidate, PatternError, Selection, matches
from hypothesis import given
from hypothesis import strategies as st

DENSE_LEAVES = ["self_attn.qkv_proj.weight", "mlp.gate.weight", "mlp.shared_experts.up_proj.weight", "norm.weight"]
EXPERT_LEAVES = ["mlp.experts.w13_weight", "mlp.experts.w2_weight", "mlp.experts.w2_weight_scale"]
PATTERNS = ["experts", "weight", "layers", "0", "1", "self_attn", "experts.w2_weight", "mlp.gate", "nowhere", "norm"]


SIZES = st.integers(0, 4) | st.integers(0, 50)
BUDGETS = st.integers(0, 20) | st.integers(0, 400)


@st.composite
def models(draw):
    """Layers of candidates: experts or dense, of any size, some of which may not leave; in any order of declaration."""
    layers = []
    for index in range(draw(st.integers(1, 6))):
        leaves = draw(st.lists(st.sampled_from(DENSE_LEAVES + EXPERT_LEAVES), unique=True))
        layers.append(
            [
                Candidate(f"layers.{index}.{leaf}", draw(SIZES), leaf in EXPERT_LEAVES, draw(st.booleans()))
                for leaf in leaves
            ]
        )
    return layers


def eligible(candidates, patterns):
    return [c for c in candidates if c.may_leave and (not patterns or any(matches(p, c.name) for p in patterns))]


def play(layers, budget, patterns):
    """Run a selection and keep the books independently; yields (selection, what is out, what was seen) per layer."""
    selection = Selection(budget, patterns)
    out, seen = [], []
    for layer in layers:
        leave, back = selection.layer(layer)
        assert set(leave) <= set(layer)
        assert len(set(leave)) == len(leave)
        for c in back:
            assert c in out, "it came back without having left"
            assert c not in layer, "what was built just now should not have moved at all"
            out.remove(c)
        out += leave
        seen += layer
        yield selection, out, seen


@given(models(), BUDGETS, st.sets(st.sampled_from(PATTERNS), max_size=3))
def test_budget_and_books(layers, budget, patterns):
    for selection, out, seen in play(layers, budget, patterns):
        able = eligible(seen, patterns)
        assert selection.taken == sum(c.nbytes for c in out)
        assert all(c in able for c in out)
        assert len(set(out)) == len(out)
        assert selection.taken >= min(budget, sum(c.nbytes for c in able))
        if out:
            assert selection.taken < budget + max(c.nbytes for c in able) or selection.taken == 0
        if budget == 0:
            assert not out
        for pattern in patterns:
            assert selection.hits[pattern] == sum(c.may_leave and matches(pattern, c.name) for c in seen)


@given(models(), BUDGETS)
def test_experts_leave_first(layers, budget):
    for _, out, seen in play(layers, budget, set()):
        experts = [c for c in eligible(seen, ()) if c.experts]
        dense = [c for c in out if not c.experts]
        if dense:
            assert all(c in out for c in experts), "a dense weight is out while an expert could be"
            assert sum(c.nbytes for c in experts) < budget, "the experts alone are enough"
        spent = sum(c.nbytes for c in out)
        if dense and dense[-1].nbytes:
            assert spent - dense[-1].nbytes < budget, "the last dense weight is not needed"


@given(models(), BUDGETS, st.randoms())
def test_the_order_of_experts_and_dense_weights_in_a_layer_does_not_matter(layers, budget, random):
    """Without patterns only the order among experts, and among dense weights, decides."""
    mixed = []
    for layer in layers:
        experts, dense = [c for c in layer if c.experts], [c for c in layer if not c.experts]
        shuffled = []
        while experts or dense:
            shuffled.append((random.choice([s for s in (experts, dense) if s])).pop(0))
        mixed.append(shuffled)
    for (a, left, _), (b, right, _) in zip(play(layers, budget, set()), play(mixed, budget, set())):
        assert set(left) == set(right) and a.taken == b.taken


@given(models(), BUDGETS, st.sets(st.sampled_from(PATTERNS), max_size=3), st.randoms())
def test_with_a_large_budget_no_order_matters(layers, budget, patterns, random):
    everything = sum(c.nbytes for layer in layers for c in layer) + 1
    shuffled = [random.sample(layer, len(layer)) for layer in random.sample(layers, len(layers))]
    ends = [list(play(ls, everything, patterns))[-1][1] for ls in (layers, shuffled)]
    assert set(ends[0]) == set(ends[1]) == set(eligible([c for layer in layers for c in layer], patterns))


@given(models(), st.integers(1, 400), st.sets(st.sampled_from(PATTERNS), min_size=1, max_size=3))
def test_with_patterns_parameters_leave_in_order_of_declaration_and_none_returns(layers, budget, patterns):
    want, taken = [], 0
    for c in eligible([c for layer in layers for c in layer], patterns):
        if taken < budget:
            want.append(c)
            taken += c.nbytes
    selection, got = Selection(budget, patterns), []
    for layer in layers:
        leave, back = selection.layer(layer)
        assert not back
        got += leave
    assert got == want


def test_a_dense_weight_returns_for_later_experts():
    """By hand: 3 layers of 10 dense and 20 expert bytes, budget 45."""
    layers = [[Candidate(f"l.{i}.d", 10, False, True), Candidate(f"l.{i}.experts.w", 20, True, True)] for i in range(3)]
    selection = Selection(45, set())
    assert selection.layer(layers[0]) == ([layers[0][1], layers[0][0]], [])
    assert selection.layer(layers[1]) == ([layers[1][1]], [])
    assert selection.taken == 50
    assert selection.layer(layers[2]) == ([layers[2][1]], [layers[0][0]])
    assert selection.taken == 60


def test_a_dense_weight_returns_when_the_budget_is_met_to_the_byte_without_it():
    dense, expert = Candidate("l.0.d", 10, False, True), Candidate("l.1.experts.w", 20, True, True)
    selection = Selection(20, set())
    assert selection.layer([dense]) == ([dense], [])
    assert selection.layer([expert]) == ([expert], [dense])
    assert selection.taken == 20


@pytest.mark.parametrize(
    "pattern, name, want",
    [
        ("experts", "model.layers.0.mlp.experts.w13_weight", True),
        ("experts", "model.layers.0.mlp.shared_experts.up_proj.weight", False),
        ("shared_experts", "model.layers.0.mlp.shared_experts.up_proj.weight", True),
        ("experts", "experts", True),
        ("experts.w2_weight", "model.layers.0.mlp.experts.w2_weight", True),
        ("experts.w2_weight", "model.layers.0.mlp.experts.w2_weight_scale", False),
        ("w2_weight", "model.layers.0.mlp.experts.w2_weight_scale", False),
        ("w2_weight_scale", "model.layers.0.mlp.experts.w2_weight_scale", True),
        ("layers.0", "model.layers.0.mlp.gate.weight", True),
        ("layers.0", "model.layers.01.mlp.gate.weight", False),
        ("layers.0", "model.layers.10.mlp.gate.weight", False),
        ("layers.1", "model.layers.10.mlp.gate.weight", False),
        ("model.layers", "model.layers.10.mlp.gate.weight", True),
        ("mlp.weight", "model.layers.0.mlp.gate.weight", False),
        ("gate.weight", "model.layers.0.mlp.gate.weight", True),
        ("ate.weight", "model.layers.0.mlp.gate.weight", False),
        ("e.w", "model.layers.0.mlp.gate.weight", False),
    ],
)
def test_patterns_name_whole_segments(pattern, name, want):
    assert matches(pattern, name) is want


def seen(*patterns):
    selection = Selection(100, set(patterns))
    selection.layer(
        [
            Candidate("model.layers.0.self_attn.qkv_proj.weight", 5, False, True),
            Candidate("model.layers.0.mlp.experts.w13_weight", 5, True, True),
            Candidate("model.layers.0.mlp.experts.w2_weight", 5, True, True),
            Candidate("model.layers.0.mlp.experts.w2_weight_scale", 0, True, False),
            Candidate("model.layers.0.mlp.shared_experts.up_proj.weight", 5, False, True),
        ]
    )
    return selection


@pytest.mark.parametrize(
    "pattern, nearest",
    [
        ("expert", "experts.w13_weight"),
        ("mlp.expert", "experts.w13_weight"),
        ("w2_weights", "experts.w2_weight"),
        ("shared_expert", "up_proj.weight"),
        ("experts.w1_weight", "experts.w13_weight"),
        ("qkv", "qkv_proj.weight"),
        ("zzzzz", "experts.w2_weight"),  # resembles nothing: then what most people want
    ],
)
def test_a_misspelt_pattern_is_refused_with_the_nearest_names(pattern, nearest):
    selection = seen(pattern)
    with pytest.raises(PatternError) as error:
        selection.check(selection.hits)
    text = str(error.value)
    assert text.startswith(f"--cpu-offload-params {pattern}: ")
    assert "no parameter of the decoder layers has that name" in text and "must stay" not in text
    assert nearest in text.split("Nearest: ")[1]
    assert "whole dotted segments" in text


def test_a_pattern_for_metadata_is_told_that_it_must_stay():
    selection = seen("w2_weight_scale")
    with pytest.raises(PatternError, match=r"matches model\.layers\.0\.mlp\.experts\.w2_weight_scale, which must stay"):
        selection.check(selection.hits)


def test_a_good_pattern_passes_and_the_bad_one_beside_it_is_named():
    seen("experts", "self_attn").check({"experts": 2, "self_attn": 1})
    selection = seen("experts", "nope")
    with pytest.raises(PatternError, match="--cpu-offload-params nope: "):
        selection.check(selection.hits)


def test_a_hit_on_another_rank_counts():
    """With pipeline parallelism a rank may hold no layer that a pattern names."""
    selection = seen("layers.40")
    assert selection.hits == {"layers.40": 0}
    selection.check({"layers.40": 3})
    with pytest.raises(PatternError):
        selection.check({"layers.40": 0})


def test_a_model_without_layers_still_gets_a_readable_error():
    selection = Selection(1, {"experts"})
    with pytest.raises(PatternError, match=r"has that name\. Give whole dotted"):
        selection.check(selection.hits)
