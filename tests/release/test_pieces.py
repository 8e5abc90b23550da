# SPDX-License-Identifier: Apache-2.0
"""Where a graph is cut for blocking copies, the release's own splitting gives the pieces of the resident model."""

import moe
import pytest
import torch

ATTENTION = "offload_test::attention"
_library = torch.library.Library("offload_test", "DEF")
_library.define("attention(Tensor x) -> Tensor")
_library.impl("attention", lambda x: x.sin(), "CompositeExplicitAutograd")
torch.library.register_fake(ATTENTION, torch.empty_like, lib=_library)


class Model(torch.nn.Module):
    """The expert layers with a stand-in for attention before each, at which a release cuts."""

    def __init__(self, inner):
        super().__init__()
        self.layers = inner.layers

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.ops.offload_test.attention(x * 2)
            x = layer(x)
        return x


def traced(model, config, x):
    """(graph as Dynamo hands it to the release's backend, its inputs)"""
    held = []

    def backend(graph, inputs):
        held.append((graph, inputs))
        return graph

    torch._dynamo.reset()
    moe.run(torch.compile(model, backend=backend, fullgraph=True), config, x)
    return held[0]


def pieces(split):
    """What every compiled piece calls, in order; its values are numbered otherwise and not compared."""
    compiled = [item.graph.graph for item in split if not item.is_splitting_graph]
    return [[str(n.target) for n in graph.nodes if n.op.startswith("call_")] for graph in compiled]


@pytest.fixture(scope="module")
def config():
    with moe.engine() as config:
        yield config


def test_pieces_are_the_resident_models(config, patched, monkeypatch):
    from vllm.compilation.backends import split_graph
    from vllm.model_executor.offloader import base

    from vllm.expert_offload import Memory, Offloader
    from vllm.expert_offload.graphs import FILL_OP
    from vllm.expert_offload.staging import Staging

    x = torch.randn(32, moe.HIDDEN, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(base, "_instance", base.NoopOffloader())
    resident = Model(moe.build(config))
    moe.fill(resident)
    moe.process(resident)
    graph, _ = traced(resident, config, x)
    expected = moe.run(resident, config, x)
    _, plain = split_graph(graph, [ATTENTION])

    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    memory = Memory.found(pinnable=False, pin_disabled=False, uva_disabled=False, view=lambda t: t)
    offloader = Offloader(1 << 30, {"experts"}, memory, lambda line: None)
    monkeypatch.setattr(base, "_instance", offloader)
    model = Model(moe.build(config))
    moe.fill(model)
    hook = Staging.hook

    def hook_as_on_a_gpu(self, group, module):
        """Without the op that overwrites after use, which would stand in the pieces."""
        self.poison = False
        hook(self, group, module)

    monkeypatch.setattr(Staging, "hook", hook_as_on_a_gpu)
    moe.process(model)
    graph, inputs = traced(model, config, x)
    patched.join_graph_cuts(graph, [ATTENTION, FILL_OP])
    split, cut = split_graph(graph, [ATTENTION, FILL_OP])
    assert len(cut) == len(plain)
    assert pieces(cut) == pieces(plain)
    assert any("moe_forward" in call for piece in pieces(cut) for call in piece)
    assert torch.equal(_called(split, inputs, config), expected)


def _called(split, inputs, config):
    from vllm.forward_context import set_forward_context

    with torch.no_grad(), set_forward_context(None, config):
        out = split(*inputs)
    return out[0] if isinstance(out, tuple) else out
