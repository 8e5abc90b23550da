#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""For those who work on the patch series: wheels, trees, and the series as git commits.

    tools/series.py fetch            every pin's wheel into the cache, verified by its sha256
    tools/series.py check            every series applies to its real wheel, and every touched file compiles
    tools/series.py tree TAG DIR     the wheel's Python in DIR, patched
    tools/series.py checkout TAG     build/TAG: a git repository of the pin, one commit a patch
    tools/series.py export TAG       commits of build/TAG back to patches/TAG, and the hashes of the files they touch

In a checkout, a commit is a patch: its first line is the patch's subject, the rest its header (DEP-3 fields).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import vllm_offload as cli  # noqa: E402

CACHE = Path.home() / ".cache" / "vllm-offload" / "wheels"
BASE = "upstream"


def git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    """What git says, of `folder` alone: a user's settings would change prefixes, line ends or the diff's algorithm."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=vllm-offload", "-c", "user.email=series@localhost", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, input=given, capture_output=True)
    if done.returncode:
        sys.exit(f"{folder}: git {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def pin(tag: str) -> cli.Pin:
    entries = cli.releases()
    if tag not in entries:
        sys.exit(f"{tag} is not a pin; pins: {', '.join(entries)}")
    return cli.pin_for(entries[tag]["version"])


def wheel(tag: str) -> Path:
    """The pin's wheel, downloaded once; another file under its name is an error."""
    entry = cli.releases()[tag]
    path = CACHE / entry["wheel"]["file"]
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            requirement = Path(folder, "pin.txt")
            requirement.write_text(f"vllm=={entry['version']} --hash=sha256:{entry['wheel']['sha256']}\n")
            options = [
                "-q",
                "--no-deps",
                "--only-binary=:all:",
                "--require-hashes",
                "-r",
                str(requirement),
                "-d",
                folder,
            ]
            if subprocess.run([sys.executable, "-m", "pip", "download", *options]).returncode:
                wanted = entry["wheel"]["sha256"]
                sys.exit(f"{tag}: the package index gave no wheel with sha256 {wanted}; see pip's words above")
            Path(folder, path.name).rename(path)
    digest = cli.sha256(path.read_bytes())
    if digest != entry["wheel"]["sha256"]:
        sys.exit(f"{path} has sha256 {digest}, {tag}'s is {entry['wheel']['sha256']}: remove it and fetch again")
    return path


def unpack(tag: str, folder: Path) -> None:
    """The wheel's Python files and metadata."""
    with zipfile.ZipFile(wheel(tag)) as z:
        z.extractall(folder, [n for n in z.namelist() if n.endswith(".py") or ".dist-info/" in n])


def check(tag: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unpack(tag, Path(folder))
        print(cli.check(Path(folder), pin(tag).entry["version"]))


def checkout(tag: str) -> Path:
    """The pin and its series as commits; `build/TAG` is there only once every patch is in it."""
    folder = ROOT / "build" / tag
    if folder.exists():
        sys.exit(f"{folder} exists: export what is in it, remove it, and check out again")
    part = folder.with_name(f".{tag}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    unpack(tag, part)
    git(part, "init", "-q", "-b", "series")
    git(part, "add", "-f", "vllm")
    git(part, "commit", "-q", "-m", f"vllm {tag}, as its wheel has it")
    git(part, "tag", BASE)
    series = cli.PATCHES / tag
    for name, text in cli.read_series(series) if series.exists() else ():  # a new pin has none yet
        for path, _, hunks in cli.parse_patch(name, text):
            file = part / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(cli.apply_hunks(name, path, file.read_bytes() if file.exists() else b"", hunks))
            git(part, "add", "-f", path)
        header = cli.FILE.split(text)[0].removeprefix(b"Subject: ")
        git(part, "commit", "-q", "-a", "--cleanup=verbatim", "-F", "-", given=header)
    part.rename(folder)
    return folder


def export(tag: str) -> list[str]:
    """Write one patch per commit since upstream, with one line of context, and the touched files' hashes."""
    source, target = ROOT / "build" / tag, cli.PATCHES / tag
    if git(source, "status", "--porcelain", "--untracked-files=all", "--", "vllm", ":(exclude)**/__pycache__/**"):
        sys.exit(f"{source} has changes that are not committed: commit them, then export")
    patches, paths = {}, set()
    for number, commit in enumerate(git(source, "rev-list", "--reverse", f"{BASE}..HEAD").decode().split(), 1):
        message = git(source, "log", "-1", "--format=%B", commit).decode().strip()
        diff = git(source, "diff", "--no-color", "-U1", "--no-renames", f"{commit}~", commit)
        diff = re.sub(rb"(?m)^(diff --git|index|new file mode) .*\n", b"", diff)
        slug = re.sub(r"[^a-z0-9]+", "-", message.splitlines()[0].lower()).strip("-")
        name = f"{number:04}-{slug}.patch"
        patches[name] = f"Subject: {message}\n\n".encode() + diff
        said = {path.decode() for _, path in cli.FILE.findall(diff)}
        if (
            lost := set(git(source, "diff", "--name-only", "--no-renames", f"{commit}~", commit).decode().splitlines())
            - said
        ):
            sys.exit(f"{message.splitlines()[0]}: a series can't say what happens to {', '.join(sorted(lost))}")
        paths |= {path for path, _, _ in cli.parse_patch(name, patches[name])}
    in_wheel = set(git(source, "ls-tree", "-r", "--name-only", BASE).decode().splitlines())
    hashes = {path: cli.sha256(git(source, "show", f"{BASE}:{path}")) for path in sorted(paths & in_wheel)}
    table = f'["{tag}".files]\n' + "".join(f'"{path}" = "{digest}"\n' for path, digest in hashes.items())
    pins = (cli.PATCHES / "releases.toml").read_text().rstrip("\n") + "\n"
    pattern = re.compile(rf'(?m)^\["{re.escape(tag)}"\.files\]\n(?:".*\n)*')
    pins = pattern.sub(lambda _: table, pins) if pattern.search(pins) else f"{pins}\n{table}"
    target.mkdir(exist_ok=True)
    for old in target.glob("*.patch"):
        old.unlink()
    for name, text in patches.items():
        (target / name).write_bytes(text)
    (target / "series").write_text("".join(f"{name}\n" for name in patches))
    (cli.PATCHES / "releases.toml").write_text(pins)
    return list(patches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fetch", "check", "tree", "checkout", "export"])
    parser.add_argument("tag", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    a = parser.parse_args()
    if a.command == "fetch":
        for tag in cli.releases():
            print(f"{tag}: {wheel(tag)}")
    elif a.command == "check":
        for tag in [a.tag] if a.tag else cli.releases():
            check(tag)
    elif a.tag is None or (a.command == "tree" and a.folder is None):
        parser.error(f"{a.command} needs a TAG" + (" and a DIR" if a.command == "tree" else ""))
    elif a.command == "tree":
        if a.folder.exists() and any(a.folder.iterdir()) and not (a.folder / "vllm" / "__init__.py").is_file():
            sys.exit(f"{a.folder} holds something other than a vllm: it would be removed; give another folder")
        shutil.rmtree(a.folder, ignore_errors=True)
        unpack(a.tag, a.folder)
        print(cli.apply(a.folder.resolve(), pin(a.tag).entry["version"]))
    elif a.command == "checkout":
        print(f"{checkout(a.tag)}: edit, commit, then tools/series.py export {a.tag}")
    else:
        names = export(a.tag)
        print(f"patches/{a.tag}: {len(names)} patches")


if __name__ == "__main__":
    try:
        main()
    except cli.Refused as error:
        sys.exit(f"series: {error}")
