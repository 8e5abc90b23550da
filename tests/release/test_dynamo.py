# SPDX-License-Identifier: Apache-2.0
"""The expert op is opaque: it finds its layer by name and reads the layer's real attributes while a graph runs.

So the release's own way without mapped memory does not trace, a forward that does trace is wrong, and ours is right,
on the torch that the pin names.
"""

import inspect

import moe
import pytest
import torch
from torch.func import functional_call


@pytest.fixture(scope="module")
def config():
    with moe.engine() as config:
        yield config


@pytest.fixture(scope="module")
def resident(config):
    """Input and output of the model with everything where it was built, the opaque op on."""
    model = moe.build(config)
    moe.fill(model)
    moe.process(model)
    x = torch.randn(32, moe.HIDDEN, generator=torch.Generator().manual_seed(2))
    return x, moe.run(model, config, x)


def compiled(model, backend="eager"):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


def test_the_release_alone_does_not_trace(config, monkeypatch):
    """UVAOffloader of the release, let loose on CPU tensors: Dynamo refuses its wrapped forward."""
    import vllm.model_executor.offloader.uva as uva
    from vllm.model_executor.offloader import base

    if torch.__version__.startswith("2.13"):
        pytest.skip("torch 2.13 alone traces it; what is wrong with it then is the next test's")
    source = inspect.getsource(uva)
    assert source.count('if device == torch.device("cpu"):') == 1
    source = source.replace('if device == torch.device("cpu"):', "if False:").replace(
        'if p.device.type == "cpu" or getattr', "if getattr"
    )
    space = dict(vars(uva))
    exec(compile(source, uva.__file__, "exec"), space)
    space.update(is_uva_available=lambda: False, is_pin_memory_available=lambda: False, should_pin_memory=lambda: False)
    offloader = space["UVAOffloader"](cpu_offload_max_bytes=1 << 30, cpu_offload_params={"experts"})
    monkeypatch.setattr(base, "_instance", offloader)
    model = moe.build(config)
    assert offloader.cpu_offload_bytes > 0
    moe.fill(model)
    moe.process(model)
    x = torch.ones(32, moe.HIDDEN)
    moe.run(model, config, x)  # eager, it runs
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        moe.run(compiled(model), config, x)
    assert "OrderedDict" in str(refused.value) or "setattr" in str(refused.value).lower()


def test_a_forward_that_traces_is_wrong(config, resident, monkeypatch):
    """`functional_call` with device copies, written so that Dynamo takes it: the op does not see what it swaps in."""
    from vllm.model_executor.offloader import base

    monkeypatch.setattr(base, "_instance", base.NoopOffloader())
    model = moe.build(config)
    moe.fill(model)
    moe.process(model)
    x, expected = resident
    assert torch.equal(moe.run(model, config, x), expected)
    for layer in model.layers:
        state = {k: v.clone() for k, v in layer.named_parameters()}
        for p in layer.parameters():
            if p.dim() == 3:
                p.data = torch.full_like(p.data, float("nan"))  # the host's side of it
        original = layer.forward

        def forward(hidden_states, layer=layer, state=state, original=original):
            layer.forward = original
            return functional_call(layer, state, (hidden_states,), tie_weights=False)

        layer.forward = forward
    out = moe.run(compiled(model), config, x)
    assert not torch.allclose(out, expected)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("budget", [1, 3 * 8 * 64 * 32 * 4 * 3 // 2, 1 << 30], ids=["one tensor", "half", "all"])
def test_ours_is_right(config, resident, monkeypatch, backend, budget):
    """Equal to the last bit, while the host's side is unreadable and the device's copy is overwritten after use."""
    from vllm.model_executor.offloader import base

    from vllm.expert_offload import Memory, Offloader

    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    lines = []
    memory = Memory(0, "this is a test", None, lambda t: t)
    offloader = Offloader(budget, {"experts"}, memory, lines.append, lambda module: False)
    monkeypatch.setattr(base, "_instance", offloader)
    model = moe.build(config)
    offloader.built(torch.device("cpu"))
    moe.fill(model)
    moe.process(model)
    assert lines and "moved to host memory" in lines[0]
    assert all(item.out for item in offloader.items.values()), "what was chosen stays out after processing"
    x, expected = resident
    model_ = model if backend is None else compiled(model, backend)
    before = offloader.staging.fills
    out = moe.run(model_, config, x)
    assert torch.equal(out, expected)
    assert offloader.staging.fills - before == len(offloader.staging.groups)
    with torch.no_grad():
        routed = model.layers[0].gate(model.layers[0].norm(x)).topk(2).indices.flatten()
    a, b = torch.bincount(routed, minlength=moe.EXPERTS).topk(2).indices.tolist()
    item = next(i for i in offloader.items.values() if i.out)
    with item.buffer.opened():
        item.host[[a, b]] = item.host[[b, a]].clone()
    assert not torch.allclose(moe.run(model_, config, x), expected), "two experts changed places and nothing did"
