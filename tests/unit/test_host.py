# SPDX-License-Identifier: Apache-2.0
"""Host memory of exactly the size asked, found again by address, unreadable when sealed, given back when unused."""

import ctypes
import gc
import mmap
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from expert_offload.host import (
    Arena,
    HostBuffer,
    Mapping,
    flat_bytes,
    like,
)
from host_helpers import child, lies_in, ours
from hypothesis import given
from hypothesis import strategies as st

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.float64]


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


def test_huge_pages_are_asked_for_and_not_needed(monkeypatch):
    def flags(buffer: HostBuffer) -> list[str]:
        areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
        area = next(a for a in areas if a.startswith(f"{buffer.mapping.start:x}-"))
        return re.search(r"^VmFlags: (.*)$", area, re.M)[1].split()

    assert "hg" in flags(HostBuffer(4 * 2**20))
    advise = Mapping.madvise

    def refuse(self, advice, *span):
        if advice == mmap.MADV_HUGEPAGE:
            raise OSError(22, "Invalid argument")
        return advise(self, advice, *span)

    monkeypatch.setattr(Mapping, "madvise", refuse)
    buffer = HostBuffer(4 * 2**20)
    assert "hg" not in flags(buffer) and "dc" in flags(buffer) and not buffer.bytes.any()


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
