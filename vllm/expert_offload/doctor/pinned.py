# SPDX-License-Identifier: Apache-2.0
"""How much memory the driver page-locks, found out by doing it."""

from __future__ import annotations

from .. import fit
from ..host import PIN_SWITCH, HostMemoryError, pin_limit
from .asked import Asked
from .gpu import gpus
from .lines import OK, WARN, Line, gib
from .machine import Machine

NAME = "page-locking"
QUICK_BYTES = 2**30  # of the quick try; a driver page-locks some GiB a second
QUICK_SHARE = 10  # percent of what is free: the quick try must not push other programs out
_FIRST, _LAST = 16 * 2**20, 256 * 2**20  # bytes of the first buffers and of the largest, as growing tries


def _wanted(machine: Machine, asked: Asked) -> int:
    """Bytes that the server would page-lock on this host, or 2**63 when that is left open."""
    return asked.budget * asked.ranks if asked.budget else fit.UNKNOWN


def check(machine: Machine, asked: Asked) -> Line:
    """Page-lock growing buffers up to the planned amount or a cap, and say what stopped it."""
    if machine.cpu_backend:
        return Line(NAME, OK, "this is vLLM's CPU backend, which needs none")
    if machine.env("VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY") == "1":
        return Line(NAME, WARN, "turned off: VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY is 1", "Unset it: copies block")
    if not gpus(machine):
        return Line(NAME, WARN, "not tried: without a CUDA device nothing is page-locked", "See the GPU's line")
    free = machine.free_memory.nbytes
    try:
        limit, why = pin_limit(
            asked=machine.env(PIN_SWITCH),
            wsl=machine.wsl,
            wsl_switch=machine.env("VLLM_WSL2_ENABLE_PIN_MEMORY") or None,
            total=max((limit.size for limit in machine.free_memory.limits if limit.kind != "cgroup"), default=free),
            ranks=1,
        )
    except ValueError as error:
        return Line(NAME, WARN, str(error), f"Set {PIN_SWITCH} to a number of GiB, or unset it")
    if limit == 0:
        return Line(NAME, WARN, f"turned off: {why}", "Unset it: without page-locked memory every copy blocks")
    room = free - fit.RESERVE_BYTES - _LAST
    cap = room if asked.pin_quota else min(QUICK_BYTES, free * QUICK_SHARE // 100)
    wanted = _wanted(machine, asked)
    # --pin-quota without a plan goes to the limit, and never past half of what is free: the rest of the machine lives.
    goal = min(cap, wanted if wanted < fit.UNKNOWN else max(0, room) // 2, fit.UNKNOWN if limit is None else limit)
    return _answered(machine, asked, max(goal, 0), limit, why)


def _answered(machine: Machine, asked: Asked, goal: int, limit: int | None, why: str | None) -> Line:
    if goal < _FIRST:
        return Line(NAME, WARN, f"not tried: {gib(max(goal, 0))} are too little to try with", "Free memory; see RAM")
    locked, refused = _try(machine, goal)
    wanted = _wanted(machine, asked)
    planned = f" of {gib(wanted)} planned" if wanted < fit.UNKNOWN else ""
    slow = "The server starts and copies the rest from ordinary memory, blocking and slower"
    if refused:
        step = f"{slow}; close programs that use the GPU, and set {PIN_SWITCH}={int(locked * 0.8) / 2**30:.1f}"
        if machine.wsl:
            step += ". Windows' driver sets this quota: neither memlock nor .wslconfig moves it much"
        return Line(NAME, WARN, f"{gib(locked)}{planned} page-locked, then: {refused}", step)
    if limit is not None and planned and wanted > limit:
        step = f"{slow}; or raise {PIN_SWITCH}, if the driver gives more"
        return Line(NAME, WARN, f"{gib(locked)} page-locked{planned}, no more than {gib(limit)}: {why}", step)
    more = "" if asked.pin_quota or locked >= wanted else f"; a quick try{planned}: --pin-quota looks for the limit"
    return Line(NAME, OK, f"{gib(locked)} page-locked and read back through the device{more}")


def _try(machine: Machine, goal: int) -> tuple[int, str | None]:
    """(bytes page-locked at once, what stopped it before `goal`). All is given back."""
    arena = machine.arena(None, None)
    held, size = [], _FIRST
    try:
        while arena.refused is None and (left := goal - arena.locked) >= _FIRST:
            held.append(arena.take(min(size, left)))
            size = min(2 * size, _LAST)
    except HostMemoryError as error:
        return arena.locked, str(error)
    return arena.locked, arena.refused
