#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peak of the host memory that a command and everything it started hold together, from its start until a line or its
end; with --memory in a control group of so many GiB, where the OOM killer ends what takes more.

    python3 bench/host_peak.py --until '^READY$' --out peak.json -- python3 bench/load.py --model qwen35-2304 ...
    python3 bench/host_peak.py --memory 96 --case "glm53 in 96 GiB" -- vllm serve MODEL

What is counted, in bytes, every 50 ms or as fast as it goes:

    Pss     the kernel's share-out (smaps_rollup): a page that three processes map counts a third in each. Exact, but
            the kernel walks every page for it: with 100 GiB locked it takes seconds and holds the process up. After two
            samples over 100 ms, one after the other, it is left out for the rest of the run; `pss_until` says when.
    Rss     RssAnon + RssShmem + RssFile of /proc/PID/status: costs nothing, always taken, counts what is shared in
            every process that maps it. `hwm` sums each process' own high-water mark, which the kernel keeps: a spike
            between two samples is in it, and no peak of Rss can be above it.
    MemAvailable
            how far it fell below its value before the start. Memory that cudaHostAlloc makes belongs to the driver: it
            may be in no process' figures, nor in a control group's, and shows here. So does every other process on the
            machine. Mappings registered with the driver are the process' own, and are in all three.
    cgroup  memory.current and memory.peak of the group: also page cache and the kernel's own, not the driver's.

`value` is Pss when it was taken to the end (`method`: "pss"), otherwise Rss ("rss"). Compare like with like: the
difference of two runs is one of Rss when either of them has no Pss.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rows
from cgroups import Group, NoGroup

SLOW = 0.1  # seconds of one sample, above which Pss costs too much
PSS = {"Pss": "pss", "Pss_Anon": "pss_anon", "Pss_File": "pss_file", "Pss_Shmem": "pss_shmem"}
RSS = {"RssAnon": "rss_anon", "RssFile": "rss_file", "RssShmem": "rss_shmem"}
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def kilobytes(text: str) -> dict[str, int]:
    """The "Name:  123 kB" lines of a file of /proc, in bytes."""
    return {name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


def tree(proc: Path, top: int) -> list[int]:
    """`top` and all its descendants that are there at this moment. A process that vanishes meanwhile is left out."""
    children = collections.defaultdict(list)
    for entry in os.listdir(proc):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The name stands in brackets and may hold anything, brackets too; behind it come state and parent.
                fields = (proc / entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children[int(fields[1])].append(int(entry))
    found = [top]
    for pid in found:
        found += children[pid]
    return found


def resident(proc: Path, pid: int) -> dict[str, int]:
    """Rss of one process by kind, bytes; from statm where status does not tell them apart. Empty when it is gone."""
    try:
        lines = kilobytes((proc / str(pid) / "status").read_text(errors="replace"))
        if RSS.keys() <= lines.keys():
            return {ours: lines[theirs] for theirs, ours in RSS.items()} | dict(hwm=lines.get("VmHWM", 0))
        _, pages, shared, *_ = map(int, (proc / str(pid) / "statm").read_text().split())
    except (OSError, ValueError):
        return {}
    page = os.sysconf("SC_PAGE_SIZE")
    return dict(rss_anon=(pages - shared) * page, rss_file=shared * page, rss_shmem=0)


@dataclass
class Sampler:
    """Samples of the tree below `top`, which is left out itself: it is the one that measures.

    `peaks`: the most of each kind, each at a moment of its own. `unreadable`: processes whose Pss was refused, and
    which count with what is surely theirs, RssAnon.
    """

    top: int
    proc: Path = Path("/proc")
    group: Group | None = None
    slow: float = SLOW
    peaks: dict[str, int] = field(default_factory=dict)
    pss: bool = True
    pss_until: float | None = None
    samples: int = 0
    slowest: float = 0.0
    unreadable: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self._slow_ones = 0
        self.available = self._available()
        if not (self.proc / "self/smaps_rollup").exists():  # gVisor, kernels before 4.14
            self._without_pss()

    def _available(self) -> int:
        return kilobytes((self.proc / "meminfo").read_text()).get("MemAvailable", 0)

    def _without_pss(self) -> None:
        self.pss, self.pss_until = False, round(time.monotonic() - self.began, 2)

    def _shares(self, pid: int, rss: dict[str, int]) -> dict[str, int]:
        try:
            lines = kilobytes((self.proc / str(pid) / "smaps_rollup").read_text())
        except (FileNotFoundError, ProcessLookupError):  # gone, or without memory: ended and not yet waited for
            return {}
        except OSError:
            self.unreadable.add(pid)
            return dict(pss=rss["rss_anon"], pss_anon=rss["rss_anon"])
        return {ours: lines.get(theirs, 0) for theirs, ours in PSS.items()}

    def sample(self) -> float:
        """Take one, and return the seconds that it cost."""
        began = time.monotonic()
        total: collections.Counter[str] = collections.Counter()
        for pid in tree(self.proc, self.top)[1:]:
            if rss := resident(self.proc, pid):
                total.update(rss)
                total["rss"] += sum(rss[kind] for kind in RSS.values())
                if self.pss:
                    total.update(self._shares(pid, rss))
        total["available_fell"] = self.available - self._available()
        if self.group and (held := self.group.held()) is not None:
            total["cgroup_held"] = held
        for kind, n in total.items():
            self.peaks[kind] = max(n, self.peaks.get(kind, 0))
        cost = time.monotonic() - began
        self.samples += 1
        self.slowest = max(self.slowest, cost)
        # Two running: one alone may be the machine's other work.
        self._slow_ones = self._slow_ones + 1 if cost > self.slow else 0
        if self.pss and self._slow_ones == 2:
            self._without_pss()
        return cost

    def figures(self) -> dict:
        return dict(
            method="pss" if self.pss else "rss",
            peaks=self.peaks,
            seconds=round(time.monotonic() - self.began, 2),
            pss_until=self.pss_until,
            samples=self.samples,
            slowest_sample=round(self.slowest, 4),
            **(dict(unreadable=len(self.unreadable)) if self.unreadable else {}),
        )


def measure(
    command: list[str], until: str = "", group: Group | None = None, every: float = 0.05, stop: bool = False
) -> dict:
    """Run `command`, its output passed on, and sample it.

    Args:
        until: stop sampling at the first line of standard output that has this pattern; without one, at the end.
        group: sampled as well; the command runs in it when it is of our own making.
        every: seconds from one sample to the next.
        stop: end the command when the line came, instead of letting it finish.

    Returns figures of one row: peaks in bytes, seconds, exit status (negative: the signal), last JSON line printed.
    """
    # What outlives its parent becomes a child of this process, and is counted on.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seen, last = threading.Event(), [b""]
    sampler = Sampler(os.getpid(), group=group)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        preexec_fn=group.enter if group and group.made else None,
        env={"PYTHONUNBUFFERED": "1", **os.environ},  # a line in a buffer would be seen too late
    )

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            if until and re.search(until, line.decode(errors="replace").rstrip("\r\n")):
                seen.set()
            if line.startswith(b"{"):
                last[0] = line

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        while process.poll() is None and not seen.is_set():
            rest = every - sampler.sample()
            seen.wait(max(rest, 0.0))
        found = {**sampler.figures(), **({"cgroup_peak": group.figures()["cgroup_peak"]} if group else {})}
        if stop:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        else:
            process.wait()
    finally:
        if stop or process.poll() is None:  # told to end it, or interrupted
            for pid in tree(Path("/proc"), os.getpid())[:0:-1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    reader.join(5)  # a grandchild may hold the pipe open for ever
    with contextlib.suppress(ValueError):
        found["printed"] = json.loads(last[0])
    if until:
        found["line_seen"] = seen.is_set()
    # The OOM killer's count is that of the end, the peak that of the line.
    return {**(group.figures() if group else {}), **found, "exit_status": process.returncode}


def build(case: str, found: dict) -> dict:
    """The row: the peak by the method that was used throughout."""
    kind = {"pss": "Pss", "rss": "Rss"}[found["method"]]
    killed = {} if found.get("oom_kills") is None else dict(oom_killed=found["oom_kills"] > 0)
    return rows.row(f"{case}: host peak ({kind})", found["peaks"].get(found["method"], 0), "bytes", **found, **killed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", default="", metavar="REGEX", help="sample until a line of standard output has this")
    parser.add_argument("--stop", action="store_true", help="end the command at that line")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--memory", type=float, metavar="GIB", help="run it in a new control group of so many GiB")
    where.add_argument("--cgroup", type=Path, metavar="FOLDER", help="sample this group of someone else's as well")
    parser.add_argument("--every", type=float, default=50, metavar="MS")
    parser.add_argument("--case", default="", help="what the row calls it; the command without this")
    parser.add_argument("--out", metavar="FILE", help="write the row there, as bench/results has them")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    a = parser.parse_args(arguments)
    command = a.command[1:] if a.command[:1] == ["--"] else a.command
    if not command:
        parser.error("no command: write it after --")
    if a.stop and not a.until:
        parser.error("--stop ends the command at the line of --until, and there is none")
    try:
        group = Group.given(a.cgroup) if a.cgroup else None
        if a.memory:
            group = Group.make(int(a.memory * 2**30), f"host-peak-{os.getpid()}")
    except NoGroup as error:
        parser.exit(2, f"host_peak: {error}\n")
    # Ended from outside, still take the group away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        found = measure(command, a.until, group, a.every / 1000, a.stop)
    except (FileNotFoundError, PermissionError, subprocess.SubprocessError) as error:  # no such command, or no entry
        parser.exit(127, f"host_peak: the command did not start: {error}\n")
    finally:
        if group:
            group.remove()
    result = build(a.case or shlex.join(command), found)
    rows.write(a.out, [result])
    print(json.dumps(result), file=sys.stderr)
    if a.until and not found["line_seen"] and found["exit_status"] == 0:
        print(f"host_peak: no line of the output had {a.until!r}; this is the peak to the end", file=sys.stderr)
        return 3
    code = found["exit_status"]
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
