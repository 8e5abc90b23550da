#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Patch the vLLM of a base image, strictly: a step of the Dockerfile.

    python3 install.py --release TAG [--series HASH]

Refuses a base that holds another release, and a series other than the one that the labels will name; then applies the
series and compiles the files that it has written, so that a start need not.
"""

from __future__ import annotations

import argparse
import py_compile
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import vllm_offload as cli


def install(release: str, series: str) -> str:
    pins = cli.releases()
    if release not in pins:
        raise cli.Refused(f"RELEASE={release} is no pin; pins: {', '.join(pins)}")
    tree, version = cli.find_tree(None)
    if version != pins[release]["version"]:
        named = ", ".join(sorted(set(pins[release].get("images", {}).values()))) or "none"
        raise cli.Refused(
            f"RELEASE={release} asked for vllm {pins[release]['version']}, and the base holds {version} in {tree}: "
            f"give a BASE of that release; patches/releases.toml names {named}"
        )
    pin = cli.pin_for(version)
    if series and series != pin.hash:
        raise cli.Refused(f"SERIES={series} asked for, and the files copied in are series {pin.hash}: build again")
    line = cli.apply(tree, version)
    for path in cli.Journal(tree).data["files"]:
        # Checked by the source's hash, not by its time: a later `revert` must not leave stale code to be loaded.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        py_compile.compile(str(tree / path), doraise=True, invalidation_mode=mode)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", required=True)
    parser.add_argument("--series", default="")
    a = parser.parse_args()
    try:
        print(install(a.release, a.series))
    except (cli.Refused, OSError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
