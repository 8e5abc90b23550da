#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Take out of an installed vLLM what no GPU of the variant `slim` can load: a step of the Dockerfile.

    python3 prune.py [--tree DIR]     DIR contains vllm/ (default: where this Python finds vllm)

A library goes only where the headers of its GPU code say that those GPUs find none in it. vLLM imports each inside a
`try`, or after a look at the GPU, as it must on the platforms whose wheels never had it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import arch

VARIANT = "slim"
# FlashAttention 3, FlashMLA, QuTLASS, DeepSelect and Flash KDA: for Hopper and Blackwell.
LIBRARIES = (
    "vllm/vllm_flash_attn/_vllm_fa3_C",
    "vllm/_flashmla_C",
    "vllm/_flashmla_extension_C",
    "vllm/_qutlass_C",
    "vllm/_deepselect_C",
    "vllm/_flashkda_C",
)
# Kernels that are compiled on use: DeepGEMM refuses what is below 9.0, the other one's name says it.
FOLDERS = ("vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100")


def size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())


def prune(tree: Path) -> list[tuple[str, int]]:
    """What was removed, with its bytes. Everything is judged before anything goes."""
    gpus = arch.VARIANTS[VARIANT][0]
    going = [path for name in LIBRARIES for path in arch.files_of(tree, (name,))]
    going += [folder for name in FOLDERS if (folder := tree / name).is_dir()]
    if not going:
        raise arch.Damaged(f"nothing of {', '.join((*LIBRARIES, *FOLDERS))} is in {tree}: is it a CUDA build of vLLM?")
    for path in going:
        for library in [path] if path.is_file() else sorted(path.rglob("*.so")):
            code = [piece for container in arch.read(library) for piece in container]
            runs = [gpu for gpu in gpus if any(piece.runs_on(arch.number(gpu)) for piece in code)]
            if runs:
                raise arch.Damaged(
                    f"{library.relative_to(tree)} has code for {', '.join(runs)}, which {VARIANT} serves: "
                    "take it out of docker/slim/prune.py's list"
                )
    removed = [(str(path.relative_to(tree)), size(path)) for path in going]
    for path in going:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return removed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path)
    tree = parser.parse_args(argv).tree
    try:
        removed = prune(tree or arch.installed())
    except arch.Damaged as error:
        print(f"prune: {error}", file=sys.stderr)
        return 1
    for name, count in removed:
        print(f"{name}: {count / 1e6:.1f} MB")
    print(f"removed {sum(count for _, count in removed) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
