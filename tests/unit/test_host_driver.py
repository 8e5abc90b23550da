# SPDX-License-Identifier: Apache-2.0
"""Below page-locked memory: processes that end or fork, the runtime of torch, and how much may be taken."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_offload import cuda
from expert_offload.host import (
    Arena,
    HostBuffer,
    memory_total,
    pin_limit,
)
from host_helpers import ALL, child, filled, intact
from hypothesis import given
from hypothesis import strategies as st

# -- a process of its own --------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_parent_s_memory_alone(runtime):
    """It neither unregisters it, nor unmaps what by then lies at the same addresses in the child."""
    driver = runtime()
    buffer = HostBuffer(2**20, pin=True)
    buffer.bytes.fill_(9)

    def drops():
        nonlocal buffer
        address = buffer.bytes.data_ptr()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        at = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(2**20), 3, flags, -1, ctypes.c_long(0))
        if at != address:
            os.abort()  # MADV_DONTFORK left something there
        ctypes.memset(at, 5, 2**20)
        gc.collect()
        buffer = None
        gc.collect()
        if ctypes.string_at(at, 2**20) != b"\5" * 2**20 or driver.freed:
            os.abort()

    assert child(drops) == 0
    assert driver.registered == {buffer.bytes.data_ptr(): 2**20} and buffer.bytes.tolist() == [9] * 2**20
    del buffer
    assert driver.freed == [2**20]


ENDS = """
import sys
sys.path.insert(0, {here!r})
import conftest
from expert_offload import cuda, host
fake = conftest.FakeRuntime()
cuda.library = lambda: fake
arena = host.Arena(None)
host.kept = arena.take(2**20)
host.cycle = [arena.take(5000)]
host.cycle.append(host.cycle)
arena.take(100)
assert len(fake.registered) == 2 and fake.freed == [100]
import os
if {forks} and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("forks", [False, True])
def test_a_process_ends_without_a_word(forks):
    """With buffers in globals and in a cycle: when those die, modules are half gone."""
    code = ENDS.format(here=str(Path(__file__).parent), forks=forks)
    done = subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- the CUDA runtime ------------------------------------------------------------------------------------------------


def test_a_torch_without_cuda_is_a_refusal_in_words(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    cuda.library.cache_clear()
    arena = Arena(None)
    made = filled(arena, [5000])
    assert not made[0][0].pinned and intact(made) and f"torch {torch.__version__} has no CUDA" in arena.refused
    with pytest.raises(cuda.CudaMissing):
        cuda.host_register(4096, 1)


@pytest.mark.parametrize("lacks", ["libcudart.so.77: cannot open", "undefined symbol: cudaHostGetDevicePointer"])
def test_a_runtime_that_is_not_there_or_not_whole_is_a_refusal_in_words(monkeypatch, lacks):
    class Part:
        def __getattr__(self, name):
            if name in lacks:
                raise AttributeError(lacks)
            return type("Function", (), {})()

    if "undefined" in lacks:
        monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: Part())
    monkeypatch.setattr(torch.version, "cuda", "77.1")
    cuda.library.cache_clear()
    arena = Arena(None)
    assert not arena.take(5000).pinned
    assert (
        f"torch {torch.__version__} has CUDA 77.1, but no whole runtime: " in arena.refused and lacks in arena.refused
    )


def test_the_runtime_is_asked_for_by_its_major_version_and_told_every_type(monkeypatch):
    """A function that has no types would be given the lower half of an address."""

    class Whole:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, name):
            function = type("Function", (), {"argtypes": None, "restype": ctypes.c_int})()
            setattr(self, name, function)
            return function

    monkeypatch.setattr(cuda.ctypes, "CDLL", Whole)
    monkeypatch.setattr(torch.version, "cuda", "13.4")
    cuda.library.cache_clear()
    found = cuda.library()
    cuda.library.cache_clear()
    assert found.name == "libcudart.so.13"
    assert {name: vars(found)[name].argtypes for name in cuda._ARGUMENTS} == cuda._ARGUMENTS
    restypes = {name: vars(found)[name].restype for name in cuda._ARGUMENTS}
    assert restypes == {n: ctypes.c_char_p if n == "cudaGetErrorName" else ctypes.c_int for n in restypes}


def test_everything_goes_through_c_whole(runtime, monkeypatch):
    """The fake again, behind functions of C's types: no address is cut, and what pointers bring back arrives."""
    driver, arena = runtime(shift=1 << 46, quota=8000), Arena(None)

    functions = {
        name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(getattr(driver, name))
        for name, types in cuda._ARGUMENTS.items()
        if name != "cudaGetErrorName"
    }
    behind = type("Library", (), {**functions, "cudaGetErrorName": staticmethod(driver.cudaGetErrorName)})
    monkeypatch.setattr(cuda, "library", lambda: behind)
    made = filled(arena, [5000, 4000])
    assert driver.registered == {made[0][0].bytes.data_ptr(): 5000} and driver.asked == [5000, 4000]
    assert len(driver.copies) == 4 and intact(made) and driver.last_error == 0
    with pytest.raises(cuda.CudaError) as error:
        cuda.host_register(made[1][0].bytes.data_ptr(), 2**40)
    assert driver.asked[-1] == 2**40
    assert (error.value.code, error.value.name) == (2, "cudaErrorMemoryAllocation")
    assert str(error.value) == "cudaHostRegister answers cudaErrorMemoryAllocation (2)"
    del made
    assert driver.registered == {}


def test_the_runtime_that_is_here():
    """Whatever it says: on a machine with a card it page-locks, elsewhere that is a refusal like any other."""
    cuda.library.cache_clear()
    arena = Arena(None)
    made = filled(arena)
    assert intact(made) and made[0][0].pinned is (arena.refused is None) and arena.held == ALL


# -- how much --------------------------------------------------------------------------------------------------------

TOTAL = 64 * 2**30
WSL = "on WSL at most 40 % of the machine's memory is page-locked (EXPERT_OFFLOAD_PIN_GIB changes that)"


@pytest.mark.parametrize(
    "asked, wsl, wsl_switch, ranks, limit, why",
    [
        (None, False, None, 1, None, None),
        (None, False, None, 8, None, None),
        ("", False, None, 1, None, None),
        (" ", False, "0", 1, None, None),
        (None, False, "0", 1, None, None),
        ("0", False, None, 1, 0, "EXPERT_OFFLOAD_PIN_GIB is 0"),
        ("0.0", True, "1", 4, 0, "EXPERT_OFFLOAD_PIN_GIB is 0"),
        ("24", False, None, 1, 24 * 2**30, "EXPERT_OFFLOAD_PIN_GIB allows 24 GiB of page-locked memory on this host"),
        (
            "0.5",
            False,
            None,
            2,
            2**28,
            "EXPERT_OFFLOAD_PIN_GIB allows 0.5 GiB of page-locked memory on this host, shared",
        ),
        (" 8 ", True, None, 1, 8 * 2**30, "EXPERT_OFFLOAD_PIN_GIB allows 8 GiB"),
        ("60", True, "1", 1, 60 * 2**30, "EXPERT_OFFLOAD_PIN_GIB allows 60 GiB"),
        (None, True, None, 1, TOTAL * 40 // 100, WSL),
        (None, True, "1", 1, TOTAL * 40 // 100, WSL),
        (None, True, "", 1, TOTAL * 40 // 100, WSL),
        (None, True, None, 4, TOTAL * 40 // 100 // 4, WSL + ", shared by 4 ranks"),
        (None, True, "0", 1, 0, "VLLM_WSL2_ENABLE_PIN_MEMORY is 0"),
        ("8", True, "0", 1, 0, "VLLM_WSL2_ENABLE_PIN_MEMORY is 0"),
        ("1e-12", False, None, 1, 0, "EXPERT_OFFLOAD_PIN_GIB allows 1e-12 GiB"),
    ],
)
def test_how_much_may_be_page_locked(asked, wsl, wsl_switch, ranks, limit, why):
    found = pin_limit(asked=asked, wsl=wsl, wsl_switch=wsl_switch, total=TOTAL, ranks=ranks)
    assert found[0] == limit and (found[1] is None if why is None else found[1].startswith(why))


@pytest.mark.parametrize("asked", ["-1", "-0.001", "nan", "inf", "-inf", "all", "8GiB", "8,5", "0x10", "1 2"])
@pytest.mark.parametrize("wsl", [True, False])
def test_a_limit_that_is_no_number_names_the_variable_the_value_and_what_is_allowed(asked, wsl):
    with pytest.raises(ValueError) as error:
        pin_limit(asked=asked, wsl=wsl, wsl_switch="0", total=TOTAL, ranks=1)
    for words in ("EXPERT_OFFLOAD_PIN_GIB=", repr(asked), "a number of GiB", "0 to turn page-locking off"):
        assert words in str(error.value)


def test_no_ranks_are_an_error():
    with pytest.raises(ValueError, match="0 ranks"):
        pin_limit(asked=None, wsl=True, wsl_switch=None, total=TOTAL, ranks=0)


@given(
    asked=st.none() | st.floats(0, 1e6),
    wsl=st.booleans(),
    switch=st.sampled_from([None, "0", "1"]),
    total=st.integers(0, 2**50),
    ranks=st.integers(1, 64),
)
def test_all_ranks_together_stay_within_the_host_s_cap(asked, wsl, switch, total, ranks):
    text = None if asked is None else repr(asked)
    limit, why = pin_limit(asked=text, wsl=wsl, wsl_switch=switch, total=total, ranks=ranks)
    cap = asked * 2**30 if asked is not None else total * 0.4 if wsl else None
    if cap is None:
        assert limit is None and why is None
        return
    assert isinstance(limit, int) and limit >= 0 and why and ranks * limit <= cap
    off = asked == 0 or (wsl and switch == "0")
    assert limit == 0 if off else ranks * (limit + 1) > cap - 1


def test_the_machine_s_memory(tmp_path):
    assert memory_total() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    told = tmp_path / "meminfo"
    told.write_text("MemFree:        12 kB\nMemTotal:       16303456 kB\nSwapTotal: 4 kB\n")
    assert memory_total(str(told)) == 16303456 * 1024
    told.write_text("MemFree: 12 kB\n")
    with pytest.raises(ValueError, match="has no line MemTotal"):
        memory_total(str(told))
