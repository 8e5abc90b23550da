# SPDX-License-Identifier: Apache-2.0
"""What is written down and played a few experts at a time gives the bytes of what is done to all of them."""

import pytest
import torch
from expert_offload.deferred import Deferred, Tape
from expert_offload.repack import chunks
from fake_model import CPU, parameter
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


def test_its_storage_is_asked_for_its_size_alone():
    """As `replace_parameter` does; a parameter is not overwritten with what is as large, as neither is a plain one."""
    tape = Tape(COUNT, CPU)
    made = tape.source(weight(), lambda a, b: weight()[a:b])
    size = made[:, :, ::2].untyped_storage().nbytes()
    assert size + 0 == COUNT * N * K - 1 and f"{size}" == f"{COUNT * N * K - 1}"
    other = made.transpose(1, 2).contiguous()
    as_large = other.untyped_storage().nbytes() == made.untyped_storage().nbytes()
    assert not as_large and other.untyped_storage().nbytes() != made.untyped_storage().nbytes()
    assert tape.why is None
    assert len(made.untyped_storage().tolist()) == COUNT * N * K and "address" in tape.why


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
