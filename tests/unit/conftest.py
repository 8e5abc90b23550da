# SPDX-License-Identifier: Apache-2.0
"""The package under test is the checkout's, as `expert_offload`: an installed vllm would win over a checkout's `vllm.`.

Loaded when a test asks for it, and once: it needs torch, and its op library may be defined only once in a process.
"""

import ctypes
import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Our kernels run in Triton's interpreter, which must be told before Triton is imported, by torch for instance.
os.environ["TRITON_INTERPRET"] = "1"

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


class FakeRuntime:
    """Stands for the CUDA runtime below `expert_offload.cuda`: its C functions, with memory behind each pointer.

    What it does wrong is set before or between calls: `quota` bytes may be registered at once (None: any number), and
    the call of number `refuse_at` is refused whatever it asks for; `no_pointer`: there is no device pointer; `shift`:
    how far the device's addresses lie from the host's; `delivers`: what copies out of registered memory bring, "all",
    "nothing", "zeros", nothing after the first time ("once"), or the bytes of the first time ("old"); `full`: from how
    many bytes cudaMalloc refuses; `keeps`: cudaHostUnregister fails.
    """

    def __init__(self, **wrong):
        self.quota = self.refuse_at = self.full = None
        self.no_pointer = self.keeps = False
        self.shift, self.delivers = 0, "all"
        self.registered = {}  # address: bytes
        self.asked = []  # bytes of every registration, granted or not
        self.freed = []  # bytes of every one undone
        self.flags = set()
        self.copies = []  # (where from, bytes) of every copy out of registered memory
        self.last_error = 0
        self._seen = {}  # the bytes of the first copy, by where it was from
        self._blocks, self._idle = {}, {}  # device memory in use; what was freed, with its bytes, for the next
        vars(self).update(wrong)

    def _answer(self, code):
        self.last_error = code or self.last_error
        return code

    def cudaGetErrorName(self, code):
        names = {1: "InvalidValue", 2: "MemoryAllocation", 713: "HostMemoryNotRegistered"}
        return f"cudaError{names[code]}".encode()

    def cudaGetLastError(self):
        code, self.last_error = self.last_error, 0
        return code

    def cudaHostRegister(self, address, nbytes, flags):
        self.asked.append(nbytes)
        self.flags.add(flags)
        over = self.quota is not None and sum(list(self.registered.values())) + nbytes > self.quota
        if over or len(self.asked) == self.refuse_at:
            return self._answer(2)
        assert address not in self.registered
        ctypes.string_at(address, nbytes)  # it must be mapped; the driver takes hold of every page of it
        self.registered[address] = nbytes
        self._seen.clear()
        return 0

    def cudaHostUnregister(self, address):
        # It must be mapped still, though it may be sealed.
        page = ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.create_string_buffer(1)
        assert ctypes.CDLL(None).mincore(*page) == 0
        if self.keeps or address not in self.registered:
            return self._answer(713)
        self.freed.append(self.registered.pop(address))
        return 0

    def cudaHostGetDevicePointer(self, out, address, flags):
        if self.no_pointer or address not in self.registered:
            return self._answer(1)
        out.contents.value = address + self.shift
        return 0

    def cudaMalloc(self, out, nbytes):
        if self.full is not None and nbytes >= self.full:
            return self._answer(2)
        block = self._idle.pop(nbytes, None) or ctypes.create_string_buffer(nbytes)
        self._blocks[ctypes.addressof(block)] = block
        out.contents.value = ctypes.addressof(block)
        return 0

    def cudaFree(self, address):
        block = self._blocks.pop(address)
        self._idle[len(block)] = block
        return 0

    def cudaMemcpy(self, to, source, nbytes, kind):
        for start, size in list(self.registered.items()):  # threads take others away
            for base in {start, start + self.shift}:
                if base <= source < base + size:
                    assert source + nbytes <= base + size
                    self.copies.append((source, nbytes))
                    brings = "nothing" if self.delivers == "once" and len(self.copies) > 1 else self.delivers
                    there = ctypes.string_at(source - base + start, nbytes)
                    first = self._seen.setdefault(source, there)
                    if brings != "nothing":
                        ctypes.memmove(to, {"zeros": bytes(nbytes), "old": first}.get(brings, there), nbytes)
                    return 0
        ctypes.memmove(to, source, nbytes)
        return 0

    def cudaDeviceSynchronize(self):
        return 0


@pytest.fixture
def runtime(monkeypatch):
    """A function that puts a new CUDA runtime in place, with whatever it is told to do wrong (see `FakeRuntime`)."""
    from expert_offload import cuda

    def made(**wrong):
        fake = FakeRuntime(**wrong)
        monkeypatch.setattr(cuda, "library", lambda: fake)
        return fake

    yield made
    gc.collect()  # what is registered here must not be unregistered elsewhere


@pytest.fixture
def mapped(runtime):
    """A driver that page-locks whatever it is asked to."""
    return runtime()
