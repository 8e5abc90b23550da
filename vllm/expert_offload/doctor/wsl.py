# SPDX-License-Identifier: Apache-2.0
"""WSL's version, and what it breaks."""

from __future__ import annotations

from .asked import Asked
from .gpu import used
from .lines import OK, WARN, Line
from .machine import Machine, version

NAME = "WSL"
# WSL 2.7.0 ships kernel 6.6.114.1; CUDA graphs are captured on 50-series cards from there on (microsoft/WSL#14452,
# vllm-project/vllm#37242). The version of WSL itself can't be asked from inside a container, its kernel's can.
_GRAPHS = (6, 6, 114)
_PINNED = (4, 19, 121)  # before it no page-locked memory at all (vllm-project/vllm#41496)
_UPDATE = "In PowerShell: `wsl --update` (2.7.0 or newer; `--pre-release` if it gives an older one), `wsl --shutdown`"


def check(machine: Machine, asked: Asked) -> Line:
    """WSL 1 or 2, its kernel against what these cards need, and Docker Desktop without WSL."""
    kernel = machine.kernel
    if "linuxkit" in kernel:
        step = "In Docker Desktop's settings, General: 'Use the WSL 2 based engine'; then start again"
        return Line(NAME, WARN, f"kernel {kernel}: Docker Desktop runs a virtual machine that has no GPU", step)
    if not machine.wsl:
        return Line(NAME, OK, f"not WSL (kernel {kernel or 'not known'})")
    if "wsl2" not in kernel.lower() and version(kernel) < _PINNED:
        step = "In PowerShell: `wsl --set-version DISTRO 2` (`wsl -l -v` lists names), then `wsl --update`"
        return Line(NAME, WARN, f"kernel {kernel}: WSL 1, which has no GPU", step)
    if version(kernel) < _PINNED:
        return Line(NAME, WARN, f"kernel {kernel}: too old to page-lock memory (4.19.121)", _UPDATE)
    if version(kernel) < _GRAPHS and any(gpu.capability >= (12, 0) for gpu in used(machine, asked)):
        found = f"WSL 2, kernel {kernel}, older than WSL 2.7.0's 6.6.114.1: capturing CUDA graphs fails on this card"
        return Line(NAME, WARN, found, f"{_UPDATE}; until then --enforce-eager, which is several times slower")
    if asked.ranks > 1 and machine.env("NCCL_P2P_DISABLE") != "1":
        found = f"WSL 2, kernel {kernel}: {asked.ranks} GPUs may hang in NCCL's peer-to-peer check"
        return Line(NAME, WARN, found, "Set NCCL_P2P_DISABLE=1")
    return Line(NAME, OK, f"WSL 2, kernel {kernel}")
