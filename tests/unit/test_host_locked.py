# SPDX-License-Identifier: Apache-2.0
"""Page-locked as far as the driver goes, whatever it answers: it is faked below our ctypes calls (conftest.py)."""

import ctypes
import gc
import logging

import pytest
import torch
from expert_offload import cuda
from expert_offload.host import (
    Arena,
    gib,
)
from host_helpers import ALL, SIZES, filled, intact, lies_in, ours
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# -- page-locked -----------------------------------------------------------------------------------------------------


def test_a_page_locked_buffer_is_registered_whole_and_unregistered_before_it_goes(runtime):
    driver, before = runtime(), ours()
    arena = Arena(None)
    buffer = arena.take(12345)
    assert buffer.pinned and driver.registered == {buffer.bytes.data_ptr(): 12345}
    assert driver.flags == {3}, "portable and mapped"
    assert (arena.locked, arena.held, arena.refused) == (12345, 12345, None)
    stays = buffer.bytes[:1]
    del buffer
    assert len(driver.registered) == 1 and arena.locked == 12345, "unregistered while a tensor reads it"
    del stays
    assert driver.registered == {} and driver.freed == [12345]
    assert (arena.locked, arena.held, ours()) == (0, 0, before)


def test_every_buffer_is_unregistered_once_and_no_earlier_than_it_dies(runtime):
    driver, arena = runtime(), Arena(None)
    made = filled(arena)
    assert intact(made) and all(b.pinned for b, _ in made) and (arena.locked, arena.held) == (ALL, ALL)
    while made:
        left = list(driver.registered.values())
        buffer, _ = made.pop(len(made) // 2)
        assert driver.freed == [] or buffer.nbytes not in driver.freed
        nbytes = buffer.nbytes
        del buffer, _
        left.remove(nbytes)
        assert sorted(driver.registered.values()) == sorted(left) and arena.locked == arena.held == sum(left)
    assert sorted(driver.freed) == sorted(SIZES)
    gc.collect()
    assert len(driver.freed) == len(SIZES)


def test_a_limit_of_nothing_never_asks_the_driver(monkeypatch):
    """As on a torch without CUDA: not even its library is looked for."""
    monkeypatch.setattr(cuda, "library", lambda: pytest.fail("asked"))
    arena = Arena(0, "this is a test")
    made = filled(arena)
    assert intact(made) and not any(b.pinned for b, _ in made)
    assert (arena.locked, arena.held, arena.refused) == (0, ALL, "this is a test")
    del made
    assert arena.held == 0 and Arena(0).refused == "it is turned off" and Arena(None).refused is None


def test_a_negative_limit_is_an_error():
    with pytest.raises(ValueError, match="at most -1 bytes"):
        Arena(-1)


@pytest.mark.parametrize("refuse_at", range(1, len(SIZES) + 2))
def test_the_driver_refuses_the_nth_buffer(runtime, refuse_at):
    """Nothing ends, and it is asked no more: what it gave stays page-locked, the rest is ordinary memory."""
    driver, arena = runtime(refuse_at=refuse_at), Arena(None)
    made = filled(arena)
    gave = SIZES[: refuse_at - 1]
    assert intact(made) and [b.pinned for b, _ in made] == [i < len(gave) for i in range(len(SIZES))]
    assert driver.asked == SIZES[:refuse_at] and list(driver.registered.values()) == gave and driver.freed == []
    assert arena.locked == sum(gave) and arena.held == ALL
    assert driver.last_error == 0, "torch's next kernel would be blamed for the refusal"
    if refuse_at <= len(SIZES):
        words = f"the driver refused to page-lock {gib(SIZES[refuse_at - 1])} (cudaHostRegister answers "
        words += f"cudaErrorMemoryAllocation (2)), after {gib(sum(gave))} had been page-locked"
        assert arena.refused == words
    else:
        assert arena.refused is None
    del made
    assert driver.freed == gave[::-1] or sorted(driver.freed) == sorted(gave)
    assert driver.registered == {} and arena.locked == arena.held == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 60000), min_size=1, max_size=12),
    quota=st.none() | st.integers(0, 200_000),
    limit=st.none() | st.integers(0, 200_000),
    gone=st.integers(0, 11),
    delivers=st.sampled_from(["all", "all", "nothing", "zeros", "once", "old"]),
    shift=st.sampled_from([0, 1 << 46]),
)
def test_whatever_the_driver_does(runtime, sizes, quota, limit, gone, delivers, shift):
    """No crash, every byte right, never more than the limit, one reason, no question after the first refusal."""
    driver = runtime(quota=quota, delivers=delivers, shift=shift)
    arena, made = Arena(limit, "this is a test"), []
    for i, nbytes in enumerate(sizes):
        asked, refused = len(driver.asked), arena.refused
        closed = refused is not None and "limit" not in refused
        made += filled(arena, [nbytes])
        assert arena.locked == sum(driver.registered.values()) == sum(b.nbytes for b, _ in made if b.pinned)
        assert limit is None or arena.locked <= limit
        assert not closed or (len(driver.asked) == asked and arena.refused == refused)
        assert made[-1][0].pinned or arena.refused
        if i == gone:
            del made[0]
    assert intact(made) and arena.held == sum(b.nbytes for b, _ in made)
    assert delivers == "all" or not driver.registered
    del made
    assert driver.registered == {} and arena.locked == arena.held == 0


def test_a_quota_across_buffers(runtime):
    """A small buffer would still fit after the refusal. It is not tried: under WSL each try at the cap is a risk."""
    driver, arena = runtime(quota=50_000), Arena(None)
    made = filled(arena, [20_000, 20_000, 20_000, 10])
    assert [b.pinned for b, _ in made] == [True, True, False, False] and driver.asked == [20_000] * 3
    assert arena.locked == 40_000 and intact(made)
    del made[0]
    assert not arena.take(20_000).pinned and arena.locked == 20_000


def test_a_limit_is_kept_and_told_and_room_in_it_used_again(runtime):
    """Processing gives a weight another size: its old buffer dies, and the new one may be page-locked as that was."""
    driver, arena = runtime(), Arena(40_000, "somebody says so")
    made = filled(arena, [20_000, 15_000, 5_001, 5_000])
    assert [b.pinned for b, _ in made] == [True, True, False, True] and driver.asked == [20_000, 15_000, 5_000]
    assert arena.locked == 40_000 and arena.refused == "the limit of 0.04 MiB is reached: somebody says so"
    del made[0]
    assert arena.locked == 20_000 and arena.take(20_000).pinned and not arena.take(20_001).pinned and intact(made)


def test_the_driver_s_refusal_outweighs_the_limit(runtime):
    runtime(refuse_at=2)
    arena = Arena(100)
    made = filled(arena, [60, 60, 30, 10])
    assert [b.pinned for b, _ in made] == [True, False, False, False]
    assert arena.refused.startswith("the driver refused to page-lock 0.00 MiB")
    filled(arena, [1000])
    assert arena.refused.startswith("the driver refused")


@pytest.mark.parametrize("nbytes", [1, 2, 4096, 12288, 12289, 2**20 + 17])
@pytest.mark.parametrize("delivers", ["nothing", "zeros", "once", "old"])
@pytest.mark.parametrize("shift", [0, 1 << 46])
def test_memory_that_does_not_deliver_is_given_up(runtime, nbytes, delivers, shift):
    """Device memory keeps what the last trial left, so a copy that does nothing must not find the pattern there."""
    driver, arena = runtime(shift=shift), Arena(None)
    first = filled(arena, [nbytes])
    driver.delivers = delivers
    driver.copies.clear()
    made = filled(arena, [nbytes, nbytes])
    assert first[0][0].pinned and not any(b.pinned for b, _ in made) and intact(first + made)
    assert driver.asked == [nbytes] * 2 and driver.freed == [nbytes] and arena.locked == nbytes
    words = "a copy out of page-locked memory delivered other bytes than lie there, after"
    assert arena.refused.startswith(words)


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 12288, 12289, 16384, 2**20, 2**20 + 17])
def test_what_is_tried_is_the_first_a_middle_and_the_last_page(runtime, nbytes):
    """At the host's address and at the device's, twice each; no other page is touched."""
    driver = runtime(shift=1 << 46)
    buffer = Arena(None).take(nbytes)
    start = buffer.bytes.data_ptr()
    once = buffer._probes()
    assert sum(length for _, length in once) <= 3 * 4096 and all(o + n <= nbytes for o, n in once)
    assert once[0][0] == 0 and sum(once[-1]) == nbytes and (once == [(0, nbytes)] or len(once) == 3)
    by_address = [(base + o, n) for base in (start, start + driver.shift) for o, n in once]
    assert driver.copies == by_address * 2
    assert buffer.fault() is None and buffer.bytes.tolist() == [0] * nbytes if nbytes < 2**20 else True


def test_a_buffer_can_be_tried_again_later_and_is_not_changed(runtime):
    driver, arena = runtime(shift=1 << 46), Arena(None)
    made = filled(arena, [50_000])
    (buffer, _) = made[0]
    assert buffer.fault() is None and intact(made)
    buffer.bytes.zero_()
    assert buffer.fault() is None, "zeros are bytes as good as any"
    buffer.seal()
    assert buffer.fault() is None
    driver.delivers = "nothing"
    assert buffer.fault() == "a copy out of page-locked memory delivered other bytes than lie there"
    driver.delivers, driver.no_pointer = "all", True
    assert "cudaHostGetDevicePointer answers cudaErrorInvalidValue (1)" in buffer.fault()


def test_a_refused_device_pointer_gives_the_buffer_up(runtime):
    driver, arena = runtime(no_pointer=True), Arena(None)
    made = filled(arena, [5000, 6000])
    assert not any(b.pinned for b, _ in made) and intact(made)
    assert driver.asked == [5000] == driver.freed and driver.last_error == 0
    assert arena.refused == (
        "page-locked memory could not be read from the device (cudaHostGetDevicePointer answers "
        "cudaErrorInvalidValue (1)), after 0.00 MiB had been page-locked"
    )


def test_a_full_device_is_asked_again_once_torch_gave_back_what_it_keeps(runtime, monkeypatch):
    driver, emptied = runtime(full=1), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: (emptied.append(1), setattr(driver, "full", None)))
    assert Arena(None).take(5000).pinned and emptied == [1]
    driver.full = 1
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    arena = Arena(None)
    assert not arena.take(5000).pinned and emptied == [1, 1] and driver.last_error == 0
    assert "could not be read from the device (cudaMalloc answers cudaErrorMemoryAllocation (2))" in arena.refused
    assert driver.registered == {}


def test_device_memory_of_a_trial_is_freed_even_when_it_failed(runtime, monkeypatch):
    driver = runtime()
    Arena(None).take(5000)
    assert driver._blocks == {}
    monkeypatch.setattr(driver, "cudaDeviceSynchronize", lambda: driver._answer(1))
    arena = Arena(None)
    assert not arena.take(5000).pinned and driver._blocks == {} and "cudaDeviceSynchronize" in arena.refused


def test_memory_that_stays_registered_is_never_given_back(runtime, caplog):
    """Else what came to lie there next would be read from the old pages. The log says so; nothing ends."""
    driver, arena, before = runtime(), Arena(None), ours()
    buffer = arena.take(2**20)
    start = buffer.bytes.data_ptr()
    driver.keeps = True
    with caplog.at_level(logging.WARNING):
        del buffer
    (record,) = caplog.records
    assert record.getMessage() == (
        "expert offload: 1.00 MiB of host memory stay page-locked: cudaHostUnregister answers "
        "cudaErrorHostMemoryNotRegistered (713)"
    )
    assert ours() == before + 2**20 and ctypes.string_at(start, 1) == b"\0" and driver.last_error == 0
    assert arena.locked == 2**20, "it is page-locked, whoever thinks it died"
    driver.keeps = False
    gc.collect()
    assert driver.freed == [] and len(driver.registered) == 1


def test_memory_that_neither_delivers_nor_can_be_unregistered_is_replaced(runtime, caplog):
    driver, arena, before = runtime(delivers="zeros", keeps=True), Arena(None), ours()
    made = filled(arena, [5000])
    (bad,) = driver.registered
    buffer = made[0][0]
    assert buffer.bytes.data_ptr() != bad and buffer.mapping.start == buffer.bytes.data_ptr() and not buffer.pinned
    assert lies_in(arena, buffer.bytes, buffer) and intact(made) and (arena.locked, arena.held) == (0, 5000)
    assert len(caplog.records) == 1 and ours() == before + 2 * 8192
    del buffer, made
    assert ours() == before + 8192 and driver.freed == []
