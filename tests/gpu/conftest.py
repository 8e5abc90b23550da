# SPDX-License-Identifier: Apache-2.0
"""GPU tests: `pytest -m gpu tests/gpu` with a patched release on the path. Figures go to $EXPERT_OFFLOAD_FIGURES."""

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture(scope="session", autouse=True)
def needs_a_card():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip(
        "vllm.expert_offload_adapter", reason="no patched vllm on the path: python3 vllm_offload.py apply"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """For models and what was found about them; the same one for several processes (`pytest -n 6`) on one card."""
    workers = os.environ.get("PYTEST_XDIST_WORKER")
    return tmp_path_factory.getbasetemp().parent if workers else tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def once(folder):
    """once(name, make) -> what `make` returned (JSON), made by the process that comes first."""

    def get(name, make):
        kept = folder / f"{name}.json"
        with open(f"{kept}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(json.dumps(make()))
        return json.loads(kept.read_text())

    return get


@pytest.fixture(scope="session")
def figures():
    """Rows for bench/results, written as they come so that an interrupted run keeps what it measured."""
    rows: list[dict] = []

    def note(case: str, value: float, unit: str, **more: object) -> None:
        import torch

        import vllm

        command = "python3 -m pytest -m gpu tests/gpu"
        rows.append(
            dict(
                release=vllm.__version__,
                gpu=torch.cuda.get_device_name(),
                case=case,
                value=value,
                unit=unit,
                command=command,
                **more,
            )
        )
        if path := os.environ.get("EXPERT_OFFLOAD_FIGURES"):
            with open(f"{path}{os.environ.get('PYTEST_XDIST_WORKER', '')}", "w") as f:
                json.dump(rows, f, indent=1)

    return note
