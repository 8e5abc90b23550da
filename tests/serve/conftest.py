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


# Everything is served on the newest pin that has a CPU backend of its own, and on the default, which has none; on the
# others what must differ there.
WHOLE = ("0.32.0", "0.33.0")


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
    if release in WHOLE:  # older ones do not run Qwen3.5 on a CPU
        models["qwen3.5"] = plain.with_name("qwen35")
        script = Path(__file__).with_name("random_qwen35.py")
        subprocess.run([sys.executable, str(script), str(models["qwen3.5"])], check=True)
    return models
