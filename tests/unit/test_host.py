# SPDX-License-Identifier: Apache-2.0
"""Host memory of exactly the size asked, found again by address, unreadable when sealed, given back when unused.

And page-locked as far as the driver goes along, whatever it answers: it is faked below our ctypes calls (conftest.py).
"""

import ctypes
import errno
import faulthandler
import gc
import itertools
import logging
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from expert_offload import cuda, host
from expert_offload.host import (
    Arena,
    HostBuffer,
    HostMemoryError,
    Mapping,
    flat_bytes,
    gib,
    like,
    memory_total,
    pin_limit,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.float64]


def ours() -> int:
    """Bytes that this process maps with MADV_DONTFORK, as the kernel counts them: our buffers, and nobody else's."""
    return sum(
        int(re.search(r"^Size: +(\d+) kB", area, re.M)[1]) * 1024
        for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
        if re.search(r"^VmFlags:.* dc( |$)", area, re.M)
    )


def child(function) -> int:
    """Signal that ended a forked child which called `function`, or 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        signal.alarm(20)
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 2**20, 2**20 + 1, 3 * 2**20, 5 * 2**24 + 12345])
def test_exactly_the_size_asked_and_given_back(nbytes):
    """No power of two (5 * 2**24 would become 2**27), no cache of freed memory."""
    gc.collect()
    before = ours()
    buffer = HostBuffer(nbytes, pin=False)
    assert ours() - before == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert buffer.bytes.shape == (nbytes,) and buffer.bytes.dtype is torch.uint8 and buffer.nbytes == nbytes
    assert buffer.bytes.data_ptr() % mmap.PAGESIZE == 0
    del buffer
    assert ours() == before


def test_memory_lives_as_long_as_the_last_tensor_on_it():
    before = ours()
    buffer = HostBuffer(2**20, pin=False)
    buffer.bytes.fill_(7)
    view = buffer.tensor_like(torch.empty(2**18, dtype=torch.float32))[5:9]
    del buffer
    assert ours() > before
    assert flat_bytes(view).tolist() == [7] * 16
    del view
    assert ours() == before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_buffer_without_bytes(nbytes):
    with pytest.raises(ValueError, match=f"a host buffer of {nbytes} bytes"):
        HostBuffer(nbytes, pin=False)


def test_a_new_buffer_is_zero_and_takes_no_memory_until_written():
    def resident() -> int:
        return int(re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

    before = resident()
    buffer = HostBuffer(2**26, pin=False)
    assert resident() - before < 2**24
    buffer.bytes.fill_(1)
    assert resident() - before > 2**25
    assert HostBuffer(100, pin=False).bytes.tolist() == [0] * 100


# -- sealed ----------------------------------------------------------------------------------------------------------


def sealed(nbytes: int = 5000) -> HostBuffer:
    buffer = HostBuffer(nbytes, pin=False)
    buffer.bytes.fill_(42)
    buffer.seal()
    return buffer


@pytest.mark.parametrize("offset", [0, 4999])
def test_reading_a_sealed_buffer_dies(offset):
    """The child makes its own buffer: one of the parent's it would not even have."""
    assert child(lambda: ctypes.string_at(sealed().bytes.data_ptr() + offset, 1)) == signal.SIGSEGV
    assert child(lambda: sealed().bytes.clone()) == signal.SIGSEGV


def test_the_same_child_lives_when_it_reads_what_is_opened():
    def reads():
        buffer = sealed()
        with buffer.opened() as there:
            if there.tolist() != [42] * 5000:
                os.abort()

    assert child(reads) == 0


def test_a_sealed_buffer_is_sealed_again_after_use_even_when_that_failed():
    def fails():
        buffer = sealed()
        try:
            with buffer.opened() as there:
                there.fill_(1)
                raise KeyError
        except KeyError:
            pass
        ctypes.string_at(buffer.bytes.data_ptr(), 1)

    def reads_on():
        buffer = sealed()
        with buffer.opened():
            pass
        ctypes.string_at(buffer.bytes.data_ptr(), 1)

    assert child(fails) == signal.SIGSEGV
    assert child(reads_on) == signal.SIGSEGV


def test_writes_inside_opened_last():
    buffer = sealed()
    with buffer.opened() as there:
        there.fill_(43)
    with buffer.opened() as there:
        assert there.tolist() == [43] * 5000


def test_opened_leaves_an_unsealed_buffer_readable():
    buffer = HostBuffer(10, pin=False)
    with buffer.opened() as there:
        there.fill_(3)
    assert buffer.bytes.tolist() == [3] * 10


def test_a_sealed_buffer_is_given_back_too():
    before = ours()
    buffer = sealed(2**20)
    assert ours() > before
    del buffer
    assert ours() == before


def test_a_failed_protection_is_an_error():
    buffer = HostBuffer(10, pin=False)
    with pytest.raises(OSError, match="mprotect of 10 bytes"):
        buffer._protect(-1)


def test_a_forked_child_has_no_copy():
    """A copy of every offloaded byte on the first write of either side would be the end of a large model."""
    buffer = HostBuffer(4096, pin=False)
    buffer.bytes.fill_(9)
    plain = torch.full((4096,), 9, dtype=torch.uint8)
    assert child(lambda: ctypes.string_at(plain.data_ptr(), 1)) == 0
    assert child(lambda: ctypes.string_at(buffer.bytes.data_ptr(), 1)) == signal.SIGSEGV
    assert buffer.bytes.tolist() == [9] * 4096


# -- tensors on bytes ------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """Contiguous, transposed, sliced, expanded and offset tensors of many types, with random bytes behind them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    count = int(torch.Size(shape).numel())
    offset = draw(st.integers(0, 3))
    raw = torch.randint(0, 256, ((count + offset) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)[offset:].view(shape).permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        axis = draw(st.integers(0, tensor.dim() - 1))
        start = draw(st.integers(0, tensor.shape[axis] - 1))
        tensor = tensor.narrow(axis, start, draw(st.integers(1, tensor.shape[axis] - start)))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def values(tensor: torch.Tensor) -> list:
    """Elements as bytes in logical order: NaN is as good as any other."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8).tolist()


@given(tensors())
def test_bytes_go_to_a_buffer_and_back(tensor):
    flat = flat_bytes(tensor)
    assert flat.data_ptr() == tensor.data_ptr() and flat.dim() == 1 and flat.is_contiguous()
    buffer = HostBuffer(flat.numel(), pin=False)
    buffer.bytes.copy_(flat)
    back = buffer.tensor_like(tensor)
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert back.data_ptr() == buffer.bytes.data_ptr()
    assert values(back) == values(tensor)
    assert back._base is None, "a reference that the audit would find"


def test_a_transposed_weight_takes_its_own_bytes_only():
    whole = torch.arange(24, dtype=torch.int32).view(4, 6)
    assert flat_bytes(whole.t()).numel() == 96
    assert flat_bytes(whole[1:3]).numel() == 48
    assert flat_bytes(whole[:, 2]).numel() == 4 * (3 * 6 + 1)
    assert flat_bytes(whole[:0]).numel() == 0
    assert torch.equal(like(flat_bytes(whole.t()).clone(), whole.t()), whole.t())


# -- arena -----------------------------------------------------------------------------------------------------------


def lies_in(arena: Arena, tensor: torch.Tensor, buffer: HostBuffer) -> bool:
    return arena.holding(tensor) is buffer.mapping


def test_a_tensor_is_found_by_its_address():
    arena = Arena(0)
    first, second = arena.take(1000), arena.take(1000)
    assert lies_in(arena, first.bytes, first) and lies_in(arena, second.bytes, second)
    assert lies_in(arena, second.bytes[999:], second) and not lies_in(arena, second.bytes, first)
    assert arena.holding(first.bytes.clone()) is None
    assert arena.holding(torch.empty(0)) is None
    assert arena.holding(HostBuffer(1000, pin=False).bytes) is None, "another offloader's"


def test_the_bounds_of_a_buffer():
    buffer = HostBuffer(1000, pin=False)
    start = buffer.bytes.data_ptr()
    assert [buffer.mapping.holds(start + i) for i in (-1, 0, 999, 1000)] == [False, True, True, False]
    assert not buffer.mapping.holds(0)


def test_a_mapped_view_is_found_at_the_device_s_address():
    """Under WSL the device sees the memory elsewhere than the host does."""
    arena = Arena(0)
    buffer, elsewhere = arena.take(1000), torch.zeros(1000, dtype=torch.uint8)
    assert arena.holding(elsewhere) is None
    assert buffer.mapped(elsewhere) is elsewhere
    assert lies_in(arena, elsewhere[999:], buffer) and lies_in(arena, buffer.bytes, buffer)
    assert not buffer.mapping.holds(elsewhere.data_ptr() + 1000)


def test_memory_that_only_a_stray_tensor_holds_is_found_still():
    """The audit names whoever reads a buffer that no parameter owns any more."""
    arena = Arena(0)
    stray = arena.take(1000).bytes[10:20]
    gc.collect()
    assert arena.holding(stray) is not None
    address = stray.data_ptr()
    del stray
    assert not any(m.holds(address) for m in list(arena._live)), "the arena must not keep memory alive"


def test_a_spare_is_used_again_only_at_its_own_size():
    arena = Arena(0)
    spare = arena.take(1000)
    spare.bytes.fill_(5)
    assert arena.take(1000, spare) is spare
    for nbytes in (999, 1001, 4096):
        other = arena.take(nbytes, spare)
        assert other is not spare and other.nbytes == nbytes
    assert arena.take(1000) is not spare
    assert spare.bytes.tolist() == [5] * 1000


# -- page-locked -----------------------------------------------------------------------------------------------------

SIZES = [5000, 1, 4096, 20000, 12288, 12289, 3 * 2**20, 7777]
ALL = sum(SIZES)


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def filled(arena: Arena, sizes=SIZES) -> list[tuple[HostBuffer, torch.Tensor]]:
    """A buffer of each size, which must come empty, and what was then written to it."""
    made = []
    for nbytes in sizes:
        buffer, content = arena.take(nbytes), random_bytes(nbytes)
        assert not buffer.bytes.any(), "a trial left something behind"
        buffer.bytes.copy_(content)
        made.append((buffer, content))
    return made


def intact(made: list[tuple[HostBuffer, torch.Tensor]]) -> bool:
    return all(torch.equal(buffer.bytes, content) for buffer, content in made)


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


def test_no_memory_is_an_error_with_figures_and_the_next_step(runtime):
    """2**50 bytes are more than a process can address, so the system itself refuses here."""
    driver, arena = runtime(), Arena(None)
    kept, before = arena.take(3 * 2**20), ours()
    with pytest.raises(HostMemoryError) as error:
        arena.take(2**50)
    for words in ("1048576.00 GiB", f"{2**50} bytes", "3.00 MiB", f"{3 * 2**20} bytes", "Lower --cpu-offload-gb"):
        assert words in str(error.value)
    assert "Cannot allocate memory" in str(error.value)
    del error
    assert driver.asked == [3 * 2**20] and ours() == before and (arena.held, arena.refused) == (3 * 2**20, None)
    assert arena.take(5000).pinned and kept.pinned


@pytest.mark.parametrize("fails_at", range(1, 5))
@pytest.mark.parametrize("step", ["__new__", "madvise"])
def test_mmap_is_refused_at_the_nth_buffer(runtime, monkeypatch, step, fails_at):
    driver, arena, count, before = runtime(), Arena(None), itertools.count(1), ours()

    def fails(*args, **kw):
        if next(count) == fails_at:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return getattr(host.mmap.mmap, step)(*args, **kw)

    monkeypatch.setattr(host, "Mapping", type("Mapping", (Mapping,), {step: fails}))
    made = []
    for _ in range(fails_at - 1):
        made += filled(arena, [5000])
    with pytest.raises(HostMemoryError, match=rf"\(5000 bytes: .*\({len(made) * 5000} bytes\)"):
        arena.take(5000)
    assert len(driver.asked) == len(made) and arena.held == arena.locked == len(made) * 5000 and intact(made)
    del made
    gc.collect()
    assert driver.registered == {} and ours() == before


@pytest.mark.parametrize("wrong", [{}, {"refuse_at": 20}, {"quota": 30 * 5000}, {"shift": 1 << 46}])
@pytest.mark.parametrize("limit", [None, 25 * 5000])
def test_threads_take_at_once(runtime, wrong, limit):
    driver, arena, made, faults = runtime(**wrong), Arena(limit), [], []
    register, inside = driver.cudaHostRegister, []

    def slow(*args):
        inside.append(1)
        faults.extend(["two at once"] if len(inside) > 1 else [])
        time.sleep(0.0005)  # lets every other thread come
        inside.pop()
        return register(*args)

    driver.cudaHostRegister = slow

    def work():
        try:
            for i in range(8):
                mine = filled(arena, [5000])
                if i % 4:
                    made.extend(mine)
                assert (limit is None or arena.locked <= limit) and intact(mine)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert faults == [] and intact(made) and len(made) == 48 and arena.held == 48 * 5000
    assert arena.locked == sum(driver.registered.values()) == sum(b.nbytes for b, _ in made if b.pinned)
    assert limit is None or arena.locked <= limit
    if "refuse_at" in wrong and limit is None:
        assert len(driver.asked) == 20, "asked after the first refusal"
    if not wrong and limit is None:
        assert arena.refused is None and arena.locked == arena.held


def test_a_spare_keeps_what_it_is(runtime):
    driver, arena = runtime(refuse_at=2), Arena(None)
    locked, ordinary = arena.take(5000), arena.take(6000)
    assert arena.take(5000, locked) is locked and locked.pinned
    assert arena.take(6000, ordinary) is ordinary and not ordinary.pinned
    assert driver.asked == [5000, 6000] and arena.held == 11000


def test_a_buffer_alone(runtime):
    driver = runtime()
    assert not HostBuffer(100).pinned and not HostBuffer(100, pin=False).pinned and driver.asked == []
    assert HostBuffer(100, pin=True).pinned
    driver.quota = 0
    assert not HostBuffer(100, pin=True).pinned


# -- a process of its own --------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_parent_s_memory_alone(runtime):
    """It neither unregisters it, nor unmaps what by then lies at the same addresses in the child."""
    driver = runtime()
    buffer = HostBuffer(2**20, pin=True)
    buffer.bytes.fill_(9)

    def drops():
        nonlocal buffer
        address = buffer.bytes.data_ptr()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        at = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(2**20), 3, flags, -1, ctypes.c_long(0))
        if at != address:
            os.abort()  # MADV_DONTFORK left something there
        ctypes.memset(at, 5, 2**20)
        gc.collect()
        buffer = None
        gc.collect()
        if ctypes.string_at(at, 2**20) != b"\5" * 2**20 or driver.freed:
            os.abort()

    assert child(drops) == 0
    assert driver.registered == {buffer.bytes.data_ptr(): 2**20} and buffer.bytes.tolist() == [9] * 2**20
    del buffer
    assert driver.freed == [2**20]


ENDS = """
import sys
sys.path.insert(0, {here!r})
import conftest
from expert_offload import cuda, host
fake = conftest.FakeRuntime()
cuda.library = lambda: fake
arena = host.Arena(None)
host.kept = arena.take(2**20)
host.cycle = [arena.take(5000)]
host.cycle.append(host.cycle)
arena.take(100)
assert len(fake.registered) == 2 and fake.freed == [100]
import os
if {forks} and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_ends_without_a_word(forks):
    """With buffers in globals and in a cycle: when those die, modules are half gone."""
    code = ENDS.format(here=str(Path(__file__).parent), forks=forks)
    done = subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- the CUDA runtime ------------------------------------------------------------------------------------------------


def test_a_torch_without_cuda_is_a_refusal_in_words(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    cuda.library.cache_clear()
    arena = Arena(None)
    made = filled(arena, [5000])
    assert not made[0][0].pinned and intact(made) and f"torch {torch.__version__} has no CUDA" in arena.refused
    with pytest.raises(cuda.CudaMissing):
        cuda.host_register(4096, 1)


@pytest.mark.parametrize("lacks", ["libcudart.so.77: cannot open", "undefined symbol: cudaHostGetDevicePointer"])
def test_a_runtime_that_is_not_there_or_not_whole_is_a_refusal_in_words(monkeypatch, lacks):
    class Part:
        def __getattr__(self, name):
            if name in lacks:
                raise AttributeError(lacks)
            return type("Function", (), {})()

    if "undefined" in lacks:
        monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: Part())
    monkeypatch.setattr(torch.version, "cuda", "77.1")
    cuda.library.cache_clear()
    arena = Arena(None)
    assert not arena.take(5000).pinned
    assert (
        f"torch {torch.__version__} has CUDA 77.1, but no whole runtime: " in arena.refused and lacks in arena.refused
    )


def test_the_runtime_is_asked_for_by_its_major_version_and_told_every_type(monkeypatch):
    """A function that has no types would be given the lower half of an address."""

    class Whole:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, name):
            function = type("Function", (), {"argtypes": None, "restype": ctypes.c_int})()
            setattr(self, name, function)
            return function

    monkeypatch.setattr(cuda.ctypes, "CDLL", Whole)
    monkeypatch.setattr(torch.version, "cuda", "13.4")
    cuda.library.cache_clear()
    found = cuda.library()
    cuda.library.cache_clear()
    assert found.name == "libcudart.so.13"
    assert {name: vars(found)[name].argtypes for name in cuda._ARGUMENTS} == cuda._ARGUMENTS
    restypes = {name: vars(found)[name].restype for name in cuda._ARGUMENTS}
    assert restypes == {n: ctypes.c_char_p if n == "cudaGetErrorName" else ctypes.c_int for n in restypes}


def test_everything_goes_through_c_whole(runtime, monkeypatch):
    """The fake again, behind functions of C's types: no address is cut, and what pointers bring back arrives."""
    driver, arena = runtime(shift=1 << 46, quota=8000), Arena(None)

    functions = {
        name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(getattr(driver, name))
        for name, types in cuda._ARGUMENTS.items()
        if name != "cudaGetErrorName"
    }
    behind = type("Library", (), {**functions, "cudaGetErrorName": staticmethod(driver.cudaGetErrorName)})
    monkeypatch.setattr(cuda, "library", lambda: behind)
    made = filled(arena, [5000, 4000])
    assert driver.registered == {made[0][0].bytes.data_ptr(): 5000} and driver.asked == [5000, 4000]
    assert len(driver.copies) == 4 and intact(made) and driver.last_error == 0
    with pytest.raises(cuda.CudaError) as error:
        cuda.host_register(made[1][0].bytes.data_ptr(), 2**40)
    assert driver.asked[-1] == 2**40
    assert (error.value.code, error.value.name) == (2, "cudaErrorMemoryAllocation")
    assert str(error.value) == "cudaHostRegister answers cudaErrorMemoryAllocation (2)"
    del made
    assert driver.registered == {}


def test_the_runtime_that_is_here():
    """Whatever it says: on a machine with a card it page-locks, elsewhere that is a refusal like any other."""
    cuda.library.cache_clear()
    arena = Arena(None)
    made = filled(arena)
    assert intact(made) and made[0][0].pinned is (arena.refused is None) and arena.held == ALL


# -- how much --------------------------------------------------------------------------------------------------------

TOTAL = 64 * 2**30
WSL = "on WSL at most 40 % of the machine's memory is page-locked (EXPERT_OFFLOAD_PIN_GIB changes that)"


@pytest.mark.parametrize(
    "asked, wsl, wsl_switch, ranks, limit, why",
    [
        (None, False, None, 1, None, None),
        (None, False, None, 8, None, None),
        ("", False, None, 1, None, None),
        (" ", False, "0", 1, None, None),
        (None, False, "0", 1, None, None),
        ("0", False, None, 1, 0, "EXPERT_OFFLOAD_PIN_GIB is 0"),
        ("0.0", True, "1", 4, 0, "EXPERT_OFFLOAD_PIN_GIB is 0"),
        ("24", False, None, 1, 24 * 2**30, "EXPERT_OFFLOAD_PIN_GIB allows 24 GiB of page-locked memory on this host"),
        (
            "0.5",
            False,
            None,
            2,
            2**28,
            "EXPERT_OFFLOAD_PIN_GIB allows 0.5 GiB of page-locked memory on this host, shared",
        ),
        (" 8 ", True, None, 1, 8 * 2**30, "EXPERT_OFFLOAD_PIN_GIB allows 8 GiB"),
        ("60", True, "1", 1, 60 * 2**30, "EXPERT_OFFLOAD_PIN_GIB allows 60 GiB"),
        (None, True, None, 1, TOTAL * 40 // 100, WSL),
        (None, True, "1", 1, TOTAL * 40 // 100, WSL),
        (None, True, "", 1, TOTAL * 40 // 100, WSL),
        (None, True, None, 4, TOTAL * 40 // 100 // 4, WSL + ", shared by 4 ranks"),
        (None, True, "0", 1, 0, "VLLM_WSL2_ENABLE_PIN_MEMORY is 0"),
        ("8", True, "0", 1, 0, "VLLM_WSL2_ENABLE_PIN_MEMORY is 0"),
        ("1e-12", False, None, 1, 0, "EXPERT_OFFLOAD_PIN_GIB allows 1e-12 GiB"),
    ],
)
def test_how_much_may_be_page_locked(asked, wsl, wsl_switch, ranks, limit, why):
    found = pin_limit(asked=asked, wsl=wsl, wsl_switch=wsl_switch, total=TOTAL, ranks=ranks)
    assert found[0] == limit and (found[1] is None if why is None else found[1].startswith(why))


@pytest.mark.parametrize("asked", ["-1", "-0.001", "nan", "inf", "-inf", "all", "8GiB", "8,5", "0x10", "1 2"])
@pytest.mark.parametrize("wsl", [True, False])
def test_a_limit_that_is_no_number_names_the_variable_the_value_and_what_is_allowed(asked, wsl):
    with pytest.raises(ValueError) as error:
        pin_limit(asked=asked, wsl=wsl, wsl_switch="0", total=TOTAL, ranks=1)
    for words in ("EXPERT_OFFLOAD_PIN_GIB=", repr(asked), "a number of GiB", "0 to turn page-locking off"):
        assert words in str(error.value)


def test_no_ranks_are_an_error():
    with pytest.raises(ValueError, match="0 ranks"):
        pin_limit(asked=None, wsl=True, wsl_switch=None, total=TOTAL, ranks=0)


@given(
    asked=st.none() | st.floats(0, 1e6),
    wsl=st.booleans(),
    switch=st.sampled_from([None, "0", "1"]),
    total=st.integers(0, 2**50),
    ranks=st.integers(1, 64),
)
def test_all_ranks_together_stay_within_the_host_s_cap(asked, wsl, switch, total, ranks):
    text = None if asked is None else repr(asked)
    limit, why = pin_limit(asked=text, wsl=wsl, wsl_switch=switch, total=total, ranks=ranks)
    cap = asked * 2**30 if asked is not None else total * 0.4 if wsl else None
    if cap is None:
        assert limit is None and why is None
        return
    assert isinstance(limit, int) and limit >= 0 and why and ranks * limit <= cap
    off = asked == 0 or (wsl and switch == "0")
    assert limit == 0 if off else ranks * (limit + 1) > cap - 1


def test_the_machine_s_memory(tmp_path):
    assert memory_total() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    told = tmp_path / "meminfo"
    told.write_text("MemFree:        12 kB\nMemTotal:       16303456 kB\nSwapTotal: 4 kB\n")
    assert memory_total(str(told)) == 16303456 * 1024
    told.write_text("MemFree: 12 kB\n")
    with pytest.raises(ValueError, match="has no line MemTotal"):
        memory_total(str(told))
