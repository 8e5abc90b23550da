# SPDX-License-Identifier: Apache-2.0
"""Slots below the engine: the kernels against their reference on a card, one expert layer with and without slots."""

import random
import sys
from pathlib import Path

import pytest
import torch

import vllm

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "release"), str(TESTS / "unit")]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(vllm.__version__ < "0.26", reason="v0.17.1 and v0.18.0 have no slots yet"),
]


def linked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes in host memory of ours that kernels read in place."""
    from vllm.expert_offload_adapter import host_memory

    from vllm.expert_offload.host import HostBuffer, like

    wanted = torch.empty(shape, dtype=dtype)
    buffer = HostBuffer(wanted.nbytes, pin=True)
    assert buffer.pinned
    buffer.bytes.copy_(torch.randint(256, (wanted.nbytes,), dtype=torch.uint8))
    return like(buffer.mapped(host_memory().view(buffer.bytes)), wanted)


@pytest.mark.parametrize(
    "experts, slots, tokens, k", [(64, 16, 2, 8), (256, 92, 8, 8), (256, 92, 32, 8), (160, 7, 3, 6)]
)
def test_graphs_plan_and_fill_as_the_reference(experts, slots, tokens, k):
    """200 batches through one captured graph; after each, every array and every byte of the slots."""
    from pool_reference import Reference, compare

    from vllm.expert_offload.pool import Part, Pool

    draw = random.Random(0)
    sources = [linked((experts, 3, 8200), torch.uint8), linked((experts, 64, 16), torch.int32)]
    sources += [torch.randn(experts, 33, device="cuda", dtype=torch.bfloat16), torch.randn(experts, device="cuda")]
    made = [torch.zeros((slots, *s.shape[1:]), dtype=s.dtype, device="cuda") for s in sources]
    pool = Pool([Part(s, m, s.is_cuda and i < 2) for i, (s, m) in enumerate(zip(sources, made))])
    reference = Reference(experts, slots)
    each = sum(s.nbytes // experts for s in sources[:2])
    ids = torch.zeros((tokens, k), dtype=torch.int32, device="cuda")
    rows = torch.zeros(1, dtype=torch.int32, device="cuda")
    slot_ids = torch.empty_like(ids)

    def step():
        pool.plan(ids, rows, slot_ids)
        pool.fill()

    step()  # compiles
    pool.reset()
    pool.counters.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(200):
        hot = experts if turn % 3 else max(k, slots // 2)
        chosen = [draw.sample(range(hot), k) for _ in range(tokens)]
        valid = draw.choice([tokens, draw.randint(0, tokens)])
        ids.copy_(torch.tensor(chosen))
        rows.fill_(valid)
        graph.replay()
        torch.cuda.synchronize()
        compare(pool, reference, reference.plan([e for row in chosen[:valid] for e in row], each))
        held = torch.tensor([e for e in reference.holds if e >= 0], device="cuda")
        there = torch.tensor([s for s, e in enumerate(reference.holds) if e >= 0], device="cuda")
        for source, slot in zip(sources, made):
            assert torch.equal(slot[there].view(torch.uint8), source[held].view(torch.uint8)), turn
        where = [max(0, pool.slot_of.tolist()[e]) for row in chosen for e in row]
        assert slot_ids.flatten().tolist() == where


@pytest.fixture
def layer(request):
    """An expert layer of the release on the card, of the scheme `request.param`, filled and processed."""
    import harness
    import walk
    from schemes import SCHEMES
    from vllm.v1.worker.workspace import init_workspace_manager

    with walk.engine() as config, torch.device("cuda"):
        init_workspace_manager(torch.device("cuda"))
        _, owner = walk.build(config, SCHEMES[request.param])
        harness.fill(owner)
        walk.process(owner)
        yield owner


def run(owner, apply, x, weights, ids):
    return apply(
        layer=owner, x=x.clone(), topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None
    ).clone()


@pytest.mark.parametrize("layer", ["ct W4A16", "ct NVFP4, SM86", "unquantized"], indirect=True)
@pytest.mark.parametrize("slots", [2, 4, 6])
def test_a_layer_with_slots(layer, slots, figures, request):
    """Bit for bit where all experts of the batch have slots; else to the rounding of two sums instead of one."""
    import walk

    from vllm.expert_offload.pooled import Layer, Pools, bytes_per_slot

    pools = Pools([Layer("layer", layer, {})], slots * bytes_per_slot(layer), torch.device("cuda"))
    assert (pools.slots, pools.left_out) == (slots, {})
    draw, worst = torch.Generator(device="cuda").manual_seed(0), 0.0
    for tokens in (1, 2, 3, 8, 1, 32, 1, 33):
        x = torch.randn((tokens, walk.HIDDEN), dtype=torch.bfloat16, device="cuda", generator=draw)
        weights, ids = torch.rand((tokens, walk.EXPERTS), device="cuda", generator=draw).topk(2)
        ids = ids.int()
        pools.valid_rows(tokens)
        want, got = (run(layer, f, x, weights, ids) for f in (layer.quant_method.apply, layer.expert_pool))
        assert want.abs().max() > 0
        apart = ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
        worst = max(worst, apart)
        if tokens * 2 <= slots:
            assert torch.equal(got, want), apart
        assert apart < 0.02, (tokens, apart)
    figures(
        f"layer {request.node.callspec.params['layer']}, {slots} slots of 6: apart at most", worst, "of the largest"
    )
    if slots < 6:
        layer.w13_weight.data[:2] = layer.w13_weight.data[:2].flip(0)
        pools.written([layer.w13_weight])
        assert not torch.equal(run(layer, layer.expert_pool, x, weights, ids), got), "void: swapped experts do not show"


@pytest.mark.parametrize("layer", ["ct W4A16", "ct NVFP4, SM86", "unquantized"], indirect=True)
def test_a_wide_batch_has_the_layer_brought(layer):
    """Bit for bit, out of a buffer that page-locked memory was copied to, whatever lies where the layer says."""
    import walk

    from vllm.expert_offload.pooled import Layer, Pools
    from vllm.expert_offload.roles import may_leave

    weights = {n: p.data.cpu().pin_memory() for n, p in layer._parameters.items() if may_leave(layer, n, p.dim())}
    x = torch.randn((200, walk.HIDDEN), dtype=torch.bfloat16, device="cuda")
    chosen, ids = torch.rand((200, walk.EXPERTS), device="cuda").topk(2)
    want = run(layer, layer.quant_method.apply, x, chosen, ids.int())
    pools = Pools([Layer(str(i), layer, weights) for i in range(2)], 2**30, torch.device("cuda"))
    for name in weights:
        layer._parameters[name].data.zero_()
    for _ in range(3):
        assert torch.equal(run(layer, layer.expert_pool, x, chosen, ids.int()), want)
    assert pools.stream is not None and want.abs().max() > 0
