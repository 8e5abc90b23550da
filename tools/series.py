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


def git(folder: Path, *arguments: str, **kw) -> str:
    identity = ["-c", "user.name=vllm-offload", "-c", "user.email=series@localhost", "-c", "core.autocrlf=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, text=True, capture_output=True, **kw).stdout


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
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(requirement), "-d", folder]
            if subprocess.run(command).returncode:
                sys.exit(f"{tag}: the package index gave no wheel with sha256 {entry['wheel']['sha256']}; see pip's words above")
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
    folder = ROOT / "build" / tag
    if folder.exists():
        sys.exit(f"{folder} exists: export what is in it, remove it, and check out again")
    folder.mkdir(parents=True)
    unpack(tag, folder)
    git(folder, "init", "-q", "-b", "series")
    git(folder, "add", "-f", "vllm")
    git(folder, "commit", "-q", "-m", f"vllm {tag}, as its wheel has it")
    git(folder, "tag", BASE)
    for name, text in cli.read_series(cli.PATCHES / tag):
        for path, hunks in cli.parse_patch(name, text):
            file = folder / path
            file.write_bytes(cli.apply_hunks(name, path, file.read_bytes() if file.exists() else b"", hunks))
            git(folder, "add", "-f", path)
        header = text.decode().split("\n--- ")[0].removeprefix("Subject: ")
        git(folder, "commit", "-q", "-a", "--cleanup=verbatim", "-F", "-", input=header)
    return folder


def export(tag: str) -> list[str]:
    """Write one patch per commit since upstream, with one line of context, and the touched files' hashes."""
    source, target = ROOT / "build" / tag, cli.PATCHES / tag
    if git(source, "status", "--porcelain", "--untracked-files=no"):
        sys.exit(f"{source} has changes that are not committed: commit them, then export")
    target.mkdir(exist_ok=True)
    for old in target.glob("*.patch"):
        old.unlink()
    names, paths = [], set()
    for number, commit in enumerate(git(source, "rev-list", "--reverse", f"{BASE}..HEAD").split(), 1):
        message = git(source, "log", "-1", "--format=%B", commit).strip()
        diff = git(source, "diff", "--no-color", "-U1", "--no-renames", f"{commit}~", commit)
        diff = re.sub(r"(?m)^(diff --git|index|new file mode) .*\n", "", diff)
        slug = re.sub(r"[^a-z0-9]+", "-", message.splitlines()[0].lower()).strip("-")
        names.append(f"{number:04}-{slug}.patch")
        (target / names[-1]).write_text(f"Subject: {message}\n\n{diff}")
        paths |= {path for path, hunks in cli.parse_patch(names[-1], diff.encode()) if hunks[0][0]}
    (target / "series").write_text("".join(f"{name}\n" for name in names))
    in_wheel = set(git(source, "ls-tree", "-r", "--name-only", BASE).split())  # a created file may be changed later on
    hashes = {p: cli.sha256(subprocess.run(["git", "show", f"{BASE}:{p}"], cwd=source, check=True, capture_output=True).stdout) for p in paths & in_wheel}
    pins = (cli.PATCHES / "releases.toml").read_text()
    table = "".join(f'"{p}" = "{hashes[p]}"\n' for p in sorted(hashes))
    pattern = re.compile(rf'(?ms)^\["{re.escape(tag)}"\.files\]\n.*?(?=^\[|\Z)')
    (cli.PATCHES / "releases.toml").write_text(pattern.sub(lambda _: f'["{tag}".files]\n{table}\n', pins).rstrip("\n") + "\n")
    return names


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
        shutil.rmtree(a.folder, ignore_errors=True)
        unpack(a.tag, a.folder)
        print(cli.apply(a.folder.resolve(), pin(a.tag).entry["version"]))
    elif a.command == "checkout":
        print(f"{checkout(a.tag)}: edit, commit, then tools/series.py export {a.tag}")
    else:
        names = export(a.tag)
        print(f"patches/{a.tag}: {len(names)} patches")


if __name__ == "__main__":
    main()
