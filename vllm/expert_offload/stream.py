# SPDX-License-Identifier: Apache-2.0
"""Whole layers of experts through two buffers on the GPU, for batches that need almost all of them.

A kernel that multiplies many tokens reads an expert's weights once for every block of them, over the link each time
where they lie in host memory. Here each layer's bytes cross it once, by the copy engine, into one of two buffers: while
one layer computes out of its buffer, the next one's bytes come into the other. Layers run in the order in which they
were built; whichever else is asked for is brought when it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from .host import flat_bytes, like

_ALIGN = 512  # of each weight in a buffer, as the CUDA allocator's own blocks are
Weights = dict[str, torch.Tensor]


class Stream:
    """Two buffers, and the layers that pass through them.

    Args:
        layers: of each layer, in the order in which they run, its weights in page-locked host memory, by attribute.
        device: where kernels run. On a CPU copies are done at once (for tests).
    """

    def __init__(self, layers: Sequence[Weights], device: torch.device) -> None:
        self.nbytes = 2 * size(layers)
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        halves = flat.split(self.nbytes // 2) if self.nbytes else (flat, flat)
        self._parts = [_laid(weights, halves[number % 2]) for number, weights in enumerate(layers)]
        self._holds: list[int | None] = [None, None]
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._side = torch.cuda.Stream(device)
            self._came, self._read = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def take(self, layer: int) -> Weights:
        """The weights of `layer` on the device, by attribute, for work on the current stream; the next ones set off.

        Call `done` behind that work, before another `take`.
        """
        buffer = layer % 2
        if self._holds[buffer] != layer:
            self._bring(layer)
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._came[buffer])
        if layer + 1 < len(self._parts) and self._holds[1 - buffer] != layer + 1:
            self._bring(layer + 1)
        return {name: part for name, part, _ in self._parts[layer]}

    def done(self, layer: int) -> None:
        """The current stream has been given all work that reads what `take` gave for `layer`."""
        if self._cuda:
            self._read[layer % 2].record()

    def forget(self) -> None:
        """What was brought is no longer what host memory holds."""
        self._holds = [None, None]

    def _bring(self, layer: int) -> None:
        buffer = layer % 2
        self._holds[buffer] = layer
        with torch.cuda.stream(self._side) if self._cuda else contextlib.nullcontext():
            if self._cuda:
                self._side.wait_event(self._read[buffer])
            for _, part, host in self._parts[layer]:
                flat_bytes(part).copy_(flat_bytes(host), non_blocking=True)
            if self._cuda:
                self._came[buffer].record(self._side)


def _laid(weights: Weights, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(attribute, tensor in `buffer`, tensor in host memory) of each weight of a layer."""
    found, start = [], 0
    for name, host in weights.items():
        nbytes = flat_bytes(host).numel()
        found.append((name, like(buffer[start : start + nbytes], host), host))
        start += _aligned(nbytes)
    return found


def size(layers: Sequence[Weights]) -> int:
    """Bytes of one buffer: of the largest layer."""
    return max((sum(_aligned(flat_bytes(host).numel()) for host in layer.values()) for layer in layers), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
