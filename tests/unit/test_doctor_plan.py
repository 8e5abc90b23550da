# SPDX-License-Identifier: Apache-2.0
"""The doctor's plan, its figures of the KV cache, and the backend that it names."""

import json
import re
from dataclasses import replace

import pytest
from expert_offload.doctor import backend, kv, plan
from expert_offload.doctor.lines import FAIL, OK, WARN
from expert_offload.doctor.model import KNOWN
from hypothesis import given
from hypothesis import strategies as st
from test_doctor_fakes import (
    GIB,
    RTX3090,
    RTX5090,
    answers,
    asked,
    checkpoint,
    machine,
    memory,
    no_command,
    patched,
    wsl,
)

QWEN = KNOWN["qwen3.5-35b-a3b-nvfp4"]
RTX4080 = "0, NVIDIA GeForce RTX 4080, 8.9, 580.95.05, 16376, 16000"


def budget(step: str) -> int:
    return int(float(re.search(r"--cpu-offload-gb ([\d.]+)", step)[1]) * GIB)


def length(step: str) -> int:
    return int(re.search(r"--max-model-len (\d+)", step)[1])


# -- the KV cache ----------------------------------------------------------------------------------------------------


def test_only_full_attention_layers_keep_every_token():
    cache = kv.cache(QWEN.config, 1)
    assert cache.per_token == 10 * 2 * 2 * 256 * 2 == 20480
    assert cache.fixed == 30 * 32 * 128 * 128 * 4
    by_types = {**QWEN.config, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10}
    assert kv.cache(by_types, 1) == cache
    assert kv.cache(QWEN.config, 1, "fp8").per_token == cache.per_token // 2
    assert kv.cache(QWEN.config, 2).per_token == cache.per_token // 2
    assert kv.cache(QWEN.config, 4).per_token == cache.per_token // 2, "a rank has one head at the least"


PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, kv.Cache(4 * 2 * 8 * 64 * 2, 0)),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, kv.Cache(4 * 576 * 2, 0)),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128},
            kv.Cache(2 * 2048, 2 * 128 * 2048),
        ),
        (
            {"hybrid_override_pattern": "M*-E", "mamba_num_heads": 2, "mamba_head_dim": 3, "ssm_state_size": 4},
            kv.Cache(2048, 4 * 24),
        ),
        ({"layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2}, kv.Cache(2048, 0)),
        ({"num_attention_heads": 0}, None),
        ({"num_hidden_layers": None}, None),
    ],
)
def test_kinds_of_layers(more, expected):
    assert kv.cache(PLAIN | more, 1) == expected


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "context"), [(RTX3090, 32768), (RTX4080, 32768), (RTX5090, 131072), (RTX3090, 262144)]
)
def test_what_the_plan_advises_fits(tmp_path, card, context):
    box = machine(tmp_path, run=answers(card))
    line = plan.check(box, asked(context=context))
    assert "estimate" in line.found
    if line.state == WARN:
        advised = asked(context=context, budget=budget(line.step))
        line = plan.check(box, advised)
        assert line.state == OK, line
        if advised.budget > GIB // 2:
            assert plan.check(box, advised._replace(budget=advised.budget - GIB // 2)).state == WARN, "the smallest one"
    more = int(re.search(r"up to (\d+) tokens fit", line.found)[1])
    assert more >= context


@pytest.mark.parametrize(
    ("card", "context", "share", "gib", "ranks"),
    [
        (RTX4080, 32768, 0.85, 12, 1),
        (RTX3090, 65536, 0.88, 6, 1),
        (RTX5090, 131072, 0.9, 1.5, 1),
        (f"{RTX3090}\n1{RTX3090[1:]}", 262144, 0.88, 0, 2),
    ],
)
def test_the_presets_are_as_planned(tmp_path, card, context, share, gib, ranks):
    """compose/*.env."""
    wants = asked(context=context, utilization=share, budget=int(gib * GIB), ranks=ranks)
    assert plan.check(machine(tmp_path, run=answers(card)), wants._replace(patterns=frozenset({"experts"}))).state == OK


def test_a_shorter_context_is_the_other_way(tmp_path):
    box = machine(tmp_path, run=answers(RTX4080))
    line = plan.check(box, asked(context=262144, budget=10 * GIB))
    assert line.state == WARN
    assert plan.check(box, asked(context=length(line.step), budget=10 * GIB)).state == OK
    assert plan.check(box, asked(context=262144, budget=budget(line.step))).state == OK


def test_where_no_offload_helps(tmp_path):
    box = machine(tmp_path, run=answers("0, NVIDIA GeForce RTX 3080, 8.6, 580.95.05, 10240, 10000"))
    line = plan.check(box, asked(context=262144))
    assert line.state == WARN
    assert plan.check(box, asked(context=length(line.step), budget=budget(line.step))).state == OK
    tiny = machine(tmp_path / "b", run=answers("0, NVIDIA GeForce RTX 3050, 8.6, 580.95.05, 4096, 4000"))
    assert "--tensor-parallel-size 2" in plan.check(tiny, asked(context=1024)).step


def test_too_much_offload_is_said(tmp_path):
    box = machine(tmp_path, run=answers(RTX5090))
    line = plan.check(box, asked(context=32768, budget=12 * GIB))
    assert line.state == WARN and "All fits the GPU" in line.step
    assert plan.check(box, asked(context=32768)).state == OK
    box = replace(box, run=answers(RTX3090))
    line = plan.check(box, asked(context=131072, budget=15 * GIB))
    assert line.state == WARN and "is enough and faster" in line.step
    assert plan.check(box, asked(context=131072, budget=budget(line.step))).state == OK


def test_wsl_needs_staging(tmp_path):
    line = plan.check(wsl(tmp_path, run=answers(RTX4080)), asked(context=32768, budget=12 * GIB))
    assert "staging 0.38 GiB" in line.found
    assert "staging" not in plan.check(machine(tmp_path / "b", run=answers(RTX4080)), asked(budget=12 * GIB)).found


def test_too_little_host_memory_is_fatal(tmp_path):
    box = machine(tmp_path, ram=12)
    line = plan.check(box, asked(budget=14 * GIB, context=4096))
    assert line.state == FAIL and "12.00 GiB are free" in line.found and "add 6 GiB" in line.step
    assert budget(line.step) == 8 * GIB + GIB // 2
    memory(box.root, 18)
    assert plan.check(box, asked(budget=14 * GIB, context=4096)).state != FAIL


def test_a_checkpoints_own_sizes(tmp_path):
    folder = checkpoint(tmp_path / "model")
    line = plan.check(machine(tmp_path), asked(model=str(folder)))
    assert line.state == OK and "experts 24 MiB" in line.found and "table" not in line.found
    line = plan.check(machine(tmp_path / "small", ram=1), asked(model=str(folder), budget=GIB))
    assert line.state == FAIL, "a worker beside its weights does not fit"


def test_patterns_decide_what_may_leave(tmp_path):
    folder, box = checkpoint(tmp_path / "model"), machine(tmp_path)
    line = plan.check(box, asked(model=str(folder), patterns=frozenset({"experts.w2_weight"}), budget=GIB))
    assert "Host 8 MiB per rank" in line.found
    line = plan.check(box, asked(model=str(folder), patterns=frozenset({"layers.3.mlp"})))
    assert "can't be told" in line.found


def test_what_can_not_be_planned(tmp_path):
    box = machine(tmp_path)
    assert plan.check(box, asked(model="acme/unknown")).state == WARN
    assert plan.check(box, asked(model="/nowhere")).state == WARN, "the files' line fails"
    dense = checkpoint(tmp_path / "dense", experts=0)
    line = plan.check(box, asked(model=str(dense)))
    assert line.state == WARN and "no routed expert" in line.found and line.step
    silent = checkpoint(tmp_path / "silent", num_attention_heads=0)
    for line, said in (
        (plan.check(box, asked(model=str(silent))), "KV cache"),
        (plan.check(replace(box, run=no_command), asked()), "no GPU"),
    ):
        assert line.state == WARN and said in line.found and line.step


def test_a_drafters_layers_are_not_loaded(tmp_path):
    folder = checkpoint(tmp_path / "model")
    before = plan.find(machine(tmp_path), asked(model=str(folder)))
    text = (folder / "model.safetensors").read_bytes().replace(b"model.layers.3", b"mtp.xxx.layer3"[:14])
    (folder / "model.safetensors").write_bytes(text)
    after = plan.find(machine(tmp_path / "b"), asked(model=str(folder)))
    assert after.experts == before.experts * 3 // 4 and after.total < before.total


@given(
    st.integers(4, 80), st.integers(1, 4), st.integers(0, 200_000), st.booleans(), st.integers(0, 30), st.integers(0, 8)
)
def test_arithmetic_of_the_advice(room, ranks, context, staged, experts, other):
    """The smallest offload fits, half a GiB less does not, and the context that is said to fit does."""
    wants = plan.Need((experts + other) * GIB, experts * GIB, staged * GIB // 3, kv.cache(QWEN.config, ranks), context)
    smallest = wants.smallest(room * GIB)
    if smallest is None:
        assert wants.on_gpu(wants.leaves) > room * GIB
    else:
        assert wants.on_gpu(min(smallest, wants.leaves)) <= room * GIB
        assert not smallest or wants.on_gpu(smallest - GIB // 2) > room * GIB
        assert wants.fitting(room * GIB, smallest) >= context // 1024 * 1024


# -- the backend -----------------------------------------------------------------------------------------------------

CT = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "none"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 block"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, ""),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gguf"}, ""),
        (
            CT | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}, "input_activations": {}}}},
            "nvfp4a16",
        ),
        (
            CT | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}, "input_activations": {"b": 1}}}},
            "nvfp4",
        ),
        (CT | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}}}, "int4"),
        (
            CT | {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}},
            "fp8 block",
        ),
        (CT, ""),
    ],
)
def test_the_method_from_config(config, kind):
    assert backend.method(config) == kind


@pytest.mark.parametrize(
    ("kind", "capability", "release", "flashinfer", "name"),
    [
        ("nvfp4", (8, 6), (0, 18, 0), True, "MARLIN"),
        ("nvfp4", (8, 9), (0, 32, 0), True, "MARLIN"),
        ("nvfp4", (9, 0), (0, 26, 0), True, "MARLIN"),
        ("nvfp4", (9, 0), (0, 32, 0), True, "HUMMING"),
        ("nvfp4", (10, 0), (0, 26, 0), True, "FLASHINFER_TRTLLM"),
        ("nvfp4", (12, 0), (0, 18, 0), True, "FLASHINFER_CUTLASS"),
        ("nvfp4", (12, 0), (0, 18, 0), False, "VLLM_CUTLASS"),
        ("int4", (12, 0), (0, 26, 0), True, "MARLIN"),
        ("fp8 block", (8, 6), (0, 26, 0), True, "MARLIN"),
        ("fp8 block", (12, 0), (0, 26, 0), True, "TRITON"),
        ("none", (8, 6), (0, 26, 0), True, "TRITON"),
        ("none", (12, 0), (0, 26, 0), True, "FLASHINFER_CUTLASS"),
        ("none", (12, 0), (0, 18, 0), True, "TRITON"),
        ("mxfp4", (12, 0), (0, 26, 0), True, ""),
        ("", (8, 6), (0, 26, 0), True, ""),
        ("nvfp4", (7, 5), (0, 26, 0), True, ""),
        ("nvfp4", (8, 6), (), True, ""),
    ],
)
def test_the_backend_of_each_card(kind, capability, release, flashinfer, name):
    assert backend.chosen(kind, capability, release, flashinfer) == name


def test_the_backends_line(tmp_path):
    box = machine(tmp_path)
    assert backend.check(box, asked()) == ("MoE backend", OK, "MARLIN, for nvfp4 on compute capability 8.6", "")
    assert backend.check(box, asked(backend="triton")).found == "triton, as asked by --moe-backend"
    assert backend.check(box, asked(model="acme/unknown")).state == WARN
    assert backend.check(replace(box, run=no_command), asked()).state == WARN
    other = checkpoint(tmp_path / "model", quantization_config={"quant_method": "quark"})
    line = backend.check(box, asked(model=str(other)))
    assert line.state == WARN and "can't be told" in line.found and "log says it" in line.step
    (other / "config.json").write_text(json.dumps({"text_config": {"quantization_config": {"quant_method": "awq"}}}))
    assert backend.check(box, asked(model=str(other))).found.startswith("MARLIN")


def test_the_cpu_backend_has_its_own(tmp_path):
    box = machine(tmp_path, run=no_command)
    patched(box.site, local="+cpu")
    assert backend.check(box, asked()).state == OK and plan.check(box, asked()).state == OK
