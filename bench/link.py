#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GB/s (10^9 bytes a second) between the card and each kind of host memory, and what each kind costs to make.

    python3 bench/link.py --out link.json

Kinds:
    plain           an anonymous mapping; the driver copies it through buffers of its own, no kernel can read it
    registered      the same, page-locked by cudaHostRegister (portable, mapped): what vllm.expert_offload uses
    huge            the same, with MADV_HUGEPAGE before the first touch; `huge_bytes` says how much the kernel gave
    write-combined  cudaHostAlloc (write-combined, mapped); memory of this kind cannot be registered, only allocated
All but "huge" are kept from huge pages, also where the machine gives them to everybody.

Ways: the copy engine to the device and back, and a kernel that reads the memory where it lies. Sizes: 1 GiB, 64 MiB,
and 1 GiB in pieces of 2 MiB in no order (about an expert's weight), a copy or a kernel each. Of the CPU: seconds to
allocate, touch and register a GiB, and GB/s of one thread's memcpy into this memory and out of it; write-combined
memory is not cached, so what the CPU must read has no place there.

Takes 2 GiB of host memory, 3.2 GiB on the card, and about a minute. What was copied is compared each time.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows
from cudart import CudaError, Runtime

GiB, MiB = 2**30, 2**20
KINDS = ("plain", "registered", "huge", "write-combined")
# CUDA runtime API: cudaHostRegisterPortable | Mapped, cudaHostAllocMapped | WriteCombined, cudaMemcpyKind.
REGISTER, WRITE_COMBINED, TO_DEVICE, TO_HOST = 1 | 2, 2 | 4, 1, 2
SLOW_READ = 5.0  # seconds that a GiB may take the CPU to read, or an eighth of it is read instead


@dataclass
class Memory:
    """`nbytes` of host memory at `address`; `device` is where a kernel reads it, 0 where none can.

    `seconds`: to allocate, touch and register all of it. `free` gives it back.
    """

    kind: str
    nbytes: int
    address: int
    device: int
    seconds: dict[str, float]
    huge: int | None
    free: Callable[[], None] = field(repr=False)


def array(address: int, nbytes: int) -> np.ndarray:
    """The bytes at `address`, as they lie."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def huge_bytes(smaps: str, start: int, end: int) -> int | None:
    """AnonHugePages of the areas that touch [start, end) in the text of /proc/PID/smaps; None without such a line."""
    found = None
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M):
        if not (bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", area)):
            continue
        low, high = (int(b, 16) for b in bounds.groups())
        line = re.search(r"^AnonHugePages: +(\d+) kB", area, re.M)
        if low < end and high > start and line:
            found = (found or 0) + int(line[1]) * 1024
    return found


def make(kind: str, nbytes: int, cuda: Any) -> Memory:
    """Host memory of `kind`, touched, and known to the driver except for "plain"."""
    clock, seconds, huge = time.perf_counter, dict.fromkeys(("allocate", "touch", "register"), 0.0), None
    pointer, began = ctypes.c_void_p(), clock()
    if kind == "write-combined":
        cuda.cudaHostAlloc(ctypes.byref(pointer), nbytes, WRITE_COMBINED)
        address, mapping = pointer.value or 0, None
    else:
        # Huge pages begin at multiples of their size, and not every kernel lets a mapping begin there.
        mapping = mmap.mmap(-1, nbytes + 2 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = -(-ctypes.addressof(ctypes.c_char.from_buffer(mapping)) // (2 * MiB)) * 2 * MiB
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE if kind == "huge" else mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            print(f"{kind}: the kernel does not take advice on huge pages: {error}", file=sys.stderr)
    seconds["allocate"], began = clock() - began, clock()
    array(address, nbytes)[:: mmap.PAGESIZE] = 1
    seconds["touch"], began = clock() - began, clock()
    if kind in ("registered", "huge"):
        cuda.cudaHostRegister(address, nbytes, REGISTER)
        seconds["register"] = clock() - began
    if mapping is not None:
        huge = huge_bytes(Path("/proc/self/smaps").read_text(), address, address + nbytes)
    device = ctypes.c_void_p()
    if kind != "plain":
        cuda.cudaHostGetDevicePointer(ctypes.byref(device), address, 0)

    def free(kept: object = mapping) -> None:
        """`kept` holds the mapping; it goes when this function does."""
        if kind in ("registered", "huge"):
            cuda.cudaHostUnregister(address)
        elif kind == "write-combined":
            cuda.cudaFreeHost(address)

    return Memory(kind, nbytes, address, device.value or 0, seconds, huge, free)


class Card:
    """A buffer of `nbytes` on the device, work on it, and the device's own clock."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        import torch

        self.torch = torch
        self.buffer = torch.zeros(nbytes // 8, dtype=torch.int64, device=device)
        self.pattern = torch.arange(nbytes // 8, dtype=torch.int64, device=device)

    @property
    def stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream

    def view(self, device_pointer: int, nbytes: int) -> Any:
        """Host memory as the device reads it: a tensor on the mapped address, int64."""
        named = dict(shape=(nbytes // 8,), typestr="<i8", data=(device_pointer, False), version=2)
        tensor = self.torch.as_tensor(type("Mapped", (), {"__cuda_array_interface__": named})(), device="cuda")
        assert tensor.data_ptr() == device_pointer, "torch made a copy: this is no view of host memory"
        return tensor

    def read(self, source: Any, start: int, end: int) -> None:
        """A kernel that reads elements of `source` and writes their complement: no copy engine can do that."""
        self.torch.bitwise_not(source[start:end], out=self.buffer[start:end])

    def holds(self, nbytes: int, inverted: bool) -> bool:
        """Whether the buffer begins with the pattern, or its complement."""
        found, wanted = self.buffer[: nbytes // 8], self.pattern[: nbytes // 8]
        return bool(self.torch.equal(found, ~wanted if inverted else wanted))

    def timed(self, work: Callable[[], None], repeats: int) -> list[float]:
        """Seconds of each run of `work` by events on its stream, the first two left out: clocks and caches warm up."""
        seconds = []
        for _ in range(repeats + 2):
            first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            seconds.append(first.elapsed_time(last) / 1000)
        return seconds[2:]


def pieces(total: int, piece: int) -> list[tuple[int, int]]:
    """Bounds of `total` bytes in pieces, in an order that no prefetcher guesses and each run repeats."""
    bounds = [(start, min(start + piece, total)) for start in range(0, total, piece)]
    random.Random(0).shuffle(bounds)
    return bounds


def rate(case: str, nbytes: int, seconds: list[float], **more: object) -> dict:
    """The row of a rate: the median of several runs, and the slowest and fastest."""
    each = [nbytes / s / 1e9 for s in seconds]
    spread = [round(f(each), 2) for f in (min, max)]
    value = round(statistics.median(each), 2)
    return rows.row(case, value, "GB/s", bytes=nbytes, runs=len(each), spread=spread, **more)


def ways(memory: Memory, card: Card, cuda: Any, plan: list[tuple[str, int, int]], repeats: int) -> list[dict]:
    """Rates of the link. `memory` holds the pattern; afterwards it holds the complement of it."""
    found, base = [], card.buffer.data_ptr()
    # A kernel reads it before the copy back overwrites it.
    todo = ["copy to device", *(["kernel reads"] if memory.device else []), "copy to host"]
    source = card.view(memory.device, memory.nbytes) if memory.device else None
    for way in todo:
        for size, total, piece in plan:
            cut = pieces(total, piece)

            def work(way: str = way, cut: list[tuple[int, int]] = cut) -> None:
                for start, end in cut:
                    host, device = memory.address + start, base + start
                    if way == "kernel reads":
                        card.read(source, start // 8, end // 8)
                    elif way == "copy to device":
                        cuda.cudaMemcpyAsync(device, host, end - start, TO_DEVICE, card.stream)
                    else:
                        cuda.cudaMemcpyAsync(host, device, end - start, TO_HOST, card.stream)

            if way != "copy to host":
                card.buffer.zero_()
            case, more = f"link {memory.kind} {way} {size}", dict(kind=memory.kind, way=way, pieces=len(cut))
            found.append(rate(case, total, card.timed(work, repeats), **more))
            if way != "copy to host" and not card.holds(total, inverted=way == "kernel reads"):
                raise AssertionError(f"{case}: what arrived is not what was sent")
        if way == todo[-2]:
            card.torch.bitwise_not(card.pattern, out=card.buffer)  # what the copy back shall bring
    for start in (0, memory.nbytes - MiB):  # write-combined memory is too slow to look at all of it
        words = array(memory.address + start, MiB).view(np.int64)
        if not np.array_equal(words, ~np.arange(start // 8, (start + MiB) // 8)):
            raise AssertionError(f"link {memory.kind} copy to host: what arrived is not what was sent")
    return found


def memcpy(destination: int, source: int, nbytes: int, repeats: int) -> list[float]:
    """Seconds of each copy by one thread of the CPU, the first left out."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        ctypes.memmove(destination, source, nbytes)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def measure(kind: str, nbytes: int, card: Card, cuda: Any, repeats: int = 5) -> list[dict]:
    """All rows of one kind of memory."""
    memory = make(kind, nbytes, cuda)
    try:
        pattern = np.arange(nbytes // 8, dtype=np.int64)
        other, scale = pattern.ctypes.data, nbytes / GiB
        more: dict[str, Any] = {"kind": kind} | ({} if memory.huge is None else {"huge_bytes": memory.huge})
        found = [
            rows.row(f"memory {kind} {step}", round(s / scale, 4), "s/GiB", bytes=nbytes, **more)
            for step, s in memory.seconds.items()
        ]
        found.append(rate(f"cpu writes {kind}", nbytes, memcpy(memory.address, other, nbytes, 2), kind=kind))
        plan = [("whole", nbytes, nbytes), ("64 MiB", min(64 * MiB, nbytes), nbytes), ("2 MiB pieces", nbytes, 2 * MiB)]
        found += ways(memory, card, cuda, plan, repeats)
        part = nbytes // 32
        slow = memcpy(other, memory.address, part, 1)[0] * 32 > SLOW_READ * scale
        part = nbytes // 8 if slow else nbytes
        found.append(rate(f"cpu reads {kind}", part, memcpy(other, memory.address, part, 2), kind=kind))
        return found
    finally:
        memory.free()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="write the rows there, as bench/results has them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    a = parser.parse_args()
    if unknown := set(a.kinds.split(",")) - {*KINDS}:
        parser.error(f"{', '.join(sorted(unknown))}: the kinds are {', '.join(KINDS)}")
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        parser.exit(2, "link: no CUDA device\n")
    card = Card(GiB)
    cuda = Runtime(ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}"))
    found: list[dict] = []
    refused = 0
    for kind in a.kinds.split(","):
        try:
            more = measure(kind, GiB, card, cuda)
        except CudaError as error:  # the other kinds are worth having
            print(f"{kind}: {error}", file=sys.stderr)
            refused += 1
            continue
        for row in more:
            print(f"{row['case']:45} {row['value']:9} {row['unit']:6} {row.get('spread', '')}", flush=True)
        found += more
        rows.write(a.out, found)
    return refused


if __name__ == "__main__":
    sys.exit(main())
