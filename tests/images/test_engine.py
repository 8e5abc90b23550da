# SPDX-License-Identifier: Apache-2.0
"""What `.ci/engine.sh` says and does where it can have no engine: the script itself, with programs that fail."""

import subprocess
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / ".ci" / "engine.sh"
NO_ENGINE = "case $1 in info) exit 1 ;; buildx|compose) exit 0 ;; esac; exit 1"
NO_CONTAINER = (
    'case $1 in run) echo "OCI runtime create failed: no cgroups here" >&2; exit 125 ;; import) cat >/dev/null ;; esac'
)


@pytest.fixture
def engine(tmp_path):
    """Run the script with programs of these texts before the machine's own; `id -u` says who runs it."""

    def run(*arguments, user=0, **programs):
        for name, text in {"id": f"echo {user}", **programs}.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path)}
        command = ["bash", str(ENGINE), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)

    return run


CAUSES = {
    "only root can start one": dict(user=1000, docker=NO_ENGINE),
    "dockerd does not answer; its last words: failed to mount overlay": dict(
        docker=NO_ENGINE, dockerd='echo "failed to mount overlay: operation not permitted"; exit 1'
    ),
    "runs no container: OCI runtime create failed: no cgroups here": dict(docker=NO_CONTAINER),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_without_an_engine_it_says_why_and_an_optional_one_is_done_without(engine, cause):
    required = engine("echo", "ran", **CAUSES[cause])
    assert required.returncode == 1 and required.stdout == "" and cause in required.stderr, required.stderr
    optional = engine("--optional", "sh", "-c", 'echo "ran, $DOCKER_HOST"; exit 7', **CAUSES[cause])
    assert optional.returncode == 7, "the command's own status"
    assert optional.stdout == "ran, unix:///nonexistent/no-engine\n", "tests must not find an engine that runs nothing"
    assert cause in optional.stderr and "what needs an engine is skipped" in optional.stderr


def test_with_an_engine_that_runs_containers_the_command_gets_it(engine):
    done = engine(
        "sh",
        "-c",
        'echo "ran, $DOCKER_HOST"; exit 3',
        docker='case "$1 $2" in "import -" | "buildx build") cat >/dev/null ;; esac',
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "ran, \n", "")
