# SPDX-License-Identifier: Apache-2.0
"""The package under test is the checkout's, as `expert_offload`: an installed vllm would win over a checkout's `vllm.`.

Loaded when a test asks for it, and once: it needs torch, and its op library may be defined only once in a process.
"""

import gc
import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests have other work too.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

PACKAGE = Path(__file__).resolve().parents[2] / "vllm" / "expert_offload"


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "expert_offload":
            return None
        return importlib.util.spec_from_file_location(
            name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
        )


sys.meta_path.insert(0, Finder)
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def few_objects():
    """Each start looks at every object there is: let it be none that the imports made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def switched_on(monkeypatch):
    """The CPU is a device with memory of its own."""
    import torch
    from expert_offload.offloader import CPU_SWITCH, POISON_SWITCH

    monkeypatch.setenv(CPU_SWITCH, "1")
    monkeypatch.delenv(POISON_SWITCH, raising=False)
    torch._dynamo.reset()


@pytest.fixture
def mapped(monkeypatch):
    """A driver that page-locks whatever it is asked to."""
    import torch

    driver = type("Driver", (), {"cudaHostRegister": lambda *_: 0, "cudaHostUnregister": lambda *_: 0})()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
