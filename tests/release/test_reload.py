# SPDX-License-Identifier: Apache-2.0
"""Weights that a release reloads while it serves arrive in host memory, by its own code, layer by layer."""

from types import SimpleNamespace

import moe
import pytest
import torch

from vllm.expert_offload import Memory, Offloader


@pytest.fixture(scope="module")
def config():
    with moe.engine() as config:
        yield config


def started(config, offloader, monkeypatch):
    """A model, served once."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.offloader import base

    monkeypatch.setattr(base, "_instance", offloader or base.NoopOffloader())
    model = moe.build(config)
    layerwise.record_metadata_for_reloading(model)  # as `initialize_model` does
    moe.fill(model)
    moe.process(model)
    return model


def reload(model, seed):
    """What `reload_weights` does with a checkpoint, here random numbers."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    g = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(shape, generator=g) * 0.3

    for name, parameter in sorted(model.named_parameters()):
        loader = parameter.weight_loader
        if parameter.dim() != 3:
            loader(parameter, new(*parameter.shape))
            continue
        down = name.endswith("w2_weight")
        for expert in range(moe.EXPERTS):
            for shard in ("w2",) if down else ("w1", "w3"):
                part = new(moe.HIDDEN, moe.WIDTH) if down else new(moe.WIDTH, moe.HIDDEN)
                loader(parameter, part, name.split(".")[-1], shard, expert)
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32, quantization=None))


def offloading(patterns):
    memory = Memory(0, "this is a test", None, lambda t: t)
    return Offloader(1 << 30, patterns, memory, lambda line: None, lambda module: False)


@pytest.mark.parametrize("patterns", [{"experts"}, set()], ids=["experts", "everything"])
def test_reloaded_weights_are_served(patterns, config, patched, monkeypatch):
    x = torch.randn(16, moe.HIDDEN, generator=torch.Generator().manual_seed(2))
    resident = started(config, None, monkeypatch)
    before = moe.run(resident, config, x)
    reload(resident, 3)
    expected = moe.run(resident, config, x)
    assert expected.isfinite().all() and not torch.equal(expected, before)

    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    model = started(config, offloading(patterns), monkeypatch)
    assert torch.equal(moe.run(model, config, x), before)
    reload(model, 3)
    for _ in range(2):  # the second pass reads what the first left behind
        assert torch.equal(moe.run(model, config, x), expected)


def copy_in(model, weights):
    """`reload_weights` with processed weights (`is_checkpoint_format=False`), without a worker."""
    settings = SimpleNamespace(load_config=SimpleNamespace(device="cpu"), lora_config=None)
    settings.model_config = SimpleNamespace(quantization=None)
    try:
        from vllm.model_executor.model_loader.reload.inplace import reload_weights  # from v0.32.0 on
    except ImportError:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        runner = SimpleNamespace(vllm_config=settings, model_config=settings.model_config, get_model=lambda: model)
        for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            setattr(runner, name, lambda: None)
        GPUModelRunner.reload_weights(runner, weights_iterator=weights, is_checkpoint_format=False)
    else:
        reload_weights(settings, model, weights, None, False)


def test_processed_weights_that_are_copied_in_are_served(config, patched, monkeypatch):
    x = torch.randn(16, moe.HIDDEN, generator=torch.Generator().manual_seed(2))
    resident = started(config, None, monkeypatch)
    before = moe.run(resident, config, x)
    new = [(name, parameter.data * 1.25) for name, parameter in resident.named_parameters()]
    with torch.no_grad():
        copy_in(resident, iter(new))
    expected = moe.run(resident, config, x)
    assert not torch.equal(expected, before)

    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    model = started(config, offloading(set()), monkeypatch)
    with torch.no_grad():
        copy_in(model, iter(new))
    for _ in range(2):
        assert torch.equal(moe.run(model, config, x), expected)
