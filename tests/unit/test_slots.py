# SPDX-License-Identifier: Apache-2.0
"""How many slots fit, and how much has to leave the card."""

import math

import pytest
from expert_offload.fit import GIB, TooLittleMemory
from expert_offload.slots import Card, Sizes, asked_cache, host_bytes, plan_slots
from hypothesis import given
from hypothesis import strategies as st

MIB = 2**20
# Qwen3.5-35B-A3B in 4 bits on a card of 16 GB: 40 layers, 256 experts of 1.5 MiB and their scales.
CARD = Card(12 * GIB, 2 * GIB, GIB, (1664 * 1024,) * 40, experts=256, top_k=8)

some = st.integers(0, 40 * GIB)


@st.composite
def cards(draw):
    layers = tuple(draw(st.lists(st.integers(1, 8 * MIB), min_size=1, max_size=48)))
    experts = draw(st.integers(1, 512))
    top_k = draw(st.integers(1, min(16, experts)))
    numbers = [draw(some) for _ in range(3)]
    return Card(*numbers, layers, experts, top_k, wsl=draw(st.booleans()), break_even=draw(st.integers(0, 64)))


def used(card, slots):
    return slots * sum(card.layers) + card.staging


# -- slots -------------------------------------------------------------------------------------------------------------


@given(cards())
def test_auto_takes_all_that_is_left_and_no_more(card):
    plan = plan_slots(None, card)
    assert plan.nbytes == plan.slots * sum(card.layers)
    least = max(card.top_k, card.break_even)
    fits = [
        n
        for n in range(card.experts + 1)
        if used(card, n) + card.kv_cache <= card.free and (not card.wsl or used(card, n) * 100 <= 55 * card.free)
    ]
    best = max(fits, default=0)
    assert plan.slots == (best if best >= least else 0)
    assert "\n" not in plan.reason and plan.reason.startswith("expert pool: ")


@given(cards(), some)
def test_more_memory_is_never_fewer_slots(card, more):
    slots = plan_slots(None, card).slots
    assert plan_slots(None, card._replace(free=card.free + more)).slots >= slots
    assert plan_slots(None, card._replace(kv_cache=max(0, card.kv_cache - more))).slots >= slots
    assert plan_slots(None, card._replace(staging=max(0, card.staging - more))).slots >= slots
    assert plan_slots(None, card._replace(kv_cache=card.kv_cache + more)).slots <= slots
    assert plan_slots(None, card._replace(wsl=True)).slots <= slots


@given(cards(), st.floats(0.001, 64))
def test_a_number_is_taken_or_refused(card, asked):
    wanted = min(card.experts, int(asked * GIB) // sum(card.layers))
    try:
        plan = plan_slots(asked, card)
    except TooLittleMemory as error:
        assert f"--expert-cache-gb {asked:g} " in str(error)
        over = used(card, wanted) + card.kv_cache > card.free
        over |= card.wsl and used(card, wanted) * 100 > 55 * card.free
        assert over or wanted < card.top_k
    else:
        assert card.top_k <= plan.slots == wanted
        assert plan.nbytes <= asked * GIB and used(card, plan.slots) + card.kv_cache <= card.free


@given(cards())
def test_what_an_error_proposes_is_taken(card):
    small = 0.9 * card.top_k * sum(card.layers) / GIB
    with pytest.raises(TooLittleMemory) as caught:
        plan_slots(small, card)
    proposed = float(str(caught.value).split("--expert-cache-gb ")[-1].split()[0])
    roomy = card._replace(free=10 * (card.kv_cache + card.staging) + 10 * 2**40)
    assert plan_slots(proposed, roomy).slots >= card.top_k


@pytest.mark.parametrize(
    "card, reason",
    [
        (
            CARD,
            "expert pool: 141 slots a layer for 256 experts in 40 layers, 8.95 GiB: 12.00 GiB free on the GPU less "
            "2.00 GiB for the KV cache of the context asked for and 1.00 GiB for staging leave 9.00 GiB",
        ),
        (
            CARD._replace(wsl=True, staging=0),
            "expert pool: 103 slots a layer for 256 experts in 40 layers, 6.54 GiB: 12.00 GiB free on the GPU less "
            "2.00 GiB for the KV cache of the context asked for leave 6.60 GiB (on WSL at most 55 % of what is free)",
        ),
        (
            CARD._replace(free=80 * GIB),
            "expert pool: 256 slots a layer for 256 experts in 40 layers, 16.25 GiB: 80.00 GiB free on the GPU less "
            "2.00 GiB for the KV cache of the context asked for and 1.00 GiB for staging leave 77.00 GiB; "
            "more would stay empty",
        ),
        (
            CARD._replace(kv_cache=10 * GIB + GIB // 2),
            "expert pool: off, 12.00 GiB free on the GPU less 10.50 GiB for the KV cache of the context asked for and "
            "1.00 GiB for staging leave 0.50 GiB: 7 slots a layer for 256 experts in 40 layers, and one token needs 8",
        ),
        (
            CARD._replace(break_even=150),
            "expert pool: off, 12.00 GiB free on the GPU less 2.00 GiB for the KV cache of the context asked for and "
            "1.00 GiB for staging leave 9.00 GiB: 141 slots a layer for 256 experts in 40 layers, and below 150 a pool "
            "costs more than it gives",
        ),
        (CARD._replace(layers=()), "expert pool: off, no layer is offloaded"),
    ],
)
def test_the_reason_of_auto(card, reason):
    assert plan_slots(None, card).reason == reason


def test_a_number_says_so_and_no_break_even_stops_it():
    plan = plan_slots(1.0, CARD._replace(break_even=150))
    assert (plan.slots, plan.nbytes) == (15, 15 * 40 * 1664 * 1024)
    assert plan.reason == ("expert pool: 15 slots a layer for 256 experts in 40 layers, 0.95 GiB: --expert-cache-gb 1")
    assert plan_slots(0.0, CARD).reason == "expert pool: off, --expert-cache-gb 0"
    assert plan_slots(0.0, CARD).slots == plan_slots(5.0, CARD._replace(layers=())).slots == 0


@pytest.mark.parametrize(
    "asked, card, message",
    [
        (
            0.25,
            CARD,
            "--expert-cache-gb 0.25 gives 3 slots a layer for 256 experts in 40 layers, and one token needs 8: "
            "--expert-cache-gb 0.508 or more, or 0",
        ),
        (
            9.5,
            CARD,
            "--expert-cache-gb 9.5 takes 9.46 GiB (149 slots a layer for 256 experts in 40 layers), and 12.00 GiB free "
            "on the GPU less 2.00 GiB for the KV cache of the context asked for and 1.00 GiB for staging leave 9.00 "
            "GiB: --expert-cache-gb auto (9.00 GiB), or a smaller --max-model-len",
        ),
        (
            4,
            CARD._replace(kv_cache=11 * GIB),
            "--expert-cache-gb 4 takes 4.00 GiB (63 slots a layer for 256 experts in 40 layers), and 12.00 GiB free "
            "on the GPU less 11.00 GiB for the KV cache of the context asked for and 1.00 GiB for staging leave 0.00 "
            "MiB: --expert-cache-gb 0, or a smaller --max-model-len",
        ),
    ],
)
def test_what_a_number_that_does_not_fit_is_told(asked, card, message):
    with pytest.raises(TooLittleMemory) as caught:
        plan_slots(asked, card)
    assert str(caught.value) == message


@pytest.mark.parametrize("text, asked", [("auto", None), (" AUTO ", None), ("0", 0), ("1.5", 1.5), ("6", 6)])
def test_the_flag(text, asked):
    assert asked_cache(text) == asked


@pytest.mark.parametrize("text", ["", "all", "-1", "nan", "inf", "4GiB"])
def test_another_flag_is_refused(text):
    with pytest.raises(ValueError, match=f"--expert-cache-gb {text}: it takes auto, a number of GiB, or 0"):
        asked_cache(text)


# -- what goes to the host ---------------------------------------------------------------------------------------------


@st.composite
def some_sizes(draw):
    layer, layers = draw(st.integers(1, 2 * GIB)), draw(st.integers(1, 64))
    experts, resident, kv_cache = layer * layers, draw(some), draw(some)
    over = draw(st.integers(-layer, experts + layer))  # what does not fit
    card = max(0, resident + experts + kv_cache - over)
    beside, host = draw(st.integers(0, 2 * layer)), draw(st.integers(0, 2 * experts))
    return Sizes(card, resident, experts, layer, draw(st.integers(1, layer)), kv_cache, beside, host)


def fits(sizes, moved):
    on_card = sizes.resident + sizes.experts - moved + sizes.kv_cache + (sizes.beside if moved else 0)
    return on_card <= sizes.card and min(moved + sizes.largest, sizes.experts) * bool(moved) <= sizes.host


@given(some_sizes())
def test_the_fewest_whole_layers_that_fit_go(sizes):
    possible = [n for n in range(0, sizes.experts + 1, sizes.layer) if fits(sizes, n)]
    try:
        moved = host_bytes(sizes)
    except TooLittleMemory as error:
        assert not possible
        assert "--max-model-len" in str(error) and str(error).startswith("--cpu-offload-gb auto: ")
    else:
        assert moved == possible[0]


def moved(sizes):
    try:
        return host_bytes(sizes)
    except TooLittleMemory:
        return math.inf


@given(some_sizes(), some)
def test_more_card_is_never_more_to_the_host(sizes, more):
    before = moved(sizes)
    assert moved(sizes._replace(card=sizes.card + more)) <= before
    assert moved(sizes._replace(kv_cache=max(0, sizes.kv_cache - more))) <= before
    assert before in (math.inf, moved(sizes._replace(host=sizes.host + more)))


QWEN = Sizes(
    card=14 * GIB,
    resident=4 * GIB,
    experts=15 * GIB,
    layer=384 * MIB,
    largest=256 * MIB,
    kv_cache=2 * GIB,
    beside=GIB,
    host=24 * GIB,
)


def test_whole_layers_leave_and_nothing_where_all_fits():
    assert host_bytes(QWEN) == 22 * 384 * MIB  # 8 GiB are 21.3 layers
    assert host_bytes(QWEN._replace(card=21 * GIB)) == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(card=6 * GIB),
            "--cpu-offload-gb auto: with all experts in host memory the GPU would still hold 4.00 GiB of the model, "
            "2.00 GiB for the KV cache of the context asked for and 1.00 GiB for the experts' way, 1.00 GiB more than "
            "the 6.00 GiB that may be used of it: a smaller --max-model-len, a checkpoint of fewer bits, or more GPUs "
            "(--tensor-parallel-size)",
        ),
        (
            dict(host=8 * GIB),
            "--cpu-offload-gb auto: beside 4.00 GiB of the model and 2.00 GiB for the KV cache of the context asked "
            "for, 8.25 GiB of the experts have to go to host memory, up to 8.50 GiB, and 8.00 GiB are free for them: "
            "free or add 0.50 GiB of host memory, or a smaller --max-model-len, or a checkpoint of fewer bits",
        ),
    ],
)
def test_what_does_not_fit_is_told(change, message):
    with pytest.raises(TooLittleMemory) as caught:
        host_bytes(QWEN._replace(**change))
    assert str(caught.value) == message
