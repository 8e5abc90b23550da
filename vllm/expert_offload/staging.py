# SPDX-License-Identifier: Apache-2.0
"""One place on the GPU where the weights of the layer that runs now lie: the way without mapped memory.

The parameters of every layer that has offloaded weights point into one staging buffer, whose address never changes, so
a compiled graph, an opaque op that looks its layer up by name, and a kernel that kept a pointer all read the same
place. What is there changes: `expert_offload::fill` copies the bytes of a group (one layer's experts, or its dense
weights) in before the group's module runs. The op claims to write the module's input, which is what keeps it before the
module's kernels (they depend on that input) and after the previous layer's (which made it).

Experts are fetched right before the expert op, not at the start of their layer: what the fill claims to write lies in
memory there anyway, so it keeps nothing from being fused. Where a graph must be cut at it, `graphs.join_cuts` finds the
place.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn

from .host import HostBuffer, flat_bytes, like

# Kernels ask for 16-byte pointers, TMA descriptors for 128; the CUDA allocator's own blocks are aligned like this.
_ALIGN = 512

_library = torch.library.Library("expert_offload", "DEF")
_library.define("fill(Tensor(a!) anchor, int group) -> ()")
_library.define("drop(Tensor(a!) anchor, int group) -> ()")

# One engine per process, as in vLLM itself: a compiled graph names a layer by number, not by object.
_current: Staging | None = None


def _fill(anchor: torch.Tensor, group: int) -> None:
    assert _current is not None
    _current.fill(group)


def _drop(anchor: torch.Tensor, group: int) -> None:
    assert _current is not None
    _current.drop(group)


def _traced(anchor: torch.Tensor, group: int) -> None:
    """Nothing happens while a graph is traced."""


for _name, _op in (("fill", _fill), ("drop", _drop)):
    _library.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"expert_offload::{_name}", _traced, lib=_library)


def _anchor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a module's arguments: by name where they are given so, else the first matrix."""
    named = kwargs.get("hidden_states")
    for value in (named, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
            return value
    raise TypeError("expert offload: a layer was called without a floating-point matrix to order its copies by")


class Bound(NamedTuple):
    """A parameter, the host buffer with its bytes, and a tensor on that buffer (its dtype, shape and strides)."""

    parameter: nn.Parameter
    buffer: HostBuffer
    host: torch.Tensor


class Staging:
    """The staging buffer and what each group of parameters puts into it.

    Args:
        device: where kernels run.
        poison: overwrite a group's bytes with NaN after its module, so that a late or early reader shows.
    """

    def __init__(self, device: torch.device, poison: bool) -> None:
        self.device = device
        self.poison = poison
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self.fills = 0
        self.places = 1
        self.groups: dict[int, tuple[bool, list[Bound]]] = {}
        self._copies: dict[int, list[tuple[torch.Tensor, HostBuffer]]] = {}

    def hook(self, group: int, module: nn.Module) -> None:
        """Make `module` fetch what `bind` gives it under the number `group` before each forward pass."""
        original, poison = module.forward, self.poison

        def forward(*args: Any, **kwargs: Any) -> Any:
            torch.ops.expert_offload.fill(_anchor(args, kwargs), group)
            out = original(*args, **kwargs)
            if poison:
                torch.ops.expert_offload.drop(_anchor(out if isinstance(out, tuple) else (out,), {}), group)
            return out

        module.forward = forward  # type: ignore[method-assign]

    def bind(self, group: int, experts: bool, bound: list[Bound]) -> None:
        """Say which parameters `group` needs before its module runs, all of them experts' weights or none."""
        self.groups[group] = (experts, bound)

    def allocate(self, places: int) -> None:
        """Make room for the largest group of experts, `places` times for the largest of dense weights; point there.

        Dense weights of layers in turn, so that the next layers' may come while this one's are still read
        (`graphs.join_cuts`).
        """
        global _current
        self.places = places
        need = {True: 0, False: 0}
        for experts, bound in self.groups.values():
            need[experts] = max(need[experts], sum(_aligned(b.buffer.nbytes) for b in bound))
        self.bytes = torch.empty(need[True] + places * need[False], dtype=torch.uint8, device=self.device)
        dense = itertools.cycle([need[True] + place * need[False] for place in range(places)])
        if self.poison:
            self.bytes.fill_(0xFF)
        self._copies.clear()
        for group, (experts, bound) in sorted(self.groups.items()):
            copies, start = [], 0 if experts else next(dense)
            for b in bound:
                part = self.bytes[start : start + b.buffer.nbytes]
                b.parameter.data = like(part, b.host)
                copies.append((part, b.buffer))
                start += _aligned(b.buffer.nbytes)
            self._copies[group] = copies
        _current = self

    def fill(self, group: int) -> None:
        """Copy the bytes of `group` in: in stream order from page-locked memory, blocking from pageable."""
        self.fills += 1
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not self._pinned(group):
            raise RuntimeError(
                "expert offload: a CUDA graph is being captured around a copy from pageable memory, which would fault: "
                'set --compilation-config \'{"cudagraph_mode": "NONE"}\' and report how this start was made'
            )
        for part, buffer in self._copies[group]:
            with buffer.opened() as source:
                part.copy_(source, non_blocking=buffer.pinned)

    def _pinned(self, group: int) -> bool:
        return all(buffer.pinned for _, buffer in self._copies[group])

    def drop(self, group: int) -> None:
        """Overwrite the bytes of `group`: every floating-point format reads NaN."""
        for part, _ in self._copies[group]:
            part.fill_(0xFF)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the staging buffer, by address."""
        start = self.bytes.data_ptr()
        return start <= tensor.data_ptr() < start + max(1, self.bytes.numel())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def current() -> Staging | None:
    """The engine's staging, None where every weight is read in place."""
    return _current


def to_device(buffer: HostBuffer, host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` of the tensor `host` that lies on `buffer`."""
    flat = torch.empty(buffer.nbytes, dtype=torch.uint8, device=device)
    with buffer.opened() as source:
        flat.copy_(source)
    return like(flat, host)


def to_host(buffer: HostBuffer, tensor: torch.Tensor) -> None:
    """Copy the bytes of the device tensor `tensor` into `buffer`, blocking."""
    with buffer.opened() as target:
        target.copy_(flat_bytes(tensor))
