# SPDX-License-Identifier: Apache-2.0
"""Real servers of a patched pin on the CPU backend; run with the Python that holds the release."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import envs  # noqa: E402
from server import Server  # noqa: E402

# Everything is served on the default pin; on the others, that experts offloaded answer as resident ones do. A start
# takes half a minute, and all of them on each pin would take an hour.
WHOLE = "0.33.0"
# What offload must not disturb (test_features.py) is served on the newest pin that has a CPU backend of its own.
FEATURED = "0.32.0"
OFFLOADED = {"EXPERT_OFFLOAD_CPU": "1"}


@pytest.fixture(scope="session")
def release() -> str:
    """Version of the release under test, without the suffix of a build."""
    pytest.importorskip(
        "vllm.expert_offload", reason="no patched vllm for this Python: tools/test.py makes an environment for each pin"
    )
    return importlib.metadata.version("vllm").split("+")[0]


@pytest.fixture(scope="session")
def models(release, tmp_path_factory) -> dict[str, Path]:
    """The committed model as it is (experts in W4A16) and unpacked to bf16."""
    committed = ROOT / "tests" / "models" / "tiny-moe"
    plain = tmp_path_factory.mktemp("models") / "bf16"
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "quantize.py"), "bf16", str(committed), str(plain)], check=True
    )
    models = {"w4a16": committed, "bf16": plain}
    made_by = {}
    if release == WHOLE:  # those before v0.32.0 do not run Qwen3.5 on a CPU
        made_by["qwen3.5"] = "random_qwen35.py"
    if release == FEATURED:
        made_by["qwen2"] = "random_qwen2.py"
    for name, script in made_by.items():
        models[name] = plain.with_name(name)
        subprocess.run([sys.executable, str(Path(__file__).with_name(script)), str(models[name])], check=True)
    return models


@pytest.fixture(scope="session")
def serve(release, models, tmp_path_factory):
    """serve(scheme, *arguments, **variables) -> a Server; releases that ask for preloaded libraries get them."""
    extra = envs.preload(Path(sys.executable)) if release == "0.18.0" else {}
    if release == "0.18.0" and "tcmalloc" not in extra.get("LD_PRELOAD", ""):
        pytest.skip("v0.18.0 serves on the CPU only with tcmalloc: apt-get install libtcmalloc-minimal4")
    folder = tmp_path_factory.mktemp("logs")
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}

    def make(scheme: str, *arguments: str, **variables: str) -> Server:
        log = folder / f"{len(list(folder.iterdir()))}.log"
        line = ("--max-model-len", "1024", *arguments)
        return Server(
            Path(sys.executable), models[scheme], log, *line, environment=extra | cache | variables, deadline=400
        )

    return make
