# SPDX-License-Identifier: Apache-2.0
"""The release's own way to put a processed weight into a layer, with a Deferred one."""

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("prefer_copy", [False, True])
def test_replace_parameter(patched, prefer_copy):
    """By tensors of its own shape and type, and of others: v0.33.0 copies the first and rebinds `.data` to the last."""
    import inspect

    from vllm.model_executor.utils import replace_parameter

    from vllm.expert_offload.deferred import Deferred, Tape

    if prefer_copy and "prefer_copy" not in inspect.signature(replace_parameter).parameters:
        pytest.skip("no such switch: a release without it makes a new parameter, or (v0.33.0) asks the tensors alone")
    kw = dict(prefer_copy=True) if prefer_copy else {}
    weight = torch.arange(48, dtype=torch.uint8).view(4, 3, 4)
    tape = Tape(4, torch.device("cpu"))
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(tape.source(weight, lambda a, b: weight[a:b].clone()), requires_grad=False)
    layer.w13_weight.weight_loader = "a loader"
    with tape.writing():
        replace_parameter(layer, "w13_weight", layer.w13_weight.flip(1), **kw)
        replace_parameter(layer, "w13_weight", nn.Parameter(layer.w13_weight.data ^ 0x0F, requires_grad=False), **kw)
        words = layer.w13_weight.data.view(torch.int32)
        replace_parameter(layer, "w13_weight", words.transpose(1, 2).contiguous(), **kw)
    made = layer.w13_weight
    assert isinstance(made, Deferred) and isinstance(made, nn.Parameter) and made.weight_loader == "a loader"
    assert tape.why is None and (made.shape, made.dtype) == ((4, 1, 3), torch.int32)
    rows = [tape.play(e, e + 1, tape.program(made))[made.number] for e in range(4)]
    expected = (weight.flip(1) ^ 0x0F).view(torch.int32).transpose(1, 2)
    assert torch.equal(torch.cat(rows), expected)


def test_replace_parameter_of_the_older_methods(patched):
    """GPTQ's and AWQ's asks how large both storages are, of a tensor that a loop over experts has filled."""
    from vllm.model_executor.layers.quantization.utils import replace_parameter

    from vllm.expert_offload.deferred import Tape

    weight = torch.arange(48, dtype=torch.int32).view(4, 3, 4)
    tape = Tape(4, torch.device("cpu"))
    layer = nn.Module()
    layer.w13_qweight = nn.Parameter(tape.source(weight, lambda a, b: weight[a:b].clone()), requires_grad=False)
    with tape.writing():
        repacked = torch.empty((4, 4, 3), dtype=torch.int32)
        for expert in range(4):
            repacked[expert] = layer.w13_qweight[expert].t()
        replace_parameter(layer, "w13_qweight", repacked)
    made = layer.w13_qweight
    made = tape.whole(made) if hasattr(made, "tape") else made
    assert torch.equal(made, weight.transpose(1, 2))
