#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a CUDA build of torch importable on a machine without CUDA's libraries, for tests of the CPU backend.

    PYTHON-OF-THE-ENVIRONMENT tools/cuda_stubs.py

The package index has only CUDA builds of most torch versions, and their libraries are gigabytes of downloads that a
CPU never calls. What torch links is satisfied here by empty stand-ins: for each library that torch needs and that is
not there, every symbol that torch takes from it, under the same version name, returning an error. `torch.cuda` then
says that there is no device, as it does on any machine without one.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

WANTED = re.compile(r"lib(cu|nv|nccl)")
TAKEN = re.compile(r"_*(cu|nv|nccl)", re.IGNORECASE)
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA runtime API, "Data types"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(libraries: list[Path]) -> list[str]:
    """CUDA libraries that `libraries` link and that do not lie beside them."""
    have = {p.name for p in libraries}
    found = (n for p in libraries for n in re.findall(r"NEEDED.*\[(.+?)\]", output("readelf", "-dW", str(p))))
    return [n for n in dict.fromkeys(found) if WANTED.match(n) and n not in have]


def versions(libraries: list[Path]) -> dict[str, str]:
    """Symbol version name -> the library that has to define it."""
    owner: dict[str, str] = {}
    for p in libraries:
        file = ""
        for line in output("readelf", "-VW", str(p)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"Name: (\S+)\s+Flags", line):
                owner[found[1]] = file
    return owner


def undefined(libraries: list[Path]) -> set[tuple[str, str]]:
    """(symbol, version or "") that `libraries` take from elsewhere."""
    defined: set[str] = set()
    missing: set[str] = set()
    for p in libraries:
        for line in output("nm", "-D", str(p)).splitlines():
            fields = line.split()
            if len(fields) == 2 and fields[0] in "Uw":
                missing.add(fields[1])
            elif len(fields) == 3:
                defined.add(fields[2].partition("@")[0])
    pairs = {(s.partition("@")[0], s.partition("@")[2].lstrip("@")) for s in missing}
    return {(name, version) for name, version in pairs if name not in defined}


def build(library: Path, symbols: dict[str, set[str]]) -> None:
    """Compile one stand-in with `symbols` (version -> names)."""
    names = sorted(set().union(*symbols.values())) if symbols else []
    text = "".join(
        f'const char *{n}(void) {{ return "no CUDA on this machine"; }}\n'
        if re.search("String|Name", n)
        else f"int {n}(void) {{ return {NO_DEVICE}; }}\n"
        for n in names
    )
    script = "".join(f"{v} {{ global: {'; '.join(sorted(s))}; }};\n" for v, s in symbols.items() if v)
    with tempfile.TemporaryDirectory() as folder:
        source, exports = Path(folder, "stub.c"), Path(folder, "exports")
        source.write_text(text)
        exports.write_text(script)
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(library), str(source)]
        command += [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={exports}"] if script else [])]
        subprocess.run(command, check=True)


def main() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("no torch is installed for this Python")
    package = Path(spec.origin).parent
    libraries = sorted([*package.glob("lib/*.so*"), *package.glob("*.so")])
    wanted, owner = needed(libraries), versions(libraries)
    symbols: dict[str, dict[str, set[str]]] = {name: collections.defaultdict(set) for name in wanted}
    for name, version in undefined(libraries):
        if owner.get(version) in symbols:
            symbols[owner[version]][version].add(name)
        elif not version and wanted and TAKEN.match(name):
            symbols[wanted[0]][""].add(name)
    for name in wanted:
        build(package / "lib" / name, symbols[name])
    print(f"{len(wanted)} stand-ins for CUDA libraries in {package / 'lib'}")


if __name__ == "__main__":
    main()
