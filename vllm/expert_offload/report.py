# SPDX-License-Identifier: Apache-2.0
"""What a start says about the offload: what moved, where it lies, what stayed and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .fit import gib

if TYPE_CHECKING:
    from .offloader import Offloader
    from .residency import Item

_PREFIX = "expert offload: "


def _names(items: Iterable[Item], limit: int = 3) -> str:
    names = [i.name for i in items]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def lines(offloader: Offloader) -> list[str]:
    """The start-up report, a line per fact."""
    items = list(offloader.items.values())
    out = [i for i in items if i.out]
    size = {kind: sum(i.buffer.nbytes for i in out if i.buffer and i.experts is kind) for kind in (True, False)}
    layers = len({i.layer for i in out})
    total = offloader.moved
    asked = gib(offloader.selection.budget)
    found = [
        f"{gib(total)} moved to host memory, {asked} asked for ({len(out)} tensors of {layers} layers): routed experts "
        f"{gib(size[True])}, dense weights {gib(size[False])}; host memory held "
        f"{gib(offloader.arena.held)}, page-locked {gib(offloader.arena.locked)}"
    ]
    mapped = sum(i.buffer.nbytes for i in out if i.buffer and i.mapped)
    if mapped:
        how = "" if mapped == total else f" {gib(mapped)} of"
        found.append(f"kernels read{how} host memory in place (mapped, zero copy)")
    if offloader.staging is not None and mapped < total:
        staging = offloader.staging.bytes.numel()
        which = "each layer" if not mapped else f"each layer of the other {gib(total - mapped)}"
        how = "blocking" if offloader.blocking else "in stream order"
        why = (offloader.blocking and (offloader.arena.refused or offloader.memory.why)) or offloader.memory.unmapped
        found.append(
            f"{which} is copied before it runs, {how}, into a staging buffer of {gib(staging)} on the device, "
            f"so {gib(max(0, total - staging))} are free for other use; because {why}"
        )
        if total <= staging:
            found.append(
                "WARNING: one layer is offloaded and staging takes as much: raise --cpu-offload-gb, nothing is gained"
            )
    found += _pools(offloader)
    for why, layers in offloader.whole.items():
        found.append(f"experts of {layers} layers were processed a whole layer at a time, not in place: {why}")
    for why, layers in offloader.whole_scales.items():
        found.append(f"scales of the experts of {layers} layers were converted all at once: {why}")
    kept = [i for i in items if i.kept]
    for reason in sorted({i.kept or "" for i in kept}):
        group = [i for i in kept if i.kept == reason]
        found.append(f"{len(group)} tensors stay on the GPU: {reason} ({_names(group)})")
    if offloader.unclassified:
        found.append(
            f"{len(offloader.unclassified)} tensors stay on the GPU: their role is not known "
            f"({', '.join(offloader.unclassified[:3])}); please report this"
        )
    return [_PREFIX + line for line in found]


def _pools(offloader: Offloader) -> list[str]:
    pools = offloader.pools
    if pools is None:
        return []
    found = [
        f"{gib(pools.nbytes)} on the device: {pools.slots} slots in each of {len(pools.layers)} layers for experts in "
        f"use{' and two buffers for whole layers' if pools.stream else ''}, {gib(offloader.cache)} asked for"
    ]
    if not pools.slots:
        why = "less than one expert of each" if pools.layers else "no layer that could have them"
        found = [f"WARNING: --expert-cache-gb makes no slots: {gib(offloader.cache)} are {why}"]
    return found + [f"{len(names)} layers have no slots: {why}" for why, names in pools.left_out.items()]


def nothing_moved(items: list[Item], device: torch.device, cpu_switch: str) -> str:
    """The error of a start that was asked to offload and moved nothing."""
    kept = [i for i in items if i.kept]
    if kept:
        why = f"all {len(kept)} candidates stay on the GPU, since {kept[0].kept} ({_names(kept)})"
    elif device.type == "cpu":
        why = f"this is the CPU backend, where weights are in host memory anyway (set {cpu_switch}=1 to try it there)"
    else:
        why = "the model has no decoder layer with a weight that may leave"
    return (
        f"--cpu-offload-gb was given and no byte left the device on any rank: {why}. Start without the flag, or name "
        "other weights with --cpu-offload-params"
    )


def no_parts(staged: int) -> str:
    """Why weights cannot be reloaded a few elements at a time beside `staged` weights, and what to do."""
    return (
        f"expert offload: sparse weight updates change single elements in place, and {staged} offloaded weights are "
        "copied from host memory over whatever is in place before each use: transfer whole weights (backend nccl or "
        "ipc), or serve without --cpu-offload-gb"
    )
