# SPDX-License-Identifier: Apache-2.0
"""Which quantization is processed in chunks on this pin and which whole, and that both give the same bytes.

Layers are the release's own, in an offloader as a start has it. Kernels stand in: what they make of an expert depends
on its bytes, so a mistaken one shows. `test_repack.py` runs the release's loops around Marlin's repack.
"""

from __future__ import annotations

import hashlib

import pretend
import pytest
import repacks
import torch
import walk
from schemes import SCHEMES
from test_roles_run import RUN
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.expert_offload import Memory, Offloader, offloader, repack, residency, roles, scales
from vllm.expert_offload.standin import Deferred
from vllm.expert_offload.tape import leaves

# Schemes of methods that docs/schemes.md has in chunks, which are not, and the operation that the report names.
WHOLE = {"unquantized, on a CPU": "prepack_moe_weight"}


def repacked(b_q_weight, *rest, **named):
    """As `pretend`'s, but the bytes are the expert's, in another order."""
    sizes = [int(r) for r in rest if not isinstance(r, torch.Tensor)]
    size_k, size_n, bits = (named[n] if n in named else sizes.pop(0) for n in ("size_k", "size_n", "num_bits"))
    return b_q_weight.flip(-1).reshape(*b_q_weight.shape[:-2], size_k // 16, size_n * bits // 2).clone()


@pytest.fixture(scope="module")
def release(patched):
    """The release's configuration, and every module imported that has a method."""
    pretend.import_below("vllm.model_executor.layers", lambda name: "quantization" in name or "fused_moe" in name)
    with walk.engine() as config, walk.frozen():
        yield config


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    """An expert is a chunk, scales are large enough for it, and the CPU is a device."""
    monkeypatch.setenv("EXPERT_OFFLOAD_CPU", "1")
    monkeypatch.setattr(repack, "CHUNK", 1)
    monkeypatch.setattr(scales, "LEAST", 1)
    monkeypatch.setattr(residency, "_AT_ONCE", 2**14)
    for name in ("gptq_marlin_repack", "awq_marlin_repack", "gptq_marlin_moe_repack", "awq_marlin_moe_repack"):
        monkeypatch.setitem(pretend.KERNELS, name, repacked)
    monkeypatch.setitem(pretend.KERNELS, "marlin_int4_fp8_preprocess", lambda x, *_, **__: x.clone())


class Counted(TorchDispatchMode):
    """Bytes of the tensors that operations make while it is on, as long as they live: `most` at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in leaves(args, kwargs or {}) if is_real(t)}
        self.live = {key: (held, size) for key, (held, size) in self.live.items() if not held.expired()}
        for made in out if isinstance(out, (list, tuple)) else [out]:
            if is_real(made) and (storage := made.untyped_storage())._cdata not in given:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return out


def is_real(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, Deferred) and x.device.type != "meta"


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def fill(owner: nn.Module) -> None:
    """Random bytes, and scales that are numbers; what counts or names something stays one."""
    walk.fill(owner)
    for name, parameter in owner._parameters.items():
        role, seed = roles.role_of(roles.method_of(owner), name), int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        if role in (roles.Role.INDEX, roles.Role.SHAPE) or not parameter.numel():
            continue
        if role is roles.Role.GLOBAL_SCALE:  # w1 and w3 have the same
            parameter.data.copy_(torch.linspace(0.5, 2, len(parameter)).view(-1, *[1] * (parameter.dim() - 1)))
            continue
        shape, dtype = parameter.shape, parameter.dtype
        if dtype == torch.float8_e4m3fn:
            made = repacks.scales(*shape, device="cpu", seed=seed)
        elif dtype == torch.uint8 and role is roles.Role.BLOCK_SCALE:
            made = repacks.random_bytes(*shape, device="cpu", seed=seed) % 200 + 20
        elif dtype.is_floating_point:
            made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) + 0.5
        else:
            made = repacks.random_bytes(*shape, dtype=dtype, device="cpu", seed=seed)
        parameter.data.copy_(made)


class Made:
    """A layer of a scheme, processed: by the release alone, or in an offloader."""

    def __init__(self, config, name: str, offloaded: bool, around: TorchDispatchMode | None = None) -> None:
        scheme = SCHEMES[name]
        with pretend.on(scheme.device):
            layer, owner = walk.build(config, scheme)
            self.method = roles.method_of(owner)
            self.off = Offloader(2**40 if offloaded else 1, {"experts"}, Memory(0, "t", "t", None), print, lambda m: 0)
            if offloaded:
                self.off.wrap_modules([Block(layer)], "model.layers")
            (fill if roles.processed_apart(owner) else walk.fill)(owner)
            self.apart = roles.processed_apart(owner)
            with around or torch.no_grad():
                if offloaded:
                    with self.off.loading(owner, torch.device("cpu")):
                        walk.process(owner)
                else:
                    walk.process(owner)
            self.registered = {n: p for n, p in owner._parameters.items() if p is not None}
            self.held = {p: t for p, t in walk.held(layer).items() if not p.endswith("_base")}


NOTHING_MOVES = {"gguf"}  # its weights have no size yet when layers are built


@pytest.mark.parametrize("name", RUN)
def test_in_chunks_or_whole(name, release, monkeypatch):
    monkeypatch.setattr(offloader, "check_scales", lambda *_: None)  # a kernel that stands in may leave anything
    got = Made(release, name, offloaded=True)
    assert (got.off.moved > 0) is (name not in NOTHING_MOVES)
    if name in WHOLE:
        assert got.apart and WHOLE[name] in " ".join(got.off.whole)
    else:
        assert got.off.whole == {}, "docs/schemes.md says that this method is processed in chunks"
    assert got.off.whole_scales == {}


APART = [name for name, scheme in RUN.items() if name not in WHOLE]


@pytest.mark.parametrize("name", APART)
def test_the_bytes_are_the_release_s_own(name, release):
    want = Made(release, name, offloaded=False)
    if not want.apart:
        pytest.skip("processed whole")
    got = Made(release, name, offloaded=True)
    assert list(got.registered) == list(want.registered)
    for leaf, tensor in want.registered.items():
        if roles.role_of(got.method, leaf) is not roles.Role.WEIGHT:
            assert type(got.registered[leaf]) is type(tensor), leaf
        assert repacks.same_bytes(got.registered[leaf], tensor), leaf
    assert got.held.keys() == want.held.keys()
    for path, tensor in want.held.items():
        assert not isinstance(got.held[path], Deferred) and repacks.same_bytes(got.held[path], tensor), path


WIDENED = ("ct NVFP4, SM86", "ct NVFP4, FlashInfer", "ct MXFP4", "modelopt NVFP4, SM86", "mxfp4")
TWICE = "ct NVFP4, TRTLLM"  # the release has both projections as lists of experts, and stacks them then


@pytest.mark.parametrize("name", [n for n in (*WIDENED, TWICE) if n in RUN])
def test_no_second_copy_of_all_scales_is_made(name, release, monkeypatch):
    """While they are converted there is what they become, once more as a list of experts, and chunks."""
    monkeypatch.setattr(walk, "EXPERTS", 96)
    counted = Counted()
    got = Made(release, name, offloaded=True, around=counted)
    final = [p.nbytes for n, p in got.registered.items() if roles.role_of(got.method, n) is roles.Role.BLOCK_SCALE]
    listed = sum(final) if name == TWICE else max(final)
    chunks = 8 * walk.HIDDEN * walk.WIDTH  # a weight's, which is one expert
    assert 0 < counted.most <= sum(final) + listed + chunks
