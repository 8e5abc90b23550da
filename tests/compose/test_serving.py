# SPDX-License-Identifier: Apache-2.0
"""The compose file as it stands, with a real engine: a real patched `vllm serve` in a container, from start to stop.

The `vllm` service's GPU reservation is granted by an engine that finds a stand-in for NVIDIA's hook (`hooks/`); what
serves in the container is the CPU backend, through the entrypoint and the doctor that every image has.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time

import pytest
from composing import Project
from docker.models.containers import Container

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

KEY = "key-of-the-test"
GREEDY = {"model": "tiny-moe", "max_tokens": 48, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPTS = ("In the beginning God created the ", "def __init__(self, ", "Return the number of ")
CHAT = {"messages": [{"role": "user", "content": "Who is the king of Israel?"}]}
MOVED = "24.00 MiB moved to host memory"


@pytest.fixture
def project(request):
    """Taken down at the end, whatever happened."""
    project = Project(API_KEY=KEY, **request.getfixturevalue(request.param) if hasattr(request, "param") else {})
    try:
        yield project
    finally:
        project("--profile", "*", "down", "-v", "-t", "10", check=False)


def start(project: Project, service: str, **variables: str) -> None:
    """Up and healthy, by compose's own word; what it said of itself on the way must be true."""
    project("up", "-d", service, **variables)
    assert "health: starting" in project.status(service)
    try:
        project("up", "-d", "--wait", "--wait-timeout", "240", service, **variables)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{project('logs', '--no-log-prefix', '--tail', '60', service)}") from None
    assert "(healthy)" in project.status(service)


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


def ended(project: Project, service: str) -> Container:
    """The container, once it has ended for good: two more attempts, then it stays down."""
    until = time.monotonic() + 180
    while "Exited" not in (status := project.status(service)) or project.container().attrs["RestartCount"] < 2:
        assert time.monotonic() < until, status
        time.sleep(1)
    time.sleep(5)
    container = project.container()
    assert (container.status, container.attrs["RestartCount"]) == ("exited", 2)
    return container


@pytest.mark.parametrize("project", ["gpu_service"], indirect=True)
def test_from_start_to_stop(project):
    """One container's life, since each start takes half a minute."""
    start(project, "vllm")
    log = project("logs", "--no-log-prefix", "vllm")
    assert MOVED in log

    # Nothing is open but the loopback port, and the key is in no command line.
    container = project.container()
    assert container.ports == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(project.port)}]}
    said = json.dumps([container.top(), container.attrs["Path"], container.attrs["Args"]])
    assert KEY not in said + log
    host = container.attrs["HostConfig"]
    assert container.attrs["Config"]["User"] == "2000:0" and host["CapDrop"] == ["ALL"]
    assert host["DeviceRequests"], "a GPU was asked for"

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
    project("exec", "vllm", "touch", "/cache/left-by-the-test")
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
    project("stop", "vllm")
    seconds = time.monotonic() - began
    client.join(30)
    assert not client.is_alive()
    state = project.container().attrs["State"]
    print(f"stopped in {seconds:.1f} s, exit status {state['ExitCode']}, {len(said)} lines; the last: {said[-1][:200]}")
    assert seconds < 55 and state["ExitCode"] in (0, 143) and not state["OOMKilled"], state
    assert said[-1] == "data: [DONE]", said[-1]
    assert "Exited" in project.status("vllm")

    # Up again, without offload: the volume is the same, and so are the tokens.
    start(project, "vllm", OFFLOAD_GB="0")
    project("exec", "vllm", "test", "-f", "/cache/left-by-the-test")
    assert "moved to host memory" not in project("logs", "--no-log-prefix", "--since", "60s", "vllm")
    assert tokens(project) == offloaded

    # The bench measures it.
    report = project("run", "--rm", "-T", "bench", BENCH_INPUT="64", BENCH_OUTPUT="16", BENCH_PROMPTS="2")
    print(report)
    assert "Mean TTFT (ms)" in report and "Failed requests:                         0" in report


@pytest.fixture
def cpu_service(image):
    return {"CPU_IMAGE": image}


@pytest.mark.parametrize("project", ["cpu_service"], indirect=True)
def test_the_demo_as_a_service(project):
    start(project, "cpu")
    assert MOVED in project("logs", "--no-log-prefix", "cpu")
    assert all(len(found) == 48 for found in tokens(project))


@pytest.mark.parametrize("project", ["gpu_service"], indirect=True)
def test_a_wrong_setting_does_not_loop(project):
    """Two more attempts, then it stays down, with the status that it ended with."""
    project("up", "-d", "vllm", EXTRA_ARGS="--no-such-flag")
    ended(project, "vllm")
    assert project.status("vllm").startswith("Exited (2)")
    assert "unrecognized arguments: --no-such-flag" in project("logs", "--no-log-prefix", "vllm")


@pytest.mark.parametrize("project", ["gpu_service"], indirect=True)
def test_too_little_memory_is_refused_with_figures(project):
    """The default model, before anything of it is there: what it needs is known, and what is free too."""
    asked = {"MODEL": "Sehyo/Qwen3.5-35B-A3B-NVFP4", "OFFLOAD_GB": "16", "MEMORY_LIMIT": "4g"}
    project("up", "-d", "vllm", **asked)
    container = ended(project, "vllm")
    assert container.attrs["HostConfig"]["Memory"] == 4 * 2**30 and not container.attrs["State"]["OOMKilled"]
    assert project.status("vllm").startswith("Exited (78)")
    log = project("logs", "--no-log-prefix", "vllm")
    assert log.count("FAIL plan") == 3 and log.count("entrypoint: not serving") == 3, log
    words = " ".join(log.replace("\x1b[2K", "").split())  # wrapped for a screen
    said = r"--cpu-offload-gb 16 .{,20} takes up to 1[678]\.\d\d GiB of host memory and 3\.\d\d GiB are free by"
    assert re.search(said, words), log
    assert re.search(r"What fits: raise .{,60} to \d+ GiB .{,40} MEMORY_LIMIT=\d+g with compose", words), log
    assert "Starting vLLM" not in log and "HTTP" not in log

    # Asked alone it says the same, in words and in JSON, and ends with a status of its own.
    said = project("run", "--rm", "-T", "vllm", "doctor", "--json", check=False, **asked)
    found = {line["name"]: line for line in json.loads(said[said.index("{") : said.rindex("}") + 1])["checks"]}
    assert found["plan"]["state"] == "FAIL" and "What fits: " in found["plan"]["step"], found["plan"]
