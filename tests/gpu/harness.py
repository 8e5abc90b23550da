# SPDX-License-Identifier: Apache-2.0
"""Synthetic models on a real engine, several in one process: build, generate, measure, change an expert, end.

Weights come from a seed per parameter name, drawn on the GPU, so two engines that differ only in where weights lie are
the same model. Expert weights are large: with small ones a fault in an expert does not show in the tokens.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import hashlib
import os
import platform
import time
from dataclasses import dataclass, field

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The compiler's choice of a reduction by time, anew in each process, rounds a norm in one of several ways.
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

import same_kernels
import synthetic
import torch

EXPERT_SCALE = 3.0
PART = 0.2  # GiB that may be page-locked in "part": less than half of the experts of the 8-layer model
# What each kind of memory is asked for by.
SWITCHES = {
    "pinned": ("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1"),
    "unpinned": ("VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", "1"),
    "pageable": ("EXPERT_OFFLOAD_PIN_GIB", "0"),
    "part": ("EXPERT_OFFLOAD_PIN_GIB", str(PART)),
}


@torch.no_grad()
def fill(model: torch.nn.Module, *_: object, **__: object) -> None:
    """Deterministic weights by parameter name, the same values wherever a parameter lies."""
    for path, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is None or p.device.type == "meta":
                continue
            g = torch.Generator(device="cuda").manual_seed(
                int.from_bytes(hashlib.sha256(f"{path}.{leaf}".encode()).digest()[:4], "little")
            )
            expert = leaf.startswith(("w13", "w2"))
            if p.dtype in (torch.uint8, torch.int32):
                if "zero" in leaf or "g_idx" in leaf:
                    continue
                v = (
                    torch.empty(p.nbytes, dtype=torch.uint8, device="cuda")
                    .random_(0, 256, generator=g)
                    .view(p.dtype)
                    .view(p.shape)
                )
            elif p.dtype == torch.float8_e4m3fn:
                v = (torch.rand(p.shape, generator=g, device="cuda") * 3 + 1).to(p.dtype)
            elif "global_scale" in leaf:
                v = torch.full(p.shape, 300.0 / (EXPERT_SCALE if expert else 1), device="cuda").to(p.dtype)
            elif "scale" in leaf:
                v = (
                    (torch.rand(p.shape, generator=g, device="cuda") * 0.004 + 0.002) * (EXPERT_SCALE if expert else 1)
                ).to(p.dtype)
            elif "norm" in type(module).__name__.lower() and p.dim() == 1:
                v = torch.full(p.shape, 0.0 if "Gemma" in type(module).__name__ else 1.0, device="cuda").to(p.dtype)
            elif leaf == "A":  # Mamba's decay must be negative
                v = -(torch.rand(p.shape, generator=g, device="cuda") + 0.5).to(p.dtype)
            elif p.is_floating_point():
                v = (torch.randn(p.shape, generator=g, device="cuda") * (0.06 if expert else 0.02)).to(p.dtype)
            else:
                continue
            p.data.copy_(v.view(p.shape))


def pretend(wsl: bool) -> None:
    """Make the platform look like WSL2, or not: the kernel's release string is all that releases look at."""
    real = os.uname()
    release = "5.15.167.4-microsoft-standard-WSL2" if wsl else real.release
    fake = collections.namedtuple("uname_result", "system node release version machine processor")(
        real.sysname, real.nodename, release, real.version, real.machine, ""
    )
    platform.uname = lambda: fake
    from vllm.platforms import interface
    from vllm.utils import platform_utils

    for f in (interface.in_wsl, platform_utils.is_pin_memory_available, platform_utils.is_uva_available):
        getattr(f, "cache_clear", lambda: None)()


def lies(pointer: int) -> str:
    """Where the driver says that `pointer` lies: "unregistered", "host", "device" or "managed"."""

    class Attributes(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int),
            ("device", ctypes.c_int),
            ("device_pointer", ctypes.c_void_p),
            ("host_pointer", ctypes.c_void_p),
            ("reserved", ctypes.c_long * 8),
        ]

    assert torch.version.cuda is not None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    found = Attributes()
    assert runtime.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(pointer)) == 0
    return ("unregistered", "host", "device", "managed")[found.type]


def blocks() -> dict[int, int]:
    """Address and requested bytes of every live block of torch's allocator on the card."""
    found = [b for segment in torch.cuda.memory_snapshot() for b in segment["blocks"]]
    return {b["address"]: b["requested_size"] for b in found if b["state"] == "active_allocated"}


@dataclass
class Run:
    """One engine: its tokens, the blocks that loading made on the GPU, and how often a graph was replayed.

    `loaded`, known after `end`: the bytes of those blocks that went away with the engine. What the process keeps for
    the next one (a table that is made once) was never this model's.
    """

    llm: object
    tokens: list[list[int]] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    loaded: int = 0
    replays: int = 0
    seconds: float = 0.0

    @property
    def offloader(self):
        from vllm.model_executor.offloader import get_offloader

        return get_offloader()

    @property
    def runner(self):
        """The worker's model runner, of either kind."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def v2(self) -> bool:
        """Whether the V2 model runner runs, whatever was asked for."""
        return type(self.runner).__module__ == "vllm.v1.worker.gpu.model_runner"

    @property
    def drafter(self):
        """What proposes tokens, None without speculation; its `model` is the drafter's own."""
        return getattr(self.runner, "speculator" if self.v2 else "drafter", None)

    @property
    def graphs(self) -> str:
        """Name of the CUDA graph mode that was resolved when all was known."""
        return self.runner.compilation_config.cudagraph_mode.name

    def generate(self, tokens: int = 64, **kw) -> list[list[int]]:
        from vllm import SamplingParams

        words = self.llm.llm_engine.model_config.get_vocab_size()
        prompts = [{"prompt_token_ids": [(i * 7919 + k * 104729) % words for i in range(32)]} for k in range(2)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, sampling, use_tqdm=False, **kw)]

    def swap_two_experts(self) -> None:
        """Exchange the first two experts' gate and up weights of one offloaded layer, where they lie in host memory."""
        item = next(i for i in self.offloader.items.values() if i.out and i.name.endswith("w13_weight"))
        torch.cuda.synchronize()
        kept = item.host[0].clone()
        item.host[0].copy_(item.host[1])
        item.host[1].copy_(kept)
        if self.offloader.pools is not None:
            self.offloader.pools.written([item.parameter])


def start(model: str, *, mode: str, memory: str = "mapped", v2: bool = False, **kw) -> Run:
    """An engine on `model`, dummy weights unless `load_format` says otherwise.

    Args:
        mode: "eager", "compiled" (the release's default graphs) or "piecewise" (compiled, no full graphs).
        memory: "mapped", "pinned" (no UVA), "wsl" (its rules, where memory can be page-locked), "pageable" (its rules,
            where it can't), "part" (as much as `PART` is) or "unpinned" (the switch).
        v2: ask for the V2 model runner, else for V1; which one ran is `Run.v2`.
        kw: more settings of vllm.LLM; what `compilation_config` says is added to the mode's.
    """
    import vllm.envs as envs
    import vllm.model_executor.model_loader.dummy_loader as dummy
    from vllm.model_executor.model_loader import base_loader

    from vllm import LLM

    for kind, (name, value) in sorted(SWITCHES.items(), key=lambda switch: switch[0] == memory):
        os.environ.pop(name, None)
        if kind == memory:
            os.environ[name] = value
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(v2))
    getattr(envs, "disable_envs_cache", lambda: None)()
    pretend(memory in ("pageable", "wsl", "part"))
    same_kernels.on_newer_library()
    same_kernels.first_configuration()
    dummy.initialize_dummy_weights = fill
    dummy.DummyModelLoader.load_weights = lambda self, model, config: fill(model)
    run = Run(llm=None)
    load = base_loader.BaseModelLoader.load_model

    def measured(self, *a, **k):
        gc.collect()
        torch.cuda.empty_cache()
        before = blocks()
        out = load(self, *a, **k)
        gc.collect()
        torch.cuda.synchronize()
        run.made.update(blocks().items() - before.items())  # a drafter's model is loaded after the target's
        return out

    settings = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=mode == "eager",
        gpu_memory_utilization=0.08,
        kv_cache_memory_bytes=2**30,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        seed=0,
        **same_kernels.marlin(),
    )
    if "nemotron" in model:
        synthetic.introduce_nemotron()
    if "qwen35" in model:
        settings.update(language_model_only=True, **same_kernels.triton_prefill())
    if mode != "eager":
        # Which kernels are combined is decided by time as well, and deterministic mode refuses to.
        by_time = dict.fromkeys(("combo_kernels", "benchmark_combo_kernel"), False)
        settings["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4], "inductor_compile_config": by_time}
    if mode == "piecewise":
        settings["compilation_config"]["cudagraph_mode"] = "PIECEWISE"
    if more := kw.pop("compilation_config", None):
        settings["compilation_config"] = {**settings.get("compilation_config", {}), **more}
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        run.replays += 1
        return replay(graph)

    began = time.time()
    base_loader.BaseModelLoader.load_model = measured
    try:
        run.llm = LLM(model=model, **{**settings, **kw})
    finally:
        base_loader.BaseModelLoader.load_model = load
    torch.cuda.CUDAGraph.replay = counted
    try:
        run.tokens = run.generate()
    finally:
        torch.cuda.CUDAGraph.replay = replay
    run.seconds = time.time() - began
    return run


def end(run: Run) -> None:
    """Free everything that the engine held on the card, so that the next one starts on an empty one; set `loaded`."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.offloader import base

    client = run.llm.llm_engine.engine_core
    runner = run.runner
    free(runner.kv_caches)
    free(runner.model.parameters())  # not buffers: vLLM keeps rotary tables for the next model of the process
    if (drafted := getattr(run.drafter, "model", None)) is not None:
        free(drafted.parameters())
    del drafted, runner
    if hasattr(client, "_finalizer"):
        # v0.33.0 shuts down when the client is collected, and takes the process's offloader and tables away with it:
        # now, while they are this engine's.
        client.shutdown()
    del client
    run.llm = None
    base.set_offloader(base.NoopOffloader())
    torch._dynamo.reset()
    cleanup_dist_env_and_memory()
    gc.collect()
    torch.cuda.empty_cache()
    run.loaded = sum(dict(run.made.items() - blocks().items()).values())


def free(tensors) -> None:
    """Give back the storage of each tensor that torch's allocator made, whoever else still points to it."""
    for t in tensors:
        if isinstance(t, (list, tuple)):
            free(t)
        elif t.is_cuda and t.untyped_storage().resizable():
            t.untyped_storage().resize_(0)
