# SPDX-License-Identifier: Apache-2.0
"""Host memory for offloaded tensors: mappings of our own, of exactly the size asked.

torch's pinned allocator rounds up to a power of two and never gives memory back; here a buffer is one anonymous
mapping, page-locked by registering it with the driver, and returned to the system when the last tensor on it dies.
Whether and how much memory can be page-locked is found out buffer by buffer, and whatever can't stays ordinary memory.
Since the addresses are ours, "does this tensor lie in host memory?" is answered by looking at them, not at `.device`
(a mapped view says "cuda") or at a mark on a parameter (which survives a change of its data).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from . import cuda
from .fit import gib

# Documented in the README: GiB that may be page-locked on a host, by all ranks together; 0: none.
PIN_SWITCH = "EXPERT_OFFLOAD_PIN_GIB"
# Windows caps page-locked memory for all of its processes together, at about half of the memory; reaching that cap can
# hang the host, so a default must stay well below it.
_WSL_PERCENT = 40

_libc = ctypes.CDLL(None, use_errno=True)
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PROBE = 4096  # bytes, at most, of each place where a page-locked buffer is tried
# No byte is zero, and no two places of a buffer get the same: 251 does not divide _PROBE.
_PATTERN = (bytes(range(1, 252)) * (3 * _PROBE // 251 + 1))[: 3 * _PROBE]
_INVERTED = bytes(range(255, -1, -1))

_add_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

_log = logging.getLogger(__name__)


class HostMemoryError(MemoryError):
    """The system gave no memory for a buffer."""


class Mapping(mmap.mmap):
    """An anonymous private mapping, alive as long as any tensor on it, whoever holds that.

    It knows where it lies: `start`, and `alias`, the address range at which the device reads the same bytes once
    `HostBuffer.mapped` was called, which may differ from the host's (WSL). `registered_at`: 0, or the address that the
    driver has page-locked; it unregisters itself before it is unmapped. `maker`: the process that made it.
    """

    start: int = 0
    alias: tuple[int, int] = (0, 0)
    registered_at: int = 0
    maker: int = 0

    def holds(self, address: int) -> bool:
        """Whether `address`, the host's or the device's, lies in this mapping."""
        return self.start <= address < self.start + len(self) or self.alias[0] <= address < self.alias[1]

    def unregister(self) -> bool:
        """Have the driver forget the mapping; False when it would not, and then the mapping stays for ever.

        For whatever came to lie at the same address would be read from the old pages. Logged, not raised or warned of:
        this runs where the last tensor dies, and there Python prints whatever a warning filter raises, while the same
        warning the next time is dropped.
        """
        if self.registered_at:
            try:
                cuda.host_unregister(self.registered_at)
            except cuda.CudaError as error:
                # As text: a record that somebody keeps would keep the frames of the error, and buffers in them.
                _log.warning(f"expert offload: {gib(len(self))} of host memory stay page-locked: {error}")
                self._stay()
                return False
            self.registered_at = 0
        return True

    def _stay(self) -> None:
        """Never be unmapped: one reference too many, which also brings back an object that is being deleted."""
        self._add_reference(self)

    _add_reference = staticmethod(_add_reference)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing, pid: Callable[[], int] = os.getpid) -> None:
        # At the interpreter's end no module's globals can be relied on, so what this needs hangs on the class.
        if self.maker == pid() and not ending():
            self.unregister()
        else:
            # The system takes everything from a process that ends, in the right order. In a forked child, the
            # registration is its parent's, and at these addresses, where it has nothing of ours (MADV_DONTFORK), may
            # lie something of its own by now, which unmapping would take away.
            self._stay()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes between the first and the last element of `tensor`, as a 1-D uint8 view of its storage."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).view(torch.uint8)


def like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the bytes `flat` (1-D, uint8, as long as `flat_bytes(tensor)`) with `tensor`'s dtype, shape, strides.

    By way of `.data`, which keeps no reference to the tensors in between: the audit looks at every tensor there is.
    """
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).data


class HostBuffer:
    """`nbytes` bytes of host memory, zero at first.

    Args:
        nbytes: size; the mapping is rounded up to a page, nothing more.
        pin: try to page-lock it; where that is refused the buffer is ordinary memory.
        held: bytes that whoever asks holds already, for the error.

    Raises HostMemoryError when the system gives no memory. `bytes` is a 1-D uint8 CPU tensor over the whole buffer,
    `mapping` the memory below it.
    """

    def __init__(self, nbytes: int, pin: bool = False, held: int = 0) -> None:
        if nbytes <= 0:
            raise ValueError(f"a host buffer of {nbytes} bytes was asked for; it must have at least one")
        self.nbytes = nbytes
        self.sealed = False
        self._map(held)
        if pin:
            self.page_lock()

    def _map(self, held: int) -> None:
        try:
            mapping = Mapping(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.maker = os.getpid()
            # A forked child would share the pages, and when this process writes one it gets a copy, while the device
            # reads the old one. So before the driver learns of them.
            mapping.madvise(mmap.MADV_DONTFORK)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"expert offload: the system gave no {gib(self.nbytes)} of host memory ({self.nbytes} bytes: {error}); "
                f"{gib(held)} of offloaded weights lie there already ({held} bytes). Lower --cpu-offload-gb, or give "
                "this machine, container or WSL more memory"
            ) from error
        # On huge pages the link is as fast, but a GiB is touched and page-locked in 0.19 s, not 0.42 (bench/link.py,
        # on an H200's host). A kernel without them refuses the advice.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.mapping = mapping
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)[: self.nbytes].data
        mapping.start = self.bytes.data_ptr()

    @property
    def pinned(self) -> bool:
        """Whether the buffer is page-locked, so that the device may read it at any time."""
        return bool(self.mapping.registered_at)

    def page_lock(self) -> str | None:
        """Page-lock a buffer that nobody has written yet; None, or why it is ordinary memory still, in words.

        A copy out of it must deliver, twice: under WSL registered memory has been seen from which every copy succeeds
        and none delivers, or none but the first (https://github.com/FlashML-org/FreeToken/issues/291). The pattern is
        written after the driver has seen the pages, as weights are: a page that was there before proves nothing about
        those that were not.
        """
        try:
            cuda.host_register(self.mapping.start, self.nbytes)
        except cuda.CudaError as error:
            return f"the driver refused to page-lock {gib(self.nbytes)} ({error})"
        self.mapping.registered_at = self.mapping.start
        pattern = _PATTERN[: sum(length for _, length in self._probes())]
        fault = self._try(pattern) or self._try(pattern.translate(_INVERTED))
        for offset, length in self._probes():
            ctypes.memset(self.mapping.start + offset, 0, length)
        if fault is not None and not self.mapping.unregister():
            self._map(self.nbytes)  # the driver would go on reading the old one wrongly, whatever it is called here
        return fault

    def _probes(self) -> list[tuple[int, int]]:
        """(offset, bytes) where the buffer is tried: in its first, a middle and its last page, or all of it."""
        if self.nbytes <= 3 * _PROBE:
            return [(0, self.nbytes)]
        pages = -(-self.nbytes // mmap.PAGESIZE)
        starts = dict.fromkeys(page * mmap.PAGESIZE for page in (0, pages // 2, pages - 1))
        return [(start, min(_PROBE, self.nbytes - start)) for start in starts]

    def _try(self, pattern: bytes) -> str | None:
        at = 0
        for offset, length in self._probes():
            ctypes.memmove(self.mapping.start + offset, pattern[at : at + length], length)
            at += length
        return self.fault()

    def fault(self) -> str | None:
        """What is wrong with reading this page-locked buffer from the device, in words; None when its bytes arrive.

        Changes nothing, so it may be asked at any time. At the host's address, from where copies read, and at the
        device's, where that differs, from where kernels read in place.
        """
        start = self.mapping.start
        with self.opened():
            there = b"".join(ctypes.string_at(start + offset, length) for offset, length in self._probes())
            try:
                for address in dict.fromkeys((start, cuda.host_pointer_for_device(start))):
                    spans = [(address + offset, length) for offset, length in self._probes()]
                    if cuda.through_device(spans, there.translate(_INVERTED)) != there:
                        return "a copy out of page-locked memory delivered other bytes than lie there"
            except cuda.CudaError as error:
                return f"page-locked memory could not be read from the device ({error})"
        return None

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor over the buffer with the dtype, shape and strides of `tensor`."""
        return like(self.bytes, tensor)

    def mapped(self, view: torch.Tensor) -> torch.Tensor:
        """Note that `view` (a device tensor, made by the driver's mapping) reads this buffer, and return it."""
        self.mapping.alias = (view.data_ptr(), view.data_ptr() + self.nbytes)
        return view

    def seal(self) -> None:
        """Make the buffer unreadable outside `opened`: a stray reader dies at its first byte instead of being right."""
        self._protect(_PROT_NONE)
        self.sealed = True

    @contextlib.contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """`bytes`, readable and writable for the duration of the block."""
        if not self.sealed:
            yield self.bytes
            return
        self._protect(_PROT_READ_WRITE)
        try:
            yield self.bytes
        finally:
            self._protect(_PROT_NONE)

    def _protect(self, protection: int) -> None:
        address, length = self.bytes.data_ptr(), -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), protection) != 0:
            raise OSError(ctypes.get_errno(), f"mprotect of {self.nbytes} bytes of host memory failed")


class Arena:
    """The host buffers of one offloader. The driver's first refusal is its last: from then on, none is page-locked.

    Args:
        limit: bytes that may be page-locked at once; 0: none, None: as many as the driver gives.
        why: where the limit comes from, in words.
        make_room: called with the bytes of each buffer before it is made; raises where there is no room for it.

    `refused`: why memory was not page-locked, in words; None as long as all of it was. Threads may take at once.
    """

    def __init__(
        self, limit: int | None, why: str | None = None, make_room: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"at most {limit} bytes may be page-locked, it says; give 0 for none, None for no limit")
        self.limit = limit
        self.why = why
        self.refused = (why or "it is turned off") if limit == 0 else None
        self._open = limit != 0
        self._make_room = make_room
        self._lock = threading.RLock()
        # Not of buffers: a mapping that only a stray tensor keeps alive has no buffer any more, and must be found.
        self._live: weakref.WeakSet[Mapping] = weakref.WeakSet()

    @property
    def held(self) -> int:
        """Bytes of all buffers that live."""
        return sum(len(m) for m in self._mappings())

    @property
    def locked(self) -> int:
        """Bytes that are page-locked."""
        return sum(len(m) for m in self._mappings() if m.registered_at)

    def take(self, nbytes: int, spare: HostBuffer | None = None) -> HostBuffer:
        """`spare` when it has the right size, else a new buffer of `nbytes` bytes, page-locked where that can be.

        Raises HostMemoryError when the system gives no memory, and for nothing that the driver does.
        """
        with self._lock:
            if spare is not None and spare.nbytes == nbytes:
                buffer = spare
            else:
                self._make_room(nbytes)
                buffer = HostBuffer(nbytes, held=self.held)
                if self._open:
                    self._page_lock(buffer)
            self._live.add(buffer.mapping)
            return buffer

    def _page_lock(self, buffer: HostBuffer) -> None:
        locked = self.locked
        if self.limit is not None and locked + buffer.nbytes > self.limit:
            # Not the last word: what is processed again leaves its buffer, and its new one may have the room.
            self.refused = f"the limit of {gib(self.limit)} is reached" + (f": {self.why}" if self.why else "")
            return
        fault = buffer.page_lock()
        if fault is not None:
            self._open = False
            self.refused = f"{fault}, after {gib(locked)} had been page-locked"

    def _mappings(self) -> list[Mapping]:
        with self._lock:
            return list(self._live)

    def holding(self, tensor: torch.Tensor) -> Mapping | None:
        """The live mapping that the first byte of `tensor` lies in, by address; None when it lies elsewhere."""
        address = tensor.data_ptr()
        return next((m for m in self._mappings() if m.holds(address)), None) if address else None


def memory_total(path: str = "/proc/meminfo") -> int:
    """The machine's memory in bytes; under WSL, the virtual machine's. Raises OSError or ValueError without it."""
    with open(path) as file:
        for line in file:
            name, _, amount = line.partition(":")
            if name == "MemTotal":
                return int(amount.split()[0]) * 1024
    raise ValueError(f"{path} has no line MemTotal, so the machine's memory is not known; set {PIN_SWITCH}")


def pin_limit(
    *, asked: str | None, wsl: bool, wsl_switch: str | None, total: int, ranks: int
) -> tuple[int | None, str | None]:
    """Bytes that each rank may page-lock (None: as many as the driver gives), and why, in words, where it is limited.

    Args:
        asked: the value of EXPERT_OFFLOAD_PIN_GIB, None or empty when it is not set; raises ValueError when it is no
            number from 0 up.
        wsl: whether this is WSL.
        wsl_switch: the value of the release's VLLM_WSL2_ENABLE_PIN_MEMORY: 0 counts, 1 is no longer needed.
        total: the machine's memory in bytes.
        ranks: how many processes on this host share what may be page-locked.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks on this host; there must be at least one")
    number = _gib_asked(asked)
    if number == 0:
        return 0, f"{PIN_SWITCH} is 0"
    if wsl and wsl_switch is not None and wsl_switch.strip() == "0":
        return 0, "VLLM_WSL2_ENABLE_PIN_MEMORY is 0"
    if number is not None:
        cap, why = int(number * 2**30), f"{PIN_SWITCH} allows {number:g} GiB of page-locked memory on this host"
    elif wsl:
        cap = total * _WSL_PERCENT // 100
        why = f"on WSL at most {_WSL_PERCENT} % of the machine's memory is page-locked ({PIN_SWITCH} changes that)"
    else:
        return None, None
    return cap // ranks, f"{why}, shared by {ranks} ranks" if ranks > 1 else why


def _gib_asked(asked: str | None) -> float | None:
    if asked is None or not asked.strip():
        return None
    try:
        number = float(asked)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"{PIN_SWITCH}={asked!r}: it takes a number of GiB, such as 24 or 0.5, that all ranks on this host "
            "together may page-lock, or 0 to turn page-locking off"
        )
    return number
