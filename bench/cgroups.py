# SPDX-License-Identifier: Apache-2.0
"""A memory control group for one command: found, made, limited, read and removed, for version 1 and version 2.

Every path is below a root, so that tests can give a tree of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

ADVICE = (
    "version 2 gives a group's memory controller to its children only when no process lies in the group itself; as "
    "root, where {group} is this container's own:\n"
    "    mkdir {group}/rest && for p in $(cat {group}/cgroup.procs); do echo $p > {group}/rest/cgroup.procs; done\n"
    "    echo +memory > {group}/cgroup.subtree_control\n"
    "or let systemd do it: systemd-run --scope -p MemoryMax=BYTES -p MemorySwapMax=0 COMMAND"
)
# What each version calls: the limit, the limit with or of swap, the peak, what is held now, the events.
FILES = {
    1: (
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.max_usage_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
    ),
    2: ("memory.max", "memory.swap.max", "memory.peak", "memory.current", "memory.events"),
}


class NoGroup(RuntimeError):
    """A memory group cannot be had here; the message says what to do."""


def number(path: Path) -> int | None:
    """The number that a file holds; None when there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def own_group(root: Path = Path("/")) -> tuple[int, Path, Path]:
    """Version of the hierarchy that counts memory, where it is mounted, and the group that this process lies in.

    On a hybrid machine both versions are mounted and the controller belongs to one: to version 1 when the process has
    a line for it there.
    """
    groups = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups[controllers] = path
    wanted = next((c for c in groups if "memory" in c.split(",")), "" if "" in groups else None)
    if wanted is None:
        raise NoGroup("this kernel has no memory control groups (/proc/self/cgroup names none)")
    version = 1 if wanted else 2
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, top, point, *_ = left.split(" ")
        kind, _, options = right.split(" ", 2)
        if (version == 1 and kind == "cgroup" and "memory" in options.split(",")) or (version, kind) == (2, "cgroup2"):
            mount = root / point.lstrip("/")
            # A container sees the hierarchy from its own group down: that prefix is no folder here.
            inside = os.path.relpath(groups[wanted], top)
            own = mount if inside == "." or inside.startswith("..") else mount / inside
            return version, mount, own if own.is_dir() else mount
    raise NoGroup(f"the memory control groups (version {version}) are not mounted: mount them at /sys/fs/cgroup")


@dataclass
class Group:
    """A group of one's own, or one that somebody else made (`made` false: it is read, and left as it is)."""

    path: Path
    version: int
    made: bool = False
    trouble: list[str] = field(default_factory=list)

    @classmethod
    def given(cls, path: Path) -> Group:
        version = 1 if (path / FILES[1][3]).exists() else 2
        if not (path / FILES[version][3]).exists():
            raise NoGroup(f"{path} is no memory control group: it has neither {FILES[1][3]} nor {FILES[2][3]}")
        return cls(path, version)

    @classmethod
    def make(cls, limit: int, name: str, root: Path = Path("/")) -> Group:
        """A new group of at most `limit` bytes and no swap, below this process's own group or the nearest one that
        may have children with a limit."""
        version, mount, own = own_group(root)
        parent = own if version == 1 else parent_of_limited(own, mount)
        group = cls(parent / name, version, made=True)
        try:
            group.path.mkdir()
            (group.path / FILES[version][0]).write_text(str(limit))
        except OSError as error:
            with contextlib.suppress(OSError):
                group.path.rmdir()
            why = f"no group of {limit} bytes below {parent}: {error}. It takes root, and a writable {mount}"
            raise NoGroup(why) from error
        # Version 1 limits memory and swap together, so the same number means no swap; version 2 limits swap.
        swap = str(limit) if version == 1 else "0"
        try:
            (group.path / FILES[version][1]).write_text(swap)
        except OSError as error:
            group.trouble.append(f"swap is not limited: {error}")
        return group

    def enter(self) -> None:
        """Put the calling process into the group: in a child, before it becomes the command."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def held(self) -> int | None:
        """Bytes that the group holds now, page cache included."""
        return number(self.path / FILES[self.version][3])

    def figures(self) -> dict:
        """Limit, peak (bytes) and kills by the OOM killer so far; None for what this kernel does not tell."""
        limit, _, peak, _, events = FILES[self.version]
        try:
            kills = re.search(r"^oom_kill (\d+)$", (self.path / events).read_text(), re.M)
        except OSError:
            kills = None
        return dict(
            cgroup=str(self.path),
            cgroup_version=self.version,
            limit=number(self.path / limit),
            cgroup_peak=number(self.path / peak),
            oom_kills=int(kills[1]) if kills else None,
            **(dict(trouble=self.trouble) if self.trouble else {}),
        )

    def remove(self, patience: float = 10.0) -> None:
        """End what is left in a group of our own (the command's children, nobody else's) and take it away."""
        if not self.made:
            return
        until = time.monotonic() + patience
        while True:
            with contextlib.suppress(OSError):
                for pid in (self.path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def parent_of_limited(own: Path, mount: Path) -> Path:
    """The nearest group from `own` up whose children may have memory limits (version 2), which it asks for if need be.

    A group with processes in it refuses, unless it is the very root. Up to the mount point, which in a container is
    the container's own group: its limits hold all the same.
    """
    if "memory" not in (mount / "cgroup.controllers").read_text().split():
        raise NoGroup(f"{mount} was not given the memory controller: who started this container must delegate it")
    reasons = []
    for group in [own, *own.parents]:
        control = group / "cgroup.subtree_control"
        try:
            if "memory" in control.read_text().split():
                return group
            control.write_text("+memory")
            return group
        except OSError as error:
            reasons.append(f"{group}: {error.strerror}")
        if group == mount:
            break
    raise NoGroup(f"no group here may have children with a limit ({'; '.join(reasons)}). {ADVICE.format(group=mount)}")
