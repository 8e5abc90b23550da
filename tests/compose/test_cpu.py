# SPDX-License-Identifier: Apache-2.0
"""The compose file's `cpu` service with a real engine: a real patched `vllm serve` in a container, from start to stop.

The image is built from docker/cpu/Dockerfile on a base made of this machine, with the tests' environment of the pin for
its environment, so that neither a registry nor gigabytes of packages are asked for. VLLM_OFFLOAD_CPU_IMAGE names an
image that is there already.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from pathlib import Path

import envs
import pytest
from conftest import ROOT, Project, docker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

KEY = "key-of-the-test"
GREEDY = {"model": "tiny-moe", "max_tokens": 48, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPTS = ("In the beginning God created the ", "def __init__(self, ", "Return the number of ")
CHAT = {"messages": [{"role": "user", "content": "Who is the king of Israel?"}]}


@pytest.fixture(scope="session")
def image(engine) -> str:
    if named := os.environ.get("VLLM_OFFLOAD_CPU_IMAGE"):
        return named
    if Path("/etc/debian_version").read_text().split(".")[0] != "12":
        pytest.skip("the base's stand-in is made of a Debian 12: build docker/cpu, name it in VLLM_OFFLOAD_CPU_IMAGE")
    base, tag = "vllm-offload-test/bookworm:latest", "vllm-offload-test/cpu:v0.32.0"
    environment = envs.make("v0.32.0").parent.parent / "lib" / envs.PYTHON
    envs.run(ROOT / "tests" / "compose" / "base.sh", base)
    line = (
        "-f",
        "docker/cpu/Dockerfile",
        "--build-arg",
        f"BASE={base}",
        "--build-context",
        f"environment={environment}",
    )
    docker("buildx", "build", "--load", *line, "-t", tag, ".")
    return tag


@pytest.fixture(scope="module")
def project(image):
    project = Project(CPU_IMAGE=image, API_KEY=KEY)
    try:
        yield project
    finally:
        project("--profile", "*", "down", "-v", "-t", "10", check=False)


def start(project: Project, **variables: str) -> None:
    """Up and healthy, by compose's own word; what it said of itself on the way must be true."""
    project("up", "-d", "cpu", **variables)
    assert "health: starting" in project.status("cpu")
    try:
        project("up", "-d", "--wait", "--wait-timeout", "240", "cpu", **variables)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{project('logs', '--no-log-prefix', '--tail', '60', 'cpu')}") from None
    assert "(healthy)" in project.status("cpu")


def tokens(project: Project) -> list[list[int]]:
    """Greedy token ids of the prompts and of a chat."""
    found = []
    for path, body in [*(("/v1/completions", {"prompt": p}) for p in PROMPTS), ("/v1/chat/completions", CHAT)]:
        with project.ask(path, {**GREEDY, **body}, KEY) as answer:
            assert answer.status == 200, answer.read()
            found.append(json.load(answer)["choices"][0]["token_ids"])
    return found


def events(answer: http.client.HTTPResponse) -> list[str]:
    """What follows `data: ` in each event, to the end of the stream."""
    return [line[6:].decode().strip() for line in answer if line.startswith(b"data: ")]


def test_from_start_to_stop(project):
    """One container's life, since each start takes half a minute."""
    start(project)
    log = project("logs", "--no-log-prefix", "cpu")
    assert "24.00 MiB moved to host memory" in log

    # Nothing is open but the loopback port, and the key is in no command line.
    container = project.container()
    assert container["NetworkSettings"]["Ports"] == {
        "8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(project.port)}]
    }
    assert KEY not in project("top", "cpu") + json.dumps([container["Path"], container["Args"]]) + log
    assert container["Config"]["User"] == "2000:0" and container["HostConfig"]["CapDrop"] == ["ALL"]

    # The key counts.
    for key in ("", "wrong"):
        with project.ask("/v1/models", key=key) as answer:
            assert answer.status == 401
    with project.ask("/v1/models", key=KEY) as answer:
        assert [m["id"] for m in json.load(answer)["data"]] == ["tiny-moe"]

    # A chat, streamed, says what it says in one piece; experts in the other memory or not, tokens are the same.
    offloaded = tokens(project)
    assert all(len(found) == 48 for found in offloaded)
    with project.ask("/v1/chat/completions", {**GREEDY, **CHAT, "stream": True}, KEY) as answer:
        *chunks, last = events(answer)
    pieces = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert last == "[DONE]" and len(pieces) > 10
    assert [t for piece in pieces for t in piece.get("token_ids") or []] == offloaded[-1]

    # Stopped under load: the request ends, whole or with a word, and nothing has to be killed.
    project("exec", "cpu", "touch", "/cache/left-by-the-test")
    said: list[str] = []

    def long_request() -> None:
        body = {**GREEDY, "prompt": PROMPTS[0], "max_tokens": 900, "stream": True}
        with project.ask("/v1/completions", body, KEY) as answer:
            said.append(str(answer.status))
            said.extend(line.decode().strip() for line in answer if line.strip())

    client = threading.Thread(target=long_request)
    client.start()
    until = time.monotonic() + 30
    while len(said) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert 5 <= len(said) < 900, "the request runs"
    began = time.monotonic()
    project("stop", "cpu")
    seconds = time.monotonic() - began
    client.join(30)
    assert not client.is_alive()
    state = project.container()["State"]
    print(f"stopped in {seconds:.1f} s, exit status {state['ExitCode']}, {len(said)} lines; the last: {said[-1][:200]}")
    assert seconds < 55 and state["ExitCode"] in (0, 143) and not state["OOMKilled"], state
    assert said[-1] == "data: [DONE]", said[-1]
    assert "Exited" in project.status("cpu")

    # Up again, without offload: the volume is the same, and so are the tokens.
    start(project, CPU_OFFLOAD_GB="0")
    project("exec", "cpu", "test", "-f", "/cache/left-by-the-test")
    assert "moved to host memory" not in project("logs", "--no-log-prefix", "--since", "60s", "cpu")
    assert tokens(project) == offloaded

    # The bench measures it.
    bench = {"IMAGE": project.variables["CPU_IMAGE"], "MODEL": "/models/tiny-moe", "SERVED_NAME": "tiny-moe"}
    bench |= {"BENCH_URL": "http://cpu:8000", "BENCH_INPUT": "64", "BENCH_OUTPUT": "16", "BENCH_PROMPTS": "2"}
    report = project("run", "--rm", "-T", "bench", **bench)
    print(report)
    assert "Mean TTFT (ms)" in report and "Failed requests:                         0" in report
    project("down", "-t", "30")


def test_a_wrong_setting_does_not_loop(project):
    """Two more attempts, then it stays down, with the status that it ended with."""
    project("up", "-d", "cpu", EXTRA_ARGS="--no-such-flag")
    until = time.monotonic() + 180
    while "Exited" not in (status := project.status("cpu")) or project.container()["RestartCount"] < 2:
        assert time.monotonic() < until, status
        time.sleep(1)
    time.sleep(5)
    container = project.container()
    assert (container["State"]["Status"], container["RestartCount"]) == ("exited", 2)
    assert project.status("cpu").startswith("Exited (2)")
    assert "unrecognized arguments: --no-such-flag" in project("logs", "--no-log-prefix", "cpu")
