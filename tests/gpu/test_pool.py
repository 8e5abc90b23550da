# SPDX-License-Identifier: Apache-2.0
"""Experts in use are kept in GPU slots: answers stay the resident model's at few, half and all slots.

Rows of an expert come out of its own product, and a token's rows are summed in the router's order, whatever slot they
came from: where all of a batch's experts have slots, tokens are equal. In a batch that needs more, two passes are
added, which rounds once more; there log-probabilities must agree.
"""

import pytest
from test_tokens import DEFAULT

import vllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(vllm.__version__ < "0.26", reason="v0.17.1 and v0.18.0 have no slots yet"),
]
EXPERTS, TOPK, LAYERS = 64, 8, 8
CLOSE = 0.05  # nats of a log-probability, of which rounding the sum of two passes takes a part


def start(path, mode, slots, **more):
    """An engine with all experts in mapped host memory and `slots` slots in each layer."""
    import harness

    # Of an expert: 2 * 512 * 2048 and 2048 * 512 weights of four bits; scales of 1 byte for 16 of them and two of 4, or
    # of 2 bytes for 128.
    weights = 3 * 512 * 2048
    each = weights // 2 + (weights // 16 + 8 if "nvfp4" in path else weights // 128 * 2)
    cache = (slots + 0.5) * each * LAYERS / 2**30
    offload = dict(cpu_offload_gb=8.0, cpu_offload_params={"experts"}, expert_cache_gb=cache)
    return harness.start(path, mode=mode, v2=DEFAULT, **offload, **more)


def counted(run) -> dict[str, int]:
    """The device's counters, over all layers."""
    from vllm.expert_offload.pool import COUNTERS

    return dict(zip(COUNTERS, run.offloader.pools.counters.sum(0).tolist()))


def scores(run, sequences) -> list[list[float]]:
    """Log-probability of each token of each sequence but its first, the sequence given."""
    from vllm import SamplingParams

    out = []
    for tokens in sequences:
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (done,) = run.llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        out.append([options[t].logprob for t, options in zip(done.prompt_token_ids[1:], done.prompt_logprobs[1:])])
    return out


@pytest.fixture(scope="session")
def resident(folder, once):
    """What a resident engine of the default runner answers, one per scheme and mode."""
    import harness
    import synthetic

    def get(scheme: str, mode: str) -> dict:
        def make() -> dict:
            path = synthetic.qwen35(folder, scheme)
            run = harness.start(path, mode=mode, v2=DEFAULT)
            sequences = [tokens[:48] for tokens in run.tokens]
            found = dict(path=path, tokens=run.tokens, sequences=sequences, scores=scores(run, sequences))
            harness.end(run)
            return {**found, "loaded": run.loaded}

        return once(f"pooled-{scheme}-{mode}", make)

    return get


@pytest.mark.parametrize("scheme", ["nvfp4", "w4a16"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("slots", [12, 16, 32, 64])
def test_answers_with_slots(scheme, mode, slots, resident, figures):
    import harness

    base = resident(scheme, mode)
    run = start(base["path"], mode, slots)
    case, more = f"qwen3.5 8 layers {scheme} {mode} {slots} slots of 64", dict(mode=mode, seconds=round(run.seconds, 1))
    few = slots < 2 * TOPK  # two requests may need more experts
    try:
        pools = run.offloader.pools
        assert (pools.slots, len(pools.layers), pools.left_out) == (slots, LAYERS, {})
        moved, held = run.offloader.moved, pools.nbytes
        before = counted(run)
        again = run.generate()
        after = {name: n - before[name] for name, n in counted(run).items()}
        got = scores(run, base["sequences"])
        apart = max(abs(a - b) for x, y in zip(base["scores"], got) for a, b in zip(x, y))
        figures(f"{case}: tokens equal", int(run.tokens == base["tokens"]), "tokens equal", counters=after, **more)
        figures(f"{case}: log-probabilities apart at most", round(apart, 5), "nats", **more)
        assert after["needed"] == after["hits"] + after["filled"] + after["rest"] and after["hits"] > 0, after
        assert after["filled"] > 0 or slots == EXPERTS, after
        assert apart < CLOSE
        if not few:
            assert run.tokens == base["tokens"] and again == run.tokens, after
        run.swap_two_experts()
        assert run.generate() != run.tokens, "void: two experts changed places and no token did"
    finally:
        harness.end(run)
    freed, planned = base["loaded"] - run.loaded, moved - held
    figures(f"{case}: GPU bytes as planned", freed - planned, "bytes above plan", planned=planned, **more)
    assert abs(freed - planned) <= 0.02 * moved
