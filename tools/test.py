#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every test that needs no GPU: what no pin matters for, then release and serve on each, in its own environment.

    tools/test.py [--layer unit|images|compose|release|serve] [--tag TAG] [--jobs N] [pytest arguments]

`unit` needs no vLLM; `images` and `compose` skip what needs a Docker engine where none answers (`make test-images`
starts one); `release` runs our patches inside the real Python of a pin on the torch that it names; `serve` boots its
real server. Environments are made on the first run (`envs`) and kept in the cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import envs  # noqa: E402

import vllm_offload as cli  # noqa: E402

PRINTING = threading.Lock()
ONCE = ("compose", "images", "unit")  # in the newest pin's environment
EACH = ("serve", "release")


def command(python: Path, layer: str, more: list[str]) -> list[str]:
    return [str(python), "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", f"tests/{layer}", *more]


def test(layer: str, tag: str, more: list[str], held: IO[bytes] | None) -> bool:
    """Run one layer on one pin in a process of its own; whether it passed. `held` keeps its output until it is done."""
    began = time.monotonic()
    if held is None:
        print(f"== {layer} on {tag}", flush=True)
    python = envs.make(tag)
    if layer in EACH:
        envs.patch(python)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "EXPERT_OFFLOAD_"))}
    if layer == "unit":
        clean["PYTHONPATH"] = os.pathsep.join([str(envs.triton(python)), *filter(None, [clean.get("PYTHONPATH")])])
    done = subprocess.run(command(python, layer, more), cwd=ROOT, env=clean, stdout=held, stderr=held)
    with PRINTING:
        if held is not None:
            held.seek(0)
            print(f"== {layer} on {tag}\n{held.read().decode(errors='replace')}", end="")
        print(f"== {layer} on {tag}: {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=[*ONCE, *EACH])
    parser.add_argument("--tag", choices=[*cli.releases()])
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="layers at a time (default: two)")
    arguments, more = parser.parse_known_args()
    tags = [arguments.tag] if arguments.tag else [*cli.releases()]
    # The longest first, so that the last ones to end are short: whole servers of the newest pins, then containers.
    runs = [("serve", tag) for tag in reversed(tags)]
    runs += [(layer, tags[-1]) for layer in ONCE]
    runs += [("release", tag) for tag in reversed(tags)]
    runs = [run for run in runs if arguments.layer in (None, run[0])]

    def run(layer: str, tag: str) -> bool:
        if len(runs) == 1 or arguments.jobs == 1:
            return test(layer, tag, more, None)
        with tempfile.TemporaryFile() as held:
            return test(layer, tag, more, held)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        passed = list(pool.map(lambda one: run(*one), runs))
    failed = [f"{layer} on {tag}" for (layer, tag), good in zip(runs, passed) if not good]
    print(f"{sum(passed)} of {len(runs)} layers passed" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
