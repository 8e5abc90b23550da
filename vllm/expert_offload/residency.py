# SPDX-License-Identifier: Apache-2.0
"""Moving one parameter between GPU and host, and proof afterwards that everything lies where its reader looks.

A parameter leaves by getting new `.data`. Whoever took a view of the old data before (a buffer registered at
construction, a kernel's config) would go on reading it. So after every move the old storage must be dead; if anything
still holds it, the move is undone and the parameter stays, with the reason in the report.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .host import Arena, HostBuffer, flat_bytes, like
from .staging import to_device, to_host

MappedView = Callable[[torch.Tensor], torch.Tensor]


class AuditError(RuntimeError):
    """Something lies where its reader can't read it."""


@dataclass(eq=False)
class Item:
    """A parameter that leaves the GPU: the same one before and after post-load processing renames or replaces it."""

    name: str
    owner: nn.Module
    layer: int
    group: int
    experts: bool
    parameter: nn.Parameter | None = None
    buffer: HostBuffer | None = None
    host: torch.Tensor | None = None
    kept: str | None = None

    @property
    def out(self) -> bool:
        """Whether its bytes lie in host memory now."""
        return self.buffer is not None


def leave(item: Item, parameter: nn.Parameter, arena: Arena, view: MappedView | None, spare: HostBuffer | None = None) -> bool:
    """Move `parameter`'s data to host memory; False, with `item.kept` set, when something else still holds its bytes.

    Args:
        item: gets the buffer, and a CPU tensor on it.
        arena: where the buffer comes from.
        view: makes the device's view of a page-locked 1-D uint8 CPU tensor (zero copy); None leaves `.data` on the host.
        spare: a buffer to use again when it has the right size.
    """
    old = parameter.data
    offset, shape, stride, device = old.storage_offset(), old.shape, old.stride(), old.device
    buffer = arena.take(flat_bytes(old).numel(), spare)
    to_host(buffer, old)
    host = buffer.tensor_like(old)
    dying = StorageWeakRef(old.untyped_storage())
    parameter.data = host if view is None else like(buffer.mapped(view(buffer.bytes)), host)
    del old
    if not dying.expired():
        gc.collect()  # a cycle that nobody reaches is no holder
    if not dying.expired():
        storage = torch.UntypedStorage._new_with_weak_ptr(dying.cdata)
        if storage is not None:
            parameter.data = torch.empty(0, dtype=host.dtype, device=device).set_(storage, offset, shape, stride)
            item.parameter, item.buffer, item.host = parameter, None, None
            item.kept = "something else holds a view of it"
            return False
    item.parameter, item.buffer, item.host, item.kept = parameter, buffer, host, None
    return True


def come_back(item: Item, device: torch.device) -> None:
    """Give the parameter a copy of its bytes on `device`; the host buffer stays with the item."""
    assert item.parameter is not None and item.buffer is not None and item.host is not None
    item.parameter.data = to_device(item.buffer, item.host, device)
    item.parameter = None  # processing may replace it, and nothing of ours should keep the old one alive


def audit(
    items: Iterable[Item],
    owners: Iterable[tuple[str, nn.Module]],
    device: torch.device,
    arena: Arena,
    in_staging: Callable[[torch.Tensor], bool] | None,
) -> None:
    """Check every tensor that Python can reach against where it should lie; raise AuditError with names.

    - An offloaded parameter lies in the staging buffer, or at the device's address of its own host buffer.
    - No tensor anywhere in the process is a host-side view of a buffer except the offloader's own, and none lies in a
      buffer that belongs to no item (a kernel that captured weights before they were processed again).
    - Everything else that an expert layer registers (scales, indices, biases) lies on `device`.

    Args:
        items: all that left.
        owners: the expert layers, by name.
        device: where kernels run.
        arena: whose buffers to look for.
        in_staging: whether a tensor lies in the staging buffer; None when memory is mapped.
    """
    items = [i for i in items if i.out]
    faults: list[str] = []
    ours = {id(t) for i in items for t in (i.host, i.parameter) if t is not None}
    ours |= {id(i.buffer.bytes) for i in items if i.buffer is not None}
    current = {id(i.buffer) for i in items}
    for item in items:
        assert item.parameter is not None and item.buffer is not None
        placed = in_staging(item.parameter) if in_staging else item.buffer.holds(item.parameter.data_ptr())
        if not placed or item.parameter.device.type != device.type:
            faults.append(f"{item.name} was offloaded, but lies on {item.parameter.device} at another address")
    gc.collect()
    # By type, not isinstance: that would run `__class__` of every object of the process.
    for tensor in [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]:
        if id(tensor) in ours or tensor.device.type not in ("cpu", device.type) or tensor.layout is not torch.strided:
            continue
        try:
            buffer = arena.holding(tensor)
        except RuntimeError:  # a fake or functional tensor of a compiler has no address
            continue
        if buffer is None:
            continue
        host_side = tensor.device.type == "cpu" and in_staging is None and device.type != "cpu"
        if id(buffer) not in current:
            faults.append(f"{_holder(tensor)} reads host memory that no parameter owns any more")
        elif host_side or in_staging is not None:
            faults.append(f"{_holder(tensor)} is a host tensor that a kernel cannot read")
    for name, owner in owners:
        for leaf, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and tensor.device.type != device.type and tensor.numel():
                faults.append(f"{name}.{leaf} lies on {tensor.device}, its kernel reads it on {device}")
    if faults:
        shown = "\n  ".join(faults[:20])
        raise AuditError(
            f"expert offload: {len(faults)} tensors lie where they cannot be read:\n  {shown}\n"
            "The start ends here, because the answers would be wrong. Serve without --cpu-offload-gb, or name other "
            "parameters with --cpu-offload-params, and report the quantization method above"
        )


def _holder(tensor: torch.Tensor) -> str:
    """Whoever holds `tensor`, as well as the interpreter can tell: an attribute or entry, and the type that has it."""
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, dict):
            key = next((k for k, v in referrer.items() if v is tensor), None)
            for user in gc.get_referrers(referrer):
                if getattr(user, "__dict__", None) is referrer or isinstance(user, nn.Module):
                    return f"{type(user).__name__}.{key}"
    return f"a tensor {tuple(tensor.shape)} {tensor.dtype}"
