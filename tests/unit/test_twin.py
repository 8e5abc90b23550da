# SPDX-License-Identifier: Apache-2.0
"""A twin runs the code of a release's method on other tensors, and leaves the original as it was."""

import functools
from dataclasses import dataclass

import pytest
import torch
from expert_offload.twin import NoTwin, Rows, View, row_bytes, slots_for, twin_of
from torch import nn

E, S = 6, 2


@dataclass(frozen=True)
class Description:
    scale: torch.Tensor | None
    group: int = 16


@dataclass
class Config:
    w1: Description
    shared: Description


class Kernel(nn.Module):
    def __init__(self, config: Config, layer: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.owner = [layer]
        self.bound = self.run
        self.partial = functools.partial(torch.mul, other=config.w1.scale)
        self.register_buffer("workspace", torch.zeros(3))

    def run(self) -> torch.Tensor:
        return self.config.w1.scale


class Method:
    def __init__(self, layer: nn.Module) -> None:
        self.kernel = Kernel(Config(Description(layer.scale.data), Description(torch.ones(2))), layer)
        self.table = {"transposed": layer.weight.data.transpose(1, 2), "none": None}

    def apply(self, layer, expert_map):
        return layer.weight[expert_map] * self.kernel.config.w1.scale[expert_map]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(E * 12.0).view(E, 4, 3))
        self.scale = nn.Parameter(torch.arange(E * 1.0).view(E, 1, 1))
        self.bias = nn.Parameter(torch.zeros(5))
        self.empty = nn.Parameter(torch.zeros(E, 0))
        self.topk = 8


@pytest.fixture
def made():
    layer = Layer()
    method = Method(layer)
    rows = Rows(E, S, lambda t: slots_for(t, S))
    view = View(layer, {**rows.named(layer._parameters.items()), "expert_map": "map"})
    return layer, method, rows, view, twin_of(method, rows, layer, view)


def test_the_twin_runs_on_its_rows(made):
    layer, method, rows, view, twin = made
    for real, slots in rows.pairs:
        slots.copy_(real[[4, 1]])
    where = torch.tensor([1, 0])
    assert torch.equal(twin.apply(view, where), method.apply(layer, torch.tensor([1, 4])))
    assert (view.topk, view.expert_map) == (8, "map") and view.empty.shape == (S, 0)
    assert view.bias is layer.bias, "what has no row per expert is shared"


def test_the_original_is_untouched_and_what_has_no_experts_is_shared(made):
    layer, method, rows, view, twin = made
    assert method.kernel.config.w1.scale.shape[0] == E and method.kernel.owner == [layer]
    assert twin.kernel is not method.kernel and twin.kernel.config.w1.group == 16
    assert twin.kernel.config.shared is method.kernel.config.shared
    assert twin.kernel.workspace is method.kernel.workspace
    assert twin.kernel.owner == [view]
    assert {real.data_ptr() for real, _ in rows.pairs} == {layer.weight.data_ptr(), layer.scale.data_ptr()}


def test_views_bound_methods_and_partials_follow(made):
    layer, method, rows, view, twin = made
    transposed = twin.table["transposed"]
    assert transposed.shape == (S, 3, 4) and transposed.stride() == method.table["transposed"].stride()
    assert transposed.data_ptr() == view.weight.data_ptr()
    assert twin.kernel.partial.keywords["other"].data_ptr() == view.scale.data_ptr()
    bytes_ = rows.twin(layer.weight.data.view(torch.uint8))
    assert bytes_.shape == (S, 4, 12) and bytes_.data_ptr() == view.weight.data_ptr() and row_bytes(bytes_) == 48


def test_a_bound_method_belongs_to_the_copy():
    layer = Layer()
    scale = layer.scale.data

    class Experts:
        def __init__(self):
            self.scale = scale

        def get(self):
            return self.scale

    class Holder:
        def __init__(self):
            self.get = Experts().get

    rows = Rows(E, S, lambda t: slots_for(t, S))
    assert twin_of(Holder(), rows, layer, View(layer, {})).get().shape[0] == S


def test_a_bound_method_of_the_method_itself_and_other_cycles():
    layer = Layer()
    method = Method(layer)
    method.again = method.apply
    method.ring = {"self": method, "list": [method]}
    rows = Rows(E, S, lambda t: slots_for(t, S))
    twin = twin_of(method, rows, layer, View(layer, {}))
    assert twin.again.__self__ is twin and twin.ring["self"] is twin and twin.ring["list"] == [twin]
    assert method.again.__self__ is method and method.ring["self"] is method and method.ring["list"] == [method]


def test_shared_memory_makes_no_pairs():
    layer = Layer()
    rows = Rows(E, E, lambda t: t.clone() if t.data_ptr() == layer.weight.data_ptr() else None)
    assert set(rows.named(layer._parameters.items())) == {"weight", "empty"}
    assert len(rows.pairs) == 1


@pytest.mark.parametrize(
    "held",
    [
        torch.zeros(2 * E, 3)[E:],  # begins in the middle of its memory
        torch.arange(E * 4).view(4, E).t(),  # experts are columns
    ],
)
def test_rows_that_are_not_the_memory_of_experts_have_no_twin(held):
    layer = Layer()
    rows = Rows(E, S, lambda t: slots_for(t, S))
    with pytest.raises(NoTwin):
        twin_of([held], rows, layer, View(layer, {}))


def test_one_row_for_all_experts_stays_one():
    rows = Rows(E, S, lambda t: slots_for(t, S))
    one = torch.tensor([3.0])
    twin = rows.twin(one.expand(E))
    assert twin.shape == (S,) and twin.data_ptr() == one.data_ptr() and not rows.pairs


def test_a_closure_has_no_twin():
    layer = Layer()
    scale = layer.scale.data
    rows = Rows(E, S, lambda t: slots_for(t, S))
    with pytest.raises(NoTwin, match="keeps a tensor"):
        twin_of([lambda: scale], rows, layer, View(layer, {}))
