# SPDX-License-Identifier: Apache-2.0
"""Layers of an offloader, processed a chunk of experts at a time in the host memory that they lie in."""

import gc

import pytest
import torch
from expert_offload import Memory, Offloader
from expert_offload import repack as repack_module
from expert_offload import scales as scales_module
from expert_offload.deferred import Tape
from expert_offload.host import Arena
from expert_offload.repack import RepackError, chunk_bytes, chunks
from fake_model import CPU, EXPERTS, NVFP4, Layer, Model, has_attention, load, pageable, parameter, resident, tokens
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")


class Shuffled(Layer):
    """Its experts are repacked expert by expert, as Marlin's are: other shape and type, the same bytes."""

    def __init__(self, name):
        super().__init__(name)
        self.experts.process = self.shuffle

    def shuffle(self):
        for leaf in ("w13_weight", "w2_weight"):
            old = getattr(self.experts, leaf)
            out = torch.empty((EXPERTS, old.shape[2], old.shape[1]), dtype=old.dtype)
            for e in range(EXPERTS):
                out[e] = old[e].T
            made = parameter(out.transpose(1, 2))
            made.hung = leaf
            setattr(self.experts, leaf, made)


@pytest.fixture
def one_at_a_time(monkeypatch):
    monkeypatch.setattr(repack_module, "CHUNK", 1)


def test_processed_in_place_a_chunk_at_a_time(one_at_a_time, monkeypatch):
    want = resident(make=Shuffled)
    made = pageable(2**30, "experts")
    model = Model(made, make=Shuffled)
    before = {name: item.buffer.bytes.data_ptr() for (_, name), item in made.items.items()}
    ranges = []
    play = Tape.play
    monkeypatch.setattr(Tape, "play", lambda tape, a, b, *rest: (ranges.append((a, b)), play(tape, a, b, *rest))[1])
    load(model, made)
    assert ranges == [(e, e + 1) for _ in range(6) for e in range(EXPERTS)]
    assert {name: item.buffer.bytes.data_ptr() for (_, name), item in made.items.items()} == before, "the same bytes"
    assert model.layers[0].experts.w13_weight.hung == "w13_weight", "what a release hangs onto a parameter stays"
    assert type(model.layers[0].experts.w13_weight) is torch.nn.Parameter
    assert not made.whole and torch.equal(tokens(model), want)


class TwiceNamed(Layer):
    """As compressed-tensors' WNA16: repacked under the checkpoint's name, and the same parameter under a kernel's."""

    def __init__(self, name):
        super().__init__(name, experts=NVFP4)
        self.experts.process = self.repack

    def repack(self):
        for projection in ("w13", "w2"):
            made = parameter(getattr(self.experts, f"{projection}_weight_packed").data.flip(1).clone())
            setattr(self.experts, f"{projection}_weight_packed", made)
            setattr(self.experts, f"{projection}_weight", made)


@pytest.mark.parametrize("limit", [None, 0])
def test_a_weight_with_two_names_is_one_weight(limit, mapped, one_at_a_time):
    from fake_model import view_elsewhere

    made = Offloader(2**30, {"experts"}, Memory(limit, "x", None, view_elsewhere), print, has_attention)
    model = Model(made, make=TwiceNamed)
    before = {name: item.buffer.bytes.data_ptr() for (_, name), item in made.items.items()}
    load(model, made)
    for layer in model.layers:
        assert layer.experts.w13_weight is layer.experts.w13_weight_packed
        assert layer.experts.w2_weight is layer.experts.w2_weight_packed
    assert {name: item.buffer.bytes.data_ptr() for (_, name), item in made.items.items()} == before, "the same bytes"
    assert not made.whole and torch.equal(tokens(model), resident(make=TwiceNamed))


@pytest.mark.parametrize("limit", [None, 0])
def test_processed_in_place_where_memory_is_mapped(limit, mapped, one_at_a_time):
    from fake_model import view_elsewhere

    made = Offloader(2**30, {"experts"}, Memory(limit, "x", None, view_elsewhere), print, has_attention)
    model = Model(made, make=Shuffled)
    load(model, made)
    assert torch.equal(tokens(model), resident(make=Shuffled))
    assert all(i.mapped is (limit is None) for i in made.items.values())


class Rebinding(Layer):
    """As v0.33.0's `replace_parameter`: the parameter stays and gets other data, made together or apart."""

    def __init__(self, name):
        super().__init__(name)
        self.experts.process = self.rebind

    together = False

    def rebind(self):
        for leaf in ("w13_weight", "w2_weight"):
            old = getattr(self.experts, leaf)
            made = old.data / old.data.abs().max() if self.together else old.data * 0.5
            old.data.copy_(made)
            old.data = made.transpose(1, 2).contiguous().transpose(1, 2)


class RebindingTogether(Rebinding):
    together = True


@pytest.mark.parametrize("budget", [1, 2**30], ids=["one weight", "all"])
@pytest.mark.parametrize("make", [Rebinding, RebindingTogether])
def test_a_parameter_that_is_kept_and_gets_other_data(make, budget, one_at_a_time):
    """When the tape gave up, the last weight of each layer stayed on the device: its Deferred was still held by us."""
    made = pageable(budget, "experts")
    model = Model(made, make=make)
    load(model, made)
    assert bool(made.whole) is make.together
    assert made.items and all(item.out and item.kept is None for item in made.items.values())
    assert all(type(p) is torch.nn.Parameter for layer in model.layers for p in layer.experts._parameters.values())
    assert torch.equal(tokens(model), resident(make=make))


def test_untouched_weights_do_not_move(monkeypatch):
    made = pageable(2**30, "experts")
    model = Model(made)
    monkeypatch.setattr(Tape, "play", lambda *_: pytest.fail("played"))
    originals = [layer.experts.w13_weight for layer in model.layers]
    load(model, made)
    assert all(layer.experts.w13_weight is p for layer, p in zip(model.layers, originals))


def test_a_layer_that_cannot_be_kept_apart_is_processed_whole_and_said(one_at_a_time):
    class Scaled(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.experts.process = self.scale

        def scale(self):
            w = self.experts.w13_weight
            self.experts.w13_weight = parameter(w.data / w.data.abs().max())

    said = []
    made = pageable(2**30, "experts", said=said)
    model = Model(made, make=Scaled)
    load(model, made)
    assert any("experts of 3 layers were processed a whole layer at a time" in line and "abs" in line for line in said)
    assert torch.equal(tokens(model), resident(make=Scaled))


class WithScales(Layer):
    """Its scales are multiplied, by themselves or by what mixes experts, and a config holds them."""

    by = 2.0

    def __init__(self, name):
        super().__init__(name, experts=NVFP4)
        self.experts.process = self.scale

    def scale(self):
        experts = self.experts
        self.config = [experts.w13_weight_scale]
        experts.w13_weight_scale.data = experts.w13_weight_scale.data * self.by
        experts.w2_weight_scale = parameter(experts.w2_weight_scale.data * self.factor(experts.w2_weight_scale))
        for projection in ("w13", "w2"):
            packed = getattr(experts, f"{projection}_weight_packed").data
            delattr(experts, f"{projection}_weight_packed")
            experts.register_parameter(f"{projection}_weight", parameter(packed.flip(1)))

    def factor(self, scale):
        return scale.max()


class WithMixedScales(WithScales):
    def factor(self, scale):
        return scale.data.flip(0).sum()


@pytest.mark.parametrize("make", [WithScales, WithMixedScales])
def test_scales_are_converted_beside_weights(make, one_at_a_time, monkeypatch):
    """Where that can't be done to a few experts it is said, and the weights are still processed apart."""
    monkeypatch.setattr(scales_module, "LEAST", 1)
    said = []
    made = pageable(2**30, "experts", said=said)
    model = Model(made, make=make)
    load(model, made)
    mixed = make is WithMixedScales
    assert not made.whole and bool(made.whole_scales) is mixed
    assert any("scales of the experts of 3 layers were converted all at once" in line for line in said) is mixed
    for layer in model.layers:
        assert layer.config[0] is layer.experts.w13_weight_scale
        assert all(type(p) is torch.nn.Parameter for p in layer.experts._parameters.values())
    assert torch.equal(tokens(model), resident(make=make))


def test_memory_that_gives_out_for_scales_ends_the_start(one_at_a_time, monkeypatch):
    monkeypatch.setattr(scales_module, "LEAST", 1)

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB")

    monkeypatch.setattr(scales_module.Scales, "_assembled", fails)
    made = pageable(2**30, "experts")
    with pytest.raises(RepackError, match="the scales could not be processed after loading: CUDA out of memory"):
        load(Model(made, make=WithScales), made)


@pytest.mark.parametrize("chunk", range(2 * EXPERTS))
def test_memory_that_gives_out_in_the_middle_ends_the_start(chunk, one_at_a_time, monkeypatch):
    """No half-processed layer is served, the error says where it was, and the host's memory goes back."""
    play, count = Tape.play, [0]

    def failing(tape, a, b, *rest):
        count[0] += 1
        if count[0] == chunk + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
        return play(tape, a, b, *rest)

    monkeypatch.setattr(Tape, "play", failing)
    made = pageable(2**30, "experts")
    model = Model(made, make=Shuffled)
    leaf, expert = ("w13_weight", chunk) if chunk < EXPERTS else ("w2_weight", chunk - EXPERTS)
    arena: Arena = made.arena
    with pytest.raises(RepackError, match=rf"experts {expert} to {expert} of {EXPERTS} of {leaf}.*out of memory"):
        load(model, made)
    del made, model
    gc.collect()
    assert arena.held == 0


def test_chunks():
    assert list(chunks(5, 10, 20)) == [(0, 2), (2, 4), (4, 5)]
    assert list(chunks(3, 100, 20)) == [(0, 1), (1, 2), (2, 3)], "one expert, however large"
    assert list(chunks(4, 1, 100)) == [(0, 4)]


@given(st.integers(1, 300), st.integers(1, 2**30), st.integers(1, 2**30))
def test_chunks_are_all_experts_once_and_no_larger_than_they_may(experts, row, limit):
    ranges = list(chunks(experts, row, limit))
    assert [e for a, b in ranges for e in range(a, b)] == list(range(experts))
    assert all((b - a) * row <= limit or b - a == 1 for a, b in ranges)


def test_chunk_size_follows_from_what_is_free(monkeypatch):
    cuda = torch.device("cuda")
    for free, want in ((2**40, 64 * 2**20), (80 * 2**20, 10 * 2**20), (0, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2**40))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5)
        assert chunk_bytes(cuda) == want
    assert chunk_bytes(CPU) == 64 * 2**20
