# SPDX-License-Identifier: Apache-2.0
"""The compose file as `docker compose` understands it, and a project of it with a name and a port of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker as sdk
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


def client() -> sdk.DockerClient:
    """The engine that `docker` would ask."""
    return sdk.from_env()


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
