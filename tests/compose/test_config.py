# SPDX-License-Identifier: Apache-2.0
"""What the compose file says with its defaults, with each preset and with settings of a user's: no engine is asked."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from composing import ROOT, docker

PRESETS = ["16gb", "24gb", "32gb", "2x24gb"]
SECRETS = {"HF_TOKEN": "hf_secretsecret", "API_KEY": "key-secretsecret"}


def env(name: str) -> Path:
    return ROOT / "compose" / f"{name}.env"


def flag(service: dict[str, Any], name: str) -> str:
    command = service["command"]
    assert command.count(name) == 1, command
    return command[command.index(name) + 1]


@pytest.mark.parametrize("preset", [None, *PRESETS, "cpu"])
def test_valid_and_nothing_open(config, preset, tmp_path):
    whole = config(*([env(preset)] if preset else []))
    assert set(whole["services"]) == {"vllm", "doctor", "bench", "cpu"}
    for name, service in whole["services"].items():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
            assert port["published"] == "8000" and port["target"] == 8000
        assert service["cap_drop"] == ["ALL"] and service["init"] is True, name
        assert service["logging"]["options"]["max-file"], name
    checker = shutil.which("check-jsonschema") or pytest.skip("check-jsonschema is not installed: no check by schema")
    file = tmp_path / "config.yml"
    given = ["--env-file", str(env(preset)) if preset else "/dev/null"]
    file.write_text(docker("compose", *given, "--profile", "*", "config").stdout)
    subprocess.run([checker, "--builtin-schema", "vendor.compose-spec", str(file)], check=True)


def test_defaults(config):
    services = config()["services"]
    vllm = services["vllm"]
    assert "profiles" not in vllm, "`docker compose up` without a profile starts it"
    assert [services[name]["profiles"] for name in ("doctor", "bench", "cpu")] == [["doctor"], ["bench"], ["cpu"]]
    assert vllm["image"] == "vllm-offload:v0.33.0-cu130"
    assert vllm["command"][0] == "Sehyo/Qwen3.5-35B-A3B-NVFP4"
    assert flag(vllm, "--cpu-offload-params") == "experts" and float(flag(vllm, "--cpu-offload-gb")) > 0
    assert flag(vllm, "--reasoning-parser") == "qwen3" and flag(vllm, "--tool-call-parser") == "qwen3_coder"
    assert vllm["restart"] == "on-failure:2"
    grace = re.fullmatch(r"(\d+)m0s", vllm["stop_grace_period"])
    assert grace and int(grace[1]) * 60 > int(flag(vllm, "--shutdown-timeout")), "requests may end within the grace"
    assert "/health" in vllm["healthcheck"]["test"][-1] and vllm["healthcheck"]["start_period"] == "2h0m0s"
    assert [(v["type"], v["source"], v["target"]) for v in vllm["volumes"]] == [("volume", "cache", "/cache")]
    assert int(vllm["shm_size"]) == 8 * 2**30 and vllm["ulimits"] == {"memlock": -1}
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and device["count"] == -1
    assert vllm["build"]["args"] == {"RELEASE": "v0.33.0", "VARIANT": "cu130", "BASE": ""}


def test_default_images_are_of_pins(config):
    pins = tomllib.loads((ROOT / "patches" / "releases.toml").read_text())
    built = config()["services"]
    arguments = built["vllm"]["build"]["args"]
    assert arguments["VARIANT"] in pins[arguments["RELEASE"]]["images"]
    assert built["cpu"]["build"]["args"]["RELEASE"] in pins


def test_secrets_are_in_no_command(config):
    for name, service in config(**SECRETS)["services"].items():
        words = " ".join([*service["command"], *(service.get("entrypoint") or [])])
        assert not any(secret in words for secret in SECRETS.values()), name
    given = config(**SECRETS)["services"]
    assert given["vllm"]["environment"]["VLLM_API_KEY"] == given["cpu"]["environment"]["VLLM_API_KEY"]
    assert given["vllm"]["environment"]["VLLM_API_KEY"] == given["bench"]["environment"]["OPENAI_API_KEY"]
    assert given["vllm"]["environment"]["HF_TOKEN"] == SECRETS["HF_TOKEN"]
    assert config()["services"]["vllm"]["environment"]["HF_TOKEN"] is None, "not set, rather than empty"


@pytest.mark.parametrize(
    "extra, words",
    [
        ("--seed 1", ["--seed", "1"]),
        ("""--override-generation-config '{"top_k": 20}'""", ["--override-generation-config", '{"top_k": 20}']),
        ('--chat-template "/models/my template.jinja"', ["--chat-template", "/models/my template.jinja"]),
        ("--a '$(id) `id` ; | & x'", ["--a", "$$(id) `id` ; | & x"]),
        ("", []),
    ],
)
def test_extra_arguments_keep_their_words(config, extra, words, tmp_path):
    """$$ is how `config` writes a $ that is meant."""
    expected = [*config()["services"]["vllm"]["command"], *words]
    assert config(EXTRA_ARGS=extra)["services"]["vllm"]["command"] == expected
    if "$" not in extra:  # in a file, compose would look for a variable
        for end in ("\n", "\r\n"):
            file = tmp_path / "user.env"
            file.write_bytes(f"# a comment{end}EXTRA_ARGS={extra}{end}".encode())
            assert config(file)["services"]["vllm"]["command"] == expected


def test_settings_reach_the_server(config):
    vllm = config(
        BIND="0.0.0.0", PORT="9000", MODEL="a/b c", SHM_SIZE="2gb", MEMORY_LIMIT="24g", GPUS="1", MEMLOCK="65536"
    )
    vllm = vllm["services"]["vllm"]
    assert (vllm["ports"][0]["host_ip"], vllm["ports"][0]["published"]) == ("0.0.0.0", "9000")
    assert vllm["command"][0] == "a/b c"
    assert (int(vllm["shm_size"]), int(vllm["mem_limit"])) == (2 * 2**30, 24 * 2**30)
    assert vllm["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1
    assert vllm["ulimits"]["memlock"] == 65536


def settings(text: str) -> set[str]:
    return set(re.findall(r"^#?([A-Z][A-Z0-9_]*)=", text, re.MULTILINE))


def test_every_setting_is_documented_with_its_default(config):
    compose = re.sub(r"^\s*#.*", "", (ROOT / "docker-compose.yml").read_text(), flags=re.MULTILINE)
    example = (ROOT / ".env.example").read_text()
    passed = set(re.findall(r"^ +([A-Z][A-Z0-9_]*):$", compose, re.MULTILINE))
    assert settings(example) == set(re.findall(r"\$\{([A-Z][A-Z0-9_]*)", compose)) | passed
    assert not re.search(r"^[A-Z]", example, re.MULTILINE), "copied as it is, it changes nothing"
    lines = example.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"#[A-Z0-9_]+=", line):
            assert lines[number - 1].startswith("# "), f"{line} has no comment"
    for preset in [*PRESETS, "cpu"]:
        assert settings(env(preset).read_text()) <= settings(example), preset


def test_example_gives_the_defaults(config, tmp_path):
    """With every # off, nothing changes but what has no default."""
    file = tmp_path / "all.env"
    file.write_text(re.sub(r"^#(?=[A-Z])", "", (ROOT / ".env.example").read_text(), flags=re.MULTILINE))
    plain, spelled = config()["services"], config(file)["services"]
    for name in plain:
        for part in ("command", "image", "build", "ports", "restart", "healthcheck", "shm_size", "ulimits", "deploy"):
            assert plain[name].get(part) == spelled[name].get(part), (name, part)


def test_24gb_is_the_default(config):
    assert config(env("24gb"))["services"] == config()["services"]


# -- do the presets fit? From the shape: 40 layers, 1 of 4 with full attention, hidden 2048, 256 experts of width 512.

GIB = 2**30
LAYER = 256 * 3 * 2048 * 512 / 2 / GIB  # 4-bit experts of one layer
SCALES = 40 * LAYER / 8
LINEAR, FULL = 2048 * (8192 + 4096 + 64 + 4096), 2048 * (8192 + 2 * 512 + 4096)
DENSE = 2 * (2 * 248320 * 2048 + 30 * LINEAR + 10 * FULL + 40 * (3 * 2048 * 512 + 257 * 2048)) / GIB
STATE = (32 * 128 * 128 * 4 + 8192 * 3 * 2) / GIB  # of linear attention: a layer and request, float32
CARDS = {"16gb": 15.9, "24gb": 23.7, "32gb": 31.8, "2x24gb": 23.7}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_by_reckoning(config, preset):
    vllm = config(env(preset))["services"]["vllm"]
    ranks = int(flag(vllm, "--tensor-parallel-size"))
    offload, context = float(flag(vllm, "--cpu-offload-gb")), int(flag(vllm, "--max-model-len"))
    use = 0.6 + 1.3 + 0.5 + LAYER / ranks + (0.5 if ranks > 1 else 0)
    left = CARDS[preset] * float(flag(vllm, "--gpu-memory-utilization")) - use
    left -= (40 * LAYER + SCALES + DENSE) / ranks - offload
    request = context * 10 * 2 * (2 / ranks) * 256 * 2 / GIB + 30 * STATE / ranks
    states = int(flag(vllm, "--max-num-seqs")) * 30 * STATE / ranks
    assert left > request + states + 0.2, f"{left:.2f} GiB left, {request:.2f} + {states:.2f} needed"
    said = re.search(r"left for the cache +([\d.]+)", env(preset).read_text())
    assert said and float(said[1]) == pytest.approx(left, abs=0.15), f"{left:.2f}"


def test_presets_give_what_was_asked(config):
    assert flag(config(env("32gb"))["services"]["vllm"], "--max-model-len") == "131072"
    two = config(env("2x24gb"))["services"]["vllm"]
    assert flag(two, "--tensor-parallel-size") == "2" and two["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert two["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2
