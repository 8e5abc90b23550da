# SPDX-License-Identifier: Apache-2.0
"""Moving one parameter between GPU and host, and proof afterwards that everything lies where its reader looks.

A parameter leaves by getting new `.data`. Whoever took a view of the old data before (a buffer registered at
construction, a kernel's config) would go on reading it. So after every move the old storage must be dead; if anything
still holds it, the move is undone and the parameter stays, with the reason in the report.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, ModuleType

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .deferred import Deferred
from .host import Arena, HostBuffer, flat_bytes, like
from .staging import to_device, to_host

MappedView = Callable[[torch.Tensor], torch.Tensor]
_AT_ONCE = 2**22  # values of a scale that are looked at together
_SHOWN = 20  # faults that an AuditError lists; to find out who holds a tensor takes a while


class AuditError(RuntimeError):
    """Something lies where its reader can't read it."""


class DamagedError(ValueError):
    """A scale of the checkpoint's experts is not a number."""


@dataclass(eq=False, repr=False)  # to print a tensor is to read it, and sealed memory ends the process that does
class Item:
    """A parameter that leaves the GPU: the same one before and after post-load processing renames or replaces it.

    `kept` says why it stays on the GPU although it was chosen; `final` that no later processing changes that.
    """

    name: str
    owner: nn.Module
    layer: int
    group: int
    experts: bool
    parameter: nn.Parameter | None = None
    buffer: HostBuffer | None = None
    host: torch.Tensor | None = None
    kept: str | None = None
    final: bool = False

    @property
    def out(self) -> bool:
        """Whether its bytes lie in host memory now."""
        return self.buffer is not None

    @property
    def mapped(self) -> bool:
        """Whether kernels read its bytes where they lie."""
        return self.buffer is not None and self.buffer.mapping.alias != (0, 0)


def parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(path of the owner, owner, attribute, parameter) for each parameter once, in order of declaration."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, owner, leaf, parameter


def leave(
    item: Item, parameter: nn.Parameter, arena: Arena, view: MappedView | None, spare: HostBuffer | None = None
) -> bool:
    """Move `parameter`'s data to host memory; False, with `item.kept` set, when something else still holds its bytes.

    Args:
        item: gets the buffer, and a CPU tensor on it.
        arena: where the buffer comes from.
        view: makes the device's view of a page-locked 1-D uint8 CPU tensor; None leaves `.data` on the host, as does
            a buffer that is not page-locked.
        spare: a buffer to use again when it has the right size.
    """
    old = parameter.data
    offset, shape, stride, device = old.storage_offset(), old.shape, old.stride(), old.device
    buffer = arena.take(flat_bytes(old).numel(), spare)
    to_host(buffer, old)
    host = buffer.tensor_like(old)
    dying = StorageWeakRef(old.untyped_storage())
    mapped = view is not None and buffer.pinned
    parameter.data = like(buffer.mapped(view(buffer.bytes)), host) if mapped and view else host
    del old
    if held(dying):
        storage = torch.UntypedStorage._new_with_weak_ptr(dying.cdata)
        if storage is not None:
            parameter.data = torch.empty(0, dtype=host.dtype, device=device).set_(storage, offset, shape, stride)
            item.parameter, item.buffer, item.host = parameter, None, None
            item.kept = "something else holds a view of it"
            return False
    item.parameter, item.buffer, item.host, item.kept = parameter, buffer, host, None
    return True


def come_back(item: Item, device: torch.device) -> None:
    """Give the parameter a copy of its bytes on `device`; the host buffer stays with the item.

    Unless something else holds a mapped view of the buffer: other bytes may not be written under that.
    """
    assert item.parameter is not None and item.buffer is not None and item.host is not None
    mapped = item.mapped
    dying = StorageWeakRef(item.parameter.untyped_storage())
    item.parameter.data = to_device(item.buffer, item.host, device)
    item.parameter = None  # processing may replace it, and nothing of ours should keep the old one alive
    if mapped and held(dying):
        item.buffer = item.host = None


def held(dying: StorageWeakRef) -> bool:
    """Whether anything holds the storage still; a cycle that nobody reaches does not."""
    if not dying.expired():
        gc.collect()
    return not dying.expired()


def check_scales(name: str, owner: nn.Module, scales: Iterable[str]) -> None:
    """Raise DamagedError when a processed scale among the parameters `scales` of the expert layer `name` holds NaN.

    A checkpoint of another format, or one that was cut short, shows here first; its experts would answer in NaN.
    """
    for leaf in scales:
        scale = owner._parameters[leaf]
        if scale is None or not scale.is_floating_point() or scale.device.type == "meta":
            continue
        count, first = _nans(scale)
        if count:
            raise DamagedError(
                f"expert offload: {count} of {scale.numel()} values of the scale {name}.{leaf} are NaN, the "
                f"first at {first}: the checkpoint is damaged, or not of the quantization that its config names. "
                "Download it again, or serve it without --cpu-offload-gb to see what the release makes of it"
            )


def _nans(scale: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """(how many values are NaN, where the first is); a few rows at a time, since they are widened to be looked at."""
    if scale.dim() == 0:
        return int(scale.float().isnan()), ()
    count = 0
    first: tuple[int, ...] = ()
    rows = max(1, _AT_ONCE * scale.size(0) // max(1, scale.numel()))
    for start in range(0, scale.size(0), rows):
        wrong = scale[start : start + rows].float().isnan()
        if wrong.any():
            row, *rest = (int(i) for i in wrong.nonzero()[0])
            count, first = count + int(wrong.sum()), first or (start + row, *rest)
    return count, first


def check_delivery(items: Iterable[Item]) -> None:
    """Raise AuditError when the device does not get the bytes of a page-locked buffer (`HostBuffer.fault`)."""
    for item in items:
        if item.buffer is not None and item.buffer.pinned and (fault := item.buffer.fault()) is not None:
            raise AuditError(
                f"expert offload: {item.name} lies in page-locked memory, and {fault}. The start ends here, because "
                "the answers would be wrong. Set EXPERT_OFFLOAD_PIN_GIB=0 to serve from ordinary memory"
            )


def audit(
    items: Iterable[Item],
    owners: Iterable[tuple[str, nn.Module]],
    device: torch.device,
    arena: Arena,
    in_staging: Callable[[torch.Tensor], bool] | None,
) -> None:
    """Check every tensor that Python can reach against where it should lie; raise AuditError with names.

    - An offloaded parameter lies at the device's address of its own host buffer, or in the staging buffer.
    - No tensor anywhere in the process is a host-side view of a buffer except the offloader's own, and none lies in a
      buffer that belongs to no item (a kernel that captured weights before they were processed again).
    - No `Deferred` is left: it stood for weights while they were processed, and has no bytes.
    - Everything else that an expert layer registers (scales, indices, biases) lies on `device`.

    Args:
        items: all that left.
        owners: the expert layers, by name.
        device: where kernels run.
        arena: whose buffers to look for.
        in_staging: whether a tensor lies in the staging buffer; None when there is none.
    """
    items = [i for i in items if i.out]
    faults: list[str] = []
    ours = {id(t) for i in items for t in (i.host, i.parameter) if t is not None}
    ours |= {id(i.buffer.bytes) for i in items if i.buffer is not None}
    current = {id(i.buffer.mapping) for i in items if i.buffer is not None}
    mapped = {id(i.buffer.mapping) for i in items if i.buffer is not None and i.mapped}
    for item in items:
        assert item.parameter is not None and item.buffer is not None
        lies_in = item.buffer.mapping.holds(item.parameter.data_ptr()) if item.mapped else False
        placed = lies_in or (not item.mapped and in_staging is not None and in_staging(item.parameter))
        if not placed or item.parameter.device.type != device.type:
            faults.append(f"{item.name} was offloaded, but lies on {item.parameter.device} at another address")
    gc.collect()
    # By type, not isinstance: that would run `__class__` of every object of the process.
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    skip = {id(tensors)}
    for tensor in tensors:
        if id(tensor) in ours or tensor.device.type not in ("cpu", device.type) or tensor.layout is not torch.strided:
            continue
        if isinstance(tensor, FakeTensor):
            continue
        if isinstance(tensor, Deferred):
            if tensor.tape.why is not None:  # it stands for a real tensor on the device
                continue
            faults.append(f"{_holder(tensor, skip)} stands for weights that were processed since, and has no bytes")
            continue
        try:
            mapping = arena.holding(tensor)
        except (RuntimeError, ValueError):  # a compiler's functional tensor, or one without a shape: no address
            continue
        if mapping is None:
            continue
        host_side = tensor.device.type == "cpu" and device.type != "cpu"
        if id(mapping) not in current:
            wrong = "reads host memory that no parameter owns any more"
        elif host_side or id(mapping) not in mapped:
            wrong = "is a host tensor that a kernel cannot read"
        else:
            continue
        faults.append(f"{_holder(tensor, skip) if len(faults) < _SHOWN else ''} {wrong}")
    for name, owner in owners:
        for leaf, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and tensor.device.type != device.type and tensor.numel():
                faults.append(f"{name}.{leaf} lies on {tensor.device}, its kernel reads it on {device}")
    if faults:
        shown = "\n  ".join(faults[:_SHOWN])
        raise AuditError(
            f"expert offload: {len(faults)} tensors lie where they cannot be read:\n  {shown}\n"
            "The start ends here, because the answers would be wrong. Serve without --cpu-offload-gb, or name other "
            "parameters with --cpu-offload-params, and report the quantization method above"
        )


def _holder(tensor: torch.Tensor, skip: set[int]) -> str:
    """Whoever holds `tensor`, as well as the interpreter can tell; `skip`: ids of lists that are the audit's own."""
    return _path(tensor, "", 3, skip) or f"a tensor {tuple(tensor.shape)} {tensor.dtype}"


def _path(held: object, tail: str, depth: int, skip: set[int]) -> str | None:
    """The type of an object, and the attributes and entries that lead from it to `held`, then `tail`."""
    referrers = gc.get_referrers(held)
    skip.add(id(referrers))
    for user in referrers:
        if id(user) in skip or isinstance(user, FrameType):
            continue
        # An object has a dict of attributes, or (since Python 3.11) only once somebody asks for it.
        attributes = getattr(user, "__dict__", {})
        if attributes is held:
            return (user.__name__ if isinstance(user, ModuleType) else type(user).__name__) + tail
        container = isinstance(user, (dict, list, tuple))
        entries = user if isinstance(user, dict) else dict(enumerate(user)) if container else attributes
        key = next((k for k, v in entries.items() if v is held), None)
        if key is None:
            continue
        if not container:
            return f"{type(user).__name__}.{key}{tail}"
        found = _path(user, f".{key}{tail}", depth - 1, skip) if depth else None
        if found:
            return found
    return None
