# SPDX-License-Identifier: Apache-2.0
"""GPU tests: `pytest -m gpu tests/gpu` with a patched release on the path. Figures go to $EXPERT_OFFLOAD_FIGURES."""

import json
import os
import sys

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
