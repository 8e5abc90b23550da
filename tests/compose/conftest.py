# SPDX-License-Identifier: Apache-2.0
"""What the compose tests need of this machine, or a skip that says what is missing."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import docker as sdk
import pytest
from composing import ROOT, client, docker


@pytest.fixture(scope="session")
def compose_found() -> None:
    try:
        found = docker("compose", "version", "--short", check=False)
    except FileNotFoundError:
        pytest.skip("docker is not on the PATH")
    if found.returncode:
        pytest.skip("docker has no compose plugin (Debian: apt-get install docker-compose)")


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
    python = envs.make("v0.32.0")
    envs.patch(python)  # now, so that nobody does it while it is copied
    environment = python.parent.parent / "lib" / envs.PYTHON
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
