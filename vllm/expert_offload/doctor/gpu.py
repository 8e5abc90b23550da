# SPDX-License-Identifier: Apache-2.0
"""Is there a GPU, and does its driver answer?"""

from __future__ import annotations

import re
from typing import NamedTuple

from .asked import Asked
from .lines import FAIL, OK, Line, gib
from .machine import Machine, Ran, version

NAME = "GPU"
MIB = 2**20
_QUERY = "--query-gpu=index,name,compute_cap,driver_version,memory.total,memory.free"
_FORMAT = "--format=csv,noheader,nounits"

_TOOLKIT = (
    "Start the container with its GPUs (compose: deploy.resources.reservations.devices; docker run: --gpus all). Where "
    "Docker then says 'could not select device driver \"nvidia\"': on Linux install nvidia-container-toolkit, run "
    "`nvidia-ctk runtime configure --runtime=docker` and restart docker; on Windows turn on the WSL 2 based engine in "
    "Docker Desktop's settings"
)
_WINDOWS = "Install NVIDIA's driver in Windows, none in WSL; then `wsl --update` and `wsl --shutdown` in PowerShell"
_LOAD = "`sudo modprobe nvidia`; where that fails, install the driver anew for this kernel"
# What nvidia-smi prints -> what it means, the next step. Texts of NVML's errors, as driver 580 words them.
_TROUBLE = (
    ("communicate with the NVIDIA driver", "the driver is not loaded", _LOAD),
    ("version mismatch", "the driver was updated under a running kernel", "Restart the machine"),
    ("No devices were found", "the driver sees no device", "Check the card's seat, and `sudo dmesg | grep -i nvrm`"),
    ("GPU access blocked", "Windows gives this WSL no GPU", _WINDOWS),
    ("GPU is lost", "the GPU has fallen off its bus", "Restart the machine; if it comes again, mind power and heat"),
    ("Initialize NVML: Unknown Error", "this container lost its devices", "Restart the container"),
    ("Initialize NVML: Driver Not Loaded", "the driver is not loaded", _LOAD),
)


class Gpu(NamedTuple):
    """A GPU: number and name, compute capability (8, 6), its driver's version, and bytes of memory (0: not told)."""

    number: int
    name: str
    capability: tuple[int, int]
    driver: str
    total: int
    free: int

    @property
    def datacenter(self) -> bool:
        """Whether it may run newer CUDA libraries on an older driver; GeForce and most RTX cards may not."""
        return bool(re.search(r"\b(?:[ABHLPTV]\d{1,3}S?|[AH]800|H20|G[BH]\d{3}|Tesla)\b", self.name)) and (
            "RTX" not in self.name and "GeForce" not in self.name
        )


def query(machine: Machine) -> Ran:
    """What nvidia-smi says of all GPUs."""
    return machine.ask("nvidia-smi", _QUERY, _FORMAT)


def gpus(machine: Machine) -> list[Gpu]:
    """The GPUs that a server would see, in its order; empty where nvidia-smi does not answer."""
    code, text = query(machine)
    found = [gpu for line in text.splitlines() if (gpu := _parsed(line))] if code == 0 else []
    visible = machine.env("CUDA_VISIBLE_DEVICES")
    if re.fullmatch(r"\d+(,\d+)*", visible):
        by_index = {gpu.number: gpu for gpu in found}
        return [by_index[int(index)] for index in visible.split(",") if int(index) in by_index]
    return found


def used(machine: Machine, asked: Asked) -> list[Gpu]:
    """Those that the server will use: as many as it has ranks."""
    return gpus(machine)[: asked.ranks]


def _parsed(line: str) -> Gpu | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 6 or not cells[0].isdigit():
        return None
    major, minor = (*version(cells[2]), 0, 0)[:2]
    total, free = (int(cell) * MIB if cell.isdigit() else 0 for cell in cells[4:])
    return Gpu(int(cells[0]), cells[1], (major, minor), cells[3], total, free)


def check(machine: Machine, asked: Asked) -> Line:
    """Whether there are as many GPUs as the server will use."""
    if machine.cpu_backend:
        return Line(NAME, OK, "this is vLLM's CPU backend, which needs none")
    found = gpus(machine)
    if not found:
        return Line(NAME, FAIL, *_why_none(machine))
    names = "; ".join(f"{gpu.number}: {gpu.name}{f', {gib(gpu.total)}' if gpu.total else ''}" for gpu in found)
    if len(found) < asked.ranks:
        step = f"Start with --tensor-parallel-size {len(found)}, or give the container all GPUs"
        return Line(NAME, FAIL, f"{len(found)} found ({names}), --tensor-parallel-size is {asked.ranks}", step)
    return Line(NAME, OK, f"{names}; driver {found[0].driver}")


def _why_none(machine: Machine) -> tuple[str, str]:
    code, text = query(machine)
    for printed, meaning, step in _TROUBLE:
        if printed.lower() in text.lower():
            return f"nvidia-smi answers {text.splitlines()[0][:200]!r}: {meaning}", _on_wsl(machine, step)
    if code == 0:
        if visible := machine.env("CUDA_VISIBLE_DEVICES"):
            return f"CUDA_VISIBLE_DEVICES={visible} leaves none of what nvidia-smi finds", "Unset it, or name an index"
        return f"nvidia-smi lists no GPU ({text[:200]!r})", _on_wsl(machine, "Check `nvidia-smi` on the host")
    if code is not None:
        return f"nvidia-smi fails with exit code {code}: {text[:200]!r}", _on_wsl(machine, "Mend the driver first")
    if machine.wsl and not machine.at("/dev/dxg").exists():
        if machine.container:
            return "no nvidia-smi and no /dev/dxg: this container was given no GPU", _TOOLKIT
        return "no /dev/dxg: this is WSL 1, or Windows gives it no GPU", f"`wsl --set-version DISTRO 2`. {_WINDOWS}"
    if machine.wsl and not machine.at("/usr/lib/wsl/lib").is_dir():
        if machine.container:
            return "no nvidia-smi: this container was given no driver", _TOOLKIT
        return "no /usr/lib/wsl/lib: Windows has no NVIDIA driver that knows WSL", _WINDOWS
    if machine.wsl and machine.at("/usr/lib/wsl/lib/nvidia-smi").exists():
        return "nvidia-smi is in /usr/lib/wsl/lib and not on PATH", "export PATH=$PATH:/usr/lib/wsl/lib"
    if machine.container:
        return "no nvidia-smi: this container was given no GPU", _TOOLKIT
    return "no nvidia-smi: no NVIDIA driver is installed", _on_wsl(machine, "Install NVIDIA's driver for this system")


def _on_wsl(machine: Machine, step: str) -> str:
    return _WINDOWS if machine.wsl else step
