# SPDX-License-Identifier: Apache-2.0
"""What goes where for the chosen model, whether it fits, and what to change. An estimate, and it says so."""

from __future__ import annotations

from typing import NamedTuple

from .. import fit
from . import kv, vram
from .asked import Asked
from .gpu import used
from .lines import FAIL, OK, WARN, Line, gib
from .machine import Machine
from .model import Model, find

NAME = "plan"
# Per GPU, beside weights and KV cache: activations of a profile run, CUDA graphs, workspaces, the context. Eager, with
# batches of 1024 tokens, it was 1.1 GiB (docs/memory.md); this is the round figure that a 5090 leaves where
# Qwen3.6-35B-A3B-NVFP4 has 5.98 GiB of KV cache (club-3090#612).
BESIDE = 2 * 2**30
_STEP = 2**29  # of a suggested --cpu-offload-gb
_TOO_MUCH = 4 * 2**30  # bytes above the smallest offload that are worth a word: the estimate is no better


class Need(NamedTuple):
    """Bytes per rank: `weights` of all, of which `leaves` may leave, `staging` while copies are needed, `cache`."""

    weights: int
    leaves: int
    staging: int
    cache: kv.Cache | None
    context: int

    def on_gpu(self, moved: int, context: int | None = None) -> int:
        """Bytes on a GPU when `moved` of the weights are in host memory."""
        kept = self.weights - moved + (self.staging if moved else 0) + BESIDE
        return kept + (self.cache.nbytes(self.context if context is None else context) if self.cache else 0)

    def smallest(self, room: int, context: int | None = None) -> int | None:
        """The least offload with which `room` bytes are enough, in steps of half a GiB; None when none is."""
        if self.on_gpu(0, context) <= room:
            return 0
        moved = -(-(self.on_gpu(0, context) + self.staging - room) // _STEP) * _STEP
        # The last step may ask for more than there is: then all goes.
        return moved if self.on_gpu(min(moved, self.leaves), context) <= room else None

    def fitting(self, room: int, moved: int) -> int:
        """Tokens of context for which `room` bytes are enough, a multiple of 1024."""
        left = room - self.on_gpu(min(moved, self.leaves), 0)
        if not self.cache or not self.cache.per_token:
            return 0
        return max(0, left // self.cache.per_token // 1024 * 1024)


def need(machine: Machine, asked: Asked, model: Model) -> Need:
    """What one rank takes."""
    # Mapped memory is read in place; on WSL it may not be had, and then a layer's experts are copied before they run.
    copies = machine.wsl or any(
        machine.env(f"VLLM_WEIGHT_OFFLOADING_DISABLE_{what}") == "1" for what in ("UVA", "PIN_MEMORY")
    )
    context = asked.context or int(model.text.get("max_position_embeddings") or 0)
    cache = kv.cache(model.text, asked.ranks, asked.kv_dtype)
    leaves = sum(_leaving(asked, model) or (model.experts, model.dense))
    weights, leaves, staging = (-(-n // asked.ranks) for n in (model.total, leaves, model.layer if copies else 0))
    return Need(weights, leaves, staging, cache, context)


def _leaving(asked: Asked, model: Model) -> tuple[int, int] | None:
    """Bytes of experts and of dense matrices that may leave; None when the user's patterns can't be judged."""
    if model.entries:
        return fit.leaving(model.entries, set(asked.patterns))
    return (model.experts, 0) if asked.patterns == {"experts"} else (model.experts, model.dense)


def check(machine: Machine, asked: Asked) -> Line:
    """Host memory first, which may be fatal; then each GPU's."""
    model = find(machine, asked)
    if model.fault:
        return Line(NAME, WARN, f"none: {model.fault}", "See the model files' line")
    if not model.total:
        return Line(NAME, WARN, f"none: the sizes of {asked.model} are not known here", "Download it, and ask again")
    if not model.experts:
        found = f"{asked.model}: {gib(model.total)}, no routed expert in it; offload would move dense weights"
        return Line(NAME, WARN, found, "Choose a mixture-of-experts model: dense weights are needed for every token")
    wants = need(machine, asked, model)
    return _host(machine, asked, model) or _gpu(machine, asked, model, wants)


def _host(machine: Machine, asked: Asked, model: Model) -> Line | None:
    """The refusal that the start itself would give (`fit.check`), before anything is downloaded."""
    leaving = _leaving(asked, model)
    if not asked.budget or not leaving:
        return None
    entries = model.entries
    largest = (fit.largest_parameter(entries) if entries else model.largest) // asked.ranks
    plan = fit.Plan(asked.budget, asked.ranks, *leaving, largest, leaving[1] == 0)
    free = machine.free_memory
    try:
        fit.check(plan, free)
    except fit.TooLittleMemory as error:
        ways = "; or ".join(text for text, *_ in fit.settings(plan, free))
        return Line(NAME, FAIL, str(error).partition(" No weight was read.")[0], f"What fits: {ways}")
    return None


def _gpu(machine: Machine, asked: Asked, model: Model, wants: Need) -> Line:
    how = "estimate (sizes from a table, not from files)" if model.estimate else "estimate"
    head = f"{how}: experts {gib(model.experts)}, other weights {gib(model.total - model.experts)}"
    if machine.cpu_backend:
        return Line(NAME, OK, f"{head}; host {gib(min(asked.budget or 0, wants.leaves))} per rank")
    cards = [gpu for gpu in used(machine, asked) if gpu.total]
    if not cards or not wants.cache:
        why = "no GPU to plan for" if wants.cache else "config.json does not tell the KV cache's size"
        return Line(NAME, WARN, f"{head}; {why}", "See the GPU's line" if wants.cache else "Judge by vLLM's own report")
    room = min(vram.usable(machine, asked, gpu) for gpu in cards)
    smallest = wants.smallest(room)
    moved = min(asked.budget or 0, wants.leaves)
    found = f"{head}. {_where(wants, moved, room)}"
    if asked.patterns and not _leaving(asked, model):
        found += " (what --cpu-offload-params takes can't be told from the checkpoint)"
    if smallest is None:
        return Line(NAME, WARN, found, _no_offload_helps(asked, wants, room))
    flag = f"--cpu-offload-gb {smallest / 2**30:g}"
    if wants.on_gpu(moved) > room:
        less = wants.fitting(room, moved)
        shorter = f", or --max-model-len {less}" if less >= 1024 else ""
        return Line(NAME, WARN, found, f"Start with {flag}{shorter}")
    if moved > smallest + _TOO_MUCH:
        now = f"{flag} is enough and faster" if smallest else "All fits the GPU: start without --cpu-offload-gb"
        return Line(NAME, WARN, found, now)
    return Line(NAME, OK, f"{found}; up to {wants.fitting(room, moved)} tokens fit, {flag} is the least")


def _where(wants: Need, moved: int, room: int) -> str:
    assert wants.cache
    parts = [f"weights {gib(wants.weights - moved)}"]
    if moved and wants.staging:
        parts.append(f"staging {gib(wants.staging)}")
    parts += [f"KV cache {gib(wants.cache.nbytes(wants.context))} for {wants.context} tokens", f"other {gib(BESIDE)}"]
    return f"Host {gib(moved)} per rank; GPU {' + '.join(parts)} = {gib(wants.on_gpu(moved))} of {gib(room)} usable"


def _no_offload_helps(asked: Asked, wants: Need, room: int) -> str:
    all_out = -(-wants.leaves // _STEP) * _STEP
    tokens = wants.fitting(room, wants.leaves)
    if tokens >= 1024:
        return f"Start with --max-model-len {tokens} and --cpu-offload-gb {all_out / 2**30:g}: all that may leave"
    return f"Too much for this card even with all experts out: --tensor-parallel-size {2 * asked.ranks}, or fewer bits"
