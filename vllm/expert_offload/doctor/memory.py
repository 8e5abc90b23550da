# SPDX-License-Identifier: Apache-2.0
"""The host's memory, and the shared memory through which ranks talk."""

from __future__ import annotations

from pathlib import Path

from .. import fit
from .asked import Asked
from .lines import OK, WARN, Line, gib
from .machine import Machine

NAME, SHM = "RAM", "shared memory"
# NCCL and vLLM's message queue share /dev/shm; Docker gives 64 MiB (vllm-project/vllm#1710, #16841).
SHM_BYTES = 2**30


def check(machine: Machine, asked: Asked) -> Line:
    """What is free, by the tightest limit, against what a start takes at the least."""
    free = machine.free_memory
    if not free.limits:
        return Line(NAME, WARN, "no limit could be read (/proc/meminfo, cgroups)", "Mount /proc into the container")
    found = f"{gib(free.nbytes)} free by {free.source}"
    need = asked.ranks * (fit.WORKER_BYTES + fit.CHUNK_BYTES) + (asked.budget or 0) * asked.ranks
    if free.nbytes >= need:
        return Line(NAME, OK, found)
    ways = ", and ".join(limit.raised(need)[0] for limit in free.limits if limit.size - limit.used < need)
    found += f"; {gib(need)} are needed at the least (see the plan)"
    return Line(NAME, WARN, found, f"Make room: {ways}")


def check_shm(machine: Machine, asked: Asked) -> Line:
    """The size of /dev/shm, which matters as soon as there is more than one rank."""
    if asked.ranks == 1:
        return Line(SHM, OK, "one rank needs none")
    folder = machine.at("/dev/shm")
    if not folder.is_dir():
        return Line(SHM, WARN, "there is no /dev/shm", "Start the container with --shm-size 8g or --ipc host")
    free = machine.disk_free(Path(folder))
    found = f"{gib(free)} free in /dev/shm, for {asked.ranks} ranks"
    if free >= SHM_BYTES:
        return Line(SHM, OK, found)
    step = "docker run --shm-size 8g or --ipc host; compose: shm_size: 8gb or ipc: host"
    return Line(SHM, WARN, f"{found}: NCCL hangs or dies of a bus error", step)
