# SPDX-License-Identifier: Apache-2.0
"""Is the driver new enough for the CUDA that this image runs, and does nothing stand between the two?

GeForce cards have no forward compatibility: NVIDIA, "CUDA Compatibility", section "Forward Compatibility".
"""

from __future__ import annotations

import re

from .asked import Asked
from .gpu import Gpu, used
from .lines import FAIL, OK, WARN, Line
from .machine import Machine, version

NAME, COMPAT = "driver", "compat libs"
# Least driver on Linux per CUDA release: "CUDA Toolkit Release Notes", table "CUDA Toolkit and Corresponding Driver
# Versions", for the update of each release that the images carry (12.9.1, 13.0.x).
_LEAST = {
    (12, 9): "575.57.08",
    (13, 0): "580.65.06",
}
# The same document's table of minor version compatibility: code compiled for the card runs from here on, PTX does not.
_FAMILY = {12: "525.60.13", 13: "580.65.06"}
# From this one up, parts of the wheels come as PTX alone (docker/arch.py shows it: FlashAttention 2).
_NEEDS_PTX = (12, 0)


def cuda_of(machine: Machine) -> str:
    """The CUDA release that runs here: torch's, which decides, else what the image says; empty when not known."""
    try:
        found = machine.torch_cuda()
    except (ImportError, OSError):
        found = ""
    return found or machine.env("CUDA_VERSION")


def _step(machine: Machine, gpu: Gpu, least: str) -> str:
    step = f"Install driver {least} or newer on the host"
    if machine.wsl:
        step = f"Install driver {least} or newer in Windows (nvidia.com/drivers), then `wsl --shutdown`"
    if version(cuda_of(machine))[:1] <= (12,) or gpu.capability[0] != 8:
        return step
    return f"{step}; or take RELEASE=v0.32.0 VARIANT=sm86, with CUDA 12.9, which older drivers run"


def check(machine: Machine, asked: Asked) -> Line:
    """The driver's version against the least one for this CUDA release."""
    if machine.cpu_backend:
        return Line(NAME, OK, "this is vLLM's CPU backend")
    cards = used(machine, asked)
    cuda = cuda_of(machine)
    if not cards:
        return Line(NAME, WARN, f"not known without a GPU (CUDA here: {cuda or 'none'})", "See the GPU's line")
    if len(version(cuda)) < 2:
        step = "Install a torch with CUDA; the CPU build serves no GPU"
        return Line(NAME, WARN, "this installation names no CUDA: torch has none, and CUDA_VERSION is not set", step)
    release = version(cuda)[:2]
    known = [least for at, least in sorted(_LEAST.items()) if at[0] == release[0] and at <= release]
    floor = _FAMILY.get(release[0])
    if floor is None:
        found = f"driver {cards[0].driver}; the least one for CUDA {cuda} is not in the doctor's table"
        return Line(NAME, WARN, found, "Look it up in NVIDIA's CUDA release notes")
    return _compared(machine, cards[0], cuda, known[-1] if known else floor, floor)


def _compared(machine: Machine, gpu: Gpu, cuda: str, least: str, floor: str) -> Line:
    has = version(gpu.driver)
    found = f"driver {gpu.driver}, and CUDA {cuda} needs {least}"
    if has >= version(least):
        return Line(NAME, OK, found)
    if has < version(floor):
        if gpu.datacenter and _folders(machine):
            bridged = f"{found}; compat libraries may bridge that on {gpu.name}"
            return Line(NAME, WARN, bridged, _step(machine, gpu, least))
        return Line(NAME, FAIL, found, _step(machine, gpu, least))
    if gpu.capability >= _NEEDS_PTX:
        return Line(NAME, FAIL, f"{found}: this card's kernels come partly as PTX", _step(machine, gpu, least))
    minor = f"{found}; from {floor} on, minor version compatibility runs compiled kernels but translates no PTX"
    return Line(NAME, WARN, minor, f"If a kernel fails with 'unsupported toolchain': {_step(machine, gpu, least)}")


def _folders(machine: Machine) -> list[str]:
    """Folders with the compat libcuda, as absolute paths, without those that a link repeats."""
    found = sorted(machine.at("/usr/local").glob("cuda*/compat"))
    real = {folder.resolve(): folder for folder in reversed(found) if any(folder.glob("libcuda.so*"))}
    return ["/" + str(folder.relative_to(machine.root)).lstrip("/") for folder in real.values()]


def _in_path(machine: Machine) -> str:
    """By which way the loader finds a compat libcuda; empty when it does not."""
    if re.search(r"cuda[^:]*/compat", machine.env("LD_LIBRARY_PATH")):
        return "LD_LIBRARY_PATH"
    for file in sorted(machine.at("/etc/ld.so.conf.d").glob("*.conf")):
        if re.search(r"(?m)^\s*/[^#\n]*cuda[^#\n]*/compat", file.read_text(errors="replace")):
            return f"/etc/ld.so.conf.d/{file.name}"
    if re.search(r"cuda[^\0]*/compat/libcuda\.so", machine.read("/etc/ld.so.cache")):
        return "/etc/ld.so.cache"
    return "VLLM_ENABLE_CUDA_COMPATIBILITY" if machine.env("VLLM_ENABLE_CUDA_COMPATIBILITY") in ("1", "true") else ""


def check_compat(machine: Machine, asked: Asked) -> Line:
    """Whether the loader would give a GeForce card the image's libcuda instead of the driver's: errors 803 and 804."""
    folders, way = _folders(machine), _in_path(machine)
    if not folders:
        return Line(COMPAT, OK, "this installation has none")
    there = ", ".join(folders)
    if not way:
        return Line(COMPAT, OK, f"{there} is not in the loader's path")
    cards = [gpu for gpu in used(machine, asked) if not gpu.datacenter]
    if not cards:
        return Line(COMPAT, OK, f"{there} is in the loader's path ({way}), which data centre cards may use")
    if way.startswith("/etc"):
        step = f"Take VARIANT=sm86, whose build removes them; in an image of your own: remove {there}, then `ldconfig`"
    else:
        step = f"Unset {way}" if way.startswith("VLLM") else f"Take {there} out of {way}"
    found = f"{way} puts {there} before the driver's libcuda; on {cards[0].name} CUDA then fails with error 803 or 804"
    return Line(COMPAT, WARN, found, step)
