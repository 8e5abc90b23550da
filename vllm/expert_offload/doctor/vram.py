# SPDX-License-Identifier: Apache-2.0
"""Free memory of the GPUs, who uses it, and the host memory into which Windows spills what does not fit."""

from __future__ import annotations

from .asked import Asked
from .gpu import Gpu, used
from .lines import OK, WARN, Line, gib
from .machine import Machine, version

NAME, SPILL = "free VRAM", "VRAM spilling"
# vLLM refuses to start where less is free than its share of all; the share is rounded down to a hundredth, and a little
# stays for the context that CUDA makes before vLLM looks.
_CONTEXT = 400 * 2**20
# Public reports on WSL (noonghunna/club-3090#102 and others): 0.93 to 0.944 of a 5090 works and 0.95 does not, and a
# 3090 slows down above 22.8 of 24 GiB with no message. So: 1.5 GiB stay free.
_WSL_SPARE = 3 * 2**29


def utilization(machine: Machine, asked: Asked) -> float:
    """Share of the memory that the server takes: as asked, or the release's default (`config/cache.py` of each pin)."""
    release = version(machine.release)
    return asked.utilization or (0.9 if release and release < (0, 26) else 0.92)


def usable(machine: Machine, asked: Asked, gpu: Gpu) -> int:
    """Bytes that the server may take of `gpu`."""
    share = int(gpu.total * utilization(machine, asked))
    return min(share, gpu.free - _CONTEXT) if gpu.free else share


def _share(nbytes: int, gpu: Gpu) -> float:
    return max(0, 100 * nbytes // gpu.total) / 100


def check(machine: Machine, asked: Asked) -> Line:
    """Whether as much is free as the server takes, and by whom the rest is used."""
    if machine.cpu_backend:
        return Line(NAME, OK, "this is vLLM's CPU backend, which uses none")
    cards = [gpu for gpu in used(machine, asked) if gpu.total]
    if not cards:
        return Line(NAME, WARN, "not known: no GPU, or one that tells no memory of its own", "See the GPU's line")
    share = utilization(machine, asked)
    users = _users(machine)
    parts = [f"GPU {gpu.number}: {gib(gpu.free)} of {gib(gpu.total)}" for gpu in cards]
    found = "; ".join(parts) + users
    short = [gpu for gpu in cards if gpu.free < gpu.total * share]
    if not short:
        return Line(NAME, OK, found)
    least = min(_share(gpu.free - _CONTEXT, gpu) for gpu in short)
    step = f"End other users of the card, or start with --gpu-memory-utilization {least:.2f}"
    return Line(NAME, WARN, f"{found}: less than --gpu-memory-utilization {share:g} takes, which ends the start", step)


def _users(machine: Machine) -> str:
    screen = machine.ask("nvidia-smi", "--query-gpu=display_active", "--format=csv,noheader")
    display = "; a display is in use" if screen.code == 0 and "Enabled" in screen.text else ""
    if machine.wsl:
        return f"{display}; who uses it is not told on WSL (Windows' Task Manager, column 'Dedicated GPU memory', is)"
    apps = "--query-compute-apps=pid,process_name,used_memory"
    code, text = machine.ask("nvidia-smi", apps, "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()] if code == 0 else []
    names = [f"{name} (pid {pid}, {used} MiB)" for pid, name, used in (row for row in rows if len(row) == 3)]
    return f"; used by {', '.join(names[:3])}{display}" if names else display


def check_spill(machine: Machine, asked: Asked) -> Line:
    """Under WSL, whether the server would take so much that Windows moves it to host memory without a word."""
    if not machine.wsl or machine.cpu_backend:
        return Line(SPILL, OK, "only Windows' driver does that")
    cards = [gpu for gpu in used(machine, asked) if gpu.total]
    if not cards:
        return Line(SPILL, WARN, "not known without a GPU", "See the GPU's line")
    share = utilization(machine, asked)
    safe = min(_share(gpu.free - _WSL_SPARE, gpu) for gpu in cards)
    if share <= safe:
        return Line(SPILL, OK, f"--gpu-memory-utilization {share:g} leaves Windows 1.50 GiB or more of what is free")
    found = f"--gpu-memory-utilization {share:g} may make Windows move GPU memory to the host: 2 to 6 times slower"
    step = (
        f"Start with --gpu-memory-utilization {safe:.2f} or less; and in NVIDIA's control panel, Manage 3D settings: "
        "'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback'"
    )
    return Line(SPILL, WARN, found, step)
