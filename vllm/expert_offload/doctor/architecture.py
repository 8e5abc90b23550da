# SPDX-License-Identifier: Apache-2.0
"""Does the image hold code for this GPU?"""

from __future__ import annotations

import re

from .asked import Asked
from .gpu import Gpu, used
from .lines import FAIL, OK, WARN, Line
from .machine import Machine

NAME = "architecture"
# Set by an image: compute capabilities that its compiled extensions hold code for, "8.0 8.6 9.0+PTX"; its variant; its
# name, which ends in the variant.
ARCHS, VARIANT, IMAGE = "VLLM_OFFLOAD_ARCHS", ("VLLM_OFFLOAD_VARIANT", "VARIANT"), "EXPERT_OFFLOAD_IMAGE"
# What the build has proved of each variant's libraries (docker/arch.py). They may hold code for others too.
PROVED = {"cu130": "8.0 8.6 8.9 9.0 10.0 12.0", "sm86": "8.6"}
# Below it the pins have no kernels that the offload was tried with, and no bfloat16.
_LEAST = (8, 0)
_GENERATIONS = {(5, 0): "Maxwell", (6, 0): "Pascal", (7, 0): "Volta", (7, 5): "Turing"}
_CAN_RUN = (
    "What can run: NVIDIA cards of compute capability 8.0 and newer (RTX 30, 40 and 50, A10, A40, A100, L4, L40, H100, "
    "and later)"
)


def built_for(text: str) -> list[tuple[tuple[int, int], bool]]:
    """[(compute capability, whether newer cards may translate it)] of a list such as "8.0 8.6;9.0a 12.0+PTX"."""
    found = re.findall(r"(?:sm_)?(\d+)\.?(\d)[af]?(\+PTX)?", text)
    return [((int(major), int(minor)), bool(ptx)) for major, minor, ptx in found]


def runs(capability: tuple[int, int], built: list[tuple[tuple[int, int], bool]]) -> bool:
    """Whether code of one of `built` runs on `capability`: compiled for its major version and no newer, or from PTX."""
    # CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    return any(arch <= capability and (arch[0] == capability[0] or ptx) for arch, ptx in built)


def _named(gpu: Gpu) -> str:
    generation = [name for least, name in _GENERATIONS.items() if gpu.capability >= least]
    old = f", {generation[-1]}" if generation and gpu.capability < _LEAST else ""
    return f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]}{old})"


def check(machine: Machine, asked: Asked) -> Line:
    """Each GPU that the server will use against what the image was built for."""
    if machine.cpu_backend:
        return Line(NAME, OK, "this is vLLM's CPU backend")
    cards = used(machine, asked)
    if not cards:
        return Line(NAME, WARN, "not known without a GPU", "See the GPU's line")
    archs = machine.env(ARCHS)
    built = built_for(archs)
    variant = machine.env(*VARIANT) or machine.env(IMAGE).rpartition("-")[2]
    proved = PROVED.get(variant, "")
    said = f"what the kernels were built for is not said ({ARCHS})"
    if built or proved:
        said = f"this image holds code for {archs or proved}" + (f" (variant {variant})" if variant else "")
    for gpu in cards:
        if gpu.capability == (0, 0):
            return Line(NAME, WARN, f"{gpu.name}: the driver tells no compute capability", "Update the driver")
        if built and not runs(gpu.capability, built):
            newer = gpu.capability >= _LEAST
            step = "Use the image of the other variant, or build one for this card" if newer else _CAN_RUN
            return Line(NAME, FAIL, f"no kernel for {_named(gpu)}: {said}", step)
        if not built and gpu.capability < _LEAST:
            return Line(NAME, FAIL, f"no kernel for {_named(gpu)}: {said}, and no pin has kernels below 8.0", _CAN_RUN)
        if proved and not built and not runs(gpu.capability, built_for(proved)):
            step = "If the start ends with 'no kernel image is available', use the image of the other variant"
            return Line(NAME, WARN, f"{_named(gpu)}: not proved to run; {said}", step)
    if len({gpu.capability for gpu in cards}) > 1:
        step = "Use cards of one kind (CUDA_VISIBLE_DEVICES): ranks would choose different kernels"
        return Line(NAME, WARN, f"cards of different kinds: {', '.join(map(_named, cards))}", step)
    return Line(NAME, OK, f"{_named(cards[0])}; {said}")
