# SPDX-License-Identifier: Apache-2.0
"""Post-load processing of one layer's offloaded experts, in place: up, processed, down into the same bytes.

While a release processes the layer, its weights are `Deferred` (see there). Afterwards each weight that came of it is
played a chunk of experts at a time into the host buffer that it came from, where the processed experts take as many
bytes as the unprocessed; else into a new buffer, and the old one is returned to the system. On the GPU lies one chunk.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .deferred import Deferred, Tape
from .host import Arena, HostBuffer, like
from .residency import Item, MappedView, held
from .scales import SHARE, Scales
from .tape import Read

# What a chunk takes at most, in bytes of weights; a conversion holds a few times that while it runs.
CHUNK = 64 * 2**20


class RepackError(RuntimeError):
    """The experts of a layer could not be processed; none of it may be served."""


def chunk_bytes(device: torch.device) -> int:
    """Bytes of weights to process at once: `CHUNK`, or less where the device has little left."""
    if device.type != "cuda":
        return CHUNK
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(CHUNK, (free + reserved) // 8))


class Repack:
    """The weights of one expert layer while it is processed.

    Args:
        owner: the layer, whose offloaded parameters become Deferred.
        items: those, all of them in host memory.
        device: where they are processed.
        scales: the attributes of its scales, which stay there.
    """

    def __init__(self, owner: nn.Module, items: list[Item], device: torch.device, scales: Iterable[str] = ()) -> None:
        self.owner = owner
        self.device = device
        (experts,) = {item.host.size(0) for item in items if item.host is not None}
        self.tape = Tape(experts, device)
        self.source: dict[int, Item] = {}
        self._originals: dict[int, nn.Parameter] = {}
        leaf_of = {id(p): leaf for leaf, p in owner._parameters.items()}
        for item in items:
            assert item.parameter is not None and item.host is not None
            source = self.tape.source(item.host, _reader(item, device))
            self.source[source.number] = item
            # A detached view of the source: what changes it in place changes that too.
            proxy = nn.Parameter(source, requires_grad=False)
            proxy.__dict__.update(item.parameter.__dict__)
            owner._parameters[leaf_of[id(item.parameter)]] = proxy
            self._originals[id(proxy)] = item.parameter
        self.scales = Scales(experts, device, chunk_bytes(device) // SHARE)
        self.scales.defer(owner, scales)

    @staticmethod
    def fits(owner: nn.Module, items: list[Item]) -> bool:
        """Whether the weights can be processed apart: all in host memory, of the same number of experts each."""
        hosts = [item.host for item in items if item.host is not None]
        there = {id(p) for p in owner._parameters.values()}
        if len(hosts) < len(items) or any(id(item.parameter) not in there for item in items):
            return False
        return all(h.dim() >= 2 for h in hosts) and len({h.size(0) for h in hosts}) == 1

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Process the layer within; afterwards its scales are what they have become."""
        with self.scales.writing(), self.tape.writing():  # the weights' comes first to what is made
            yield
        try:
            self.scales.settle()
        except (RuntimeError, MemoryError) as why:
            raise RepackError(_ended("the scales", why)) from why

    @property
    def gave_up(self) -> str | None:
        """Why the layer had to be processed whole, or None."""
        return self.tape.why

    def outputs(self) -> dict[str, Deferred]:
        """The owner's parameters that are weights to be, by attribute; one may have several (a kernel's name too)."""
        return {leaf: p for leaf, p in self.owner._parameters.items() if self._is_ours(p)}

    def _is_ours(self, parameter: nn.Parameter | None) -> bool:
        return isinstance(parameter, Deferred) and parameter.tape is self.tape

    def give_up_if_held(self) -> None:
        """Give up when anything but the owner holds one of the tensors: whoever does will read it while serving.

        It stands for a real tensor then, on the device, and the weight stays there (`residency.leave` sees it held).
        """
        if len(self.tape.alive()) > len(self.outputs()):
            gc.collect()
        ours = {id(p) for p in self.outputs().values()}
        if any(id(d) not in ours for d in self.tape.alive()):
            self.tape.give_up("something else holds a view of it")

    def make_real(self, but: Iterable[str]) -> None:
        """Have the outputs on the device as the release would have made them, but for those of the attributes `but`."""
        left = {id(self.outputs()[leaf]) for leaf in but}
        for leaf in [leaf for leaf, deferred in self.outputs().items() if id(deferred) not in left]:
            self._make_one_real(leaf)
        # By now nothing of ours may hold a Deferred: the tape keeps the bytes of one that lives, and its real parameter
        # then counts as held by something else and stays on the device.
        self.tape.forget()

    def _make_one_real(self, leaf: str) -> None:
        deferred = self.owner._parameters[leaf]
        if self._is_ours(deferred):  # not yet real under another name
            self.put(leaf, _parameter(self.tape.whole(deferred), deferred))

    def put(self, leaf: str, parameter: nn.Parameter) -> None:
        """Have the owner hold `parameter` wherever it holds what is `leaf` now."""
        old = self.owner._parameters[leaf]
        for name, held_there in self.owner._parameters.items():
            if held_there is old:
                self.owner._parameters[name] = parameter

    def untouched(self, leaf: str) -> Item | None:
        """The item whose weight the parameter `leaf` still is, byte for byte and shape for shape; None otherwise."""
        deferred = self.outputs()[leaf]
        steps, sources = self.tape.related(deferred)
        if len(sources) != 1 or any(s.function is not torch.ops.aten.detach.default for s in steps):
            return None
        item = self.source.get(next(iter(sources)))
        if item is None or item.host is None:
            return None
        return item if (item.host.shape, item.host.stride()) == (deferred.shape, deferred.stride()) else None

    def original(self, leaf: str) -> nn.Parameter | None:
        """The parameter for which `leaf` stood in, when the release left it alone."""
        return self._originals.get(id(self.owner._parameters[leaf]))

    def into(self, leaf: str, arena: Arena, spare: HostBuffer | None) -> tuple[HostBuffer, torch.Tensor]:
        """Process the weight `leaf` into host memory: into `spare` when it has the size, else into a new buffer.

        Returns the buffer and a CPU tensor on it. Raises RepackError when a chunk can't be processed.
        """
        deferred = self.outputs()[leaf]
        experts, (_, sources) = self.tape.experts, self.tape.related(deferred)
        program = self.tape.program(deferred)
        extent = sum((n - 1) * s for n, s in zip(deferred.shape, deferred.stride())) + 1
        buffer = arena.take(extent * deferred.element_size(), spare)
        row = max([extent * deferred.element_size() // experts, *(self._row(n) for n in sources)])
        host = buffer.tensor_like(deferred)
        for first, last in chunks(experts, row, chunk_bytes(self.device)):
            try:
                made = self.tape.play(first, last, program).pop(deferred.number)
                with buffer.opened():
                    host[first:last].copy_(made)
            except (RuntimeError, MemoryError) as why:
                raise RepackError(_ended(f"experts {first} to {last - 1} of {experts} of {leaf}", why)) from why
        return buffer, host

    def _row(self, number: int) -> int:
        item = self.source.get(number)
        return item.buffer.nbytes // self.tape.experts if item is not None and item.buffer is not None else 0

    def in_place(self, leaf: str) -> Item | None:
        """The item whose bytes the weight `leaf` may overwrite as it is made: it alone is made of them."""
        deferred = self.outputs()[leaf]
        steps, sources = self.tape.related(deferred)
        made = {n for s in steps for n in s.made}
        others = [d for d in self.outputs().values() if d is not deferred and d.number in made | sources]
        return self.source.get(next(iter(sources))) if len(sources) == 1 and not others else None

    def finish(self, leaf: str, data: torch.Tensor) -> nn.Parameter:
        """Put a plain parameter with `data` in the place of the weight `leaf`, with what the release hung onto it."""
        made = _parameter(data, self.outputs()[leaf])
        self.put(leaf, made)
        return made

    def drop_originals(self) -> None:
        """Hold the parameters no longer for which Deferred ones stood in."""
        self._originals.clear()


def chunks(experts: int, row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of experts of at most `limit` bytes each, `row` bytes an expert, at least one."""
    step = max(1, limit // max(1, row))
    for first in range(0, experts, step):
        yield first, min(experts, first + step)


def settle(repack: Repack, targets: dict[str, Item], arena: Arena, view: MappedView | None) -> None:
    """Bring what processing made of a layer's weights into host memory, and put plain parameters in place again.

    Args:
        repack: the layer, processed.
        targets: the item that each weight becomes, by the owner's attribute; it may be the one that it was made of.
        arena: where new buffers come from.
        view: makes the device's view of page-locked memory; None leaves `.data` on the host.
    """
    untouched = {leaf: item for leaf in targets if (item := repack.untouched(leaf)) is not None}
    originals = {leaf: repack.original(leaf) for leaf in untouched}
    kept = {leaf: (i.buffer, i.host, i.parameter) for leaf, i in untouched.items()}
    free = {id(item.buffer) for item in repack.source.values()} - {id(i.buffer) for i in untouched.values()}
    read = {
        id(i.buffer): StorageWeakRef(i.parameter.untyped_storage())
        for i in repack.source.values()
        if i.mapped and i.parameter is not None
    }
    sources = list(repack.source.values())
    for item in sources:
        item.parameter = None
    repack.drop_originals()
    for leaf, target in targets.items():
        if leaf in untouched:
            buffer, host, old = kept.pop(leaf)
            assert old is not None
            same = originals.pop(leaf)
            parameter = repack.finish(leaf, old.data) if same is None else same
            repack.put(leaf, parameter)
        else:
            source = repack.in_place(leaf)
            spare = source.buffer if source is not None and id(source.buffer) in free else None
            # Under a view of its old bytes that something else holds, other bytes may not be written.
            if spare is not None and id(spare) in read and held(read[id(spare)]):
                spare = None
            buffer, host = repack.into(leaf, arena, spare)
            data = host if view is None or not buffer.pinned else like(buffer.mapped(view(buffer.bytes)), host)
            parameter = repack.finish(leaf, data)
        target.parameter, target.buffer, target.host, target.kept = parameter, buffer, host, None
    for item in sources:
        if item.parameter is None:
            item.buffer = item.host = None


def _ended(what: str, why: BaseException) -> str:
    return (
        f"expert offload: {what} could not be processed after loading: {(str(why) or repr(why)).splitlines()[0]}. The "
        "start ends here, with the layer half done. If memory ran out, free some on the device, or offload less with "
        "--cpu-offload-gb"
    )


def _parameter(data: torch.Tensor, like: Deferred) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=False)
    made.__dict__.update({name: value for name, value in like.__dict__.items() if name != "_is_param"})
    return made


def _reader(item: Item, device: torch.device) -> Read:
    buffer, host = item.buffer, item.host
    assert buffer is not None and host is not None

    def read(first: int, last: int) -> torch.Tensor:
        with buffer.opened():
            return host[first:last].to(device, copy=True)

    return read
