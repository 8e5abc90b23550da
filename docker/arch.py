#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Do the compiled libraries of an installed vLLM hold code for the GPUs of an image's variant?

    python3 arch.py VARIANT [--tree DIR]     DIR contains vllm/ (default: where this Python finds vllm)

Reads the headers of the GPU code inside the ELF files; names of wheels and images say nothing about it. Runs inside the
image's build, so: the standard library alone, and nothing is imported or loaded. Exit status 1 and the names of the
libraries when a variant's GPU would find no code.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
PTX, SASS = 1, 2
# Entry flags. "a" code runs on its very GPU alone (sm_90a), "f" code on later ones of the family too (sm_100f).
ONE_GPU, FAMILY = 0x100000, 0x200000
# nvcc leaves PTX of its default target (5.2, or 7.5 from CUDA 13 on) in files that have no kernel: it proves nothing.
LEAST_PTX = 80

ANY, HOPPER = "", "9.0"
# Per variant: its GPUs, and what each must run. A tuple names one library under the names that releases gave it; the
# word behind is the one GPU that it is for. FA3 is for Hopper; everything newer or older runs FA2.
COMMON = [
    (("vllm/_C", "vllm/_C_stable_libtorch"), ANY),
    (("vllm/_moe_C", "vllm/_moe_C_stable_libtorch"), ANY),
    (("vllm/vllm_flash_attn/_vllm_fa2_C",), ANY),
]
VARIANTS = {
    "cu130": (("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"), [*COMMON, (("vllm/vllm_flash_attn/_vllm_fa3_C",), HOPPER)]),
    "sm86": (("8.6",), COMMON),
    # Every one before Hopper: docker/slim/prune.py takes out what is for later ones.
    "slim": (("8.0", "8.6", "8.9"), COMMON),
}
# sm86 serves old drivers, which can't compile the PTX of a newer CUDA: there, only SASS counts.
SASS_ALONE = ("sm86", "slim")
# FlashInfer's precompiled sampler, used by default where the package is there; where it is not, it is compiled on use.
FLASHINFER = "flashinfer_jit_cache"


class Damaged(Exception):
    """A file is not what its headers say, or there is none."""


class Code(NamedTuple):
    """One piece of GPU code: SASS or PTX, the architecture as 86 for 8.6, and how far it carries."""

    kind: int
    arch: int
    flags: int

    def runs_on(self, gpu: int) -> bool:
        if self.arch > gpu:
            return False
        if self.flags & ONE_GPU:
            return self.kind == SASS and self.arch == gpu
        if self.kind == PTX:
            return self.arch >= LEAST_PTX and not (self.flags & FAMILY and self.arch // 10 != gpu // 10)
        return self.kind == SASS and self.arch // 10 == gpu // 10

    def __str__(self) -> str:
        suffix = "a" if self.flags & ONE_GPU else "f" if self.flags & FAMILY else ""
        return f"{'sm' if self.kind == SASS else 'ptx'}_{self.arch}{suffix}"


# -- reading -----------------------------------------------------------------------------------------------------------
def sections(data: mmap.mmap | bytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every section of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise Damaged("no 64-bit ELF file")
    if len(data) < 64:
        raise Damaged("the ELF header is cut off")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if count and (size < 64 or names >= count or table + count * size > len(data)):
        raise Damaged("the section table lies behind the end of the file")
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    for name, kind, _, _, offset, length in headers:
        if kind != 8 and offset + length > len(data):  # 8: a section without bytes in the file
            raise Damaged("a section lies behind the end of the file")
        start = headers[names][4] + name
        yield bytes(data[start : data.find(b"\0", start)]).decode(errors="replace"), offset, length


def containers(data: mmap.mmap | bytes) -> Iterator[list[Code]]:
    """The code of each fat binary: one per compiled source file, of which the driver takes one piece.

    Headers are plain even where the code itself is compressed.
    """
    magic = struct.pack("<I", MAGIC)
    for name, offset, length in sections(data):
        if name not in SECTIONS:
            continue
        at, end = offset, offset + length
        while (at := data.find(magic, at, end)) >= 0:
            if at + 16 > end:
                raise Damaged(f"a fat binary at byte {at} is cut off")
            _, _, header, size = struct.unpack_from("<IHHQ", data, at)
            entry, stop = at + header, at + header + size
            if header < 16 or stop > end:
                raise Damaged(f"the fat binary at byte {at} reaches behind its section")
            found = []
            while entry < stop:
                if entry + 64 > stop:
                    raise Damaged(f"the entry at byte {entry} is cut off")
                kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
                (arch,) = struct.unpack_from("<I", data, entry + 28)
                (flags,) = struct.unpack_from("<Q", data, entry + 40)
                if header < 64 or entry + header + size > stop:
                    raise Damaged(f"the entry at byte {entry} reaches behind its fat binary")
                found.append(Code(kind, arch, flags))
                entry += header + size
            yield found
            at = stop


def read(path: Path) -> list[list[Code]]:
    """The fat binaries of a library; none for a library without GPU code."""
    if path.stat().st_size == 0:
        raise Damaged("the file is empty")
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return list(containers(data))


# -- judging -----------------------------------------------------------------------------------------------------------
def number(gpu: str) -> int:
    return int(gpu.replace(".", ""))


def files_of(tree: Path, names: tuple[str, ...]) -> list[Path]:
    return [path for name in names for path in sorted(tree.glob(f"{name}.*so"))]


def wanted(tree: Path, variant: str) -> Iterator[tuple[str, list[Path], tuple[str, ...]]]:
    """(name, files, GPUs that must find code) of each library that the variant needs."""
    gpus, libraries = VARIANTS[variant]
    for names, only in libraries:
        yield " or ".join(names), files_of(tree, names), (only,) if only else gpus
    if (tree / FLASHINFER).is_dir():
        yield f"{FLASHINFER}'s sampling", sorted((tree / FLASHINFER).rglob("sampling.so")), gpus


def judge(path: Path, gpus: tuple[str, ...], kinds_allowed: tuple[int, ...]) -> tuple[str, list[str]]:
    """(what was found, in one line; the GPUs without code)."""
    found = read(path)
    if not found:
        return "no GPU code at all", list(gpus)
    useful = [[code for code in container if code.kind in kinds_allowed] for container in found]
    counts = {gpu: sum(any(c.runs_on(number(gpu)) for c in container) for container in useful) for gpu in gpus}
    kinds = sorted({c for container in found for c in container}, key=lambda c: (c.arch, c.kind))
    runs = ", ".join(f"{gpu}: {n}" for gpu, n in counts.items())
    has = " ".join(dict.fromkeys(map(str, kinds)))
    return f"{len(found)} fat binaries, usable on {runs} ({has})", [gpu for gpu, n in counts.items() if not n]


def check(tree: Path, variant: str) -> tuple[list[str], list[str]]:
    """(lines that say what each library holds, errors)."""
    lines, errors = [], []
    kinds = (SASS,) if variant in SASS_ALONE else (SASS, PTX)
    for name, files, gpus in wanted(tree, variant):
        if not files:
            errors.append(f"no compiled extension {name} in {tree}: {variant} needs it")
        for path in files:
            try:
                line, missing = judge(path, gpus, kinds)
            except Damaged as error:
                errors.append(f"{path.relative_to(tree)} can't be read: {error}")
                continue
            lines.append(f"{path.relative_to(tree)}: {line}")
            if missing:
                errors.append(f"{path.relative_to(tree)} has no code for {', '.join(missing)}: {line}")
    return lines, errors


def installed() -> Path:
    """The folder that contains the vllm/ of this Python, which is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Damaged(f"no vllm is installed for {sys.executable}")
    return Path(spec.origin).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--tree", type=Path)
    a = parser.parse_args(argv)
    try:
        tree = a.tree or installed()
    except Damaged as why:
        print(f"arch: {why}: build on an official vLLM image", file=sys.stderr)
        return 1
    lines, errors = check(tree, a.variant)
    print("\n".join(lines))
    for error in errors:
        print(f"arch: {error}", file=sys.stderr)
    if errors:
        gpus = ", ".join(VARIANTS[a.variant][0])
        print(f"arch: variant {a.variant} is for GPUs {gpus}: take the base that patches/releases.toml names for it, "
              "or build vLLM for them", file=sys.stderr)  # fmt: skip
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
