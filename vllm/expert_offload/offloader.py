# SPDX-License-Identifier: Apache-2.0
"""The offloader that a patched release creates in place of its own when `--cpu-offload-gb` is given.

Its life follows a start of the engine:

1. `wrap_modules` sees each decoder layer as it is built and moves what the selection takes to host memory at once.
2. `built` checks the user's patterns, before any weight is read.
3. `loading` surrounds the release's post-load processing of each module: parameters come up, are processed, and what
   they have become (other names, shapes, types) goes back down.
4. `finish` lays out the staging buffer where memory is not mapped, audits, and reports. Serving begins.
5. `written` follows a reload of weights while serving.

The release's adapter (patches/) hands over what depends on the release: whether memory can be page-locked, how to make
a mapped view, a logger. Nothing here imports vLLM.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from . import fit, report, roles
from .graphs import dense_places
from .host import Arena, HostBuffer
from .memory import Memory
from .pooled import Pools, mapped_layers
from .repack import Repack, settle
from .residency import Item, audit, check_delivery, check_scales, come_back, leave, parameters
from .selection import Candidate, Selection
from .staging import Bound, Staging, to_host

# Documented in the README: treat the CPU backend as a device with memory of its own, and check every access.
CPU_SWITCH = "EXPERT_OFFLOAD_CPU"
# On a GPU: overwrite the staging buffer after each layer. For tests; costs a write of the buffer per layer.
POISON_SWITCH = "EXPERT_OFFLOAD_POISON"


def cache_factor(offloader: Offloader | None) -> str:
    """What must enter the key of the release's compile cache, since it decides which ops a graph holds."""
    staged = sorted(offloader.staging.groups) if offloader is not None and offloader.staging is not None else []
    blocking = offloader is not None and offloader.blocking
    return f"staged={staged} blocking={blocking} poison={os.environ.get(POISON_SWITCH, '')}"


class NothingMoved(RuntimeError):
    """Offload was asked for, and no byte left the device on any rank."""


class Offloader:
    """Moves parameters of decoder layers to host memory and sees that kernels read the right bytes.

    Args:
        budget: bytes per rank to move (`--cpu-offload-gb`).
        patterns: dotted name segments (`--cpu-offload-params`); empty: experts first, then dense weights.
        memory: see `Memory`.
        log: called with one line of text.
        cut_at: whether the release cuts its compiled graph at a module (attention and its like).
        cache: bytes of GPU memory per rank for slots that keep experts in use (`--expert-cache-gb`).
    """

    def __init__(
        self,
        budget: int,
        patterns: set[str],
        memory: Memory,
        log: Callable[[str], None],
        cut_at: Callable[[nn.Module], bool],
        cache: int = 0,
    ) -> None:
        self.memory = memory
        self.arena = Arena(memory.limit, memory.why, fit.make_room)
        self.view = None if memory.unmapped else memory.view
        self.whole: dict[str, int] = {}  # why layers were processed whole -> how many were
        self.whole_scales: dict[str, int] = {}  # the same of their scales alone
        self.log = log
        self.selection = Selection(budget, patterns)
        self.items: dict[tuple[int, str], Item] = {}
        self.staging: Staging | None = None
        self.cache = cache
        self.pools: Pools | None = None
        self.unclassified: list[str] = []
        self._cuts: list[bool] = []  # for each layer, whether the graph is cut in it
        self._cut_at = cut_at
        self._home: torch.device | None = None  # where weights are built
        self._groups: list[nn.Module] = []  # modules before which a staged group is fetched
        self._next_name: tuple[str, int] | None = None
        self._summed = self._has_room = False

    # -- before anything is built ------------------------------------------------------------------------------------

    def check_room(self, folder: str, ranks: int, hosts: int, device: torch.device) -> None:
        """Refuse a start whose weights do not fit into this host's memory, before any is read or memory is taken.

        Args:
            folder: of the checkpoint's files.
            ranks: on this host.
            hosts: that the model is spread over.
            device: of this rank, to speak to the others.

        Raises TooLittleMemory or CheckpointError; on every rank when one must.
        """
        if not self.selection.budget or self._has_room:  # a drafter's model: the target's was counted
            return
        self._has_room = True
        fault: Exception | None = None
        try:
            entries = fit.tensors(Path(folder))
            if leaving := fit.leaving(entries, set(self.selection.patterns)):
                experts, dense = (nbytes // hosts for nbytes in leaving)
                largest = fit.largest_parameter(entries) // (ranks * hosts)
                plan = fit.Plan(self.selection.budget, ranks, experts, dense, largest, dense == 0)
                fit.check(plan, fit.free_memory())
        except (fit.TooLittleMemory, fit.CheckpointError) as why:
            fault = why
        # All have looked before any goes on and takes memory.
        if _over_ranks({"faults": int(fault is not None)}, device)["faults"]:
            raise fault or fit.TooLittleMemory("another rank of this start has refused it, and says why")

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
        """Choose from one layer, and move what was chosen; give back what an earlier layer no longer has to give."""
        if self._home is None:
            self._home = next((p.device for p in module.parameters() if p.device.type != "meta"), None)
        if self._is_plain_cpu():
            return
        here = self._survey(layer_name, module)
        taken, returned = self.selection.layer([candidate for candidate, _, _ in here.values()])
        for candidate in returned:
            item = next(i for i in self.items.values() if i.name == candidate.name)
            if item.out:
                come_back(item, self._device())
            del self.items[id(item.owner), item.name]
        for candidate in taken:
            _, item, parameter = here[candidate.name]
            self.items[id(item.owner), item.name] = item
            item.parameter = parameter
            if parameter.device.type != "meta" and not self._down(item, parameter):
                self.selection.put_back(candidate)

    def _survey(self, layer_name: str, module: nn.Module) -> dict[str, tuple[Candidate, Item, nn.Parameter]]:
        """Every parameter of a layer by its canonical name, with whether it may leave and what it is fetched before."""
        layer = len(self._cuts)
        self._cuts.append(any(self._cut_at(m) for m in module.modules()))
        earlier = {id(item.parameter): item for item in self.items.values() if item.parameter is not None}
        group_of: dict[int, int] = {}
        here: dict[str, tuple[Candidate, Item, nn.Parameter]] = {}
        for path, owner, leaf, parameter in parameters(module):
            if id(parameter) in earlier:
                self._share(earlier[id(parameter)])
                continue
            method, unknown = roles.method_of(owner), roles.unknown(owner, leaf)
            name = ".".join(part for part in (layer_name, path, leaf) if part)
            name = roles.canonical(name, method is not None or unknown is not None)
            if unknown is not None:
                self.unclassified.append(f"{name} ({unknown})")
            shapeless = isinstance(parameter, nn.UninitializedParameter)
            can = not shapeless and parameter.numel() > 0 and roles.may_leave(owner, leaf, parameter.dim())
            if name in here:
                if can:
                    self.unclassified.append(f"{name} (the second of that name)")
                continue
            before = module.get_submodule(roles.expert_layer(path)) if method is not None else module
            group = group_of.setdefault(id(before), len(self._groups))
            if group == len(self._groups):
                self._groups.append(before)
            candidate = Candidate(name, parameter.nbytes if can else 0, method is not None, can)
            item = Item(name, owner, layer, group, method is not None)
            if shapeless and method is not None and roles.may_leave(owner, leaf, 3):
                item.kept, item.final = "their size is known only when they are loaded", True
                self.items[id(owner), name] = item
            here[name] = (candidate, item, parameter)
        return here

    def _share(self, item: Item) -> None:
        """Another layer has the parameter of `item` too, and a staged group is fetched for one layer alone."""
        if item.mapped:
            return
        parameter = item.parameter
        if item.out:
            come_back(item, self._device())
        item.parameter, item.buffer, item.host = parameter, None, None
        item.kept, item.final = "two layers share it", True

    def _down(self, item: Item, parameter: nn.Parameter, spare: HostBuffer | None = None) -> bool:
        return leave(item, parameter, self.arena, self.view, spare)

    def built(self, device: torch.device) -> None:
        """The model stands, for `device`: before any weight is read, every pattern must have matched on some rank."""
        if self._summed or not self.selection.budget:
            return
        if self._is_plain_cpu():
            raise NothingMoved(report.nothing_moved([], device, CPU_SWITCH))
        self.selection.check(_over_ranks(self.selection.hits, device))

    def _is_plain_cpu(self) -> bool:
        """Weights are in host memory anyway, and nobody asked for the CPU to be treated as a device."""
        return self._home is not None and self._home.type == "cpu" and not os.environ.get(CPU_SWITCH)

    # -- loading -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Have the offloaded parameters below `module` on `device` for the block, and decide again after it."""
        owned: dict[int, tuple[nn.Module, list[Item]]] = {}
        below = {id(m) for m in module.modules()} | {id(p) for p in module.parameters()}
        for item in self.items.values():
            if not item.final and (id(item.owner) in below or id(item.parameter) in below):
                owned.setdefault(id(item.owner), (item.owner, []))[1].append(item)
        # A layer's experts are processed in place where the release's way with them allows it.
        apart = [(o, i) for o, i in owned.values() if roles.processed_apart(o) and Repack.fits(o, i)]
        repack = Repack(*apart[0], device, roles.block_scales(apart[0][0])) if len(apart) == 1 else None
        for owner, items in owned.values():
            if repack is None or owner is not repack.owner:
                for item in items:
                    if item.out:
                        come_back(item, device)
                    item.parameter = None
        with repack.writing() if repack is not None else contextlib.nullcontext():
            yield
        for owner, items in owned.values():
            self._settle(owner, items, repack if repack is not None and owner is repack.owner else None)

    def _settle(self, owner: nn.Module, items: list[Item], repack: Repack | None) -> None:
        """Move down whatever the owner's parameters have become, into the same buffers where the sizes are equal."""
        targets = self._targets(owner, items)
        done: list[str] = []
        if repack is not None:
            if repack.scales.why:
                self.whole_scales[repack.scales.why] = self.whole_scales.get(repack.scales.why, 0) + 1
            repack.give_up_if_held()
            if repack.gave_up:
                self.whole[repack.gave_up] = self.whole.get(repack.gave_up, 0) + 1
            else:
                done = [leaf for leaf in repack.outputs() if leaf in targets]
            repack.make_real(but=done)
        spares = {id(item): item.buffer for item in items}
        if repack is not None and not repack.gave_up:
            settle(repack, {leaf: targets.pop(leaf) for leaf in done}, self.arena, self.view)
        else:
            for item in items:
                item.parameter = item.buffer = item.host = None
        for leaf, item in targets.items():
            parameter = owner._parameters[leaf]
            assert parameter is not None
            self._down(item, parameter, spares.pop(id(item), None))
        for item in items:
            if not item.out and item.kept is None:
                item.kept = "processing left no weight of that name"
        layer = items[0].name.rpartition(".")[0]
        check_scales(layer, owner, [leaf for leaf in owner._parameters if roles.is_scale(owner, leaf)])

    def _targets(self, owner: nn.Module, items: list[Item]) -> dict[str, Item]:
        """The item that each weight of a processed owner becomes, by attribute; new ones where a name came twice."""
        experts = roles.method_of(owner) is not None
        wanted = {roles.canonical(item.name.split(".")[-1], experts): item for item in items}
        found: dict[str, Item] = {}
        placed: set[int] = set()
        for leaf, parameter in owner._parameters.items():
            item = wanted.get(roles.canonical(leaf, experts))
            if item is None or parameter is None or id(parameter) in placed:
                continue
            if parameter.numel() == 0 or parameter.device.type == "meta":
                continue
            if not roles.may_leave(owner, leaf, parameter.dim()):
                continue
            placed.add(id(parameter))
            if item in found.values():  # two tensors under one canonical name, such as a checkpoint's and a kernel's
                item = Item(f"{item.name}#{leaf}", owner, item.layer, item.group, item.experts)
                self.items[id(owner), item.name] = item
            found[leaf] = item
        return found

    def finish(self, device: torch.device) -> bool:
        """Weights are processed: lay out staging, audit, report. A drafter's model comes through here as well.

        Returns whether copies block, on any rank when the first model comes, so that graphs must be cut at them.
        """
        if not self.selection.budget:
            return False
        out = [item for item in self.items.values() if item.out]
        staged = [item for item in out if not item.mapped]
        if staged or self.staging is not None:
            self._stage(staged, device)
        owners = {id(i.owner): (i.name, i.owner) for i in out if i.experts}
        names = [(".".join(name.split(".")[:-1]), owner) for name, owner in owners.values()]
        audit(out, names, device, self.arena, self.staging.holds if self.staging else None)
        # Once more: on WSL the first copy out of page-locked memory has been seen to deliver, and later ones not.
        check_delivery(out)
        if self.cache and self.pools is None:  # a drafter's experts, which come later, have no slots
            self.pools = Pools(mapped_layers(self.items.values()), self.cache, device)
        blocking = int(self.blocking)
        if not self._summed:  # once: not every rank has a drafter, and the others would not answer
            self._summed = True
            sums = _over_ranks({"moved": self.moved, "blocking": blocking}, device)
            if sums["moved"] == 0:
                raise NothingMoved(report.nothing_moved(list(self.items.values()), device, CPU_SWITCH))
            blocking = sums["blocking"]
        for line in report.lines(self):
            self.log(line)
        return bool(blocking)

    def valid_rows(self, tokens: int) -> None:
        """The next step's batch has `tokens` tokens; what a graph computes beyond them is padding."""
        if self.pools is not None:
            self.pools.valid_rows(tokens)

    def written(self, parameters: Iterable[nn.Parameter]) -> None:
        """These were overwritten where kernels read them (weights are reloaded while serving): keep it in host memory.

        Where that is mapped it is what was written; in the staging buffer the next fetch would undo it. What slots hold
        of the layer is the old experts'.
        """
        parameters = list(parameters)
        if self.pools is not None:
            self.pools.written(parameters)
        staged = {id(i.parameter): i for i in self.items.values() if i.out and not i.mapped}
        for item in filter(None, (staged.get(id(parameter)) for parameter in parameters)):
            assert item.parameter is not None and item.buffer is not None
            to_host(item.buffer, item.parameter.data)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` lies in host memory, so that nobody may write by the address that it has today."""
        return any(item.out and item.parameter is parameter for item in self.items.values())

    def refuse_parts(self) -> None:
        """Raise where weights are staged: who changes a few elements of one finds another layer's beside them."""
        if staged := sum(item.out and not item.mapped for item in self.items.values()):
            raise NotImplementedError(report.no_parts(staged))

    @property
    def moved(self) -> int:
        """Bytes that lie in host memory instead of on the GPU, on this rank."""
        return sum(item.buffer.nbytes for item in self.items.values() if item.buffer is not None)

    @property
    def blocking(self) -> bool:
        """Whether a copy to the device blocks the host, because a weight lies in memory that is not page-locked."""
        return any(not i.mapped and i.buffer is not None and not i.buffer.pinned for i in self.items.values())

    def _stage(self, out: list[Item], device: torch.device) -> None:
        checked = device.type == "cpu"
        if self.staging is None:
            self.staging = Staging(device, poison=checked or bool(os.environ.get(POISON_SWITCH)))
        groups: dict[int, list[Item]] = {group: [] for group in self.staging.groups}
        for item in out:
            groups.setdefault(item.group, []).append(item)
        for group, items in groups.items():
            if group not in self.staging.groups:
                self.staging.hook(group, self._groups[group])
            bound = [
                Bound(i.parameter, i.buffer, i.host)
                for i in items
                if i.parameter is not None and i.buffer is not None and i.host is not None
            ]
            self.staging.bind(group, bool(items) and items[0].experts, bound)
        places = 1
        if self.blocking:
            fetched = {i.layer for i in out if not i.experts}
            places = dense_places((layer in fetched, cut) for layer, cut in enumerate(self._cuts))
        self.staging.allocate(places)
        if checked:
            for item in out:
                assert item.buffer is not None
                if not item.buffer.sealed:
                    item.buffer.seal()

    def _device(self) -> torch.device:
        return self._home or torch.device("cpu")

    # -- what a release calls on any offloader, and this one has no need of -----------------------------------------

    supports_tower_offload = False

    def post_init(self) -> None:
        """Nothing: `finish` has done it, with the model at hand."""

    def sync_prev_onload(self) -> None:
        """Nothing: copies are in stream order."""

    def join_after_forward(self) -> None:
        """Nothing: there is no stream of ours to join."""


def _over_ranks(counts: dict[str, int], device: torch.device) -> dict[str, int]:
    """`counts` summed over all ranks of the default process group; as they are when there is none."""
    if not counts or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return counts
    if torch.distributed.get_world_size() == 1:
        return counts
    total = torch.tensor(list(counts.values()), dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total)
    return dict(zip(counts, total.tolist()))
