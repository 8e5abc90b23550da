# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs of another release, left in the cache's volume.

All pins name a graph's folder by a hash of the release, its configuration, its source and the compiler
(`compilation/backends.py`, `config/vllm.py`), so one of another release is never loaded. Which release made a folder
can't be told from its name; that it is older than this installation's patch can.
"""

from __future__ import annotations

from pathlib import Path

from .asked import Asked
from .installation import JOURNAL
from .lines import OK, WARN, Line, gib
from .machine import Machine

NAME = "compile cache"
_MUCH = 2 * 2**30  # bytes that are worth a word


def root(machine: Machine) -> Path:
    """vLLM's cache folder, as its `envs.py` chooses it."""
    default = Path(machine.env("XDG_CACHE_HOME") or machine.home / ".cache") / "vllm"
    return Path(machine.env("VLLM_CACHE_ROOT") or default)


def check(machine: Machine, asked: Asked) -> Line:
    """What lies in the cache, and how much of it is older than this installation."""
    cache = root(machine) / "torch_compile_cache"
    journal = machine.site / JOURNAL
    try:
        since = journal.stat().st_mtime if journal.is_file() else 0.0
        folders = [path for path in cache.glob("*") if path.is_dir() and path.name != "torch_aot_compile"]
        folders += [path for path in cache.glob("torch_aot_compile/*") if path.is_dir()]
        sizes = {path: _size(path) for path in folders}
        old = [path for path in folders if path.stat().st_mtime < since]
    except OSError as error:
        return Line(NAME, WARN, f"{cache} can't be read: {error}", f"Give it to this user: chown -R $(id -u) {cache}")
    if not folders:
        return Line(NAME, OK, f"none in {cache}: the first start compiles")
    found = f"{len(folders)} compiled graphs ({gib(sum(sizes.values()))}) in {cache}"
    stale = sum(sizes[path] for path in old)
    if not old:
        return Line(NAME, OK, found)
    found += f"; {len(old)} ({gib(stale)}) are older than this patch: harmless, other releases' are never loaded"
    if stale < _MUCH:
        return Line(NAME, OK, found)
    return Line(NAME, WARN, found, f"For their room: rm -r {cache}")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
