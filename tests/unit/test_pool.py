# SPDX-License-Identifier: Apache-2.0
"""The expert pool's kernels, in Triton's interpreter on CPU tensors, against a reference in Python.

Both get the same batches, and after each one every array of the pool and every byte of its slots is compared.
"""

import random

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="tools/test.py --layer unit brings Triton along")
from expert_offload.pool import COUNTERS, Part, Pool
from pool_reference import Reference, compare

STEPS = 30
# No shrinking: an example takes a third of a second, and is a seed for the most part.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
GARBAGE = (-1, -7, 2**31 - 1, -(2**31))


# An expert's shape and type, from one number to several chunks; rows of a multiple of 16, 4 and 2 bytes, and odd ones.
SHAPES = [((), torch.float32), ((4, 16), torch.uint8), ((3, 7), torch.bfloat16), ((4100,), torch.float16)]
SHAPES += [((5,), torch.uint8), ((3, 3), torch.float32), ((16416,), torch.int8), ((), torch.bfloat16)]


def tensor(count, shape, dtype, shift, seed):
    """[count, *shape] of random bytes that begins `shift` bytes behind an aligned address, if `dtype` allows it."""
    item = dtype.itemsize
    size = count * item * torch.Size(shape).numel()
    flat = torch.randint(256, (size + 48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    start = 16 - flat.data_ptr() % 16 + shift // item * item
    return flat[start : start + size].view(dtype).view(count, *shape)


def parts(experts, slots, shapes=SHAPES[:1], shift=0):
    """Every second one lies in host memory."""
    both = [[tensor(n, *shape, shift, 2 * i + n) for n in (experts, slots)] for i, shape in enumerate(shapes)]
    return [Part(source, into, link=i % 2 == 0) for i, (source, into) in enumerate(both)]


def rows_of(tensor):
    """The bytes of each expert, [count, bytes], in the memory of `tensor`."""
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8)


def around(tensor):
    """A copy of what lies in the memory of `tensor` before it and behind."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    return torch.cat([whole[:start], whole[start + tensor.nbytes :]])


def one(number):
    return torch.tensor([number], dtype=torch.int32)


def batch(rng, experts, shape, hot, dtype=torch.int32):
    """(ids, rows, what they choose): some rows count, the others hold anything; rarely a number is none in a row that
    counts."""
    t, k = shape
    rows = rng.choice([0, t, t, rng.randint(0, t)])
    pick = lambda: rng.randrange(hot) if rng.random() < 0.7 else rng.randrange(experts)  # noqa: E731
    ids = [[pick() if rng.random() > 0.02 else rng.choice((-1, experts)) for _ in range(k)] for _ in range(rows)]
    junk = (*GARBAGE, experts, experts + 1, 0, experts - 1)
    ids += [[rng.choice(junk) for _ in range(k)] for _ in range(t - rows)]
    return torch.tensor(ids, dtype=dtype).view(t, k), one(rows), [e for row in ids[:rows] for e in row]


sizes = st.one_of(st.integers(1, 40), st.sampled_from([1, 2, 60, 64, 65, 160, 512]))


@settings(max_examples=30, phases=PHASES)
@given(st.data(), st.integers(0, 2**32), st.sampled_from([torch.int32, torch.int64]))
def test_every_plan_is_the_references(data, seed, dtype):
    experts = data.draw(sizes, "experts")
    slots = data.draw(st.one_of(st.integers(1, experts), st.just(experts)), "slots")
    hot = data.draw(st.integers(1, experts), "hot experts")
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 10)), "rows and choices")
    pool, reference, rng = Pool(parts(experts, slots)), Reference(experts, slots), random.Random(seed)
    for _ in range(STEPS):
        ids, rows, chosen = batch(rng, experts, shape, hot, dtype)
        slot_ids = torch.full_like(ids, 99) if rng.random() < 0.7 else None
        pool.plan(ids, rows, slot_ids)
        compare(pool, reference, reference.plan(chosen, bytes_each=4))
        if slot_ids is not None:
            where = [max(0, pool.slot_of[e]) if 0 <= e < experts else 0 for e in ids.flatten().tolist()]
            assert slot_ids.flatten().tolist() == where


@settings(max_examples=8, phases=PHASES)
@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
    st.sampled_from([0, 0, 1, 2, 4, 8]),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
@example((3, 2), SHAPES[:4], 0, 2, 0)  # that each shape is met,
@example((3, 2), SHAPES[4:], 1, 3, 1)  # whatever hypothesis finds
def test_slots_hold_the_bytes_of_their_experts(size, shapes, shift, programs, seed):
    pool = Pool(parts(*size, shapes, shift), programs=programs)
    reference, rng = Reference(*size), random.Random(seed)
    bytes_each = sum(rows_of(part.source).shape[1] for part in pool.parts[::2])
    wanted = [rows_of(part.slots).clone() for part in pool.parts]
    before = [around(part.slots) for part in pool.parts]
    for _ in range(STEPS):
        ids, rows, chosen = batch(rng, pool.experts, (2, 2), pool.experts)
        pool.plan(ids, rows)
        pool.fill()
        planned = reference.plan(chosen, bytes_each)
        compare(pool, reference, planned)
        for want, part in zip(wanted, pool.parts):
            for expert, slot in planned[0]:
                want[slot] = rows_of(part.source)[expert]
            assert torch.equal(rows_of(part.slots), want)
    assert all(torch.equal(around(part.slots), ring) for part, ring in zip(pool.parts, before))


# -- single cases ------------------------------------------------------------------------------------------------------


def planned(pool, *numbers):
    """Plan one row of `numbers`; where the maps say they are."""
    pool.plan(torch.tensor([numbers], dtype=torch.int32), one(1))
    return [pool.expert_map[e].item() for e in numbers], [pool.rest_map[e].item() for e in numbers]


def test_the_victim_is_the_one_not_used_for_longest():
    pool = Pool(parts(8, 3))
    assert planned(pool, 5, 2, 7) == ([1, 0, 2], [-1, -1, -1])
    assert planned(pool, 2) == ([0], [-1])
    assert planned(pool, 6, 2) == ([1, 0], [-1, -1])  # 5 was in slot 1
    assert planned(pool, 1) == ([2], [-1])
    assert pool.expert_map.tolist() == [-1, 2, -1, -1, -1, -1, -1, -1]  # only what this batch needs


def test_more_experts_than_slots_are_left_to_be_read_in_place():
    pool = Pool(parts(8, 3))
    planned(pool, 1, 4)
    assert planned(pool, 0, 1, 2, 3, 4) == ([2, 0, -1, -1, 1], [-1, -1, 2, 3, -1])
    assert dict(zip(COUNTERS, pool.counters.tolist())) == dict(steps=2, needed=7, hits=2, filled=3, rest=2, bytes=12)


@pytest.mark.parametrize("rows", [-1, 0, 3, 4])
def test_a_number_of_rows_out_of_range_reads_nothing_beyond(rows):
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int64)[:2]  # the third row lies behind them
    pool = Pool(parts(8, 8))
    pool.plan(ids, one(rows))
    assert (pool.expert_map >= 0).nonzero().flatten().tolist() == ([1, 2, 3, 4] if rows > 0 else [])


@pytest.mark.parametrize("number", [-1, -2, -(2**31), 8, 9, 2**31 - 1])
def test_a_number_that_is_no_experts_leaves_no_trace(number):
    pool = Pool(parts(8, 3))
    before = pool._state.clone()  # with what lies between its parts
    pool.plan(torch.tensor([[number, number]]), one(1))
    assert pool.clock.item() == 1
    pool.clock.zero_()
    assert torch.equal(pool._state, before)


def test_of_more_choices_than_are_read_at_once_all_count():
    rng, experts = random.Random(1), 400
    chosen = [rng.randrange(experts) for _ in range(70 * 10)]
    pool, reference = Pool(parts(experts, 300)), Reference(experts, 300)
    pool.plan(torch.tensor(chosen).view(70, 10), one(70))
    compare(pool, reference, reference.plan(chosen, bytes_each=4))


def test_one_tensor_holds_the_counters_of_all_layers():
    counters = torch.zeros(3, len(COUNTERS), dtype=torch.int64)
    counters[1, 5] = 2**40
    pool = Pool(parts(8, 3), counters=counters[1])
    planned(pool, 1, 4)
    assert counters.tolist() == [[0] * 6, [1, 2, 0, 2, 0, 2**40 + 8], [0] * 6]


def test_the_clock_comes_round():
    pool, reference = Pool(parts(8, 3)), Reference(8, 3)
    pool.clock.fill_(2**31 - 2)
    for chosen in ([1, 2], [2, 3], [4, 5], [1, 5]):
        pool.plan(torch.tensor([chosen]), one(1))
        compare(pool, reference, reference.plan(chosen, bytes_each=4))
    assert pool.clock.item() == -(2**31) + 2


@pytest.mark.parametrize(
    "experts", [[4, 6, 1], torch.tensor([4, 6, 1]), torch.tensor([[6], [4], [1]], dtype=torch.int32)]
)
@pytest.mark.parametrize("staged", [False, True])
def test_warm_has_experts_in_slots_and_counts_no_plan(experts, staged):
    pool = Pool(parts(8, 4, SHAPES[:2]))
    planned(pool, 0, 1)
    staging = [torch.full_like(part.source, 9) for part in pool.parts]
    pool.fill()
    pool.warm(experts, pool.table(staging) if staged else None)
    assert pool.expert_at.tolist() == [0, 1, 4, 6]
    assert pool.order.tolist() == [0, 2, 3, 1]
    for part, copies in zip(pool.parts, staging):
        come = (copies if staged else part.source)[[4, 6]]
        assert torch.equal(rows_of(part.slots)[[2, 3]], rows_of(come))
        assert torch.equal(rows_of(part.slots)[1], rows_of(part.source)[1])
    assert pool.counters.tolist() == [1, 2, 0, 2, 0, 8 if staged else 16]
    assert planned(pool, 6, 4, 1) == ([3, 2, 1], [-1, -1, -1])
    assert pool.counters.tolist()[2] == 3  # hits


def test_reset_forgets_the_slots_and_keeps_the_counters():
    pool = Pool(parts(8, 3))
    for numbers in ((1, 4), (5, 6), (1, 2), (6,)):
        planned(pool, *numbers)
    assert pool.order.tolist() != [0, 1, 2]
    counted = pool.counters.tolist()
    pool.reset()
    assert torch.equal(pool._state, Pool(parts(8, 3))._state)
    assert pool.counters.tolist() == counted
    reference = Reference(8, 3)
    reference.counters = dict(zip(COUNTERS, counted))
    for chosen in ([2, 1], [4]):
        pool.plan(torch.tensor([chosen]), one(1))
        compare(pool, reference, reference.plan(chosen, bytes_each=4))


def test_addresses_beyond_32_bits():
    step = 2**31 + 64  # of address space; only what is written takes memory
    wide = torch.empty(2 * step + 64, dtype=torch.uint8).as_strided((3, 64), (step, 1))
    wide[2] = torch.arange(64, dtype=torch.uint8)
    pool = Pool([Part(wide, torch.zeros(2, 64, dtype=torch.uint8))])
    planned(pool, 2)
    pool.fill()
    assert pool.parts[0].slots.tolist() == [list(range(64)), [0] * 64]


def test_an_expert_may_lie_transposed_if_its_slot_does():
    source = torch.arange(2 * 3 * 4, dtype=torch.int32).view(2, 4, 3).transpose(1, 2)
    pool = Pool([Part(source, torch.zeros(1, 4, 3, dtype=torch.int32).transpose(1, 2))])
    planned(pool, 1)
    pool.fill()
    assert torch.equal(pool.parts[0].slots[0], source[1])
    with pytest.raises(ValueError, match="tensor 0: the elements of an expert must lie together"):
        Pool([Part(source, torch.zeros(1, 3, 4, dtype=torch.int32))])


def test_each_tensor_is_copied_as_wide_as_it_lies():
    pool = Pool(parts(3, 2, SHAPES))
    chunks = pool.own.tolist()
    assert [row[5] for row in chunks] == [4, 16, 1, 4, 4, 1, 4, 16, 16, 16, 1]
    assert [row[4] for row in chunks] == [4, 64, 42, 8192, 8, 5, 36, 8192, 8192, 32, 2]
    assert {row[5] for row in Pool(parts(3, 2, SHAPES, shift=8)).own.tolist()} == {4, 1}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, slots, message",
    [
        ((4, 8), (5, 8), "5 slots for 4 experts: at least one slot"),
        ((4, 8), (0, 8), "0 slots for 4 experts: at least one slot"),
        ((4097, 1), (1, 1), "1 slots for 4097 experts: .* no more than 4096"),
        ((4, 8), (2, 7), r"tensor 0: experts of torch.float32 \(4, 8\) on cpu do not go into slots"),
        ((), (2,), "at least one tensor, each with a first dimension"),
    ],
)
def test_tensors_that_do_not_go_together(source, slots, message):
    with pytest.raises(ValueError, match=message):
        Pool([Part(torch.zeros(source), torch.zeros(slots))])


def test_a_pool_of_nothing_another_type_or_other_counters():
    good = parts(4, 2)[0]
    with pytest.raises(ValueError, match="at least one tensor"):
        Pool([])
    with pytest.raises(ValueError, match=r"tensor 1: experts of torch\.float32"):
        Pool([good, good._replace(slots=good.slots.double())])
    with pytest.raises(ValueError, match=r"tensor 1: .* in a pool of 4 experts and 2 slots"):
        Pool([good, *parts(5, 2)])
    with pytest.raises(ValueError, match="0 tensors for a pool of 1"):
        Pool([good]).table([])
    for counters in (torch.zeros(6), torch.zeros(5, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match="counters must be 6 contiguous int64 on cpu"):
            Pool([good], counters=counters)


@pytest.mark.parametrize(
    "ids, rows",
    [
        (torch.zeros(2, 2), one(1)),
        (torch.zeros(2, dtype=torch.int32), one(1)),
        (torch.zeros(2, 4, dtype=torch.int32)[:, ::2], one(1)),
        (torch.zeros(2, 2, dtype=torch.int32), one(1).long()),
        (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_a_batch_of_another_kind(ids, rows):
    with pytest.raises(ValueError, match=r"ids must be contiguous|rows must be one int32"):
        Pool(parts(4, 2)).plan(ids, rows)


def test_slot_ids_are_like_ids():
    with pytest.raises(ValueError, match="slot_ids must be contiguous"):
        Pool(parts(4, 2)).plan(torch.zeros(2, 2, dtype=torch.int32), one(1), torch.zeros(4, dtype=torch.int32))
