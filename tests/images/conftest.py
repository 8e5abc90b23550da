# SPDX-License-Identifier: Apache-2.0
"""Bases for the image tests: made once a session from the wheels in the cache, removed with what was built on them."""

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent)]
import standin  # noqa: E402
from standin import NAME, PINS  # noqa: E402

WHEELS = Path.home() / ".cache" / "vllm-offload" / "wheels"


class Built:
    """What tools/images.py did: its words, the image, and which steps of the Dockerfile came from the cache."""

    def __init__(self, image, done):
        self.image, self.rc, self.said = image, done.returncode, done.stdout

    def steps(self):
        """{instruction: whether it was cached}, in order; the base, which no step makes, left out."""
        cached = set(re.findall(r"(?m)^#(\d+) CACHED$", self.said))
        found = re.findall(r"(?m)^#(\d+) \[[^]]*\d+/\d+\] (.*)$", self.said)
        return {text: number in cached for number, text in found if not text.startswith("FROM ")}

    def run(self, *command, user=None):
        """What a command prints in a container of the image, without a network."""
        who = ["--user", user] if user else []
        return standin.docker("run", "--rm", "--network=none", *who, self.image, *command)

    def layers(self):
        return standin.config(self.image)["RootFS"]["Layers"]


@pytest.fixture(scope="session")
def engine():
    """Skips where no engine with buildx answers; leaves no image of these tests behind."""
    if not shutil.which("docker"):
        pytest.skip("no docker here: .ci/engine.sh installs one (make test-images)")
    for command, what in ((["info"], "no Docker engine answers"), (["buildx", "version"], "docker has no buildx")):
        done = subprocess.run(["docker", *command], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{what}: {(done.stderr.strip().splitlines() or ['?'])[-1]} (make test-images starts one)")
    if not shutil.which("dpkg"):
        pytest.skip("the stand-in of the base image is made of Debian's own packages: no dpkg here")
    yield
    # The system below the bases has no such label and stays for the next session.
    with contextlib.suppress(RuntimeError):
        standin.docker("image", "prune", "--all", "--force", "--filter", f"label={standin.OURS}")


@pytest.fixture(scope="session")
def base(engine):
    """The stand-in of a pin's official image, by the pin's tag."""
    made = {}

    def make(tag):
        if tag not in made:
            wheel = WHEELS / PINS[tag]["wheel"]["file"]
            if not wheel.is_file():
                pytest.skip(f"{wheel} is not there: make fetch")
            made[tag] = f"{NAME}/base:{tag}"
            standin.make(made[tag], f"{NAME}/system:latest", wheel)
        return made[tag]

    return make


@pytest.fixture
def build(engine):
    """Build by the tool, without a network for any step."""

    def run(release, variant, base, tree=ROOT, name=NAME, more=()):
        command = [sys.executable, tree / "tools" / "images.py", "build", "--release", release, "--variant", variant]
        command += ["--base", base, "--name", name, "--", "--network=none", "--progress=plain", *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return Built(f"{name}:{release}-{variant}", done)

    return run


@pytest.fixture
def checkout(tmp_path):
    """A clone of the working tree as it is, with the settings of git that are given."""

    def clone(*settings):
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE
        ).stdout.decode()
        source, target = tmp_path / "source", tmp_path / "clone"
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / name)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "as it is"]):
            subprocess.run([*git, *command], cwd=source, check=True)
        options = [part for setting in settings for part in ("-c", setting)]
        subprocess.run([*git, *options, "clone", "-q", *options, source, target], check=True)
        return target

    return clone
