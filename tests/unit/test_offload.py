# SPDX-License-Identifier: Apache-2.0
"""A start with offload, whole, on the CPU: tokens equal the resident model's, and whatever would be wrong ends it.

The switch makes the CPU a device with memory of its own: host buffers can't be read outside a copy, and the staging
buffer is overwritten after each layer, so a tensor that is read where it should not be is a crash or a NaN.
"""

import gc
import itertools
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx
from expert_offload import Memory, Offloader
from expert_offload.host import HostBuffer
from expert_offload.staging import Bound, Staging, _anchor
from fake_model import (
    ALL_EXPERTS,
    CPU,
    EVERYTHING,
    EXPERTS,
    HIDDEN,
    NVFP4,
    PLAIN,
    QKV,
    W2,
    W13,
    Experts,
    Layer,
    Model,
    has_attention,
    kept,
    load,
    mapped_start,
    out_names,
    pageable,
    parameter,
    resident,
    shares_across_layers,
    started,
    tokens,
    view_elsewhere,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")
AMOUNTS = {"a-byte": 1, "one-parameter": W13, "half": ALL_EXPERTS // 2, "all": ALL_EXPERTS, "more": 2**30}


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("patterns", [(), ("experts",)], ids=["no-pattern", "experts"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method", [PLAIN, NVFP4])
def test_tokens_equal_and_a_swapped_expert_shows(method, compiled, patterns, amount):
    want = resident(experts=method)
    model, made = started(AMOUNTS[amount], *patterns, experts=method)
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    assert torch.equal(tokens(run), want)
    assert torch.equal(tokens(run), want), "the second pass reads what the first left behind"
    item = next(i for i in made.items.values() if i.out and "w13" in i.name)
    with item.buffer.opened():
        item.host.copy_(item.host[[1, 0, *range(2, EXPERTS)]])
    assert not torch.equal(tokens(run), want), "void: two experts changed places and no token did"


def test_a_functional_graph_can_not_move_an_expert_before_its_copy():
    """What the op's claim to write its anchor is for: without it nothing would depend on the op."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, _: (graphs.append(graph.graph), graph)[1])
    model, made = started(2**30)
    assert torch.equal(tokens(torch.compile(model, fullgraph=True, backend=backend)), resident())
    before: dict = {}  # node: groups whose copies it depends on
    experts = []
    for node in graphs[0].nodes:
        before[node] = set().union(*(before[n] for n in node.all_input_nodes))
        if torch.ops.expert_offload.fill.default in (node.target, *node.args):
            before[node] = before[node] | {node.kwargs["group"]}
        if node.target is torch.ops.unit_tests.moe_forward.default:
            experts.append([made._groups[g] for g in sorted(before[node])])
    in_order = [m for layer in model.layers for m in (layer, layer.experts)]
    assert experts == [in_order[:2], in_order[:4], in_order[:6]]


@pytest.mark.parametrize("patterns", [(), ("experts",)], ids=["no-pattern", "experts"])
def test_tokens_equal_under_inductor(patterns):
    """Functionalized: the op's claim to write its anchor is all that keeps the copies in place."""
    want = torch.compile(Model(layers=2), fullgraph=True, backend="inductor")
    model, _ = started(2**30, *patterns, layers=2)
    got = torch.compile(model, fullgraph=True, backend="inductor")
    assert torch.equal(tokens(got), tokens(want))


@given(st.integers(1, EVERYTHING + 9999), st.sets(st.sampled_from(["experts", "qkv", "layers.1", "gate"])))
@settings(max_examples=15)
def test_any_budget(budget, patterns):
    model, made = started(budget, *patterns)
    moved = sum(i.buffer.nbytes for i in made.items.values() if i.out)
    assert made.moved == made.selection.taken == moved
    able = sum(
        p.nbytes
        for name, p in Model().named_parameters()
        if p.dim() > 1 and (not patterns or any(f".{x}." in f".model.{name}" for x in patterns))
    )
    assert min(budget, able) <= moved < budget + W13
    assert torch.equal(tokens(model), resident())


def test_one_layer_at_a_time_lies_whole_on_the_device():
    """`wrap_modules` must not draw the next layer before it has taken from the last."""
    made, earlier = pageable(2**30, "experts"), []

    def layers():
        for i in range(3):
            assert all(made.arena.holding(layer.experts.w13_weight.data) is not None for layer in earlier)
            earlier.append(Layer(f"l.{i}"))
            yield earlier[-1]

    assert made.wrap_modules(layers(), prefix="l") == earlier
    assert out_names(made)[0] == "l.0.experts.w13_weight"


def test_layers_are_named_once():
    """`name_layers` holds for the next call alone; pipeline parallel ranks start in the middle."""
    made = pageable(2**30)
    made.name_layers("model.layers", 7)
    made.wrap_modules([Layer("a")])
    made.wrap_modules([Layer("b")])
    layers = {name.split(".e")[0] for name in out_names(made) if "experts" in name}
    assert layers == {"model.layers.7", "0"}


def test_experts_leave_before_dense_weights_and_dense_ones_return():
    """Layer by layer nothing else is known; in the end all experts are out, and as little else as the budget needs."""
    model, made = started(ALL_EXPERTS - 1)
    assert out_names(made) == sorted(f"model.layers.{i}.experts.{w}_weight" for i in range(3) for w in ("w13", "w2"))
    for layer in model.layers:
        assert made.arena.holding(layer.qkv.weight.data) is None and not made.staging.holds(layer.qkv.weight)
    assert torch.equal(tokens(model), resident())


# -- staging ---------------------------------------------------------------------------------------------------------


def test_the_staging_buffer_holds_nothing_between_layers():
    model, made = started(2**30)
    assert made.staging.bytes.eq(0xFF).all()
    tokens(model)
    assert made.staging.fills == 6, "three layers, and the experts of three"
    assert made.staging.bytes.eq(0xFF).all()
    assert model.layers[0].experts.w13_weight.isnan().all() and model.layers[0].qkv.weight.isnan().all()
    x = torch.ones(2, HIDDEN)
    assert not model.layers[0].experts.kernel(x, torch.ones(2, EXPERTS)).isfinite().any(), "read without a fetch"
    assert model.layers[0].experts(x, torch.ones(2, EXPERTS)).isfinite().all()


def test_an_expert_is_fetched_right_before_its_op_and_not_with_its_layer():
    model, made = started(2**30)
    order, fill = [], made.staging.fill
    made.staging.fill = lambda group: (order.append(made._groups[group]), fill(group))
    tokens(model)
    assert order == [m for layer in model.layers for m in (layer, layer.experts)]


def test_poison_follows_the_switch_on_a_device():
    assert Staging(CPU, poison=False).poison is False
    model, made = started(2**30)
    made.staging.poison = False
    for module in model.modules():
        vars(module).pop("forward", None)
    for group in made.staging.groups:
        made.staging.hook(group, made._groups[group])
    assert torch.equal(tokens(model), resident())
    assert not made.staging.bytes.eq(0xFF).all()


def test_a_layer_without_hidden_states_is_refused():
    model, _ = started(2**30)
    with pytest.raises(TypeError, match="without a floating-point matrix"):
        model.layers[0](torch.arange(3))


def test_the_hidden_states_are_found_by_name_or_as_the_first_matrix():
    ids, vector, first, second = torch.ones(2, 2, dtype=torch.int64), torch.ones(2), torch.ones(2, 2), torch.zeros(2, 2)
    assert _anchor((first,), {"hidden_states": second}) is second
    assert _anchor((ids, None, vector, first), {"residual": second}) is first
    assert _anchor((ids,), {"x": second}) is second


def test_a_module_that_returns_nothing_first_can_be_poisoned():
    """Expert layers with shared experts return a pair, whose first half is None where there are none."""

    class Pair(Experts):
        def forward(self, hidden_states, router_logits):
            return None, super().forward(hidden_states, router_logits)

    class WithPair(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.experts = Pair(f"{name}.experts", PLAIN)

        def forward(self, positions, hidden_states, residual=None):
            x = self.qkv(hidden_states)
            return hidden_states + self.experts(x, self.gate(x))[1], x

    want = resident(make=WithPair)
    model, _ = started(2**30, make=WithPair)
    assert torch.equal(tokens(model), want)


@st.composite
def groups(draw):
    """Sizes of the parameters of each layer: of its experts, and of its dense weights."""
    sizes = st.lists(st.integers(1, 2000), min_size=1, max_size=3)
    return draw(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4))


@given(groups(), st.integers(1, 4), st.randoms())
@settings(max_examples=50)
def test_experts_and_dense_weights_of_a_layer_are_there_at_once(layers, count, random):
    staging, host_values, parameters = Staging(CPU, poison=True), {}, {}
    for number, (kind, sizes) in enumerate((k, s) for layer in layers for k, s in zip((False, True), layer)):
        bound = []
        for size in sizes:
            buffer = HostBuffer(size, pin=False)
            buffer.bytes.random_(0, 255)
            bound.append(Bound(parameter(torch.empty(0, dtype=torch.uint8)), buffer, buffer.tensor_like(buffer.bytes)))
        staging.bind(number, kind, bound)
        host_values[number] = [b.buffer.bytes.tolist() for b in bound]
        parameters[number] = [b.parameter for b in bound]
    staging.allocate(count)
    need = [max(sum(-(-n // 512) * 512 for n in layer[k]) for layer in layers) for k in (0, 1)]
    assert staging.bytes.numel() == count * need[0] + need[1], "`count` layers' dense weights and one's experts"
    places = [{p.data_ptr() for p in parameters[2 * layer]} for layer in range(len(layers))]
    for first in range(len(places)):
        together = places[first : first + count]
        assert len(set().union(*together)) == sum(map(len, together)), "the next layers' may come early"
    for p in itertools.chain(*parameters.values()):
        assert staging.holds(p) and (p.data_ptr() - staging.bytes.data_ptr()) % 512 == 0
    for layer in random.sample(range(len(layers)), len(layers)):
        dense, experts = 2 * layer, 2 * layer + 1
        staging.fill(dense)
        staging.fill(experts)
        for number in (dense, experts):
            assert [p.tolist() for p in parameters[number]] == host_values[number]
        staging.drop(experts)
        assert [p.tolist() for p in parameters[dense]] == host_values[dense]
        assert all(p.eq(0xFF).all() for p in parameters[experts])
    assert staging.fills == 2 * len(layers)
    assert not staging.holds(torch.empty(1)) and not staging.holds(torch.empty(0))


# -- compiled graphs -------------------------------------------------------------------------------------------------


def fills_in_graph(model) -> list[int]:
    """Group numbers of the fill ops of the one graph that Dynamo makes of `model`."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    tokens(torch.compile(model, fullgraph=True, backend=backend))
    assert len(graphs) == 1
    return [n.args[1] for n in graphs[0].graph.nodes if n.target is torch.ops.expert_offload.fill]


def test_one_fill_for_each_staged_group_and_none_for_layers_that_stay():
    assert fills_in_graph(Model()) == []
    model, made = started(2 * (W13 + W2), "experts")
    assert [made._groups[g] for g in fills_in_graph(model)] == [model.layers[0].experts, model.layers[1].experts]
    model, made = started(2**30)
    assert [made._groups[g] for g in fills_in_graph(model)] == [m for la in model.layers for m in (la, la.experts)]
    model, made = started(1, "layers.1")
    assert [made._groups[g] for g in fills_in_graph(model)] == [model.layers[1]]


def test_a_graph_is_one_graph_where_memory_is_mapped(mapped):
    model, _ = mapped_start(2**30)
    assert fills_in_graph(model) == []


# -- mapped memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PLAIN, NVFP4])
def test_mapped_memory_is_read_in_place(mapped, method):
    said = []
    model, made = mapped_start(2**30, said=said, experts=method, mixer=True)
    want = resident(experts=method, mixer=True)
    assert made.staging is None and all("forward" not in vars(m) for m in model.modules())
    for item in made.items.values():
        assert item.kept or item.parameter.data_ptr() == item.buffer.bytes.data_ptr()
    assert torch.equal(tokens(model), want)
    assert torch.equal(tokens(torch.compile(model, fullgraph=True, backend="eager")), want)
    assert len(kept(made)) == 3
    assert said[1].endswith("kernels read host memory in place (mapped, zero copy)")
    assert f"page-locked {made.moved / 2**20:.2f} MiB" in said[0]
    item = next(i for i in made.items.values() if i.out and "w13" in i.name)
    item.host.copy_(item.host[[1, 0, *range(2, EXPERTS)]])
    assert not torch.equal(tokens(model), want)


def test_a_parameter_that_two_layers_share_moves_once_where_memory_is_mapped(mapped):
    made = Offloader(2**30, set(), Memory(None, None, None, view_elsewhere), lambda _: None, has_attention)
    model = shares_across_layers(made)
    load(model, made)
    assert not kept(made) and made.moved == EVERYTHING * 2 // 3 - QKV
    assert torch.equal(tokens(model), tokens(shares_across_layers(None)))


# -- a second model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [ALL_EXPERTS + 1, 2**30], ids=["target-gives-back", "both-out"])
def test_a_drafter_s_model_joins_after_the_start(budget):
    """Its experts may take the place of the target's dense weights, which are staged and sealed by then."""
    model, made = started(budget)
    assert any("qkv" in name or "gate" in name for name in out_names(made))
    assert torch.equal(tokens(model), resident())
    draft = Model(made, layers=2, prefix="draft")
    load(draft, made)
    assert torch.equal(tokens(model), resident())
    assert torch.equal(tokens(draft), resident(layers=2, prefix="draft"))
    assert torch.equal(tokens(model), resident())
    if budget != 2**30:
        assert all("experts" in name for name in out_names(made))
        assert made.arena.holding(model.layers[0].qkv.weight) is None


def test_a_drafter_whose_experts_stay_takes_the_target_s_place():
    """Nothing is out any more, and the hooks of the first start fetch nothing."""
    model, made = started(1, experts=None)
    assert out_names(made) == ["model.layers.0.qkv.weight"]
    draft = Layer("draft.0")
    kernel = [draft.experts.w13_weight.data]
    made.wrap_modules([draft], prefix="draft")
    assert list(kept(made)) == ["draft.0.experts.w13_weight"] and made.moved == 0
    made.finish(CPU)
    assert torch.equal(tokens(model), resident(experts=None))
    del kernel


@pytest.mark.parametrize("patterns", [(), ("experts",)], ids=["no-pattern", "experts"])
@pytest.mark.parametrize("start", [started, "mapped"])
def test_weights_that_are_reloaded_while_serving_are_served(start, patterns, request):
    """As a release reloads: layer by layer, into the tensors that its kernels read."""
    if start == "mapped":
        start = request.getfixturevalue("mapped") and mapped_start
    resident_model, (model, made) = Model(), start(2**30, *patterns)
    before = tokens(model)
    for theirs, ours in zip(resident_model.modules(), model.modules(), strict=True):
        parameters = [p for p in ours._parameters.values() if p is not None]
        for old, new in zip([p for p in theirs._parameters.values() if p is not None], parameters, strict=True):
            old.data.copy_(old.data.flip(0))
            new.data.copy_(old.data)
        made.written(parameters)
    assert torch.equal(tokens(model), tokens(resident_model))
    assert torch.equal(tokens(model), tokens(resident_model)), "the second pass reads what the first left behind"
    assert not torch.equal(tokens(model), before)


def test_host_memory_cannot_be_read_beside_the_copies():
    """Only so is a tensor on it, that a kernel would read without a fetch, found on the CPU."""
    _, made = started(2**30)
    areas = [line.split()[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
    for item in made.items.values():
        address = item.host.data_ptr()
        access = [a for r, a in areas if int(r.split("-")[0], 16) <= address < int(r.split("-")[1], 16)]
        assert access == ["---p"]


def test_the_start_holds_no_more_host_memory_than_it_says():
    """Everything that processing needed for a moment is given back."""
    made = pageable(2**30)
    model = Model(made, experts=NVFP4)
    load(model, made)
    gc.collect()
    assert {id(m) for m in made.arena._live} == {id(i.buffer.mapping) for i in made.items.values()}
    assert sum(len(m) for m in made.arena._live) == made.moved
    assert len(made.arena._live) == 12
