# SPDX-License-Identifier: Apache-2.0
"""Whether what will be held in host memory fits, found out before the first weight is read.

What is free (`free_memory`), what the checkpoint holds (`tensors`, `expert_bytes`), what a start takes (`plan`), and
whether that fits (`check`): an error that says what would, in place of the kernel's OOM killer, which says nothing.
Sizes are bytes. Ask once per host and before any rank has taken its part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
UNKNOWN = 2**63 - 1  # `Free.nbytes` when no limit can be read: everything fits
# Per rank, what a vLLM worker takes beside weights: CUDA context, pinned staging, NCCL, compiled graphs, its part of
# the engine's and the API server's processes. One process with all of that took 1.6 to 1.9 GiB (docs/memory.md); a
# server has more of them. Some of it is taken before the check.
WORKER_BYTES = 3 * GIB
CHUNK_BYTES = 64 * 2**20
RESERVE_BYTES = 256 * 2**20  # never taken for weights: below it a machine stalls before anything is killed
_STEP = GIB // 2  # of a suggested --cpu-offload-gb
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def gib(nbytes: int) -> str:
    """`nbytes` in GiB, or in MiB below a tenth of one."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:.2f} MiB"


class Limit(NamedTuple):
    """A limit on memory: its name, its kind ("host", "wsl" or "cgroup"), and of its `size` what is used for good."""

    name: str
    kind: str
    size: int
    used: int

    def raised(self, need: int) -> tuple[str, Limit]:
        """What to do so that `need` bytes are free, in words, and the limit after that."""
        if self.kind == "host":
            more = -(-(self.used + need - self.size) // GIB)
            return f"free or add {more} GiB of memory", self._replace(size=self.size + more * GIB)
        # A VM's kernel keeps about 1/32 of what the VM is given: 1/64 describes pages, the rest is itself.
        seen, given = (31, 32) if self.kind == "wsl" else (1, 1)
        whole = -(-(self.used + need) * given // (seen * GIB))
        docker = "" if ".high" in self.name else f" (docker run --memory {whole}g, MEMORY_LIMIT={whole}g with compose)"
        how = f"raise {self.name} to {whole} GiB{docker}"
        if self.kind == "wsl":
            how = f"memory={whole}GB in Windows' .wslconfig and wsl --shutdown (the VM sees {gib(self.size)} now)"
        return how, self._replace(size=whole * GIB * seen // given)


class Free(NamedTuple):
    """Free bytes, the limit that says so, in words, and all limits that were found."""

    nbytes: int
    source: str
    limits: tuple[Limit, ...] = ()


def free_memory(root: Path = Path("/")) -> Free:
    """The least of what the host (or WSL's virtual machine) and each cgroup above this process leave.

    `root` holds /proc and /sys; what cannot be read is skipped. What lies in /dev/shm is missing from MemAvailable, and
    its cgroup counts it as used and not as page cache.
    """
    limits, found = list(_cgroups(root)), _numbers(root / "proc/meminfo")
    if "MemAvailable" in found:
        wsl = "microsoft" in _read(root / "proc/sys/kernel/osrelease").lower()
        size = max(found.get("MemTotal", 0), found["MemAvailable"]) * 1024
        name = f"MemAvailable of {'the WSL virtual machine' if wsl else 'this host'}"
        limits.append(Limit(name, "wsl" if wsl else "host", size, size - found["MemAvailable"] * 1024))
    return _least(limits)


def _least(limits: list[Limit]) -> Free:
    if not limits:
        return Free(UNKNOWN, "no limit that could be read")
    name, _, size, used = min(limits, key=lambda limit: limit.size - limit.used)
    return Free(max(0, size - used), f"{name} ({gib(size)}, {gib(used)} used)", tuple(limits))


# Per version of cgroups: the limits, what is used, and what of that can be reclaimed. Both lists of file pages can: the
# kernel empties the active one too, where a second start finds its checkpoint, before it kills. A tmpfs is on neither.
# Slab counts as in MemAvailable. Above memory.high the kernel stalls who allocates, so that is a limit too.
_V2 = ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file", "slab_reclaimable")
_V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_CGROUP = re.compile(r"^(?:0:|\d+:(?:[^:\n]*,)?(memory)(?:,[^:\n]*)?):/(.*)$", re.MULTILINE)  # "memory" in v1, and path


def _cgroups(root: Path) -> Iterator[Limit]:
    """Every limit from the process's own cgroup up to the root of the mount."""
    # Where the process can't read its path, a container's limit still stands at the mount's root.
    for version, path in _CGROUP.findall(_read(root / "proc/self/cgroup") or "0::/\n1:memory:/"):
        limits, usage, cache = _V1 if version else _V2
        mount, parts = root / "sys/fs/cgroup" / version, path.split("/") if path else []
        # A container may see the host's path, while the root of its own mount is the container's cgroup.
        if not os.path.isdir(mount.joinpath(*parts)):
            parts = []
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            used, stat = _numbers(folder / usage).get(""), _numbers(folder / "memory.stat")
            for limit in limits:
                size = _numbers(folder / limit).get("", UNKNOWN)
                if used is not None and size < 2**62:  # v1 writes "none" as nearly 2**63
                    kept = max(0, used - sum(stat.get(key, 0) for key in cache))
                    yield Limit(f"{limit} of the cgroup /{'/'.join(parts[:depth])}", "cgroup", size, kept)


def _read(file: Path) -> str:
    try:
        return os.fsdecode(file.read_bytes())
    except (OSError, ValueError):
        return ""


def _numbers(file: Path) -> dict[str, int]:
    """The lines "name number" and "name: number" of a file; a number alone is named ""."""
    found = re.findall(r"^(?:(\w+):?[ \t]+)?(\d{1,19})(?!\S)", _read(file), re.MULTILINE)
    return {name: int(number) for name, number in found}


class CheckpointError(ValueError):
    """A file of the checkpoint is missing, truncated or malformed."""


class Entry(NamedTuple):
    """A tensor of a checkpoint: bytes in its file, shape, and the file's name of its type, such as "BF16"."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def tensors(folder: Path) -> dict[str, Entry]:
    """The tensors of the local `folder`, from the headers of its safetensors files; empty where there is none.

    Where the weights lie there twice, those count that vLLM reads: Mistral's own files, then those of the index.
    """
    files = sorted(folder.glob("consolidated*.safetensors"))
    index = folder / f"{'consolidated' if files else 'model'}.safetensors.index.json"
    files = files or sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except _MALFORMED as error:
            raise CheckpointError(f"{index}: a weight_map was expected, found {error!r}: download it again") from error
    if missing := [file.name for file in files if not file.is_file()]:
        names = ", ".join(missing[:3])
        raise CheckpointError(f"{folder}: {len(missing)} of {len(files)} files are missing ({names}): download them")
    return {name: entry for file in files for name, entry in _header(file).items()}


def _header(file: Path) -> dict[str, Entry]:
    """The tensors of one file, which must be long enough to hold them. The format allows headers of 100 MB."""
    found: dict[str, Entry] = {}
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            header = end = 8 + int.from_bytes(start, "little")
            for name, value in json.loads(stream.read(min(header - 8, 10**8))).items() if header <= size else ():
                if name != "__metadata__":
                    (first, last), shape = value["data_offsets"], tuple(value["shape"])
                    if not all(isinstance(n, int) and n >= 0 for n in (first, last - first, *shape)):
                        raise ValueError(f"{name}: {value}")
                    found[name] = Entry(last - first, shape, str(value["dtype"]))
                    end = max(end, header + last)
    except _MALFORMED as error:
        raise CheckpointError(f"{file}: malformed header, reading it gives {error!r}: download it again") from error
    if end > size:
        how = "it is a pointer of Git LFS: git lfs pull" if start == b"version " else "truncated: download it again"
        wants = f"its header{' alone' * (header > size)} tells of {end} bytes"
        raise CheckpointError(f"{file}: {wants}, the file has {size}, {end - size} are missing; {how}")
    return found


# Names in checkpoints, whole segments. `shared_expert` and `shared_experts` are not `experts`: they are dense. A
# drafter's layers (`mtp.layers.0.mlp.experts...`) are like others. Towers stay on the GPU.
_LEAF = r"(?:weight|weight_packed|qweight)"
_PROJECTION = r"(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3|v1|fc1|fc2|input_linear|output_linear)"
_DOWN = ("down_proj", "w2", "fc2", "output_linear")
_NUMBERED = re.compile(rf"((?:.+\.)?experts)\.\d+\.(?:.+\.)?(\w+)\.{_LEAF}")
# All experts in one tensor; `experts.mlp` in DBRX, no `experts` in Step3 and Granite.
_FUSED = re.compile(rf"((?:.+\.)?(?:experts(?:\.mlp)?|moe|block_sparse_moe))\.({_PROJECTION})(?:_blocks|[._]{_LEAF})?")
_TOWER = r"(?:visual|vision_tower|vision_model|vision_encoder|audio_tower|audio_model)"
_DENSE = re.compile(rf"(?!(?:.+\.)?{_TOWER}\.)((?:.+\.)?(?:layers|h|blocks)\.\d+\.(?:.+\.)?)\w+\.{_LEAF}")


def _sizes(entries: Mapping[str, Entry]) -> dict[tuple[bool, str, bool], int]:
    """Bytes of matrices that may leave, by (do routed experts own it, path of the owner, is it a down projection)."""
    sizes: dict[tuple[bool, str, bool], int] = {}
    for name, (nbytes, shape, _) in entries.items():
        routed, dense = _NUMBERED.fullmatch(name) or _FUSED.fullmatch(name), _DENSE.fullmatch(name)
        if routed and len(shape) >= (2 if "experts" in routed[1].split(".") else 3):
            part = True, routed[1], routed[2] in _DOWN
        elif dense and len(shape) >= 2:
            part = False, dense[1], False
        else:
            continue
        sizes[part] = sizes.get(part, 0) + nbytes
    return sizes


def expert_bytes(entries: Mapping[str, Entry]) -> tuple[int, int]:
    """Bytes of (routed experts' weights, the decoder layers' other matrices), without scales, biases and indices."""
    sizes = _sizes(entries)
    experts = sum(nbytes for (routed, *_), nbytes in sizes.items() if routed)
    return experts, sum(sizes.values()) - experts


def largest_parameter(entries: Mapping[str, Entry]) -> int:
    """Upper bound on one parameter's bytes: vLLM joins a layer's experts, and gate with up; q, k and v; and so on."""
    return max(_sizes(entries).values(), default=0)


def leaving(entries: Mapping[str, Entry], patterns: set[str]) -> tuple[int, int] | None:
    """As `expert_bytes`, of what `patterns` (`--cpu-offload-params`) name; None when that can't be told.

    A checkpoint's names are not those of vLLM's parameters, which join projections: only the experts of all layers, and
    their two weights, are found in both.
    """
    experts, dense = expert_bytes(entries)
    if not patterns:
        return experts, dense
    down = sum(nbytes for (routed, _, is_down), nbytes in _sizes(entries).items() if routed and is_down)
    parts = {"experts": experts, "w13_weight": experts - down, "w2_weight": down}
    ends = set()
    for segments in (pattern.split(".") for pattern in patterns):
        if segments[-1] not in parts or any(segment.isdigit() for segment in segments):
            return None
        ends.add(segments[-1])
    return (experts if "experts" in ends else sum(parts[end] for end in ends)), 0


class Plan(NamedTuple):
    """What a start will take of a host's memory.

    Per rank: `budget` (`--cpu-offload-gb`), `largest`, its share of `largest_parameter` (the budget may be overshot by
    it), `chunk` while a layer is repacked, `other` beside weights. `ranks`: this host's workers, tensor- and pipeline-
    parallel. `experts`, `dense`: from `expert_bytes`, of several hosts this one's part. `only_experts`: no pattern of
    the user's matches a dense matrix.
    """

    budget: int
    ranks: int
    experts: int
    dense: int
    largest: int
    only_experts: bool = False
    chunk: int = CHUNK_BYTES
    other: int = WORKER_BYTES

    @property
    def leaves(self) -> int:
        """Bytes that may leave the GPUs of this host."""
        return self.experts + (0 if self.only_experts else self.dense)

    @property
    def held(self) -> int:
        """Bytes of weights in host memory per rank, at most: the budget and one parameter more, or all there is."""
        return min(self.budget + self.largest, -(-self.leaves // self.ranks)) if self.budget else 0

    @property
    def peak(self) -> int:
        """Bytes that all ranks of this host take at once."""
        return self.ranks * (self.held + self.chunk + self.other)

    def __str__(self) -> str:
        rows = {"weights held in host memory": self.held, "a layer while it is repacked": self.chunk}
        rows |= {"worker beside its weights": self.other, "at the peak": self.peak // self.ranks}
        head = f"  {'':<28}{'per rank':>14}{f'ranks: {self.ranks}':>14}"
        return "\n".join([head, *(f"  {k:<28}{gib(n):>14}{gib(n * self.ranks):>14}" for k, n in rows.items())])


class TooLittleMemory(RuntimeError):
    """What was asked to lie in host memory does not fit."""


def check(plan: Plan, free: Free) -> None:
    """Raise TooLittleMemory when offloading as planned takes more than is free, and say what fits."""
    if plan.held and plan.peak > free.nbytes:
        ways = settings(plan, free)
        but = "" if ways[0][1].budget < plan.budget else " (no smaller --cpu-offload-gb does, not even 0.5)"
        raise TooLittleMemory(
            f"--cpu-offload-gb {plan.budget / GIB:g} with {plan.ranks} rank(s) takes up to {gib(plan.peak)} of host "
            f"memory and {gib(free.nbytes)} are free by {free.source}. No weight was read.\n{plan}\nWhat fits{but}:"
            + "".join(f"\n  {number}. {text}" for number, (text, *_) in enumerate(ways, 1))
        )


def make_room(nbytes: int) -> None:
    """Raise TooLittleMemory when a host buffer of `nbytes` bytes would leave less than `RESERVE_BYTES` of the memory.

    Asked before each buffer: a checkpoint does not always tell what its weights take, and others take memory too.
    """
    free = free_memory()
    if nbytes + RESERVE_BYTES > free.nbytes:
        need = nbytes + RESERVE_BYTES
        ways = ", and ".join(limit.raised(need)[0] for limit in free.limits if limit.size - limit.used < need)
        raise TooLittleMemory(
            f"a host buffer of {gib(nbytes)} is needed for offloaded weights, and {gib(free.nbytes)} are free by "
            f"{free.source}, of which {gib(RESERVE_BYTES)} are left alone. Lower --cpu-offload-gb, or {ways}"
        )


def settings(plan: Plan, free: Free) -> list[tuple[str, Plan, Free]]:
    """Up to three ways to make a plan fit that does not: (what to do, the plan after it, the free memory after it)."""
    ways = []
    room = free.nbytes // plan.ranks - plan.chunk - plan.other  # bytes that a rank may hold
    less = plan._replace(budget=max(0, (room - plan.largest) // _STEP * _STEP))
    flag = f"--cpu-offload-gb {less.budget / GIB:g}"
    stays = min(plan.budget, -(-plan.leaves // plan.ranks)) - less.budget
    if less.budget:
        ways.append((f"{flag}: {gib(stays)} more per rank stay on the GPU", less, free))
    limits = free.limits or (Limit(free.source, "host", free.nbytes, 0),)
    raised = [li.raised(plan.peak) if li.size - li.used < plan.peak else ("", li) for li in limits]
    ways.append((", and ".join(text for text, _ in raised if text), plan, _least([limit for _, limit in raised])))
    percent = 100 * (plan.leaves - plan.ranks * stays) // plan.leaves
    if less.budget and percent >= 25:  # 4 bits of 16
        text = f"{flag} and a checkpoint of fewer bits, {percent} % of this one's or less: the GPU holds no more"
        less = less._replace(experts=plan.experts * percent // 100, dense=plan.dense * percent // 100)
        return [*ways, (text, less, free)]
    # No help while enough can be held: the sum over ranks stays what it is.
    for ranks in range(plan.ranks - 1, 0, -1):
        fewer = plan._replace(ranks=ranks, largest=-(-plan.largest * plan.ranks // ranks))
        if plan.ranks % ranks == 0 and fewer.peak <= free.nbytes:
            return [*ways, (f"--tensor-parallel-size {ranks}, not {plan.ranks}: each GPU holds more", fewer, free)]
    return ways
