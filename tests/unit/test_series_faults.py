# SPDX-License-Identifier: Apache-2.0
"""vllm_offload.py stopped at every step by a kill or an error: the tree is always one command from either end.

A child process runs the real program and dies, or gets its error, before the Nth thing that changes the disk.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series_fakes import JOURNAL, SERIES, Project, Server, copy, snapshot

KILLED = -9


@dataclass
class Ends:
    """A project, its tree in both states, and the steps that lead from one to the other."""

    project: Project
    clean: Path
    patched: Path
    apply_steps: list[list[str]]
    revert_steps: list[list[str]]

    def __post_init__(self) -> None:
        self.original, self.final = snapshot(self.clean), snapshot(self.patched, journal=False)

    def is_clean(self, tree: Path) -> bool:
        return snapshot(tree) == self.original

    def is_patched(self, tree: Path) -> bool:
        return snapshot(tree, journal=False) == self.final


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    memory = "/dev/shm"  # thousands of small files come and go
    server = Server()
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        project = Project(Path(folder), server)
        project.pin("1.2.3", SERIES)
        clean, patched = project.tree("clean"), project.tree("patched")
        applied = project.run("apply", patched)
        reverted = project.run("revert", copy(patched, "reverted"))
        assert (applied.code, reverted.code) == (0, 0)
        yield Ends(project, clean, patched, applied.steps, reverted.steps)
    server.close()


def test_the_disk_has_it_before_the_next_step(ends: Ends) -> None:
    """Each file is on the disk before its rename and each rename before the next; state.json before and after all."""
    for steps, states in ((ends.apply_steps, 2), (ends.revert_steps, 1)):
        renames = [i for i, (what, _) in enumerate(steps) if what == "os.rename"]
        for i in renames:
            path = Path(steps[i][1])
            assert steps[i - 1] == ["fsync", str(path)]
            assert steps[i + 1] == ["fsync", str(path.parent)]
        in_tree = [i for i in renames if JOURNAL not in steps[i][1]]
        state = [i for i in renames if "state.json" in steps[i][1]]
        assert in_tree and len(state) == states and state[0] < in_tree[0]
        if states == 2:
            assert state[1] > in_tree[-1]
    for made in (JOURNAL, "vllm/expert_offload"):  # and a new folder's own name, before it is relied on
        later = ends.apply_steps[ends.apply_steps.index(["os.mkdir", str(ends.patched / made)]) :]
        synced = later.index(["fsync", str(ends.patched / "vllm")])
        last = "state.json" if made == JOURNAL else "__init__.py"
        assert synced < next(k for k, (what, path) in enumerate(later) if what == "os.rename" and last in path)
    gone = [
        i for i, (what, path) in enumerate(ends.revert_steps) if what == "os.remove" and path.endswith("state.json")
    ]
    last = max(
        i for i, (what, path) in enumerate(ends.revert_steps) if what == "os.rename" or path.endswith("added.py")
    )
    assert last < gone[0] and ends.revert_steps[gone[0] + 1][0] == "fsync"


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_killed_at_every_step(ends: Ends, command: str) -> None:
    start, steps = (ends.clean, ends.apply_steps) if command == "apply" else (ends.patched, ends.revert_steps)
    seen = set()
    for step, (what, path) in enumerate(steps, 1):
        if what in ("fsync", "os.chmod"):
            continue  # a process that dies leaves the same files before as after it
        tree = copy(start, "killed")
        assert ends.project.run(command, tree, kind="kill", at=step).code == KILLED
        status = ends.project.run("status", tree)
        word = status.text.split()[0]
        seen.add(word)
        now = snapshot(tree, journal=False)
        assert {"clean:": now == ends.original, "patched:": now == ends.final, "interrupted": True}[word], (what, path)
        assert status.code == (word == "interrupted")

        onward = copy(tree, "onward")
        assert ends.project.run("apply", onward).code == 0, (what, path)
        assert ends.is_patched(onward)
        assert json.loads((onward / JOURNAL / "state.json").read_bytes())["state"] == "applied"

        assert ends.project.run("revert", tree).code == 0, (what, path)
        assert ends.is_clean(tree)
    assert seen == {"clean:", "interrupted", "patched:"} - ({"patched:"} if command == "apply" else set())
    assert ends.project.run(command, copy(start, "killed"), kind="kill", at=len(steps) + 1).code == 0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["apply", "revert"]), st.integers(1, 250)), min_size=2, max_size=5))
def test_killed_again_on_the_way_out(ends: Ends, kills: list[tuple[str, int]]) -> None:
    tree = copy(ends.clean, "killed")
    for command, step in kills:
        assert ends.project.run(command, tree, kind="kill", at=step).code in (KILLED, 0)
    assert ends.project.run("apply", copy(tree, "onward")).code == 0
    assert ends.is_patched(tree.with_name("onward"))
    assert ends.project.run("revert", tree).code == 0
    assert ends.is_clean(tree)


def error_at(what: str) -> tuple[str, str]:
    """(fault, the words of its error) that fit the step: a full disk stops what needs room, a broken one the rest."""
    if what in ("open", "write", "os.mkdir", "os.rename", "fsync"):
        return "full", "No space left on device"
    return "io", "Input/output error"


def test_an_error_at_every_step_of_apply(ends: Ends) -> None:
    refusals = 0
    for step, (what, path) in enumerate(ends.apply_steps, 1):
        tree = copy(ends.clean, "failed")
        kind, words = error_at(what)
        result = ends.project.run("apply", tree, kind=kind, at=step)
        if result.code == 0:  # not every file system can sync a folder, and a folder that is there need not be made
            assert what in ("fsync", "os.mkdir") and Path(path).is_dir() and ends.is_patched(tree)
            continue
        refusals += 1
        assert result.code == 1 and words in result.text, result
        assert "Every file has its original bytes. Mend that and apply again" in result.text
        assert ends.is_clean(tree), (step, what, path)
    assert refusals > 80


def test_an_error_at_every_step_of_revert(ends: Ends) -> None:
    """It says so, and may be repeated, or taken back by apply."""
    refusals = 0
    for step, (what, path) in enumerate(ends.revert_steps, 1):
        tree = copy(ends.patched, "failed")
        kind, words = error_at(what)
        result = ends.project.run("revert", tree, kind=kind, at=step)
        if result.code:
            refusals += 1
            assert result.code == 1 and words in result.text and "run apply to finish or revert to undo" in result.text
            onward = copy(tree, "onward")
            assert ends.project.run("apply", onward).code == 0, (step, what, path)
            assert ends.is_patched(onward)
            assert ends.project.run("revert", tree).code == 0, (step, what, path)
        assert ends.is_clean(tree), (step, what, path)
    assert refusals > 40


def test_a_full_disk(ends: Ends) -> None:
    """A disk that is full stays full: the way back must fit into what was set aside before the first change."""
    needed = ends.project.run("apply", copy(ends.clean, "full"), kind="full", room=10**9).peak
    lying = sum(len(data or b"") for _, data in snapshot(ends.clean).values())
    states = set()
    for room in [*range(lying, needed - 20000, 10000), *range(needed - 20000, needed, 500), needed - 1]:
        tree = copy(ends.clean, "full")
        result = ends.project.run("apply", tree, kind="full", room=room)
        assert result.code == 1 and "No space left on device" in result.text, (room, needed, result)
        assert "Every file has its original bytes. Mend that and apply again" in result.text
        assert ends.is_clean(tree)
        states.add(any(what == "os.rename" and JOURNAL not in path for what, path in result.steps))
    assert states == {True, False}  # full before the first change and after it
    assert ends.project.run("apply", copy(ends.clean, "full"), kind="full", room=needed).code == 0
    tree = copy(ends.patched, "full")
    lying = sum(len(data or b"") for _, data in snapshot(tree).values())
    assert ends.project.run("revert", tree, kind="full", room=lying).code == 0
    assert ends.is_clean(tree)


@pytest.mark.parametrize(
    "where", [r"/vllm$|/vllm/[^/]*$", "/vllm/worker", "/vllm/new", "/expert_offload", r"\.config\.py"]
)
def test_folders_that_may_not_be_written(ends: Ends, where: str) -> None:
    """As root, as in an image, permissions stop nobody: the error is given instead."""
    tree = copy(ends.clean, "denied")
    result = ends.project.run("apply", tree, kind="denied", where=where)
    assert result.code == 1 and "Permission denied" in result.text
    assert "Every file has its original bytes. Mend that and apply again" in result.text
    assert ends.is_clean(tree)


def test_where_undoing_fails_too(ends: Ends) -> None:
    """A folder that turns read-only in between: both errors are told, and later either command gets through."""
    tree = copy(ends.clean, "denied")
    first = next(i for i, (what, path) in enumerate(ends.apply_steps, 1) if what == "os.rename" and "last.py" in path)
    assert ends.project.run("apply", tree, kind="kill", at=first + 1).code == KILLED
    result = ends.project.run("apply", tree, kind="denied", where=r"/vllm/[^/]*/|/vllm/\.")
    assert result.code == 1 and "and undoing failed too: [Errno 13]" in result.text
    assert "run apply to finish or revert to undo" in result.text
    assert ends.project.run("status", tree).text.startswith("interrupted while applying")
    assert ends.project.run("apply", copy(tree, "onward")).code == 0
    assert ends.is_patched(tree.with_name("onward"))
    assert ends.project.run("revert", tree).code == 0
    assert ends.is_clean(tree)
