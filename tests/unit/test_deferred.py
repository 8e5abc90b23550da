# SPDX-License-Identifier: Apache-2.0
"""What is written down and played a few experts at a time gives the bytes of what is done to all of them."""

import gc

import pytest
import torch
from expert_offload import repack as repack_module
from expert_offload.deferred import Deferred, Tape
from expert_offload.host import Arena
from expert_offload.offloader import Memory, Offloader
from expert_offload.repack import RepackError, chunk_bytes, chunks
from fake_model import CPU, EXPERTS, NVFP4, Layer, Model, has_attention, load, pageable, parameter, resident, tokens
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")
COUNT, N, K = 5, 8, 12


def weight(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (COUNT, N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(work, *weights: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
    tape = Tape(COUNT, CPU)
    with tape.writing():
        out = work(*(tape.source(w, lambda a, b, w=w: w[a:b].clone()) for w in weights))
    return tape, list(out) if isinstance(out, (tuple, list)) else [out]


def played(tape: Tape, out: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    def whole(made: torch.Tensor) -> torch.Tensor:
        if not isinstance(made, Deferred) or tape.why is not None:
            return tape.whole(made) if isinstance(made, Deferred) else made
        program = tape.program(made)
        parts = [tape.play(a, b, program)[made.number] for a, b in chunks(COUNT, 1, rows)]
        return torch.cat(parts)

    return [whole(made) for made in out]


def check(work, *weights: torch.Tensor, rows: int = 2, gives_up: str | None = None) -> None:
    want = work(*(w.clone() for w in weights))
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    tape, out = written(work, *weights)
    got = played(tape, out, rows)
    assert (tape.why is None) is (gives_up is None), tape.why
    assert gives_up is None or gives_up in tape.why
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# -- what releases do ------------------------------------------------------------------------------------------------


def filled_row_by_row(w):
    out = torch.empty((COUNT, K // 4, N), dtype=torch.int32)
    for e in range(COUNT):
        out[e] = w[e].view(torch.int32).T.contiguous() * 3 + e
    return out


def joined(w):
    return torch.cat([w[e].view(torch.int32).T.contiguous().unsqueeze(0) for e in range(COUNT)], 0)


def stacked(w):
    return torch.stack([row.T for row in w])


def halves_changed_in_place(w):
    half = N // 2
    for start in range(0, half, 2):
        kept = w[:, half + start : half + start + 2].clone()
        w[:, half + start : half + start + 2] = w[:, start : start + 2]
        w[:, start : start + 2] = kept
    return w


def padded(w):
    return torch.nn.functional.pad(w.view(COUNT, 2, N // 2, K), (0, 0, 0, 4)).reshape(COUNT, N + 8, -1)


def flipped(w):
    return w.reshape(-1, 2, N // 2, K).flip(dims=[1]).reshape(w.shape)


def parameter_with_new_data(w):
    made = parameter(w)
    made.data = made.data.transpose(1, 2).contiguous()
    return made.data.view(torch.int32)


@pytest.mark.parametrize("rows", [1, 2, 3, COUNT, 100])
@pytest.mark.parametrize(
    "work",
    [filled_row_by_row, joined, stacked, halves_changed_in_place, padded, flipped, parameter_with_new_data],
    ids=lambda f: f.__name__,
)
def test_experts_are_kept_apart(work, rows):
    check(work, weight(), rows=rows)


def test_two_weights_are_played_apart():
    a, b = weight(1), weight(2)
    tape, (x, y) = written(lambda a, b: (a.flip(1), b.transpose(1, 2)), a, b)
    for made in (x, y):
        _, sources = tape.related(made)
        assert len(sources) == 1
    check(lambda a, b: (a.flip(1), b.transpose(1, 2)), a, b)
    check(lambda a, b: (torch.cat([a, b], 1), a + b, b - a), a, b)


@pytest.mark.parametrize(
    "work, why",
    [
        (lambda w: w.flip(0), "flip"),
        (lambda w: w.float() / w.float().amax(), "amax"),
        (lambda w: w.view(-1, K), "together"),
        (lambda w: w[1:] + w[:-1], "slice"),
        (lambda w: w.transpose(0, 1), "transpose"),
        (lambda w: w[0] + w[1], "mixes"),
        (lambda w: torch.stack([w[e] for e in reversed(range(COUNT))]), "mixes"),
        (lambda w: torch.stack([w[e] for e in range(COUNT)], 1), "mixes"),
        (lambda w: w + torch.arange(K, dtype=torch.uint8), "beside"),
        (lambda w: w[0, 0, 0].item() + w, "item()"),
        (lambda w: torch.from_numpy(w.numpy().copy()), "address"),
        (lambda w: (w.data_ptr(), w * 1)[1], "address"),
        (lambda w: torch.cumsum(w, 1), "cumsum"),
        (lambda w: torch.zeros((COUNT, 1, K), dtype=w.dtype).copy_(w[:, :1]), "writes into"),
        (lambda w: rows_into(torch.zeros((COUNT, K), dtype=w.dtype), w).flip(1), "writes into"),
        (lambda w: torch.add(w[0], 1, out=torch.empty((N, K), dtype=w.dtype)), "writes into"),
    ],
)
def test_anything_else_is_done_to_all(work, why):
    check(work, weight(), gives_up=why)


def test_a_tensor_that_changes_after_its_use_ends_it():
    """Played later, the steps would read what it holds then."""

    def work(w):
        shift, out = torch.zeros(K, dtype=torch.uint8), torch.empty_like(w)
        for e in range(COUNT):
            shift.fill_(e)
            out[e] = w[e] + shift
        return out

    tape, (made,) = written(work, weight())
    with pytest.raises(RuntimeError, match="changed after it was used"):
        tape.program(made)
    with pytest.raises(RuntimeError, match="changed after it was used"):
        made.real()


def rows_into(out, w):
    for e in range(COUNT):
        out[e] = w[e, 0]
    return out


def test_work_goes_on_after_giving_up():
    def work(w):
        first = w.flip(1)
        scale = first.max()  # looks at the bytes
        first[:, 0] = scale
        held = parameter(first.data)
        held.data = held.data.transpose(1, 2)
        return first, w, held.data

    check(work, weight(), gives_up="max")


def test_data_of_another_number_of_experts():
    def work(w):
        w.data = torch.ones(COUNT + 1, 2)
        return w

    tape, out = written(work, weight())
    assert "took the place" in tape.why and torch.equal(tape.whole(out[0]), torch.ones(COUNT + 1, 2))


def test_an_empty_tensor_of_another_kind_is_real():
    """Small ones, those of another number of experts, and those on another device are nobody's weights."""
    tape = Tape(COUNT, CPU)
    with tape.writing():
        before = torch.empty((COUNT, N, K), dtype=torch.uint8)
        tape.source(weight(), lambda a, b: weight()[a:b])
        large, small = torch.empty((COUNT, N, K), dtype=torch.uint8), torch.empty((COUNT, N, K - 1), dtype=torch.uint8)
        other, far = torch.empty((COUNT + 1, N, K)), torch.empty((COUNT, N, K), device="meta")
    assert isinstance(large, Deferred) and not any(isinstance(t, Deferred) for t in (before, small, other, far))


STEPS = {
    "flip": lambda w: w.flip(1),
    "swap in place": lambda w: halves_in_place(w),
    "transpose": lambda w: w.transpose(1, 2),
    "copy": lambda w: w.contiguous(),
    "shift": lambda w: w << 1,
    "xor": lambda w: w ^ 0x55,
    "pad": lambda w: torch.nn.functional.pad(w, (0, 2)),
    "rows": lambda w: rows_anew(w),
    "join": lambda w: torch.cat([row.flip(0).unsqueeze(0) for row in w.unbind(0)]),
    "split": lambda w: torch.cat(w.split(1, dim=2)[::-1], dim=2),
    "zero a column": lambda w: zeroed(w),
    "narrow": lambda w: w[:, :, 1:],
    "one row anew": lambda w: one_row(w),
    "largest": lambda w: w ^ int(w.max()),
}


def halves_in_place(w):
    half = w.shape[1] // 2
    kept = w[:, :half].clone()
    w[:, :half] = w[:, half : 2 * half]
    w[:, half : 2 * half] = kept
    return w


def rows_anew(w):
    out = torch.empty((COUNT, w.shape[2], w.shape[1]), dtype=w.dtype)
    for e in range(COUNT):
        out[e] = w[e].T
    return out


def zeroed(w):
    w[:, :, 0].zero_()
    return w


def one_row(w):
    w[3] = w[3].flip(0)
    return w


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.integers(1, COUNT), st.integers(0, 99))
@settings(max_examples=150)
def test_any_sequence_of_steps(names, rows, seed):
    def work(w):
        views = [w]
        for name in names:
            assume(min(views[-1].shape) > 1)
            views.append(STEPS[name](views[-1]))
        return views[-1], views[0], views[len(views) // 2]

    want = work(weight(seed))
    tape, out = written(work, weight(seed))
    for a, b in zip(played(tape, out, rows), want, strict=True):
        assert torch.equal(a, b)
    # What is made row by row is no weight where it is smaller than the weights are: it is filled at once.
    assert "largest" not in names or tape.why is not None
    assert {"largest", "rows"} & {*names} or tape.why is None


# -- in an offloader -------------------------------------------------------------------------------------------------


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
    assert not any(item.kept for item in made.items.values())


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
