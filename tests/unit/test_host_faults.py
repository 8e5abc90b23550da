# SPDX-License-Identifier: Apache-2.0
"""Refusals of memory, and threads, beside page-locking: what is held stays whole."""

import errno
import gc
import itertools
import os
import threading
import time

import pytest
from expert_offload import host
from expert_offload.host import (
    Arena,
    HostBuffer,
    HostMemoryError,
    Mapping,
)
from host_helpers import filled, intact, ours


def test_no_memory_is_an_error_with_figures_and_the_next_step(runtime):
    """2**50 bytes are more than a process can address, so the system itself refuses here."""
    driver, arena = runtime(), Arena(None)
    kept, before = arena.take(3 * 2**20), ours()
    with pytest.raises(HostMemoryError) as error:
        arena.take(2**50)
    for words in ("1048576.00 GiB", f"{2**50} bytes", "3.00 MiB", f"{3 * 2**20} bytes", "Lower --cpu-offload-gb"):
        assert words in str(error.value)
    assert "Cannot allocate memory" in str(error.value)
    del error
    assert driver.asked == [3 * 2**20] and ours() == before and (arena.held, arena.refused) == (3 * 2**20, None)
    assert arena.take(5000).pinned and kept.pinned


@pytest.mark.parametrize("fails_at", range(1, 5))
@pytest.mark.parametrize("step", ["__new__", "madvise"])
def test_mmap_is_refused_at_the_nth_buffer(runtime, monkeypatch, step, fails_at):
    driver, arena, count, before = runtime(), Arena(None), itertools.count(1), ours()

    def fails(*args, **kw):
        optional = args[1:] == (host.mmap.MADV_HUGEPAGE,)
        if not optional and next(count) == fails_at:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return getattr(host.mmap.mmap, step)(*args, **kw)

    monkeypatch.setattr(host, "Mapping", type("Mapping", (Mapping,), {step: fails}))
    made = []
    for _ in range(fails_at - 1):
        made += filled(arena, [5000])
    with pytest.raises(HostMemoryError, match=rf"\(5000 bytes: .*\({len(made) * 5000} bytes\)"):
        arena.take(5000)
    assert len(driver.asked) == len(made) and arena.held == arena.locked == len(made) * 5000 and intact(made)
    del made
    gc.collect()
    assert driver.registered == {} and ours() == before


@pytest.mark.parametrize("wrong", [{}, {"refuse_at": 20}, {"quota": 30 * 5000}, {"shift": 1 << 46}])
@pytest.mark.parametrize("limit", [None, 25 * 5000])
def test_threads_take_at_once(runtime, wrong, limit):
    driver, arena, made, faults = runtime(**wrong), Arena(limit), [], []
    register, inside = driver.cudaHostRegister, []

    def slow(*args):
        inside.append(1)
        faults.extend(["two at once"] if len(inside) > 1 else [])
        time.sleep(0.0005)  # lets every other thread come
        inside.pop()
        return register(*args)

    driver.cudaHostRegister = slow

    def work():
        try:
            for i in range(8):
                mine = filled(arena, [5000])
                if i % 4:
                    made.extend(mine)
                assert (limit is None or arena.locked <= limit) and intact(mine)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert faults == [] and intact(made) and len(made) == 48 and arena.held == 48 * 5000
    assert arena.locked == sum(driver.registered.values()) == sum(b.nbytes for b, _ in made if b.pinned)
    assert limit is None or arena.locked <= limit
    if "refuse_at" in wrong and limit is None:
        assert len(driver.asked) == 20, "asked after the first refusal"
    if not wrong and limit is None:
        assert arena.refused is None and arena.locked == arena.held


def test_a_spare_keeps_what_it_is(runtime):
    driver, arena = runtime(refuse_at=2), Arena(None)
    locked, ordinary = arena.take(5000), arena.take(6000)
    assert arena.take(5000, locked) is locked and locked.pinned
    assert arena.take(6000, ordinary) is ordinary and not ordinary.pinned
    assert driver.asked == [5000, 6000] and arena.held == 11000


def test_a_buffer_alone(runtime):
    driver = runtime()
    assert not HostBuffer(100).pinned and not HostBuffer(100, pin=False).pinned and driver.asked == []
    assert HostBuffer(100, pin=True).pinned
    driver.quota = 0
    assert not HostBuffer(100, pin=True).pinned
