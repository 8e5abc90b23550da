# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu makes without a card: models, adapters, other weights, and which model runners it tries."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
import runners  # noqa: E402
import synthetic  # noqa: E402


@pytest.mark.parametrize(
    "version, expected",
    [("0.17.1", ["v1"]), ("0.26.0", ["v1"]), ("0.32.0+cpu", ["v2", "v1"]), ("0.33.0", ["v2", "v1"])],
)
def test_both_runners_where_v2_is_the_default(version, expected, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert runners.runners() == expected


def test_tests_are_collected_without_a_release(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert runners.runners() == ["v2", "v1"]


def test_adapter_fits_the_attention_of_its_model(tmp_path):
    model = Path(synthetic.qwen3(tmp_path, "w4a16", layers=2))
    config = json.loads((model / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    adapter = Path(synthetic.adapter(tmp_path, str(model)))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    wide = config["num_attention_heads"] * config["head_dim"]
    assert len(tensors) == 2 * 2 * len(settings["target_modules"])
    for name, tensor in tensors.items():
        first = name.endswith("lora_A.weight")
        inner, outer = (config["hidden_size"], wide) if "q_proj" in name else (wide, config["hidden_size"])
        assert tensor.shape == ((settings["r"], inner) if first else (outer, settings["r"]))
        assert tensor.dtype == torch.bfloat16 and tensor.abs().sum() > 0


def test_other_weights_are_the_experts_of_one_layer_in_another_order(tmp_path):
    trained = ROOT / "tests" / "models" / "tiny-moe"
    once = synthetic.reversed_experts(trained, tmp_path / "once")
    twice = synthetic.reversed_experts(once, tmp_path / "twice")
    first, second, third = (load_file(folder / "model.safetensors") for folder in (trained, once, twice))
    assert first.keys() == second.keys() == third.keys()
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert moved and all(".layers.1.mlp.experts." in name for name in moved)
    assert all(torch.equal(first[name], third[name]) for name in first)
