# SPDX-License-Identifier: Apache-2.0
"""The release's other backend keeps its layers' weights in a ring of buffers; each finds its own there."""

import pytest
import torch
from vllm.model_executor.offloader import base
from vllm.model_executor.offloader.prefetch import PrefetchOffloader


class Ring(PrefetchOffloader):
    """The release's hooks around layers, without a device: which layer's weights each buffer holds is written down."""

    def __init__(self, layers: int, step: int):
        self.prefetch_step = step
        self.module_offloaders = [None] * layers
        self.holds = {layer % step: layer for layer in range(min(step, layers))}  # as `post_init` starts
        self.faults: list[tuple[int, int]] = []

    def _wait_for_layer(self, layer_idx):
        if self.holds[layer_idx % self.prefetch_step] != layer_idx:
            self.faults.append((layer_idx, self.holds[layer_idx % self.prefetch_step]))

    def _start_prefetch(self, layer_idx):
        self.holds[layer_idx % self.prefetch_step] = layer_idx


@pytest.mark.parametrize("layers", range(1, 10))
def test_a_layer_finds_its_own_weights(layers, monkeypatch):
    for step in range(1, layers + 2):
        ring = Ring(layers, step)
        monkeypatch.setattr(base, "_instance", ring)
        chain = [torch.nn.Identity() for _ in range(layers)]
        for index, module in enumerate(chain):
            ring._hook_module_forward(index, module)
        for _ in range(3):
            x = torch.zeros(2, 2)
            for module in chain:
                x = module(x)
        assert not ring.faults, (step, ring.faults)
        if step == 1:  # void if nothing is asked of it
            ring.holds[0] = -1
            chain[0](x)
            assert ring.faults
