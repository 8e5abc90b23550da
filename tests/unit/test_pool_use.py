# SPDX-License-Identifier: Apache-2.0
"""The expert pool beside its plans: the check of a plan, what a capture allows, and where Triton is missing."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="tools/test.py --layer unit brings Triton along")
from expert_offload import pool_kernels
from expert_offload.pool import CHECK_SWITCH, Part, Pool
from triton.runtime import interpreter


@pytest.fixture
def asserting(monkeypatch):
    """The interpreter passes over tl.device_assert unless it debugs."""
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))


def pool(**more):
    return Pool([Part(torch.randn(8, 4), torch.zeros(3, 4))], **more)


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int64)


ONE = torch.tensor([1], dtype=torch.int32)


def test_the_check_finds_nothing_in_good_plans(asserting):
    checked = pool(check=True)
    for row in ((1, 2), (2, 3), (4, 5), (1, 1), (0, 1, 2, 3, 4, 5), (7,)):
        checked.plan(ids(row, [-5] * len(row)), ONE)
        checked.fill()
    checked.warm([6])
    checked.reset()
    checked.plan(ids((1, 2)), ONE)


@pytest.mark.parametrize("chosen", [(1, 8), (-1, 1)])
def test_the_check_traps_a_choice_that_is_no_expert(asserting, chosen):
    pool().plan(ids(chosen), ONE)
    with pytest.raises(Exception, match="the router chose an expert that is none"):
        pool(check=True).plan(ids(chosen), ONE)


def test_the_check_traps_more_rows_than_there_are(asserting):
    with pytest.raises(Exception, match="more rows than ids"):
        pool(check=True).plan(ids((1, 2)), ONE + 1)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(count=[4]), "more copies than slots"),
        (dict(fills=[9 * 65536]), "a copy of an expert that is none"),
        (dict(fills=[65536 + 3]), "a copy into a slot that is none"),
        (dict(fills=[5 * 65536]), "a copy of another expert than the slot's"),
        (dict(order=[3]), "the order names a slot that is none"),
        (dict(order=[0]), "the order names a slot twice"),
        (dict(slot_of=[3]), "an expert lies in a slot that is none"),
        (dict(slot_of=[1]), "a slot does not hold its expert"),
        (dict(expert_at=[8]), "a slot holds an expert that is none"),
        (dict(slot_of=[-1, -1]), "an expert does not lie in its slot"),
        (dict(expert_map=[0]), "the map does not name the slot"),
        (dict(rest_map=[2]), "an expert is on no map"),
    ],
)
def test_the_check_traps_a_wrong_plan(asserting, monkeypatch, wrong, message):
    """`wrong`: what stands at the beginning of an array after the plan."""
    checked = pool(check=True)
    verify = pool_kernels.verify

    class Spoiled:
        def __getitem__(self, grid):
            for name, values in wrong.items():
                getattr(checked, name)[: len(values)] = torch.tensor(values, dtype=torch.int32)
            return verify[grid]

    monkeypatch.setattr(pool_kernels, "verify", Spoiled())
    with pytest.raises(Exception, match=message):
        checked.plan(ids((1, 2)), ONE)


@pytest.mark.parametrize("value, checks", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_check_is_switched_by_the_environment(monkeypatch, value, checks):
    monkeypatch.delenv(CHECK_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(CHECK_SWITCH, value)
    assert pool().check is checks


class Kernels:
    """Stand in for the kernels and only note their names."""

    def __init__(self):
        self.launched = []

    def __getattr__(self, name):
        class Launch:
            def __getitem__(_, grid):
                return lambda *a, **k: self.launched.append(name)

        return Launch()


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("check", [False, True])
def test_kernels_are_launched_and_nothing_is_allocated_or_waited_for(monkeypatch, check):
    kernels, made, experts = Kernels(), pool(check=check), torch.tensor([1, 2])
    table = made.table([made.parts[0].source])
    monkeypatch.setattr("expert_offload.pool.pool_kernels", kernels)
    batch = ids((1, 2))
    with Operations() as operations:
        made.plan(batch, ONE)
        made.fill()
        made.warm(experts, table)
        made.reset()
    assert operations.seen <= {"aten::view", "aten::copy_"}  # of the state, by `reset`, from the device to the device
    assert [name for name in kernels.launched if name != "verify"] == ["plan", "fill"] * 2
    assert kernels.launched.count("verify") == 2 * check


def test_the_package_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; sys.path[:0] = ['vllm']; import expert_offload"
    subprocess.run([sys.executable, "-c", code], check=True)
    done = subprocess.run([sys.executable, "-c", f"{code}.pool"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr
