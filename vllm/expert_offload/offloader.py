# SPDX-License-Identifier: Apache-2.0
"""The offloader that a patched release creates in place of its own when `--cpu-offload-gb` is given.

Its life follows a start of the engine:

1. `wrap_modules` sees each decoder layer as it is built and moves what the selection takes to host memory at once.
2. `built` checks the user's patterns, before any weight is read.
3. `loading` surrounds the release's post-load processing of each module: parameters come up, are processed, and what
   they have become (other names, shapes, types) goes back down.
4. `finish` lays out the staging buffer where memory is not mapped, audits, and reports. Serving begins.

The release's adapter (patches/) hands over what depends on the release: whether memory can be page-locked, how to make
a mapped view, a logger. Nothing here imports vLLM.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from . import report, roles
from .host import Arena, HostBuffer
from .residency import Item, MappedView, audit, come_back, leave
from .selection import Candidate, Selection
from .staging import Bound, Staging

# Documented in the README: treat the CPU backend as a device with memory of its own, and check every access.
CPU_SWITCH = "EXPERT_OFFLOAD_CPU"
# On a GPU: overwrite the staging buffer after each layer. For tests; costs a write of the buffer per layer.
POISON_SWITCH = "EXPERT_OFFLOAD_POISON"


class Memory(NamedTuple):
    """What the release knows about the host's memory.

    `refused`: why it can't be page-locked, in words, or None when it can. `unmapped`: why it can't be read in place,
    or None. `view`: the release's function from a page-locked CPU tensor to the device's view of it.
    """

    refused: str | None
    unmapped: str | None
    view: MappedView

    @classmethod
    def found(cls, *, pinnable: bool, pin_disabled: bool, uva_disabled: bool, view: MappedView) -> Memory:
        """From what the release's platform and its two variables say."""
        refused = None
        if pin_disabled:
            refused = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY is set"
        elif not pinnable:
            refused = "this platform does not page-lock memory (WSL, or a CPU)"
        unmapped = "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set" if uva_disabled else None
        return cls(refused, unmapped, view)

    @property
    def kind(self) -> str:
        """What a compiled graph depends on: "mapped" memory needs no copies, "pinned" and "pageable" do."""
        return "pageable" if self.refused else "pinned" if self.unmapped else "mapped"


def cache_factor(memory: Memory) -> str:
    """What must enter the key of the release's compile cache, since it decides which ops a graph holds."""
    return f"{memory.kind} cpu={os.environ.get(CPU_SWITCH, '')} poison={os.environ.get(POISON_SWITCH, '')}"


class NothingMoved(RuntimeError):
    """Offload was asked for, and no byte left the GPU on any rank."""


class Offloader:
    """Moves parameters of decoder layers to host memory and sees that kernels read the right bytes.

    Args:
        budget: bytes per rank to move (`--cpu-offload-gb`).
        patterns: dotted name segments (`--cpu-offload-params`); empty: experts first, then dense weights.
        memory: see `Memory`.
        log: called with one line of text.
    """

    def __init__(self, budget: int, patterns: set[str], memory: Memory, log: Callable[[str], None]) -> None:
        self.memory = memory
        self.arena = Arena(pin=memory.kind != "pageable")
        self.view = memory.view if memory.kind == "mapped" else None
        self.log = log
        self.selection = Selection(budget, patterns)
        self.items: dict[tuple[int, str], Item] = {}
        self.staging: Staging | None = None
        self.unclassified: list[str] = []
        self._layers: list[nn.Module] = []
        self._groups: list[nn.Module] = []  # modules before which a staged group is fetched
        self._next_name: tuple[str, int] | None = None
        self._summed = False

    # -- construction ------------------------------------------------------------------------------------------------

    def name_layers(self, prefix: str, first: int) -> None:
        """The layers of the next `wrap_modules` are called `prefix.first`, `prefix.first+1`, ..."""
        self._next_name = (f"{prefix}.", first)

    def wrap_modules(self, modules: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        """Take from each module as it is built, so that one layer at a time lies whole on the GPU."""
        (start, first), self._next_name = self._next_name or (f"{prefix}." if prefix else "", 0), None
        wrapped = []
        for index, module in enumerate(modules, first):
            self._take(f"{start}{index}", module)
            wrapped.append(module)
        return wrapped

    def _take(self, layer_name: str, module: nn.Module) -> None:
        device = next((p.device for p in module.parameters()), None)
        if device is None or (device.type == "cpu" and not os.environ.get(CPU_SWITCH)):
            return
        layer = len(self._layers)
        self._layers.append(module)
        group_of: dict[int, int] = {}
        here: dict[str, tuple[Item, nn.Parameter]] = {}
        candidates = []
        for path, owner, leaf, parameter in _parameters(module):
            method = roles.method_of(owner)
            name = roles.canonical(".".join(part for part in (layer_name, path, leaf) if part), method is not None)
            before = module.get_submodule(roles.expert_layer(path)) if method is not None else module
            group = group_of.setdefault(id(before), len(self._groups))
            if group == len(self._groups):
                self._groups.append(before)
            if method is not None and roles.role_of(method, leaf) is None:
                self.unclassified.append(f"{name} ({method})")
            can = roles.may_leave(owner, leaf, parameter.dim()) and not isinstance(parameter, nn.UninitializedParameter)
            candidates.append(Candidate(name, parameter.nbytes if can else 0, method is not None, can))
            here[name] = (Item(name, owner, layer, group, method is not None), parameter)
        taken, returned = self.selection.layer(candidates)
        by_name = {item.name: item for item in self.items.values()} if returned else {}
        for candidate in returned:
            item = by_name[candidate.name]
            come_back(item, device)
            del self.items[id(item.owner), item.name]
        for candidate in taken:
            item, parameter = here[candidate.name]
            self.items[id(item.owner), item.name] = item
            if parameter.device.type != "meta":
                self._down(item, parameter)

    def _down(self, item: Item, parameter: nn.Parameter, spare: HostBuffer | None = None) -> None:
        leave(item, parameter, self.arena, self.view, spare)

    def built(self) -> None:
        """The model stands: every pattern must have matched something, on this rank or another."""
        if not self._summed:
            self.selection.check(_over_ranks(self.selection.hits, self._device()))

    # -- loading -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Have the offloaded parameters below `module` on `device` for the block, and decide again after it."""
        owned: dict[int, tuple[nn.Module, list[Item]]] = {}
        owners = {id(m): m for m in module.modules()}
        for item in self.items.values():
            if id(item.owner) in owners:
                owned.setdefault(id(item.owner), (item.owner, []))[1].append(item)
                if item.out:
                    come_back(item, device)
        yield
        for owner, items in owned.values():
            self._settle(owner, items)

    def _settle(self, owner: nn.Module, items: list[Item]) -> None:
        """Move down whatever the owner's parameters have become, into the same buffers where the sizes are equal."""
        experts = roles.method_of(owner) is not None
        wanted = {roles.canonical(item.name.split(".")[-1], experts): item for item in items}
        spares = {name: item.buffer for name, item in wanted.items()}
        for item in items:
            item.parameter = item.buffer = item.host = None
        placed: set[int] = set()
        for leaf, parameter in owner._parameters.items():
            name = roles.canonical(leaf, experts)
            item = wanted.get(name)
            if item is None or parameter is None or id(parameter) in placed or parameter.numel() == 0:
                continue
            if not roles.may_leave(owner, leaf, parameter.dim()):
                continue
            placed.add(id(parameter))
            if item.out:  # two tensors under one canonical name, such as a checkpoint's and a kernel's
                item = Item(f"{item.name}#{leaf}", owner, item.layer, item.group, item.experts)
                self.items[id(owner), item.name] = item
            self._down(item, parameter, spares.pop(name, None))

    def finish(self, device: torch.device) -> None:
        """Weights are processed: lay out staging, audit, report. A drafter's model comes through here as well."""
        out = [item for item in self.items.values() if item.out]
        if self.view is None and out:
            self._stage(out, device)
        owners = {id(i.owner): (i.name, i.owner) for i in out if i.experts}
        names = [(".".join(name.split(".")[:-1]), owner) for name, owner in owners.values()]
        audit(out, names, device, self.arena, self.staging.holds if self.staging else None)
        if not self._summed:
            self._summed = True
            if _over_ranks({"moved": self.moved}, device)["moved"] == 0:
                raise NothingMoved(report.nothing_moved(list(self.items.values()), device, CPU_SWITCH))
        for line in report.lines(self):
            self.log(line)

    @property
    def moved(self) -> int:
        """Bytes that lie in host memory instead of on the GPU, on this rank."""
        return sum(item.buffer.nbytes for item in self.items.values() if item.buffer is not None)

    def _stage(self, out: list[Item], device: torch.device) -> None:
        checked = device.type == "cpu"
        if self.staging is None:
            self.staging = Staging(device, poison=checked or bool(os.environ.get(POISON_SWITCH)))
        groups: dict[int, list[Item]] = {}
        for item in out:
            groups.setdefault(item.group, []).append(item)
        for group, items in groups.items():
            if group not in self.staging.groups:
                self.staging.hook(group, self._groups[group])
            bound = [Bound(i.parameter, i.buffer, i.host) for i in items if i.parameter is not None and i.buffer is not None and i.host is not None]
            self.staging.bind(group, items[0].experts, bound)
        self.staging.allocate()
        if checked:
            for item in out:
                assert item.buffer is not None
                if not item.buffer.sealed:
                    item.buffer.seal()

    def _device(self) -> torch.device:
        return next((p.device for m in self._layers for p in m.parameters() if p.device.type != "meta"), torch.device("cpu"))

    # -- what a release calls on any offloader, and this one has no need of -----------------------------------------

    supports_tower_offload = False

    def post_init(self) -> None:
        """Nothing: `finish` has done it, with the model at hand."""

    def sync_prev_onload(self) -> None:
        """Nothing: copies are in stream order."""

    def join_after_forward(self) -> None:
        """Nothing: there is no stream of ours to join."""


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(path of the owner, owner, attribute, parameter) for each parameter once, in order of declaration."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, owner, leaf, parameter


def _over_ranks(counts: dict[str, int], device: torch.device) -> dict[str, int]:
    """`counts` summed over all ranks of the default process group; as they are when there is none."""
    if not counts or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return counts
    if torch.distributed.get_world_size() == 1:
        return counts
    total = torch.tensor(list(counts.values()), dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total)
    return dict(zip(counts, total.tolist()))
