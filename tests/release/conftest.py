# SPDX-License-Identifier: Apache-2.0
"""Tests against a real pinned release, patched, on its CPU backend: run with the Python that holds it."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session", autouse=True)
def patched():
    """A release without the series proves nothing here."""
    pytest.importorskip("vllm", reason="no vllm for this Python: tools/test.py makes an environment for each pin")
    adapter = pytest.importorskip(
        "vllm.expert_offload_adapter", reason="vllm is not patched: python vllm_offload.py apply"
    )
    return adapter
