# SPDX-License-Identifier: Apache-2.0
"""The patched places of a release call our code, with what the release knows."""

from __future__ import annotations

import inspect
import logging
import platform
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.model_executor.offloader import base

from vllm.expert_offload import Offloader


def asked(**kw) -> OffloadConfig:
    return OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=2, cpu_offload_params={"experts"}), **kw)


@pytest.fixture
def wsl(monkeypatch):
    """WSL as the release sees it: the kernel's release string."""
    from vllm.platforms import interface
    from vllm.utils import platform_utils

    cached = [
        f
        for f in (interface.in_wsl, platform_utils.is_pin_memory_available, platform_utils.is_uva_available)
        if hasattr(f, "cache_clear")
    ]
    real = platform.uname()
    Fake = namedtuple("uname_result", "system node release version machine processor")
    fake = Fake(real.system, real.node, "5.15.167.4-microsoft-standard-WSL2", real.version, real.machine, "")
    monkeypatch.setattr(platform, "uname", lambda: fake)
    for f in cached:
        f.cache_clear()
    yield
    monkeypatch.undo()
    for f in cached:
        f.cache_clear()


def test_the_flag_makes_our_offloader():
    offloader = base.create_offloader(asked())
    assert isinstance(offloader, Offloader)
    assert offloader.selection.budget == 2 * 2**30
    assert offloader.selection.patterns == ["experts"]
    assert isinstance(base.create_offloader(OffloadConfig()), base.NoopOffloader)


def test_everything_a_release_calls_on_an_offloader_is_there():
    """Whatever the release's base class offers, ours answers, and takes as many arguments."""
    ours = base.create_offloader(asked())
    private = {"_wait_for_layer", "_start_prefetch"}  # called by the prefetch backend's own ops alone
    for name, theirs in inspect.getmembers(base.BaseOffloader, inspect.isfunction):
        if name.startswith("__") or name in private:
            continue
        mine = inspect.signature(getattr(ours, name)).parameters
        assert len(mine) >= len(inspect.signature(theirs).parameters) - 1, name


def test_prefetch_is_left_alone(patched, monkeypatch):
    """The release's own offloader is created, and nothing of ours is asked."""
    import torch
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    config = OffloadConfig(
        uva=UVAOffloadConfig(cpu_offload_gb=2),
        prefetch=PrefetchOffloadConfig(offload_group_size=4, offload_num_in_group=1),
    )
    assert not patched.offloads(config)
    assert not patched.compile_factor(config)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)  # a driver would make it
    offloader = base.create_offloader(config)
    assert type(offloader) is PrefetchOffloader
    monkeypatch.setattr(base, "_instance", offloader)
    assert patched.active() is None


@pytest.mark.parametrize("backend", ["auto", "uva", "prefetch"])
def test_no_gigabyte_no_offload(patched, backend):
    """The backend named and nothing asked of it: no offloader of ours decides anything, and the start succeeds."""
    config = OffloadConfig(
        offload_backend=backend, prefetch=PrefetchOffloadConfig(offload_group_size=1, offload_num_in_group=1)
    )
    assert not patched.offloads(config)
    offloader = base.create_offloader(OffloadConfig(offload_backend="uva"))
    import torch

    offloader.built(torch.device("cpu"))
    offloader.finish(torch.device("cpu"))


def test_compile_key_knows_which_layers_are_copied(monkeypatch):
    """What is read in place is no part of the graph, a copy is: another graph, another key."""
    import torch

    from vllm.expert_offload.staging import Staging

    offloader = base.create_offloader(asked())
    monkeypatch.setattr(base, "_instance", offloader)
    plain = asked().compute_hash()
    assert asked().compute_hash() == plain
    offloader.staging = Staging(torch.device("cpu"), poison=False)
    offloader.staging.bind(1, True, [])
    one = asked().compute_hash()
    offloader.staging.bind(3, True, [])
    assert len({plain, one, asked().compute_hash()}) == 3


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_graphs_are_cut_where_memory_is_pageable(patched, mode):
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, splitting_ops=["vllm::unified_attention"])
    compilation.cudagraph_mode = CUDAGraphMode[mode]
    patched.adapt_graphs(SimpleNamespace(compilation_config=compilation, offload_config=asked()))
    assert compilation.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert compilation.splitting_ops == ["vllm::unified_attention", "expert_offload::fill"]


@pytest.mark.parametrize("blocking", [True, False])
def test_graphs_are_cut_when_loading_ends_with_pageable_memory(patched, blocking, monkeypatch):
    """It was to be page-locked, so nothing was cut before; then the driver refused some of it."""
    import torch
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig, set_current_vllm_config
    from vllm.config.compilation import CompilationMode

    config = VllmConfig(compilation_config=CompilationConfig())
    compilation = config.compilation_config
    compilation.mode, compilation.splitting_ops = CompilationMode.VLLM_COMPILE, ["vllm::unified_attention"]
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    offloader = base.create_offloader(asked())
    monkeypatch.setattr(base, "_instance", offloader)
    monkeypatch.setattr(offloader, "finish", lambda device: blocking)
    with set_current_vllm_config(config):
        patched.finish(torch.device("cpu"))
    if blocking:
        assert compilation.cudagraph_mode == CUDAGraphMode.PIECEWISE
        assert compilation.splitting_ops == ["vllm::unified_attention", "expert_offload::fill"]
    else:
        assert compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
        assert compilation.splitting_ops == ["vllm::unified_attention"]


def test_too_little_memory_ends_the_start_before_the_model_is_built(patched, monkeypatch):
    import torch
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from vllm.expert_offload import fit

    monkeypatch.setattr(base, "_instance", base.create_offloader(asked()))

    def build(*_, **__):
        raise RuntimeError("built")

    monkeypatch.setattr(base_loader, "initialize_model", build)
    monkeypatch.setattr(DefaultModelLoader, "create_model", build, raising=False)
    config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"), load_config=LoadConfig())
    model = SimpleNamespace(
        model=str(Path(__file__).parents[1] / "models" / "tiny-moe"),
        revision=None,
        quantization="compressed-tensors",
        hf_config=SimpleNamespace(quantization_config={}),
        dtype=torch.float32,
    )
    with pytest.raises(RuntimeError, match="built"):
        DefaultModelLoader(config.load_config).load_model(config, model)
    monkeypatch.setattr(base, "_instance", base.create_offloader(asked()))
    monkeypatch.setattr(fit, "free_memory", lambda: fit.Free(2**20, "a test"))
    with pytest.raises(fit.TooLittleMemory, match="No weight was read"):
        DefaultModelLoader(config.load_config).load_model(config, model)


def test_graphs_stay_without_offload(patched):
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode

    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, splitting_ops=["vllm::unified_attention"])
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    patched.adapt_graphs(SimpleNamespace(compilation_config=compilation, offload_config=OffloadConfig()))
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL
    assert compilation.splitting_ops == ["vllm::unified_attention"]


def test_v1_runner_has_no_assertion_about_offload():
    """A hybrid model's input batch is made anew in every start (v0.18.0 refused that beside offload)."""
    from vllm.v1.worker import gpu_model_runner

    assert "assert self.offload_config" not in inspect.getsource(gpu_model_runner.GPUModelRunner)


def test_v2_runner_makes_the_offloader_before_it_builds_a_model(monkeypatch):
    """Its load_model, run as far as the first thing that needs a GPU."""
    module = pytest.importorskip(
        "vllm.v1.worker.gpu.model_runner", reason="this release has no V2 runner that imports here"
    )

    class Stop(Exception):
        pass

    def loader(*_):
        raise Stop

    monkeypatch.setattr(module, "get_model_loader", loader)
    monkeypatch.setattr(module, "DeviceMemoryProfiler", _Nothing)
    monkeypatch.setattr(base, "_instance", base.NoopOffloader())
    config = SimpleNamespace(offload_config=asked(), load_config=SimpleNamespace(load_format="auto"))
    runner = SimpleNamespace(
        vllm_config=config, eplb=SimpleNamespace(prepare_load=lambda: None), load_config=config.load_config
    )
    constructor = inspect.getsource(module.GPUModelRunner.__init__)
    if "set_offloader" in constructor:  # from v0.29.0 on; it needs a GPU
        assert "set_offloader(create_offloader(" in constructor and "get_model_loader" not in constructor
        return
    with pytest.raises(Stop):
        module.GPUModelRunner.load_model(runner)
    assert isinstance(base.get_offloader(), Offloader)


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_v2_gives_way_on_wsl(patched, wsl, monkeypatch, caplog):
    """Asked for by variable, but WSL maps no memory: V1 is taken, and one line says so."""
    if not hasattr(patched, "v2_starts"):
        pytest.skip("this release starts V2 without mapped memory, or only when it is asked to")
    from vllm.config import VllmConfig
    from vllm.utils import platform_utils

    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    platform_utils.is_uva_available.cache_clear()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(patched.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert VllmConfig.use_v2_model_runner.fget(SimpleNamespace()) is False
    assert "V1 model runner" in caplog.text
    monkeypatch.undo()
    platform_utils.is_uva_available.cache_clear()


def test_page_locking_is_tried_on_wsl_up_to_a_limit(patched, wsl, monkeypatch):
    """v0.18.0 refuses it there by name, later releases want a variable; here neither decides."""
    assert patched.host_memory().limit == 0, "the CPU backend has nothing to page-lock for"
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    one, two = patched.host_memory(), patched.host_memory(ranks=2)
    assert "WSL" in one.why and one.limit > 0 and not one.copies
    assert two.limit == one.limit // 2
    monkeypatch.setenv("EXPERT_OFFLOAD_PIN_GIB", "0")
    assert patched.host_memory().copies
