# SPDX-License-Identifier: Apache-2.0
"""A layer run from slots gives what it gives without them, whatever the batch needs; Triton's interpreter plans."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from expert_offload import pooled, roles
from expert_offload.pooled import Layer, Pooled, Pools
from expert_offload.stream import size
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

E, K, HIDDEN = 10, 3, 4
CPU = torch.device("cpu")


class MarlinExperts:
    """Named for one whose kernels skip what the map gives -1."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class Kernel:
    def __init__(self, scale: torch.Tensor) -> None:
        self.fused_experts = MarlinExperts(scale)


class UnquantizedFusedMoEMethod:
    """A weight per expert times a scale that the kernel has kept, summed over a token's experts.

    The result lies in a workspace that every call of every method writes, as vLLM's kernels have one.
    """

    is_monolithic = False
    workspace = torch.empty(999, HIDDEN, dtype=torch.float64)

    def __init__(self, scale: torch.Tensor) -> None:
        self.moe_kernel, self.calls = Kernel(scale), []

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts=None):
        self.calls.append(shared_experts)
        weight, scale = layer.w13_weight.data, self.moe_kernel.fused_experts.scale
        out = self.workspace[: len(x)].zero_()
        for t, ids in enumerate(topk_ids.tolist()):
            for e, w in zip(ids, topk_weights[t].tolist()):
                assert 0 <= e < layer.global_num_experts
                row = e if layer.expert_map is None else int(layer.expert_map[e])
                if row >= 0:
                    out[t] += w * (x[t] @ weight[row]) * scale[row]
        return out


class Experts(nn.Module):
    expert_map = None
    global_num_experts = E

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w13_weight = nn.Parameter(torch.randint(-9, 9, (E, HIDDEN, HIDDEN)).double(), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(E, HIDDEN, 1), requires_grad=False)
        self.quant_method = UnquantizedFusedMoEMethod(torch.randint(1, 9, (E,)).double())

    def forward(self, x, topk_weights, topk_ids, **more):
        apply = getattr(self, "expert_pool", None) or self.quant_method.apply
        return apply(layer=self, x=x, topk_weights=topk_weights, topk_ids=topk_ids, **more)


def each(module: Experts) -> int:
    return pooled.bytes_per_slot(module)


def slots_of(count: int, *modules: Experts) -> Pools:
    return Pools(layers_of(*modules), count * sum(map(each, modules)), CPU)


def layers_of(*modules: Experts) -> list[Layer]:
    """Without streams, since none of their weights is said to lie in host memory."""
    return [Layer(f"layers.{i}", module, {}) for i, module in enumerate(modules)]


def batch(tokens: int, seed: int) -> dict:
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).int()
    return dict(
        x=torch.randint(-5, 5, (tokens, HIDDEN)).double(), topk_weights=torch.ones(tokens, K).double(), topk_ids=ids
    )


@settings(deadline=None, max_examples=15)
@given(st.integers(1, E), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 99)), min_size=1, max_size=4))
def test_the_layer_gives_what_it_gives_without_slots(count, steps):
    plain, module = Experts(), Experts()
    pools = slots_of(count, module)
    assert pools.slots == count and isinstance(module.expert_pool, Pooled)
    for tokens, seed in steps:
        pools.valid_rows(tokens)
        given_ = batch(tokens, seed)
        assert torch.equal(module(**given_).clone(), plain(**given_))
    names = dict(zip(("steps", "needed", "hits", "filled", "rest"), pools.counters[0].tolist()))
    assert names["steps"] == len(steps) and names["needed"] == names["hits"] + names["filled"] + names["rest"]


def test_padding_fetches_nothing():
    module, plain = Experts(), Experts()
    pools = slots_of(4, module)
    pools.valid_rows(1)
    given_ = batch(5, 1)
    assert torch.equal(module(**given_)[:1].clone(), plain(**given_)[:1])
    assert pools.counters[0].tolist()[:4] == [1, K, 0, K]


def test_the_second_pass_runs_where_slots_may_not_do_and_shared_experts_once():
    module = Experts()
    slots_of(2 * K, module)
    module(**batch(2, 0), shared_experts="shared")
    assert module.expert_pool.twin.calls is module.quant_method.calls == ["shared"]
    module(**batch(3, 0), shared_experts="shared")
    assert module.quant_method.calls == ["shared", "shared", None]


def test_wide_batches_go_the_old_way():
    module, plain = Experts(), Experts()
    pools = slots_of(4, module)
    given_ = batch(pooled.WIDEST + 1, 3)
    assert torch.equal(module(**given_).clone(), plain(**given_)) and not pools.counters.any()


def streamed(count: int, *modules: Experts) -> Pools:
    """With two buffers, through which wide batches have copies of the weights as they are now."""
    layers = [
        Layer(f"layers.{i}", m, {name: p.data.clone() for name, p in m._parameters.items()})
        for i, m in enumerate(modules)
    ]
    return Pools(layers, count * sum(map(each, modules)) + 2 * size([layer.weights for layer in layers]), CPU)


def test_wide_batches_have_whole_layers_brought():
    modules, plain = [Experts(seed) for seed in range(3)], [Experts(seed) for seed in range(3)]
    pools = streamed(4, *modules)
    assert pools.slots == 4 and pools.nbytes == 4 * sum(map(each, modules)) + pools.stream.nbytes
    for module in modules:
        module.w13_weight.data.fill_(0)  # where it lies now, it is not read from
    for seed in range(2):
        for module, other in zip(modules, plain):
            given_ = batch(pooled.WIDEST + 1, seed)
            assert torch.equal(module(**given_).clone(), other(**given_))
    assert not pools.counters.any()
    pools.written([modules[0].w13_weight])
    assert pools.stream._holds == [None, None]


def test_without_room_for_buffers_there_are_slots_alone():
    module = Experts()
    buffers = 2 * size([{name: p.data for name, p in module._parameters.items()}])
    layers = [Layer("0", module, {name: p.data for name, p in module._parameters.items()})]
    assert Pools(layers, buffers + each(module) - 1, CPU).stream is None and module.expert_pool.pool.slots > 1
    pools = Pools(layers, buffers + each(module), CPU)
    assert pools.stream is not None and pools.slots == 1


def test_reloaded_weights_are_fetched_anew():
    one, two = Experts(), Experts(1)
    pools = slots_of(E, one, two)
    for module in (one, two):
        module(**batch(2, 0))
    plain = Experts()
    for module in (one, plain):
        module.w13_weight.data.mul_(2)
    pools.written([one.w13_weight])
    before = pools.counters.clone()
    assert torch.equal(one(**batch(2, 0)).clone(), plain(**batch(2, 0)))
    two(**batch(2, 0))
    filled = (pools.counters - before)[:, 3].tolist()
    assert filled[0] > 0 and filled[1] == 0


def test_all_layers_get_as_many_and_no_more_than_there_are_bytes():
    modules = [Experts(), Experts()]
    pools = Pools(layers_of(*modules), 2 * 3 * each(modules[0]) + 1, CPU)
    assert pools.slots == 3 and pools.nbytes == 6 * each(modules[0])
    scale, weights = 8, HIDDEN * HIDDEN * 8 + HIDDEN * 4
    assert each(modules[0]) == scale + weights
    assert Pools(layers_of(Experts()), 10**9, CPU).slots == E


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda m: setattr(m.quant_method, "is_monolithic", True), "routes and computes in one"),
        (lambda m: setattr(m, "expert_map", torch.arange(E)), "spread over ranks"),
        (lambda m: setattr(m.quant_method, "moe_kernel", None), "NoneType is not known to skip"),
        (
            lambda m: setattr(m.quant_method, "kept", torch.arange(E * 2).view(2, E).t()),
            "not one expert after the other",
        ),
    ],
)
def test_a_layer_that_can_have_no_slots_keeps_its_way(change, why):
    module = Experts()
    change(module)
    pools = Pools(layers_of(module, Experts()), 10**6, CPU)
    (reason,) = pools.left_out
    assert why in reason and pools.left_out[reason] == ["layers.0"]
    assert not hasattr(module, "expert_pool") and [layer.name for layer in pools.layers] == ["layers.1"]


def test_too_few_bytes_make_no_slots():
    module = Experts()
    pools = Pools(layers_of(module), each(module) - 1, CPU)
    assert (pools.slots, pools.nbytes) == (0, 0) and not hasattr(module, "expert_pool")


def test_only_tensors_with_a_role_are_an_experts_own():
    module = Experts()
    module.e_score_correction_bias = nn.Parameter(torch.zeros(E))
    assert roles.role_of("UnquantizedFusedMoEMethod", "e_score_correction_bias") is None
    slots_of(2, module)
    assert module.expert_pool.view.e_score_correction_bias is module.e_score_correction_bias
