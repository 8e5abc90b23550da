# SPDX-License-Identifier: Apache-2.0
"""Scales on a tape of their own: what comes of them is what the release would have made, and held where it was held."""

import pytest
import torch
from expert_offload import scales as scales_module
from expert_offload import standin
from expert_offload.deferred import Tape
from expert_offload.scales import Scales
from expert_offload.standin import Deferred
from fake_model import CPU, parameter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytestmark = pytest.mark.usefixtures("few_objects")
COUNT, N, K = 5, 4, 6


def scale(seed: int = 0) -> torch.Tensor:
    return torch.rand((COUNT, N, K), generator=torch.Generator().manual_seed(seed)) - 0.25


def layer(*tensors: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for index, tensor in enumerate(tensors):
        made.register_parameter(f"s{index}", parameter(tensor.clone()))
    return made


def deferred(owner: nn.Module, rows: int = 2) -> Scales:
    tape = Scales(COUNT, CPU, rows * N * K * 4)
    tape.defer(owner, list(owner._parameters))
    return tape


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(scales_module, "LEAST", 1)


def check(work, *tensors: torch.Tensor, rows: int = 2, gives_up: str | None = None) -> None:
    """`work` takes a layer and gives what it makes of it; afterwards that, and the layer, must be the release's."""
    plain, owner = layer(*tensors), layer(*tensors)
    want = work(plain)
    tape = deferred(owner, rows)
    with tape.writing():
        got = work(owner)
    tape.settle()
    assert (tape.why is None) is (gives_up is None), tape.why
    assert gives_up is None or gives_up in tape.why
    for a, b in zip([*got, *owner.parameters()], [*want, *plain.parameters()], strict=True):
        assert type(a) is type(b) and a.stride() == b.stride()
        assert torch.equal(a, b)
    assert not tape.alive()


def one_by_one(owner):
    widened = owner.s0.data.to(torch.float64)
    return [torch.cat([(widened[e].T * 2).contiguous().unsqueeze(0) for e in range(COUNT)], 0)]


def filled(owner):
    out = torch.empty((COUNT, K, N))
    for e in range(COUNT):
        out[e] = owner.s0[e].T
    owner.s0.data = out
    return [owner.s0]


def filled_like(owner):
    out = torch.empty_like(owner.s0, dtype=torch.float64)
    for e in range(COUNT):
        out[e].copy_(owner.s0[e] * 2)
    return [out]


def widened_two(owner):
    """What is changed in place was read before, and what is made of it is made of what it was."""
    made = owner.s0 * 2
    owner.s0[:, 0].zero_()
    return [made]


def of_each_other_in_place(owner):
    owner.s0[:, 0] = owner.s1[:, 1]
    return [owner.s0]


def laid_into_zeros(owner):
    padded = torch.zeros((COUNT, N + 2, K))
    padded[:COUNT, :N, :K] = owner.s0
    return [parameter(padded.view(COUNT, 2, -1, K).permute(0, 3, 1, 2).contiguous().view(COUNT, K, -1))]


def swapped_in_place(owner):
    kept = owner.s0[:, :2].clone()
    owner.s0[:, :2] = owner.s0[:, 2:4]
    owner.s0[:, 2:4] = kept
    return [owner.s0.data.transpose(1, 2)]


def swapped_and_looked_at(owner):
    """What is played twice, here and at the end, is swapped once."""
    swapped_in_place(owner)
    return [owner.s0.max()]


def of_the_largest(owner):
    """As the factor of NVFP4's scales for Marlin."""
    shifted = owner.s0.data * 8
    mask = shifted > 0
    if not mask.any() or (shifted < -100).all():
        return [shifted]
    factor = shifted[mask].max() + shifted.amin() - shifted.min()
    return [shifted * factor.item(), factor]


def copied_over(owner):
    """As v0.33.0's `replace_parameter` where shapes are equal."""
    made = torch.stack([row.flip(0) for row in owner.s0])
    owner.s0.data.copy_(made)
    return [owner.s0]


def copied_out(owner):
    out = torch.empty((COUNT, N, K))
    out.copy_(owner.s0 * 2)
    return [out]


def two(owner):
    owner.s0.data = torch.cat([owner.s0, owner.s1], 1)
    owner.s1 = parameter(owner.s1.data[:, 1:].contiguous())
    return []


WORK = [
    one_by_one,
    filled,
    filled_like,
    widened_two,
    of_each_other_in_place,
    laid_into_zeros,
    swapped_in_place,
    of_the_largest,
    copied_over,
    copied_out,
    two,
]


@pytest.mark.parametrize("rows", [1, 2, 3, COUNT, 100])
@pytest.mark.parametrize("work", WORK, ids=lambda f: f.__name__)
def test_what_comes_is_the_release_s(work, rows):
    check(work, scale(1), scale(2), rows=rows)


@pytest.mark.parametrize(
    "work, why",
    [
        (lambda o: [o.s0.sum()], "sum"),
        (lambda o: [o.s0.flip(0)], "flip"),
        (lambda o: [o.s0[o.s0 > 0].sum()], "selection"),
        (lambda o: [torch.tensor(o.s0[o.s0 > 0].shape)], "selection"),
        (lambda o: [(o.s0 < -9).any(), o.s0[o.s0 < -9].view(-1)], "selection"),
        (lambda o: [(o.s0.data_ptr(), o.s0 * 2)[1]], "address"),
        (lambda o: [torch.from_numpy(o.s0.detach().numpy().copy())], "address"),
        (lambda o: [o.s0 * torch.arange(K)], "beside"),
        (lambda o: (o.s0.data[1].zero_(), [o.s0 * 2])[1], "in place"),
        (lambda o: (o.s0.data.to(torch.float64)[2].zero_(), [])[1], "in place"),
        (lambda o: (o.s0[:, 0].copy_(o.s1[:, 1]), o.s1[:, 0].copy_(o.s0[:, 1]), [])[2], "made of each other"),
        (lambda o: [torch.empty((2, COUNT, N, K)).copy_(o.s0)], "more than their own"),
        (lambda o: [o.s0[o.s0[:, :, 0] > 0] * 2], "index"),
        (lambda o: [filled_room(torch.zeros((COUNT, N, K)), o.s0)], "in place"),
    ],
)
def test_anything_else_is_done_to_all(work, why):
    check(work, scale(1), scale(2), gives_up=why)


def filled_room(out, values):
    for e in range(COUNT):
        out[e] = values[e] * 3
    return out


def test_nothing_is_selected_in_some_chunks():
    values = -scale().abs()
    values[COUNT - 1, 0, 0] = 0.5
    check(lambda o: [o.s0[o.s0 > 0].max()], values)


def test_a_chunk_that_was_changed_is_not_taken_for_an_earlier_one():
    owner = layer(scale())
    tape = deferred(owner, rows=1)
    with tape.writing():
        widened = owner.s0.data * 2
        kept, _ = widened[0], widened[1]
        kept.zero_()
        with pytest.raises(RuntimeError, match="changed in place, long after"):
            widened * 2


def test_nothing_is_selected():
    owner = layer(scale())
    tape = deferred(owner)
    with tape.writing(), pytest.raises((RuntimeError, IndexError)):
        owner.s0[owner.s0 > 9].max()


def test_whoever_holds_a_scale_holds_the_real_one():
    """Configs take hold of the parameter, or of a view of it; both show the same bytes afterwards."""

    class Config:
        pass

    owner, config = layer(scale()), Config()
    original = owner.s0.data_ptr()
    owner.s0.hung = "a loader"
    tape = deferred(owner)
    with tape.writing():
        config.same, config.view = owner.s0, owner.s0.data.view(torch.int32)
        owner.s0.data[:, 0].zero_()
    assert isinstance(config.same, Deferred)
    tape.settle()
    assert config.same is owner.s0 and type(owner.s0) is nn.Parameter and type(config.view) is torch.Tensor
    assert owner.s0.data_ptr() == config.view.data_ptr() == original, "changed in place, where it was"
    assert owner.s0.__dict__ == {"hung": "a loader"} and id(owner.s0) not in standin._STANDS_FOR
    assert torch.equal(owner.s0[:, 0], torch.zeros(COUNT, K)) and tape.why is None


def test_a_parameter_of_a_release_s_own_class_stays_one():
    class Own(nn.Parameter):
        pass

    owner = nn.Module()
    owner.s0 = Own(scale(), requires_grad=False)
    tape = deferred(owner)
    assert isinstance(owner.s0, Deferred)
    tape.settle()
    assert type(owner.s0) is Own


def test_changed_long_after_it_was_taken_out():
    """Its place in all experts' is not known any more; to go on would be to serve something else."""
    owner = layer(scale())
    tape = deferred(owner, rows=1)
    with tape.writing():
        widened = owner.s0.data * 2
        kept = widened[0]
        widened[1]
        kept.zero_()
        with pytest.raises(RuntimeError, match="changed in place, long after"):
            widened[2]


def test_small_ones_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(scales_module, "LEAST", 4 * COUNT * N * K + 1)
    owner = layer(scale())
    deferred(owner)
    assert type(owner.s0) is nn.Parameter


@pytest.mark.parametrize("first", ["weight", "scale"])
def test_weights_stay_apart_where_scales_do_not(first):
    """An operation on both makes the scales real, and the weights' tape judges it then, as it would have before."""
    weight = torch.randint(0, 9, (COUNT, N, K)).float()
    owner, tape = layer(scale()), Tape(COUNT, CPU)
    values = scale()
    lesser = deferred(owner)
    w = tape.source(weight, lambda a, b: weight[a:b].clone())
    with lesser.writing(), tape.writing():
        made = w * owner.s0 if first == "weight" else owner.s0 * w
    assert "mixes weights and scales" in lesser.why
    assert torch.equal(made, weight * values) and "beside" in tape.why


def test_zeros_are_zeros_while_they_are_played():
    """Looked at while both tapes are written, and for all experts at once."""
    owner, tape = layer(scale(), scale()), Tape(COUNT, CPU)
    tape.source(torch.zeros(COUNT, 99, K), lambda a, b: torch.zeros(b - a, 99, K))
    lesser = deferred(owner, rows=100)
    with lesser.writing(), tape.writing():
        padded = torch.zeros((COUNT, N + 1, K))
        padded[:, :N] = owner.s0
        assert isinstance(padded, Deferred) and torch.equal(padded.min(), scale().min())
    assert lesser.why is None and tape.why is None


STEPS = {
    "widen": lambda s: s.to(torch.float64),
    "shift": lambda s: s * 4,
    "flip": lambda s: s.flip(1),
    "transpose": lambda s: s.transpose(1, 2),
    "copy": lambda s: s.contiguous(),
    "pad": lambda s: torch.nn.functional.pad(s, (0, 2)),
    "in place": lambda s: clipped(s),
    "each": lambda s: torch.stack([one.flip(0) for one in s]),
    "by the largest": lambda s: s * s[s > 0].max().item() if (s > 0).any() else s,
    "by another": lambda s: s + torch.arange(s.numel(), dtype=s.dtype).view(s.shape),
    "narrow": lambda s: s[:, :, :-1] if s.shape[2] > 1 else s,
}


def clipped(s):
    s[:, 0] = s[:, -1]
    return s


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.integers(1, COUNT), st.integers(0, 99))
@settings(max_examples=150)
def test_any_sequence_of_steps(names, rows, seed):
    def work(owner):
        made = [owner.s0.data]
        for name in names:
            made.append(STEPS[name](made[-1]))
        return [made[-1], made[len(made) // 2]]

    before, scales_module.LEAST = scales_module.LEAST, 1
    try:
        check(work, scale(seed), rows=rows)
    finally:
        scales_module.LEAST = before
