# SPDX-License-Identifier: Apache-2.0
"""Weight-transfer engines write where kernels read; the weights of offloaded layers do not stay there."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import moe
import pytest
from test_reload import offloading
from torch import nn

SPARSE = "vllm.distributed.weight_transfer.sparse_nccl_engine"
M2N = "vllm.distributed.weight_transfer.m2n_layout"
WRITES = ("param.data", "get_parameter(", "load_checkpoint_weight_patches")


@pytest.fixture(scope="module")
def config():
    with moe.engine() as config:
        yield config


def engine_module(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as why:
        if why.name != name:
            raise
        pytest.skip("this release has no such engine")


class Dense(moe.Layer):
    """With a matrix of the release's own beside the experts, which an engine may write to directly."""

    def __init__(self, prefix: str) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        super().__init__(prefix)
        self.proj = ReplicatedLinear(moe.HIDDEN, moe.HIDDEN, bias=False, prefix=f"{prefix}.proj")


def built(config, offloader, monkeypatch) -> nn.Module:
    """A model whose weights lie where the offloader has put them; how a CPU lays them out for itself is left out."""
    from vllm.model_executor.offloader import base

    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    monkeypatch.setattr(base, "_instance", offloader or base.NoopOffloader())
    return moe.build(config, Dense)


def test_sparse_updates_are_refused_at_their_start(config, patched, monkeypatch):
    module = engine_module(SPARSE)
    monkeypatch.setattr(module, "worker_init_process_group", lambda *_: "a group")

    def begin(model) -> object:
        engine = SimpleNamespace(model=model, parallel_config=None, model_update_group=None)
        module.SparseNCCLWeightTransferEngine.init_transfer_engine(engine, None)
        return engine.model_update_group

    assert begin(built(config, None, monkeypatch)) == "a group"
    offloaded = built(config, offloading({"experts"}), monkeypatch)
    with pytest.raises(NotImplementedError, match=r"6 offloaded weights .* nccl or ipc.* --cpu-offload-gb"):
        begin(offloaded)


@pytest.mark.parametrize("patterns", [{"proj"}, {"experts"}], ids=lambda p: next(iter(p)))
def test_whole_weights_go_by_the_reload_where_they_are_offloaded(patterns, config, patched, monkeypatch):
    resolve = engine_module(M2N).resolve_parameter_destinations

    def direct(model) -> set[str]:
        """The weights that the engine would write to by their address of this moment."""
        weights = dict(model.named_parameters())
        found = resolve(
            model,
            list(weights),
            [w.dtype for w in weights.values()],
            [w.shape for w in weights.values()],
            num_workers=1,
            shard_axis_size=1,
            allow_direct=True,
        )
        return {d.name for d in found if d.direct}

    resident = direct(built(config, None, monkeypatch))
    dense = {f"layers.{i}.proj.weight" for i in range(moe.LAYERS)}
    assert dense <= resident
    left = direct(built(config, offloading(patterns), monkeypatch))
    assert left == (resident - dense if patterns == {"proj"} else resident)


def test_every_engine_that_writes_by_address_is_known(patched):
    """A new one, by its source, must be read: does the reload carry on what it writes, or is it refused?"""
    folder = Path(importlib.import_module("vllm.distributed").__path__[0]) / "weight_transfer"
    sources = {file.name: file.read_text() for file in folder.glob("*.py")}
    writes = {name for name, text in sources.items() if any(sign in text for sign in WRITES)}
    assert writes <= {"m2n_layout.py", "sharded_rdt_engine.py", "sparse_nccl_engine.py"}
    # Into weights that a reload has made anew, and its own function copies on to those that kernels read.
    assert (
        "sharded_rdt_engine.py" not in writes or "_copy_and_restore_kernel_tensors(" in sources["sharded_rdt_engine.py"]
    )
