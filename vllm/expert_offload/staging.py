# SPDX-License-Identifier: Apache-2.0
"""One place on the GPU where the weights of the layer that runs now lie: the way without mapped memory.

The parameters of every layer that has offloaded weights point into one staging buffer, whose address never changes, so
a compiled graph, an opaque op that looks its layer up by name, and a kernel that kept a pointer all read the same
place. What is there changes: `expert_offload::fill` copies a layer's bytes in before the layer runs. The op claims to
write the layer's input, which is what keeps it before the layer's kernels (they depend on that input) and after the
previous layer's (which made it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .host import HostBuffer, flat_bytes, like

# Kernels ask for 16-byte pointers, TMA descriptors for 128; the CUDA allocator's own blocks are aligned like this.
_ALIGN = 512

_library = torch.library.Library("expert_offload", "DEF")
_library.define("fill(Tensor(a!) anchor, int layer) -> ()")
_library.define("drop(Tensor(a!) anchor, int layer) -> ()")

# One engine per process, as in vLLM itself: a compiled graph names a layer by number, not by object.
_current: Staging | None = None


def _fill(anchor: torch.Tensor, layer: int) -> None:
    assert _current is not None
    _current.fill(layer)


def _drop(anchor: torch.Tensor, layer: int) -> None:
    assert _current is not None
    _current.drop()


def _traced(anchor: torch.Tensor, layer: int) -> None:
    """Nothing happens while a graph is traced."""


for _name, _op in (("fill", _fill), ("drop", _drop)):
    _library.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"expert_offload::{_name}", _traced, lib=_library)


def _anchor_of(forward: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], torch.Tensor]:
    """How to find a layer's hidden states among its arguments: by name where there is one, else the first matrix."""
    names = list(inspect.signature(forward).parameters)
    position = names.index("hidden_states") if "hidden_states" in names else None

    def anchor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if position is not None:
            return args[position] if position < len(args) else kwargs["hidden_states"]
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
                return value
        raise TypeError("expert offload: the layer was called without a floating-point matrix to order its copies by")

    return anchor


class Bound(NamedTuple):
    """A parameter, the host buffer with its bytes, and a tensor on that buffer (its dtype, shape and strides)."""

    parameter: nn.Parameter
    buffer: HostBuffer
    host: torch.Tensor


class Staging:
    """The staging buffer and what each layer puts into it.

    Args:
        device: where kernels run.
        poison: overwrite the buffer with NaN bytes after each layer, so that a late or early reader shows.
    """

    def __init__(self, device: torch.device, poison: bool) -> None:
        self.device = device
        self.poison = poison
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self.fills = 0
        self.layers: dict[int, list[Bound]] = {}
        self._copies: dict[int, list[tuple[torch.Tensor, HostBuffer]]] = {}

    def hook(self, layer: int, module: nn.Module) -> None:
        """Make `module` fetch what `bind` gives it under the number `layer` before each forward pass."""
        original, poison = module.forward, self.poison
        anchor = _anchor_of(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            torch.ops.expert_offload.fill(anchor(args, kwargs), layer)
            out = original(*args, **kwargs)
            if poison:
                torch.ops.expert_offload.drop(out[0] if isinstance(out, tuple) else out, layer)
            return out

        module.forward = forward  # type: ignore[method-assign]

    def bind(self, layer: int, bound: list[Bound]) -> None:
        """Say which parameters `layer` needs before it runs."""
        self.layers[layer] = bound

    def allocate(self) -> None:
        """Make the buffer as large as the layer that needs most, and point every bound parameter into it."""
        global _current
        size = max((sum(_aligned(b.buffer.nbytes) for b in bound) for bound in self.layers.values()), default=0)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.poison:
            self.bytes.fill_(0xFF)
        self._copies.clear()
        for layer, bound in self.layers.items():
            copies, start = [], 0
            for b in bound:
                part = self.bytes[start : start + b.buffer.nbytes]
                b.parameter.data = like(part, b.host)
                copies.append((part, b.buffer))
                start += _aligned(b.buffer.nbytes)
            self._copies[layer] = copies
        _current = self

    def fill(self, layer: int) -> None:
        """Copy the bytes of `layer` into the buffer: in stream order from page-locked memory, blocking from pageable."""
        self.fills += 1
        for part, buffer in self._copies[layer]:
            with buffer.opened() as source:
                part.copy_(source, non_blocking=buffer.pinned)

    def drop(self) -> None:
        """Overwrite the buffer: every floating-point format reads NaN."""
        self.bytes.fill_(0xFF)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the staging buffer, by address."""
        start = self.bytes.data_ptr()
        return start <= tensor.data_ptr() < start + max(1, self.bytes.numel())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


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
