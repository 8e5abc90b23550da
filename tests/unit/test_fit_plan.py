# SPDX-License-Identifier: Apache-2.0
"""What a start takes of the host, and the settings that would fit."""

import re

import pytest
from expert_offload import fit
from expert_offload.fit import GIB, Entry, Free, Limit, TooLittleMemory
from expert_offload.selection import Candidate, Selection
from hypothesis import assume, given
from hypothesis import strategies as st

# -- what a start takes, and whether it fits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "held"),
    [(0, 0), (1, 8), (10, 17), (12, 19), (13, 20), (14, 20), (1000, 20)],
)
def test_a_rank_holds_its_budget_and_a_parameter_or_all_there_is(budget, held):
    plan = fit.Plan(budget, 3, experts=50, dense=9, largest=7, chunk=2, other=5)
    assert plan.held == held
    assert plan.peak == 3 * (held + 7)


def test_with_only_experts_dense_weights_stay():
    plan = fit.Plan(100, 2, experts=50, dense=9, largest=0, only_experts=True, chunk=0, other=0)
    assert (plan.leaves, plan.held, plan.peak) == (50, 25, 50)


def test_the_table():
    plan = fit.Plan(40 * GIB, 2, experts=200 * GIB, dense=8 * GIB, largest=GIB // 2)
    assert str(plan).splitlines() == [
        "                                    per rank      ranks: 2",
        "  weights held in host memory      40.50 GiB     81.00 GiB",
        "  a layer while it is repacked     64.00 MiB      0.12 GiB",
        "  worker beside its weights         3.00 GiB      6.00 GiB",
        "  at the peak                      43.56 GiB     87.12 GiB",
    ]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=5), min_size=1, max_size=5),
    st.integers(0, 300),
    st.booleans(),
)
def test_what_the_selection_takes_is_never_more_than_planned(layers, budget, only_experts):
    selection = Selection(budget, {"experts"} if only_experts else set())
    sizes = {True: 0, False: 0}
    for i, layer in enumerate(layers):
        kinds = {True: f"layers.{i}.experts.w", False: f"layers.{i}.dense.w"}
        selection.layer([Candidate(f"{kinds[e]}{j}", size, e, True) for j, (size, e) in enumerate(layer)])
        for size, experts in layer:
            sizes[experts] += size
    largest = max((size for layer in layers for size, _ in layer), default=0)
    plan = fit.Plan(budget, 1, sizes[True], sizes[False], largest, only_experts=only_experts, chunk=0, other=0)
    assert selection.taken <= plan.held


HOST = Limit("MemAvailable of this host", "host", 128 * GIB, 8 * GIB)
VM = Limit("MemAvailable of the WSL virtual machine", "wsl", 31 * GIB, 3 * GIB)
DOCKER = Limit("memory.max of the cgroup /docker/ab12", "cgroup", 64 * GIB, 4 * GIB)


def refusal(plan: fit.Plan, free: Free) -> str:
    with pytest.raises(TooLittleMemory) as error:
        fit.check(plan, free)
    return str(error.value)


def test_what_a_user_reads_in_a_container():
    plan = fit.Plan(40 * GIB, 2, experts=200 * GIB, dense=8 * GIB, largest=GIB // 2)
    free = Free(60 * GIB, "memory.max of the cgroup /docker/ab12 (64.00 GiB, 4.00 GiB used)", (DOCKER, HOST))
    assert refusal(plan, free).splitlines() == [
        "--cpu-offload-gb 40 with 2 rank(s) takes up to 87.12 GiB of host memory and 60.00 GiB are free by memory.max "
        "of the cgroup /docker/ab12 (64.00 GiB, 4.00 GiB used). No weight was read.",
        *str(plan).splitlines(),
        "What fits:",
        "  1. --cpu-offload-gb 26: 14.00 GiB more per rank stay on the GPU",
        "  2. raise memory.max of the cgroup /docker/ab12 to 92 GiB "
        "(docker run --memory 92g, MEMORY_LIMIT=92g with compose)",
        "  3. --cpu-offload-gb 26 and a checkpoint of fewer bits, 86 % of this one's or less: the GPU holds no more",
    ]


def test_what_a_user_reads_on_wsl():
    plan = fit.Plan(30 * GIB, 1, experts=60 * GIB, dense=0, largest=GIB)
    text = refusal(plan, Free(28 * GIB, "x", (VM,)))
    assert "  1. --cpu-offload-gb 23.5: 6.50 GiB more per rank stay on the GPU\n" in text
    assert "  2. memory=39GB in Windows' .wslconfig and wsl --shutdown (the VM sees 31.00 GiB now)\n" in text
    assert "  3. --cpu-offload-gb 23.5 and a checkpoint of fewer bits, 89 % of this one's or less" in text


def test_all_limits_that_are_too_tight_are_raised():
    plan = fit.Plan(290 * GIB, 1, experts=300 * GIB, dense=0, largest=0, chunk=0, other=0)
    ways = "docker run --memory 294g, MEMORY_LIMIT=294g with compose"
    docker = f"raise memory.max of the cgroup /docker/ab12 to 294 GiB ({ways})"
    text = refusal(plan, Free(60 * GIB, "x", (DOCKER, HOST)))
    assert text.endswith(f"\n  2. {docker}, and free or add 170 GiB of memory"), "nobody quantizes to a fifth"


def test_where_workers_alone_take_too_much():
    plan = fit.Plan(GIB, 4, experts=40 * GIB, dense=0, largest=0)
    text = refusal(plan, Free(8 * GIB, "x"))
    assert "What fits (no smaller --cpu-offload-gb does, not even 0.5):\n  1. free or add 9 GiB of memory\n" in text
    assert text.endswith("  2. --tensor-parallel-size 1, not 4: each GPU holds more")
    text = refusal(plan, Free(25 * GIB // 2, "x"))
    assert text.endswith("  2. --tensor-parallel-size 2, not 4: each GPU holds more"), (
        "3 would fit, and divides nothing"
    )
    plan = fit.Plan(GIB // 4, 4, experts=40 * GIB, dense=0, largest=GIB // 2)
    text = refusal(plan, Free(8 * GIB, "x"))
    assert text.endswith("  2. --tensor-parallel-size 1, not 4: each GPU holds more"), "parameters' shares grow as well"
    assert "  2." not in refusal(plan, Free(4 * GIB, "x")), "one worker is too much: no settings are made up"


def test_a_model_smaller_than_the_budget_fits_where_it_fits():
    plan = fit.Plan(1000 * GIB, 2, experts=40 * GIB, dense=0, largest=GIB, chunk=0, other=0)
    fit.check(plan, Free(40 * GIB, "x"))
    text = refusal(plan, Free(40 * GIB - 1, "x"))
    assert "--cpu-offload-gb 18.5: 1.50 GiB more per rank stay" in text


def test_nothing_held_nothing_refused():
    fit.check(fit.Plan(0, 8, 40 * GIB, 0, largest=GIB), Free(0, "x"))
    fit.check(fit.Plan(8 * GIB, 8, 0, 0, largest=GIB), Free(0, "x"))


SIZES = st.integers(0, 400 * GIB) | st.integers(0, 800).map(lambda n: n * GIB // 2)
LIMITS = st.builds(
    Limit,
    st.sampled_from(["memory.max of the cgroup /a", "memory.high of the cgroup /b"]),
    st.sampled_from(["host", "wsl", "cgroup"]),
    SIZES,
    st.integers(0, 50 * GIB),
)
PLANS = st.builds(
    fit.Plan,
    SIZES.filter(bool),
    st.integers(1, 8),
    SIZES,
    SIZES,
    st.integers(0, 4 * GIB),
    st.booleans(),
    st.sampled_from([0, fit.CHUNK_BYTES, GIB]),
    st.sampled_from([0, GIB, fit.WORKER_BYTES]),
)


@st.composite
def frees(draw):
    limits = draw(st.lists(LIMITS, max_size=3))
    return fit._least(limits) if limits else Free(draw(SIZES), "of a caller's own")


def fits(plan, free):
    try:
        fit.check(plan, free)
    except TooLittleMemory:
        return False
    return True


@given(PLANS, frees())
def test_check_is_what_the_numbers_say(plan, free):
    per_rank = min(plan.budget + plan.largest, -(-plan.leaves // plan.ranks))
    taken = plan.ranks * (per_rank + plan.chunk + plan.other)
    assert fits(plan, free) == (per_rank == 0 or taken <= free.nbytes)


@given(PLANS, frees())
def test_every_setting_fits(plan, free):
    assume(not fits(plan, free))
    ways = fit.settings(plan, free)
    assert 1 <= len(ways) <= 3
    assert len({text for text, _, _ in ways}) == len(ways)
    for text, changed, after in ways:
        assert fits(changed, after), text
        if "fewer bits" in text:
            share, was = changed.leaves / plan.ranks, plan.leaves / plan.ranks
            assert share - changed.held <= max(0, was - plan.budget) + 1, "more would lie on the GPU"
        assert (changed, after) != (plan, free)
        assert changed.largest * changed.ranks >= plan.largest * plan.ranks
        assert changed.held or plan.leaves < 1000, "it fits with weights held, not because none are"


@given(PLANS, frees())
def test_the_suggested_budget_is_the_largest_half_gib_that_fits(plan, free):
    """Read from the text, as a user does."""
    assume(not fits(plan, free))
    found = re.search(r"^  1\. --cpu-offload-gb ([\d.]+): ", refusal(plan, free), re.MULTILINE)
    budget = float(found[1]) if found else 0.0
    assert budget * 2 == int(budget * 2)
    assert budget * GIB < plan.budget
    assert fits(plan._replace(budget=int(budget * GIB)), free)
    assert not fits(plan._replace(budget=int((budget + 0.5) * GIB)), free)
    assert (found is None) == ("no smaller --cpu-offload-gb does" in refusal(plan, free))


@given(PLANS, frees())
def test_memory_that_is_asked_for_is_enough_and_hardly_more(plan, free):
    assume(not fits(plan, free))
    (after,) = [after for _, changed, after in fit.settings(plan, free) if changed == plan]
    assert after.nbytes >= plan.peak
    before = free.limits or (Limit("", "host", free.nbytes, 0),)
    assert len(after.limits) == len(before)
    for old, new in zip(before, after.limits):
        if old.size - old.used >= plan.peak:
            assert new == old
        else:
            assert new.size - new.used - plan.peak < 1.01 * GIB, "no more than a GiB of rounding"
            assert new.used == old.used


@given(st.integers(1, 300), st.integers(0, 20), st.integers(1, 4))
def test_a_containers_new_limit_read_from_the_text(budget, used, ranks):
    plan = fit.Plan(budget * GIB + 12345, ranks, 2000 * GIB, 0, largest=2**20)
    limit = Limit("memory.max of the cgroup /", "cgroup", (used + 1) * GIB, used * GIB)
    gib = int(re.search(r"docker run --memory (\d+)g", refusal(plan, Free(GIB, "x", (limit,))))[1])
    assert fits(plan, fit._least([limit._replace(size=gib * GIB)]))
    assert not fits(plan, fit._least([limit._replace(size=(gib - 1) * GIB)]))


@given(PLANS, frees(), st.integers(0, 8 * GIB))
def test_more_free_memory_never_refuses_what_fitted(plan, free, more):
    assume(fits(plan, free))
    assert fits(plan, free._replace(nbytes=free.nbytes + more))


# -- what patterns name, and room for one buffer ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "patterns, want",
    [
        (set(), (900, 50)),
        ({"experts"}, (900, 0)),
        ({"mlp.experts"}, (900, 0)),
        ({"experts.w2_weight"}, (300, 0)),
        ({"w13_weight"}, (600, 0)),
        ({"w13_weight", "experts.w2_weight"}, (900, 0)),
        ({"experts", "w2_weight"}, (900, 0)),
        ({"layers.3.mlp.experts"}, None),
        ({"experts", "self_attn"}, None),
    ],
)
def test_what_patterns_leave(patterns, want):
    entries = {
        "model.layers.0.mlp.experts.0.gate_proj.weight": Entry(300, (3, 4), "BF16"),
        "model.layers.0.mlp.experts.0.up_proj.weight": Entry(300, (3, 4), "BF16"),
        "model.layers.0.mlp.experts.0.down_proj.weight": Entry(300, (4, 3), "BF16"),
        "model.layers.0.self_attn.q_proj.weight": Entry(50, (3, 4), "BF16"),
    }
    assert fit.leaving(entries, patterns) == want


def test_room_for_one_buffer(monkeypatch):
    monkeypatch.setattr(fit, "free_memory", lambda: Free(GIB, HOST.name, (HOST._replace(size=GIB, used=0),)))
    fit.make_room(GIB - fit.RESERVE_BYTES)
    with pytest.raises(TooLittleMemory) as error:
        fit.make_room(GIB - fit.RESERVE_BYTES + 1)
    text = str(error.value)
    assert "768.00 MiB is needed" in text or "0.75 GiB is needed" in text
    assert "1.00 GiB are free by MemAvailable of this host" in text and "Lower --cpu-offload-gb, or free or add" in text
    narrow = Limit("MemAvailable of this host", "host", 64 * GIB, 60 * GIB)
    monkeypatch.setattr(fit, "free_memory", lambda: Free(4 * GIB, narrow.name, (DOCKER, narrow)))
    with pytest.raises(TooLittleMemory, match=r"or free or add 1 GiB of memory$"):
        fit.make_room(4 * GIB)
