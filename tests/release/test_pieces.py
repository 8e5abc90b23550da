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


class Attention(torch.nn.Module):
    """A stand-in at which a release cuts."""

    def forward(self, x):
        return torch.ops.offload_test.attention(x * 2)


class Mixer(torch.nn.Module):
    """Attention, and dense weights on both sides of it."""

    def __init__(self, prefix):
        super().__init__()
        self.before = torch.nn.Linear(moe.HIDDEN, moe.HIDDEN, bias=False)
        self.attention = Attention()
        self.after = torch.nn.Linear(moe.HIDDEN, moe.HIDDEN, bias=False)

    def forward(self, hidden_states):
        return hidden_states + self.after(self.attention(self.before(hidden_states)))


class Decoder(moe.Layer):
    """Attention and experts."""

    def __init__(self, prefix):
        super().__init__(prefix)
        self.mixer = Mixer(prefix)

    def forward(self, hidden_states):
        return super().forward(self.mixer(hidden_states))


def hybrid(prefix):
    """As Nemotron-H: a layer mixes or has experts, and these have no cut."""
    return (moe.Layer if int(prefix.split(".")[-1]) % 2 else Mixer)(prefix)


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


@pytest.mark.parametrize("patterns", [{"experts"}, set()], ids=["experts", "everything"])
@pytest.mark.parametrize("make", [Decoder, hybrid])
def test_pieces_are_the_resident_models(make, patterns, config, patched, monkeypatch):
    from vllm.compilation.backends import split_graph
    from vllm.model_executor.offloader import base

    from vllm.expert_offload import Memory, Offloader
    from vllm.expert_offload.graphs import FILL_OP
    from vllm.expert_offload.staging import Staging

    monkeypatch.setattr(moe, "LAYERS", 5)
    x = torch.randn(32, moe.HIDDEN, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(base, "_instance", base.NoopOffloader())
    resident = moe.build(config, make)
    moe.fill(resident)
    moe.process(resident)
    graph, _ = traced(resident, config, x)
    expected = moe.run(resident, config, x)
    _, plain = split_graph(graph, [ATTENTION])

    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    memory = Memory(0, "this is a test", None, lambda t: t)
    offloader = Offloader(1 << 30, patterns, memory, lambda line: None, lambda m: isinstance(m, Attention))
    monkeypatch.setattr(base, "_instance", offloader)
    model = moe.build(config, make)
    moe.fill(model)
    hook = Staging.hook

    def hook_as_on_a_gpu(self, group, module):
        """Without the op that overwrites after use, which would stand in the pieces."""
        self.poison = False
        hook(self, group, module)

    monkeypatch.setattr(Staging, "hook", hook_as_on_a_gpu)
    moe.process(model)
    assert any(not item.experts and item.out for item in offloader.items.values()) is (not patterns)
    graph, inputs = traced(model, config, x)
    patched.join_graph_cuts(graph, [ATTENTION, FILL_OP])
    split, cut = split_graph(graph, [ATTENTION, FILL_OP])
    # Before the first piece too, where it needs dense weights: a cut, but of nothing in two.
    assert len(cut) == len(plain) + (not patterns)
    assert pieces(cut) == pieces(plain)
    assert any("moe_forward" in call for piece in pieces(cut) for call in piece)
    assert torch.equal(_called(split, inputs, config), expected)


def _called(split, inputs, config):
    from vllm.forward_context import set_forward_context

    with torch.no_grad(), set_forward_context(None, config):
        out = split(*inputs)
    return out[0] if isinstance(out, tuple) else out
