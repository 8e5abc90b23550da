# SPDX-License-Identifier: Apache-2.0
"""Host memory for offloaded tensors: mappings of our own, of exactly the size asked.

torch's pinned allocator rounds up to a power of two and never gives memory back; here a buffer is one anonymous
mapping, page-locked by registering it with the driver, and returned to the system when the last tensor on it dies.
Since the addresses are ours, "does this tensor lie in host memory?" is answered by looking at them, not at `.device`
(a mapped view says "cuda") or at a mark on a parameter (which survives a change of its data).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterator

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
# cudaHostRegisterPortable | cudaHostRegisterMapped, CUDA runtime API, "Memory Management".
_REGISTER_FLAGS = 1 | 2


class PinError(RuntimeError):
    """The driver refused to page-lock a buffer."""


class Mapping(mmap.mmap):
    """An anonymous private mapping, alive as long as any tensor on it, whoever holds that.

    It knows where it lies: `start`, and `alias`, the address range at which the device reads the same bytes once
    `HostBuffer.mapped` was called, which may differ from the host's (WSL). It unregisters itself from the driver before
    it is unmapped.
    """

    start: int = 0
    alias: tuple[int, int] = (0, 0)
    registered_at: int = 0

    def holds(self, address: int) -> bool:
        """Whether `address`, the host's or the device's, lies in this mapping."""
        return self.start <= address < self.start + len(self) or self.alias[0] <= address < self.alias[1]

    def __del__(self) -> None:
        if self.registered_at and torch.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)


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
    """`nbytes` bytes of host memory.

    Args:
        nbytes: size; the mapping is rounded up to a page, nothing more.
        pin: page-lock it for the current CUDA device; raises PinError when the driver refuses.

    `bytes` is a 1-D uint8 CPU tensor over the whole buffer, `mapping` the memory below it.
    """

    def __init__(self, nbytes: int, pin: bool) -> None:
        if nbytes <= 0:
            raise ValueError(f"a host buffer of {nbytes} bytes was asked for; it must have at least one")
        mapping = self.mapping = Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A forked child would copy the pages when either side writes, and the driver would lose track of them.
        mapping.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes].data
        mapping.start = self.bytes.data_ptr()
        self.nbytes = nbytes
        self.pinned = pin
        self.sealed = False
        if pin:
            status = int(torch.cuda.cudart().cudaHostRegister(mapping.start, nbytes, _REGISTER_FLAGS))
            if status != 0:
                raise PinError(
                    f"the driver refused to page-lock {nbytes / 2**20:.1f} MiB of host memory (CUDA error {status}): "
                    "set VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 to serve from pageable memory, or lower "
                    "--cpu-offload-gb"
                )
            mapping.registered_at = mapping.start

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
    """The host buffers of one offloader, page-locked or none of them.

    Args:
        pin: page-lock every buffer.
    """

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        # Not of buffers: a mapping that only a stray tensor keeps alive has no buffer any more, and must be found.
        self._live: weakref.WeakSet[Mapping] = weakref.WeakSet()

    def take(self, nbytes: int, spare: HostBuffer | None = None) -> HostBuffer:
        """`spare` when it has the right size, else a new buffer of `nbytes` bytes."""
        buffer = spare if spare is not None and spare.nbytes == nbytes else HostBuffer(nbytes, self.pin)
        self._live.add(buffer.mapping)
        return buffer

    def holding(self, tensor: torch.Tensor) -> Mapping | None:
        """The live mapping that the first byte of `tensor` lies in, by address; None when it lies elsewhere."""
        address = tensor.data_ptr()
        return next((m for m in list(self._live) if m.holds(address)), None) if address else None
