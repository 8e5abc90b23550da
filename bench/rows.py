# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results: which release and card a figure belongs to, and how it was made. Imports neither torch nor
vLLM: a program that measures another one's memory must not hold theirs.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path


def installed() -> Path | None:
    """Folder of the vLLM that `import vllm` would find, without importing it; None when there is none."""
    found = importlib.util.find_spec("vllm")
    # The checkout's own vllm/ is a namespace without an origin: no release.
    return Path(found.origin).parent if found and found.origin else None


def release(folder: Path | None) -> str:
    """Version of the release in `folder`; empty when it does not say."""
    try:
        text = (folder / "_version.py").read_text() if folder else ""
    except OSError:
        text = ""
    found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", text, re.M)
    return found[1] if found else ""


def patched(folder: Path | None) -> bool:
    """Whether our series lies in the release in `folder`."""
    return bool(folder) and (Path(folder or "") / "expert_offload_adapter.py").exists()


@functools.cache
def gpu() -> str:
    """Name of the first card, as the driver's own tool gives it; empty without one."""
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        out = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.stdout.strip().splitlines()[0] if out.returncode == 0 and out.stdout.strip() else ""


def card_bytes(pid: int) -> int | None:
    """Bytes that process `pid` holds on the cards, its context and graphs too, as the driver's tool counts (in MiB)."""
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.findall(rf"^{pid}, (\d+)$", out.stdout, re.M)
    return sum(map(int, found)) * 2**20 if found else None


def row(case: str, value: float, unit: str, **more: object) -> dict:
    """One figure: `value` in `unit`, on this machine, by this command line."""
    command = shlex.join(["python3", *sys.argv])
    return dict(release=release(installed()), gpu=gpu(), case=case, value=value, unit=unit, command=command, **more)


def write(path: str | None, rows: list[dict]) -> None:
    """Lay `rows` into the file `path`, whole; nothing without a path."""
    if path:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
