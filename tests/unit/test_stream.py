# SPDX-License-Identifier: Apache-2.0
"""Layers that pass through two buffers: whatever is asked for, in whatever order, comes with its own bytes."""

import pytest
import torch
from expert_offload import stream
from expert_offload.stream import Stream, size
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def layer(seed: int, experts: int = 3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    w13 = torch.randint(0, 256, (experts, 5, 7), generator=g, dtype=torch.uint8)
    return {"w13_weight": w13, "w2_weight": torch.randn(experts, 4, 2, generator=g).transpose(1, 2)}


def same(got: dict, want: dict) -> bool:
    return list(got) == list(want) and all(
        torch.equal(g, w) and g.stride() == w.stride() and g.dtype == w.dtype
        for g, w in zip(got.values(), want.values())
    )


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=20))
def test_every_layer_comes_with_its_own_bytes(count, order):
    layers = [layer(seed, 2 + seed % 3) for seed in range(count)]
    passing = Stream(layers, CPU)
    for number in [*range(count), *(n % count for n in order), *range(count)]:
        assert same(passing.take(number), layers[number])
        passing.done(number)


def test_the_next_layer_sets_off_and_is_not_brought_twice(monkeypatch):
    brought, bring = [], Stream._bring
    monkeypatch.setattr(Stream, "_bring", lambda self, number: (brought.append(number), bring(self, number)))
    passing = Stream([layer(seed) for seed in range(4)], CPU)
    for number in range(4):
        passing.take(number)
        passing.done(number)
    assert brought == [0, 1, 2, 3]
    passing.take(0)
    assert brought[4:] == [0, 1], "the buffers held the last two"
    passing.take(0)
    assert brought[6:] == [], "both are there still"


def test_weights_that_changed_come_again():
    layers = [layer(0), layer(1)]
    passing = Stream(layers, CPU)
    passing.take(0)
    for host in layers[1].values():
        host.mul_(2)
    assert not same(passing.take(1), layers[1])
    passing.forget()
    assert same(passing.take(1), layers[1])


def test_two_buffers_of_the_largest_layer():
    layers = [layer(0, 3), layer(1, 9)]
    each = stream._aligned(9 * 5 * 7) + stream._aligned(9 * 8 * 4)
    assert size(layers) == each and Stream(layers, CPU).nbytes == 2 * each
    (a, b), (c, d) = (Stream(layers, CPU).take(n).values() for n in (0, 1))
    assert all(t.data_ptr() % 16 == 0 for t in (a, b, c, d))
    assert size([]) == 0 and Stream([], CPU).nbytes == 0


class Recorder:
    """Stands for a card: what is ordered on which stream, by events."""

    def __init__(self):
        self.log, self.current = [], "main"

    def event(self, *_):
        recorder, number = self, sum(line[0] == "event" for line in self.log)
        self.log.append(("event", number))

        class Event:
            def record(self, on=None):
                recorder.log.append(("record", number, on.name if on else recorder.current))

        return Event()

    def stream(self, name):
        recorder = self

        class On:
            def __init__(self):
                self.name = name

            def wait_event(self, event):
                record = len(recorder.log)
                event.record(None)
                _, number, _ = recorder.log.pop(record)
                recorder.log.append(("wait", number, name))

            def __enter__(self):
                recorder.current = name

            def __exit__(self, *_):
                recorder.current = "main"

        return On()


def test_no_copy_overtakes_a_reader_and_no_reader_a_copy(monkeypatch):
    """On a card: a buffer is written behind its last reader's event, and read behind its copy's."""
    card = Recorder()
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: card.stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: card.stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda side: side)
    passing = Stream([layer(seed) for seed in range(4)], CPU)
    passing._cuda, passing._side = True, card.stream("side")
    passing._came, passing._read = [card.event(), card.event()], [card.event(), card.event()]
    came, read = {0: 0, 1: 1}, {0: 2, 1: 3}  # numbers of the events
    card.log.clear()
    for number in range(4):
        passing.take(number)
        card.log.append(("work", number))
        passing.done(number)
    for number in range(4):
        at, b = card.log.index(("work", number)), number % 2
        before, behind = card.log[:at], card.log[at:]
        assert ("wait", came[b], "main") in before and behind[1] == ("record", read[b], "main")
        if number >= 2:  # the copy into its buffer waited for the reader before it
            copied = len(before) - 1 - before[::-1].index(("record", came[b], "side"))
            waited = len(before) - 1 - before[:copied][::-1].index(("wait", read[b], "side")) - (len(before) - copied)
            assert before.index(("work", number - 2)) < waited < copied
    assert [line for line in card.log if line[0] == "record" and line[2] == "side"] == [
        ("record", came[n % 2], "side") for n in range(4)
    ]


def test_a_layer_alone():
    passing = Stream([layer(0)], CPU)
    assert same(passing.take(0), layer(0))
    with pytest.raises(IndexError):
        passing.take(1)
