# SPDX-License-Identifier: Apache-2.0
"""Diffs of random files, as difflib and as git write them, and the developer's tool on a small pin."""

import io
import itertools
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import series_fakes as fakes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from series_fakes import MODULES, RELEASE, SERIES, Project, snapshot, unified

cli = fakes.load("vllm_offload", fakes.REPOSITORY / "vllm_offload.py")
series = fakes.load("series", fakes.REPOSITORY / "tools" / "series.py")

# -- diffs -----------------------------------------------------------------------------------------------------------
# Lines that look like parts of a diff, that are alike, and that hold what other tools take for the end of a line.
LINES = [
    b"",
    b"a",
    b"b",
    b"  a",
    b"- a",
    b"-- a/f.py",
    b"++ a",
    b"@@ -1 +1 @@",
    b"\\ No",
    b"\r",
    b"a\rb",
    b"\x0c",
    b"\xff",
]


@st.composite
def texts(draw: st.DrawFn, minimum: int = 0) -> bytes:
    lines = draw(st.lists(st.sampled_from(LINES), min_size=minimum, max_size=12))
    text = b"".join(line + b"\n" for line in lines)
    return text[:-1] if draw(st.booleans()) else text


@st.composite
def edited(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """(a file, the file after some edits, lines of context)"""
    old = draw(texts())
    lines = old.split(b"\n")
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(lines)))
        lines[place : place + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(LINES), max_size=2))
    new = b"\n".join(lines)
    assume(new != old)
    return old, new, draw(st.integers(0, 1))


def patch_of(diff: bytes) -> bytes:
    return b"Subject: an edit\n\nDescription: as @@ it +++ is --- said\n\n" + diff


def applied(patch: bytes, old: bytes) -> bytes:
    [(path, creates, hunks)] = cli.parse_patch("a.patch", patch)
    assert (path, creates) == ("f.py", False)
    return cli.apply_hunks("a.patch", path, old, hunks)


@settings(max_examples=400, deadline=None)
@given(edited())
def test_a_diff_gives_exactly_the_new_text(case: tuple[bytes, bytes, int]) -> None:
    old, new, context = case
    assert applied(patch_of(unified("f.py", old, new, context)), old) == new


@settings(max_examples=300, deadline=None)
@given(edited(), st.data())
def test_one_other_line_is_refused(case: tuple[bytes, bytes, int], data: st.DataObject) -> None:
    """In the file, where the patch says what must be there: another line, or one more before it."""
    old, new, context = case
    [(_, _, hunks)] = cli.parse_patch("a.patch", patch_of(unified("f.py", old, new, context)))
    covered = []
    for first, body in hunks:
        wanted = [line for line in body if line[:1] in b" -"]
        covered += range(first - 1, first - 1 + len(wanted))
    assume(covered)
    lines = list(io.BytesIO(old))
    place = data.draw(st.sampled_from(covered))
    line = lines[place]
    lines[place] = data.draw(st.sampled_from([b"another\n", line.rstrip(b"\n") + b" \n", b"another\n" + line]))
    with pytest.raises(cli.Refused, match=rf"(?s)hunk \d+ of f.py does not fit at line {place + 1}:"):
        cli.apply_hunks("a.patch", "f.py", b"".join(lines), hunks)


@settings(max_examples=200, deadline=None)
@given(edited(), st.data())
def test_a_patch_cut_short_is_refused(case: tuple[bytes, bytes, int], data: st.DataObject) -> None:
    """Except between two hunks: what is left there is a patch, and only the series' hash knows."""
    old, new, context = case
    patch = patch_of(unified("f.py", old, new, context))
    cut = data.draw(st.integers(0, len(patch) - 1))
    whole = patch[cut:].startswith(b"@@ ") and patch[:cut].endswith(b"\n") and patch[:cut].count(b"\n@@ ")
    marker = patch[cut:].startswith(b"\\ No newline")
    if not whole and not marker:
        with pytest.raises(cli.Refused, match=r"a\.patch: .*damaged"):
            cli.parse_patch("a.patch", patch[:cut])


def test_lines_behind_the_end_are_refused() -> None:
    """A hunk without context has only its number to go by."""
    for hunks in ([(3, [b"+c\n"])], [(1, [b"+c\n"]), (0, [b"+c\n"])]):
        with pytest.raises(cli.Refused, match="is out of order or behind the end"):
            cli.apply_hunks("a.patch", "f.py", b"a\nb\n", hunks)
    assert cli.apply_hunks("a.patch", "f.py", b"a\nb\n", [(2, [b"+c\n"])]) == b"a\nb\nc\n"


ENDS = [b"", b"a\n", b"a", b"a\nb\n", b"a\nb", b"a\r\nb\r\n", b"a\r\nb", b"a\nc", b"c\nb", b"\n", b"x\na\nb\ny\nz"]


@pytest.mark.parametrize("context", [0, 1])
def test_as_git_writes_it(tmp_path: Path, context: int) -> None:
    """Every pair of short files, with and without an end of their last lines."""
    for old, new in itertools.permutations(ENDS, 2):
        for side, text in (("a", old), ("b", new)):
            (tmp_path / side).mkdir(exist_ok=True)
            (tmp_path / side / "f.py").write_bytes(text)
        command = ["git", "diff", "--no-index", "--no-prefix", "--no-color", f"-U{context}", "a/f.py", "b/f.py"]
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        diff = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).stdout
        assert applied(patch_of(diff), old) == new, diff
        assert applied(patch_of(unified("f.py", old, new, context)), old) == new


# -- tools/series.py -------------------------------------------------------------------------------------------------
TAG = "v1.2.3"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Its pin's wheel is in the cache, and has the sha256 that the pin names: nothing is downloaded."""
    project = Project(tmp_path, None)
    project.pin("1.2.3", SERIES)
    cache = tmp_path / "wheels"
    cache.mkdir()
    with zipfile.ZipFile(cache / "vllm.whl", "w") as wheel:
        for path, data in RELEASE.items():
            wheel.writestr(path, data)
        wheel.writestr("vllm/kernels.so", b"not Python")
        wheel.writestr("vllm-1.2.3.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n")
    digest = cli.sha256((cache / "vllm.whl").read_bytes())
    with open(project.patches / "releases.toml", "a") as pins:
        pins.write(f'# kept\n["{TAG}".wheel]\nfile = "vllm.whl"\nsha256 = "{digest}"\n')
    settings = tmp_path / "gitconfig"  # what a user may have, and what must not show in a patch
    settings.write_text(
        "[diff]\nnoprefix = true\nalgorithm = patience\n[core]\nautocrlf = true\n[commit]\ngpgsign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setattr(cli, "HERE", project.here)
    monkeypatch.setattr(cli, "PATCHES", project.patches)
    monkeypatch.setattr(series, "ROOT", project.here)
    monkeypatch.setattr(series, "CACHE", cache)
    yield project


def commit(folder: Path, message: str, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        series.git(folder, "add", path)
    series.git(folder, "commit", "-q", "-m", message)


def test_checkout_and_export_give_the_same_series(project: Project) -> None:
    def exported() -> dict:
        assert series.export(TAG) == ["0001-change-the-config.patch", "0002-change-the-rest.patch"]
        return snapshot(project.patches)

    before = snapshot(project.patches)
    folder = series.checkout(TAG)
    assert folder == project.here / "build" / TAG and not (folder / "vllm/kernels.so").exists()
    for path, data in (RELEASE | SERIES[0][1] | SERIES[1][1]).items():
        assert (folder / path).read_bytes() == data
    assert series.git(folder, "log", "--format=%s").decode().split("\n")[:2] == [s for s, _ in reversed(SERIES)]
    first = exported()
    assert first[f"{TAG}/series"][1] == b"0001-change-the-config.patch\n0002-change-the-rest.patch\n"
    for name, (mode, text) in before.items():
        if name != f"{TAG}/series":  # git names the place behind a hunk's header, difflib does not
            assert first[name] == (mode, text) or re.sub(rb"(?m)^(@@ .* @@).+", rb"\1", first[name][1]) == text
    shutil.rmtree(folder)
    series.checkout(TAG)
    assert exported() == first


def test_export_of_more_commits(project: Project, tmp_path: Path) -> None:
    folder = series.checkout(TAG)
    windows = b"a = 1\r\nb = 2\r\n"
    files = {"vllm/untouched.py": b"untouched = False", "vllm/windows.py": windows}
    commit(folder, "Touch: it, (now)!\n\nDescription: why\n two lines", files)
    assert series.export(TAG)[2] == "0003-touch-it-now.patch"
    text = (project.patches / TAG / "0003-touch-it-now.patch").read_text()
    assert text.startswith("Subject: Touch: it, (now)!\n\nDescription: why\n two lines\n\n--- a/vllm/untouched.py\n")
    hashes = cli.releases()[TAG]["files"]
    assert hashes["vllm/untouched.py"] == cli.sha256(RELEASE["vllm/untouched.py"])
    assert not hashes.keys() - RELEASE.keys()
    assert "# kept\n" in (project.patches / "releases.toml").read_text()
    series.check(TAG)
    tree = tmp_path / "tree"
    series.unpack(TAG, tree)
    assert cli.main(["apply", "--tree", str(tree)]) == 0
    assert (tree / "vllm/windows.py").read_bytes() == windows
    assert (tree / "vllm/expert_offload/host.py").read_bytes() == MODULES["host.py"]


def test_export_for_a_new_pin(project: Project) -> None:
    """Neither its table of hashes nor its folder is there yet."""
    pins = project.patches / "releases.toml"
    start = pins.read_text().index(f'["{TAG}".files]')
    pins.write_text(pins.read_text()[:start] + pins.read_text()[pins.read_text().index("# kept") :])
    shutil.rmtree(project.patches / TAG)
    commit(series.checkout(TAG), "Only", {"vllm/config.py": b"config = 1\n"})
    series.export(TAG)
    assert cli.releases()[TAG]["files"] == {"vllm/config.py": cli.sha256(RELEASE["vllm/config.py"])}


LOST = {
    "uncommitted": "has changes that are not committed",
    "untracked": "has changes that are not committed",
    "empty": "Add a package: a series can't say what happens to vllm/package/__init__.py",
    "removed": "Remove a file: a series can't say what happens to vllm/untouched.py",
}


@pytest.mark.parametrize("change, found", LOST.items())
def test_export_refuses_what_a_series_cannot_say(project: Project, change: str, found: str) -> None:
    """And keeps every patch that is there."""
    folder = series.checkout(TAG)
    before = snapshot(project.patches)
    if change == "uncommitted":
        (folder / "vllm/untouched.py").write_bytes(b"untouched = 2\n")
    elif change == "untracked":
        (folder / "vllm/fresh.py").write_bytes(b"fresh = 2\n")
    elif change == "empty":
        commit(folder, "Add a package", {"vllm/package/__init__.py": b"", "vllm/untouched.py": b"untouched = 2\n"})
    else:
        series.git(folder, "rm", "-q", "vllm/untouched.py")
        series.git(folder, "commit", "-q", "-m", "Remove a file")
    with pytest.raises(SystemExit, match=re.escape(found)):
        series.export(TAG)
    assert snapshot(project.patches) == before


def test_checkout_of_a_stale_series_leaves_nothing(project: Project) -> None:
    """An export of half a series would remove the other half."""
    project.edit_patch(b"-value_3 = 3\n", b"-value_3 = 4\n")
    with pytest.raises(cli.Refused, match=r"hunk 1 of vllm/config\.py does not fit at line 4"):
        series.checkout(TAG)
    assert not (project.here / "build" / TAG).exists()
    project.edit_patch(b"-value_3 = 4\n", b"-value_3 = 3\n")
    series.checkout(TAG)
    with pytest.raises(SystemExit, match="exists: export what is in it"):
        series.checkout(TAG)


def test_another_wheel(project: Project) -> None:
    (series.CACHE / "vllm.whl").write_bytes(b"something else")
    with pytest.raises(SystemExit, match=rf"has sha256 {cli.sha256(b'something else')}.*remove it and fetch again"):
        series.check(TAG)


def test_tree_removes_no_folder_of_another_kind(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["series.py", "tree", TAG, str(tmp_path)])
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit, match="holds something other than a vllm"):
        series.main()
    assert snapshot(tmp_path) == before
    for _ in range(2):  # the second replaces the first
        monkeypatch.setattr("sys.argv", ["series.py", "tree", TAG, str(tmp_path / "tree")])
        series.main()
        assert (tmp_path / "tree/vllm/adapter.py").is_file()
