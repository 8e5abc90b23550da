# SPDX-License-Identifier: Apache-2.0
"""The release's own way to put a processed weight into a layer, with a Deferred one."""

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("prefer_copy", [False, True])
def test_replace_parameter(patched, prefer_copy):
    import inspect

    from vllm.model_executor.utils import replace_parameter

    from vllm.expert_offload.deferred import Deferred, Tape

    if prefer_copy and "prefer_copy" not in inspect.signature(replace_parameter).parameters:
        pytest.skip("this release always makes a new parameter")
    kw = dict(prefer_copy=True) if prefer_copy else {}
    weight = torch.arange(48, dtype=torch.uint8).view(4, 3, 4)
    tape = Tape(4, torch.device("cpu"))
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(tape.source(weight, lambda a, b: weight[a:b].clone()), requires_grad=False)
    layer.w13_weight.weight_loader = "a loader"
    with tape.writing():
        replace_parameter(layer, "w13_weight", layer.w13_weight.flip(1), **kw)
        replace_parameter(layer, "w13_weight", nn.Parameter(layer.w13_weight.data ^ 0x0F, requires_grad=False), **kw)
    made = layer.w13_weight
    assert isinstance(made, Deferred) and isinstance(made, nn.Parameter) and made.weight_loader == "a loader"
    assert tape.why is None
    rows = [tape.play(e, e + 1, tape.program(made))[made.number] for e in range(4)]
    assert torch.equal(torch.cat(rows), weight.flip(1) ^ 0x0F)
