# SPDX-License-Identifier: Apache-2.0
"""What a release can do beside offload gives the same tokens and log-probabilities as with every expert resident.

The newest pin's real server, resident and offloaded with the same settings. Each test also asserts that what it is
about took place: the answers alone would be equal where nothing did.

Tried by hand on v0.32.0's CPU backend, resident, and not tested here because it does not run there:

- LoRA, on attention alone too: with --enable-lora experts take Triton's kernels ("module 'triton.language' has no
  attribute 'bfloat16'"; v0.26.0: "Monolithic kernels are not supported for Fused MoE LoRA").
- MTP: its proposer is made of Triton kernels ("'function' object is not subscriptable").
- Sleep mode: "Sleep mode is not supported on current platform."
- The prefetch backend: "Module parameters should not already be on CPU". That it stays the release's own is tested in
  tests/release/test_adapter.py.
- A pipeline stage of Qwen3-MoE without experts: "No Qwen3MoE layer found in the model.layers". Qwen2-MoE has one.

A reload of bf16 experts does not repack them there, so that what is said after it is nonsense, resident as well. The
nonsense depends on every reloaded byte; right numbers after a reload are in tests/release/test_reload.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import FEATURED, OFFLOADED
from safetensors.torch import load_file, save_file
from server import Server

HELD_OUT = (Path(__file__).parents[1] / "models" / "heldout.txt").read_text()
SHORT = ["In the beginning God created", "def main(argv):\n"]  # a token a byte: less than a block of the prefix cache
LONG = HELD_OUT[:700]
BUDGET = 128  # tokens a step: LONG needs six
EXPERTS = ("--cpu-offload-params", "experts")
FEW = 12  # two workers on two cores wait for each other by spinning: a token takes a tenth of a second
# Two workers on any machine: the release binds each to a NUMA node of its own and refuses a start where there is one.
TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def newest_only(release):
    if release != FEATURED:
        pytest.skip("minutes saved: our modules are the same on every pin, and tests/release reloads weights on each")


def say(server: Server, *prompts: str, tokens: int = 40) -> list[dict[str, Any]]:
    """Greedy tokens of each prompt, their log-probabilities, and the length of the prompt."""
    greedy = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    found = []
    for prompt in prompts:
        answer = server.post("/v1/completions", {"prompt": prompt, **greedy})
        choice = answer["choices"][0]
        found.append(
            {
                "tokens": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "prompt": answer["usage"]["prompt_tokens"],
            }
        )
    return found


def reload(server: Server, folder: Path) -> None:
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


@pytest.fixture(scope="module")
def other(models) -> Path:
    """The trained model with layer 1's experts in reverse order, under a router that does not know."""
    folder = models["bf16"].with_name("other")
    shutil.copytree(models["bf16"], folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.experts."
    experts = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    for name, tensor in experts.items():
        number, _, rest = name.partition(".")
        tensors[f"{prefix}{31 - int(number)}.{rest}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_speculation_prefix_cache_chunks_and_a_reload(serve, other):
    """N-gram drafts, a prompt of six chunks said twice, new weights while serving; all and more than all offloaded."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    flags = ["--enforce-eager", "--speculative-config", json.dumps(speculation), "--enable-prefix-caching"]
    flags += ["--block-size", "32", "--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", "4"]

    def run(*more: str, **variables: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
        with serve("bf16", *flags, *more, VLLM_SERVER_DEV_MODE="1", **variables) as server:
            found = say(server, *SHORT, LONG, LONG)
            counted = server.metrics()
            reload(server, other)
            assert server.lines(f"Chunked prefill is enabled with max_num_batched_tokens={BUDGET}")
            if more:
                assert server.lines("expert offload: 24.00 MiB moved to host memory")
            return found + say(server, *SHORT), counted

    expected, counted = run()
    assert expected[2]["prompt"] > 5 * BUDGET
    assert counted["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert counted["vllm:prefix_cache_hits_total"] > 500, "the second time, LONG was not in the cache"
    assert expected[:2] != expected[4:], "the reload changed nothing"
    found, counted_offloaded = run("--cpu-offload-gb", "1", **OFFLOADED)
    assert found == expected
    for name in ("spec_decode_num_accepted_tokens_total", "prefix_cache_hits_total"):
        assert counted_offloaded[f"vllm:{name}"] == counted[f"vllm:{name}"]


def test_tensor_parallel(serve):
    """Two processes, each with half of every expert."""
    flags = ["--enforce-eager", "--tensor-parallel-size", "2", "--max-num-seqs", "4"]
    with serve("bf16", *flags, **TWO_WORKERS) as server:
        expected = say(server, *SHORT, LONG, tokens=FEW)
        assert server.lines("world_size=2 rank=1")
    with serve("bf16", *flags, "--cpu-offload-gb", "1", *EXPERTS, **TWO_WORKERS, **OFFLOADED) as server:
        assert say(server, *SHORT, LONG, tokens=FEW) == expected
        said = [line for line in server.log.read_text().splitlines() if "expert offload: 12.00 MiB moved" in line]
        assert {rank for line in said for rank in ("TP0", "TP1") if f"Worker_{rank} " in line} == {"TP0", "TP1"}


def test_pipeline_with_a_stage_without_experts(serve, models):
    """Two processes, the first without an expert; embeddings tied; less offloaded than one layer."""
    assert "lm_head.weight" not in load_file(models["qwen2"] / "model.safetensors")
    # Not eager: without a run at the start, which eager ones skip, the second stage has nowhere to receive.
    flags = ["--pipeline-parallel-size", "2", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    flags += ["--compilation-config", json.dumps({"mode": 2, "backend": "eager"})]
    stages = {"VLLM_PP_LAYER_PARTITION": "1,3"}
    with serve("qwen2", *flags, **TWO_WORKERS, **stages) as server:
        expected = say(server, *SHORT, LONG, tokens=FEW)
        assert server.lines("world_size=2 rank=1")
    byte = str(1 / 2**30)
    with serve("qwen2", *flags, "--cpu-offload-gb", byte, *EXPERTS, **TWO_WORKERS, **stages, **OFFLOADED) as server:
        assert say(server, *SHORT, LONG, tokens=FEW) == expected
        first, second = (
            [line for line in server.log.read_text().splitlines() if f"Worker_PP{stage} " in line and "moved" in line]
            for stage in (0, 1)
        )
    assert "0.00 MiB moved" in first[0] and "(0 tensors of 0 layers)" in first[0]
    assert "0.50 MiB moved" in second[0] and "(1 tensors of 1 layers)" in second[0]
