# SPDX-License-Identifier: Apache-2.0
"""Experts in use are kept in GPU slots: tokens stay the resident model's at few, half and all slots.

Two requests need at most 16 experts a step. The kernels run on the same shapes as without slots, whatever slot an
expert has, so tokens are equal. A batch that needs more experts than there are slots is added up from two passes, and
rounds once more: tests/gpu/test_slots.py looks at that, a layer alone.
"""

import pytest
from test_tokens import DEFAULT

import vllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(vllm.__version__ < "0.26", reason="v0.17.1 and v0.18.0 have no slots yet"),
]
EXPERTS, LAYERS = 64, 8


def start(path, mode, slots, **more):
    """An engine with all experts in mapped host memory and `slots` slots in each layer."""
    import harness

    # Of an expert: 2 * 512 * 2048 and 2048 * 512 weights of four bits; scales of 1 byte for 16 of them and two of 4, or
    # of 2 bytes for 128.
    weights = 3 * 512 * 2048
    each = weights // 2 + (weights // 16 + 8 if "nvfp4" in path else weights // 128 * 2)
    cache = ((slots + 0.5) * each * LAYERS + 2 * EXPERTS * weights // 2) / 2**30  # two buffers for wide batches
    offload = dict(cpu_offload_gb=8.0, cpu_offload_params={"experts"}, expert_cache_gb=cache)
    return harness.start(path, mode=mode, v2=DEFAULT, **offload, **more)


def counted(run) -> dict[str, int]:
    """The device's counters, over all layers."""
    from vllm.expert_offload.pool import COUNTERS

    return dict(zip(COUNTERS, run.offloader.pools.counters.sum(0).tolist()))


@pytest.fixture(scope="session")
def resident(folder, once):
    """What a resident engine of the default runner answers, one per scheme and mode."""
    import harness
    import synthetic

    def get(scheme: str, mode: str) -> dict:
        def make() -> dict:
            path = synthetic.qwen35(folder, scheme)
            run = harness.start(path, mode=mode, v2=DEFAULT)
            harness.end(run)
            return dict(path=path, tokens=run.tokens, loaded=run.loaded)

        return once(f"pooled-{scheme}-{mode}", make)

    return get


@pytest.mark.parametrize("scheme", ["nvfp4", "w4a16"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("slots", [16, 32, 64])
def test_answers_with_slots(scheme, mode, slots, resident, figures):
    import harness

    base = resident(scheme, mode)
    run = start(base["path"], mode, slots)
    case, more = f"qwen3.5 8 layers {scheme} {mode} {slots} slots of 64", dict(mode=mode, seconds=round(run.seconds, 1))
    try:
        pools = run.offloader.pools
        assert (pools.slots, len(pools.layers), pools.left_out) == (slots, LAYERS, {})
        assert pools.stream is not None  # for the prompts: 64 tokens
        moved, held = run.offloader.moved, pools.nbytes
        before = counted(run)
        again = run.generate()
        after = {name: n - before[name] for name, n in counted(run).items()}
        figures(f"{case}: tokens equal", int(run.tokens == base["tokens"]), "tokens equal", counters=after, **more)
        assert after["needed"] == after["hits"] + after["filled"] + after["rest"] and after["hits"] > 0, after
        assert after["filled"] > 0 or slots == EXPERTS, after
        assert after["rest"] == 0, after
        assert run.tokens == base["tokens"] and again == run.tokens, after
        run.swap_two_experts()
        assert run.generate() != run.tokens, "void: two experts changed places and no token did"
    finally:
        harness.end(run)
    freed, planned = base["loaded"] - run.loaded, moved - held
    figures(f"{case}: GPU bytes as planned", freed - planned, "bytes above plan", planned=planned, **more)
    assert abs(freed - planned) <= 0.02 * moved
