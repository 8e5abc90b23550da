# SPDX-License-Identifier: Apache-2.0
"""The compose file as `docker compose` understands it, and a project of it that is always taken down."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker as sdk
import pytest
from docker.models.containers import Container

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
PLAIN = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR")


def docker(*arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run docker with `variables` as the only settings: what the caller's shell has set must not count."""
    environment = {k: v for k in PLAIN if (v := os.environ.get(k)) is not None} | variables
    done = subprocess.run(["docker", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


@pytest.fixture(scope="session")
def compose_found() -> None:
    try:
        found = docker("compose", "version", "--short", check=False)
    except FileNotFoundError:
        pytest.skip("docker is not on the PATH")
    if found.returncode:
        pytest.skip("docker has no compose plugin (Debian: apt-get install docker-compose)")


def client() -> sdk.DockerClient:
    """The engine that `docker` would ask."""
    return sdk.from_env()


@pytest.fixture(scope="session")
def engine(compose_found) -> None:
    try:
        client().ping()
    except sdk.errors.DockerException:
        pytest.skip("no Docker engine answers: start one to run these tests (make test-images)")


@pytest.fixture(scope="session")
def image(engine) -> str:
    """The CPU image: real vLLM, patched.

    Built on a base made of this machine, with the tests' environment of the pin for its own, so that neither a registry
    nor gigabytes of packages are asked for. VLLM_OFFLOAD_CPU_IMAGE names one that is there already.
    """
    if named := os.environ.get("VLLM_OFFLOAD_CPU_IMAGE"):
        return named
    debian = Path("/etc/debian_version")
    if not debian.exists() or debian.read_text().split(".")[0] != "12":
        pytest.skip("the base's stand-in is made of a Debian 12: build docker/cpu, name it in VLLM_OFFLOAD_CPU_IMAGE")
    import envs

    base, tag = "vllm-offload-test/bookworm:latest", "vllm-offload-test/cpu:v0.32.0"
    environment = envs.make("v0.32.0").parent.parent / "lib" / envs.PYTHON
    envs.run(ROOT / "tests" / "compose" / "base.sh", base)
    given = ("--build-arg", f"BASE={base}", "--build-context", f"environment={environment}")
    docker("buildx", "build", "--load", "-f", "docker/cpu/Dockerfile", *given, "-t", tag, ".")
    return tag


@pytest.fixture(scope="session")
def gpu_service(image) -> dict[str, str]:
    """Settings with which the `vllm` service, as it stands, starts on a machine without a GPU."""
    gpus = sdk.types.DeviceRequest(driver="nvidia", count=-1, capabilities=[["gpu"]])
    try:
        client().containers.run(image, entrypoint="true", remove=True, device_requests=[gpus])
    except sdk.errors.APIError as why:
        pytest.skip(f"the engine grants no GPU ({why.explanation}): start dockerd with tests/compose/hooks on its PATH")
    settings = {"IMAGE": image, "MODEL": "/models/tiny-moe", "SERVED_NAME": "tiny-moe", "MAX_MODEL_LEN": "1024"}
    settings |= {"OFFLOAD_GB": "1", "MODEL_ARGS": "--enforce-eager"}
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # An engine without CAP_SYS_RESOURCE cannot lift its own limit.
    return settings if hard == resource.RLIM_INFINITY else settings | {"MEMLOCK": str(hard)}


@pytest.fixture(scope="session")
def config(compose_found, tmp_path_factory):
    """config(*files, **variables) -> the whole file as compose resolves it. Nobody's own .env is read."""
    empty = tmp_path_factory.mktemp("env") / "empty.env"
    empty.touch()

    def resolve(*files: Path, **variables: str) -> dict[str, Any]:
        given = [word for file in files or (empty,) for word in ("--env-file", str(file))]
        return json.loads(docker("compose", *given, "--profile", "*", "config", "--format", "json", **variables).stdout)

    return resolve


class Project:
    """A compose project with a name and a port of its own."""

    def __init__(self, **variables: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.name = f"vllm-offload-test-{os.getpid()}"
        self.variables = {"PORT": str(self.port), **variables}

    def __call__(self, *arguments: str, check: bool = True, **variables: str) -> str:
        line = ("compose", "--env-file", os.devnull, "-p", self.name, *arguments)
        done = docker(*line, check=check, **{**self.variables, **variables})
        return done.stdout + done.stderr

    def container(self) -> Container:
        """The project's one container, as the engine sees it now."""
        found = client().containers.list(all=True, filters={"label": f"com.docker.compose.project={self.name}"})
        assert len(found) == 1, found
        return found[0]

    def status(self, service: str) -> str:
        """As `docker compose ps -a` shows it."""
        return self("ps", "-a", "--format", "{{.Status}}", service).strip()

    @contextlib.contextmanager
    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, key: str = ""
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, data, headers)
            yield connection.getresponse()
