#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every test that needs no GPU: what no pin matters for, then release and serve on each, in its own environment.

    tools/test.py [--layer unit|images|compose|release|serve] [--tag TAG] [pytest arguments]

`unit` needs no vLLM; `images` and `compose` skip what needs a Docker engine where none answers (`make test-images`
starts one); `release` runs our patches inside the real Python of a pin on the torch that it names; `serve` boots its
real server. Environments are made on the first run (`envs`) and kept in the cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import envs  # noqa: E402

import vllm_offload as cli  # noqa: E402

ONCE = ("unit", "images", "compose")  # in the newest pin's environment
EACH = ("release", "serve")


def pytest(python: Path, folder: str, more: list[str]) -> bool:
    """Run one folder of tests in a process of its own; whether it passed."""
    command = [str(python), "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", f"tests/{folder}", *more]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "EXPERT_OFFLOAD_"))}
    return subprocess.run(command, cwd=ROOT, env=clean).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=[*ONCE, *EACH])
    parser.add_argument("--tag", choices=[*cli.releases()])
    arguments, more = parser.parse_known_args()
    tags = [arguments.tag] if arguments.tag else [*cli.releases()]
    pythons = {tag: envs.make(tag) for tag in tags}
    runs = [(layer, tags[-1]) for layer in ONCE if arguments.layer in (None, layer)]
    runs += [(layer, tag) for layer in EACH if arguments.layer in (None, layer) for tag in tags]
    failed = []
    for layer, tag in runs:
        began = time.monotonic()
        print(f"== {layer} on {tag}", flush=True)
        if layer in EACH:
            envs.patch(pythons[tag])
        if not pytest(pythons[tag], layer, more):
            failed.append(f"{layer} on {tag}")
        print(f"== {layer} on {tag}: {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{len(runs) - len(failed)} of {len(runs)} layers passed" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
