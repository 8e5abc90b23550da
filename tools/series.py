#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""For those who work on the patch series: wheels, trees, and the series as git commits.

    tools/series.py fetch            every pin's wheel into the cache, verified by its sha256
    tools/series.py check            every series applies to its real wheel, and every touched file compiles
    tools/series.py tree TAG DIR     the wheel's Python in DIR, patched
    tools/series.py checkout TAG     build/TAG: a git repository of the pin, one commit a patch
    tools/series.py start TAG FROM   the same for a pin that has no series yet: that of the pin FROM is merged into it
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
MERGED = "merged"  # in a started checkout: the last commit of FROM that was merged, or left to a hand
MORE = {"tree": " and a DIR", "start": " and a FROM"}


def attempt(folder: Path, *arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """git, of `folder` alone: a user's settings would change prefixes, line ends or the diff's algorithm."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=vllm-offload", "-c", "user.email=series@localhost", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, input=given, capture_output=True)


def git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    """What git says; its failure ends the program."""
    done = attempt(folder, *arguments, given=given)
    if done.returncode:
        sys.exit(f"{folder}: git {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def pin(tag: str) -> cli.Pin:
    entries = cli.releases()
    if tag not in entries:
        sys.exit(f"{tag} is not a pin; pins: {', '.join(entries)}")
    return cli.pin_for(entries[tag]["version"])


def download(folder: Path, *options: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """pip's download of a wheel into `folder`; `quiet`: its words are in the answer, not on the terminal."""
    fixed = ["-q", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "-d", str(folder)]  # CACHE has it already
    command = [sys.executable, "-m", "pip", "download", *fixed, *options]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE if quiet else None)


def wheel(tag: str) -> Path:
    """The pin's wheel, downloaded once; another file under its name is an error."""
    entry = cli.releases()[tag]
    path = CACHE / entry["wheel"]["file"]
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            requirement = Path(folder, "pin.txt")
            requirement.write_text(f"vllm=={entry['version']} --hash=sha256:{entry['wheel']['sha256']}\n")
            if download(Path(folder), "--require-hashes", "-r", str(requirement)).returncode:
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
    folder, part = prepare(tag)
    git(part, "init", "-q", "-b", "series")
    commit_release(tag, part)
    git(part, "tag", BASE)
    commit_series(tag, part)
    part.rename(folder)
    return folder


def start(tag: str, like: str) -> str:
    """build/TAG for a new pin: the patches of the pin `like`, each merged into it; goes on where it has stopped."""
    if (cli.PATCHES / tag / "series").exists():
        sys.exit(f"patches/{tag} has a series: tools/series.py checkout {tag}")
    folder = ROOT / "build" / tag
    if not started(tag):
        folder, part = prepare(tag)
        git(part, "init", "-q", "-b", like)
        commit_release(like, part)
        git(part, "tag", "old")
        git(part, "tag", MERGED)
        commit_series(like, part)
        git(part, "checkout", "-q", "-b", "series", "old")
        git(part, "rm", "-q", "-r", "vllm")
        for info in part.glob("*.dist-info"):
            shutil.rmtree(info)
        commit_release(tag, part)
        git(part, "tag", BASE)
        part.rename(folder)
    merge(folder, like)
    if stopped := conflicts(folder):
        mend = f"mend that, git add, git cherry-pick --continue, tools/series.py start {tag} {like} again"
        return f"{folder}: git stopped at {', '.join(stopped)}; {mend}"
    return f"{folder}: every patch merged; read each, then tools/series.py export {tag}"


def started(tag: str) -> bool:
    folder = ROOT / "build" / tag
    return (folder / ".git").is_dir() and not attempt(folder, "rev-parse", "-q", "--verify", MERGED).returncode


def merge(folder: Path, like: str) -> None:
    """The patches of `like` that were not tried yet: exactly if that fits, else by git, until it needs a hand."""
    if not conclude(folder):
        return
    commits = git(folder, "rev-list", "--reverse", f"old..{like}").decode().split()
    done = len(git(folder, "rev-list", f"old..{MERGED}").split())
    for commit, (name, text) in list(zip(commits, cli.read_series(cli.PATCHES / like)))[done:]:
        try:
            commit_patch(folder, name, text)
            git(folder, "tag", "-f", MERGED, commit)
        except cli.Refused:
            # With what both sides started from, so that a hand sees what each has changed.
            attempt(folder, "-c", "merge.conflictStyle=diff3", "cherry-pick", commit)
            git(folder, "tag", "-f", MERGED, commit)
            if not conclude(folder):
                return


def conclude(folder: Path) -> bool:
    """Finish the cherry-pick that has begun, if one has; false while it needs a hand."""
    if conflicts(folder):
        return False
    if not attempt(folder, "rev-parse", "-q", "--verify", "CHERRY_PICK_HEAD").returncode:
        git(folder, "add", "-A", "--", "vllm", ":(exclude)**/__pycache__/**")
        empty = not attempt(folder, "diff", "--cached", "--quiet").returncode  # the release has all of it already
        git(folder, "-c", "core.editor=true", "cherry-pick", "--skip" if empty else "--continue")
    return True


def conflicts(folder: Path) -> list[str]:
    """Files that git could not merge and no hand has: they have its markers, or one side has no such file."""
    stages: dict[str, set[str]] = {}
    for line in git(folder, "ls-files", "-u").decode().splitlines():
        about, _, path = line.partition("\t")
        stages.setdefault(path, set()).add(about.split()[2])
    marked = re.compile(rb"(?m)^(<<<<<<<|>>>>>>>) ")
    return [p for p, found in stages.items() if not {"2", "3"} <= found or marked.search((folder / p).read_bytes())]


def prepare(tag: str) -> tuple[Path, Path]:
    """(build/TAG, which must not be there; an empty folder to make it in)."""
    folder = ROOT / "build" / tag
    if folder.exists():
        sys.exit(f"{folder} exists: export what is in it, remove it, and check out again")
    part = folder.with_name(f".{tag}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return folder, part


def commit_release(tag: str, part: Path) -> None:
    unpack(tag, part)
    git(part, "add", "-f", "vllm")
    git(part, "commit", "-q", "-m", f"vllm {tag}, as its wheel has it")


def commit_series(tag: str, part: Path) -> None:
    for name, text in cli.read_series(cli.PATCHES / tag):
        commit_patch(part, name, text)


def commit_patch(part: Path, name: str, text: bytes) -> None:
    """One commit of what the patch does, exactly; a patch that does not fit changes nothing."""
    after = {}
    for path, creates, hunks in cli.parse_patch(name, text):
        file = part / path
        if creates and file.exists():
            raise cli.Refused(f"{name}: the release has a {path} of its own")
        after[path] = cli.apply_hunks(name, path, file.read_bytes() if file.exists() else b"", hunks)
    for path, data in after.items():
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        (part / path).write_bytes(data)
        git(part, "add", "-f", path)
    header = cli.FILE.split(text)[0].removeprefix(b"Subject: ")
    git(part, "commit", "-q", "-a", "--cleanup=verbatim", "-F", "-", given=header)


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
    parser.add_argument("command", choices=["fetch", "check", "tree", "checkout", "start", "export"])
    parser.add_argument("tag", nargs="?")
    parser.add_argument("more", nargs="?", metavar="DIR|FROM")
    a = parser.parse_args()
    if a.command == "fetch":
        for tag in cli.releases():
            print(f"{tag}: {wheel(tag)}")
    elif a.command == "check":
        for tag in [a.tag] if a.tag else cli.releases():
            check(tag)
    elif a.tag is None or (a.command in MORE and a.more is None):
        parser.error(f"{a.command} needs a TAG{MORE.get(a.command, '')}")
    elif a.command == "tree":
        folder = Path(a.more)
        if folder.exists() and any(folder.iterdir()) and not (folder / "vllm" / "__init__.py").is_file():
            sys.exit(f"{folder} holds something other than a vllm: it would be removed; give another folder")
        shutil.rmtree(folder, ignore_errors=True)
        unpack(a.tag, folder)
        print(cli.apply(folder.resolve(), pin(a.tag).entry["version"]))
    elif a.command == "start":
        print(start(a.tag, a.more))
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
