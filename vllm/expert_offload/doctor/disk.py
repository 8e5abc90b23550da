# SPDX-License-Identifier: Apache-2.0
"""Room for the model's download, and where it goes."""

from __future__ import annotations

from pathlib import Path

from .asked import Asked
from .lines import FAIL, OK, WARN, Line, gib
from .machine import Machine
from .model import KNOWN, downloads, find, hub

NAME = "model files"
_SPARE = 2 * 2**30  # bytes beside the weights: tokenizer, compile caches, what the download keeps twice for a moment


def check(machine: Machine, asked: Asked) -> Line:
    """The checkpoint is whole, or there is room for what is missing of it."""
    model = find(machine, asked)
    if model.given:
        if model.fault:
            return Line(NAME, FAIL, model.fault, "Mend that, or give --model a name of the hub to have it downloaded")
        if not model.total:
            return Line(NAME, WARN, f"no safetensors in {model.folder}", "Other formats can't be planned here")
        return Line(NAME, OK, f"{gib(model.total)} of weights in {model.folder}")
    place = _existing(hub(machine))
    if model.entries and not model.fault:
        return _slow(machine, place) or Line(NAME, OK, f"{gib(model.total)} of weights in {model.folder}")
    return _slow(machine, place) or _room(machine, asked, place)


def _room(machine: Machine, asked: Asked, place: Path) -> Line:
    free = machine.disk_free(place)
    known = KNOWN.get(asked.model.rsplit("/", 1)[-1].lower())
    there = sum(file.stat().st_size for folder in downloads(machine, asked.model) for file in folder.glob("blobs/*"))
    found = f"{asked.model} is not here whole; {gib(there)} of it are, {gib(free)} are free in {place}"
    if known is None:
        return Line(NAME, WARN, f"{found}; its size is not known", "Look on its page that the download fits")
    found += f"; about {gib(known.total)} in all, an estimate"
    need = known.total - there + _SPARE
    if free >= need:
        return Line(NAME, OK, found)
    step = (
        f"Free {gib(need - free)} more (WSL: its disk may be full while Windows' is not), or put the cache elsewhere: "
        "the volume `cache` of docker-compose.yml, without Docker HF_HOME"
    )
    return Line(NAME, WARN, found, step)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _slow(machine: Machine, place: Path) -> Line | None:
    """A Windows disk seen from WSL, by the longest mount point that `place` lies on."""
    mounts = [line.split()[1:3] for line in machine.read("/proc/mounts").splitlines() if len(line.split()) > 2]
    on = [(point, kind) for point, kind in mounts if place.is_relative_to(point)]
    if on and max(on, key=lambda mount: len(mount[0]))[1] in ("9p", "drvfs", "virtiofs"):
        step = "Use a named volume, or a folder inside WSL such as ~/models"
        return Line(NAME, WARN, f"{place} is a Windows disk: reading there is 10 to 50 times slower", step)
    return None
