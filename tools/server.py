# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` for the demo and for tests: started, waited for, asked and always ended.

    with Server(python, model, log, "--enforce-eager") as server:
        answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 8})

Standard library only, so that it runs outside the environment that holds vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

Tick = Callable[[float, str], None]

# Nothing is fetched from a hub, nothing is reported anywhere, one GiB of KV cache is enough for a small model.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
}
# A setting left over in the caller's shell must not reach a run that is compared with another.
DROPPED = re.compile(r"EXPERT_OFFLOAD_|VLLM_|PYTHONPATH$|PYTHONHOME$")
# The last line of a traceback; vLLM's processes put a prefix before it.
ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|NothingMoved)(?:: .*|$))")

# A proxy that the environment names is for other hosts.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """The server did not start or did not answer; the text ends with what its log says."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def last_line(log: Path) -> str:
    """The last line of a log that says something, or nothing; cheap enough to be called again and again."""
    with contextlib.suppress(OSError), open(log, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - 4096))
        lines = re.split(r"[\r\n]+", f.read().decode(errors="replace"))
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def summary(log: Path, lines: int = 25) -> str:
    """The errors that a log names, then its tail: the cause often lies far above the last line."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    named = dict.fromkeys(found[1] for line in text if (found := ERROR.search(line)))
    out = [f"-- errors in {log}", *(f"  {line}" for line in list(named)[:6])] if named else []
    return "\n".join([*out, f"-- the last lines of {log}", *(f"  {line}" for line in text[-lines:])])


class Server:
    """`vllm serve MODEL` in a process group of its own, from entering the context until leaving it.

    Args:
        python: the interpreter of the environment in which vLLM is installed; its `vllm` lies beside it.
        model: folder of a checkpoint. Requests find it under the name "model".
        log: file that takes what the server prints.
        arguments: more of the command line.
        environment: variables to set beside ENVIRONMENT; what matches DROPPED is not inherited.
        deadline: seconds until /health must answer.
        tick: called about once a second while the server starts, with the seconds elapsed and its last words.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        deadline: float = 600,
        tick: Tick | None = None,
    ) -> None:
        self.log = log
        self.deadline = deadline
        self.tick = tick
        self.port = free_port()
        self.seconds = 0.0
        binaries = python.absolute().parent
        # The script is run by name of its interpreter: its own first line breaks when the folder is moved.
        self.command = [str(python.absolute()), str(binaries / "vllm"), "serve", str(model.absolute())]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model", *arguments]
        inherited = {k: v for k, v in os.environ.items() if not DROPPED.match(k)}
        path = f"{binaries}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        self.environment = inherited | ENVIRONMENT | {"PATH": path} | dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        """Start, and return when /health answers; raises ServerError, with nothing left running, when it does not."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,  # not where the caller is: a folder vllm/ there must not be taken for the package
                env=self.environment,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self) -> None:
        started = time.monotonic()
        while True:
            self.seconds = time.monotonic() - started
            if self._exited():
                raise ServerError(
                    f"the server ended after {self.seconds:.0f} s, before it was ready\n{summary(self.log)}"
                )
            with contextlib.suppress(OSError), _opener.open(self.url("/health"), timeout=2):
                return
            if self.seconds > self.deadline:
                raise ServerError(f"the server was not ready within {self.deadline:.0f} s\n{summary(self.log)}")
            if self.tick:
                self.tick(self.seconds, last_line(self.log))
            time.sleep(1)

    def _exited(self) -> bool:
        """Whether the server's first process has ended. It is not reaped, so its group can still be addressed."""
        assert self.process is not None
        if self.process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stop(self, patience: float = 30) -> None:
        """End the server politely, and whatever is left of its group after `patience` seconds or an interruption."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        try:
            process.terminate()
            until = time.monotonic() + patience
            while not self._exited() and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):  # `terminate` reaps a server that has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 300) -> dict[str, Any]:
        """The JSON answer to `body`, to which the model's name is added; ServerError when it isn't one."""
        data = json.dumps({"model": "model", **body}).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        try:
            with _opener.open(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:1000]
            raise ServerError(f"{path} answered {error.code}: {words}\n{summary(self.log)}") from error
        except (OSError, ValueError) as error:
            raise ServerError(f"{path} gave no answer: {error}\n{summary(self.log)}") from error

    def metrics(self) -> dict[str, float]:
        """The server's counters, each summed over its labels."""
        found: dict[str, float] = {}
        with _opener.open(self.url("/metrics"), timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if not line.startswith("#") and line:
                    name, value = line.split("{")[0].split(" ")[0], line.rpartition(" ")[2]
                    found[name] = found.get(name, 0) + float(value)
        return found

    def lines(self, containing: str) -> list[str]:
        """What the log has said from `containing` to the end of each line that has it, each text once."""
        text = self.log.read_text(errors="replace").splitlines()
        return list(dict.fromkeys(line[line.index(containing) :] for line in text if containing in line))
