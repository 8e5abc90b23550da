# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with its experts in unreadable host memory answers what it answers with them resident.

EXPERT_OFFLOAD_CPU=1 makes the CPU a device with memory of its own: host buffers are PROT_NONE between copies and the
staging buffer is NaN after each layer, so an answer can only be right if every copy was made, and in time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import OFFLOADED, WHOLE
from server import Server, ServerError

PROMPTS = [
    "In the beginning God created",
    "def main(argv):\n",
    "Redistribution and use in source and binary forms",
    "the LORD said unto",
]
HELD_OUT = (Path(__file__).parents[1] / "models" / "heldout.txt").read_text()[:3000]
LAYER = 6 * 2**20 / 2**30  # GiB of one layer's experts in bf16: 32 experts, 3 matrices of 256 x 128


def answers(server: Server) -> dict[str, object]:
    """Greedy token ids of every prompt and of a chat, and nats per byte over the held-out text (byte tokens)."""
    greedy = {"max_tokens": 48, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found: dict[str, object] = {
        p: server.post("/v1/completions", {"prompt": p, **greedy})["choices"][0]["token_ids"] for p in PROMPTS
    }
    chat = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Who made the heaven?"}], **greedy}
    )
    found["chat"] = chat["choices"][0]["token_ids"]
    total = count = 0.0
    for start in range(0, len(HELD_OUT) - 500, 500):
        body = {"prompt": HELD_OUT[start : start + 500], "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
        scores = server.post("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][1:-1]
        total, count = total - sum(scores), count + len(scores)
    found["nats"] = total / count
    return found


@pytest.fixture(scope="session")
def resident(serve):
    known: dict[tuple[str, ...], dict[str, object]] = {}

    def get(*arguments: str):
        if arguments not in known:
            with serve(*arguments) as server:
                known[arguments] = answers(server)
        return known[arguments]

    return get


def reported(server: Server) -> str:
    return "\n".join(server.lines("expert offload: "))


@pytest.mark.parametrize("gib", [LAYER, 2 * LAYER, 1.0], ids=["one layer", "half", "all"])
def test_bf16_eager(serve, resident, release, gib):
    if release != WHOLE and gib != 1.0:
        pytest.skip("a minute saved: what is chosen is decided by our modules, the same on every pin")
    expected = resident("bf16", "--enforce-eager")
    assert 1.0 < expected["nats"] < 2.2, "the model is not the trained one"
    flags = ("--cpu-offload-gb", str(gib), "--cpu-offload-params", "experts")
    with serve("bf16", "--enforce-eager", *flags, **OFFLOADED) as server:
        assert answers(server) == expected
        moved = round(min(gib / LAYER, 4)) * 6
        assert f"{moved:.2f} MiB moved to host memory" in reported(server)
        assert "copied before it runs, blocking" in reported(server)


def test_bf16_compiled(serve, resident, release):
    """The whole of the release's compiler, with the copies as ops of the graph."""
    if release != WHOLE:
        pytest.skip("a compiled start takes minutes; tests/release compiles the opaque op on every pin's torch")
    expected = resident("bf16")
    with serve("bf16", "--cpu-offload-gb", "1", "--cpu-offload-params", "experts", **OFFLOADED) as server:
        found = answers(server)
    assert {k: v for k, v in found.items() if k != "nats"} == {k: v for k, v in expected.items() if k != "nats"}
    assert found["nats"] == pytest.approx(expected["nats"], rel=1e-3)


def test_hybrid_without_a_pattern(serve, resident, release):
    """Random Qwen3.5: experts, and after them dense weights, of layers whose states are not attention's."""
    if release != WHOLE:
        pytest.skip("Qwen3.5 runs on a CPU from v0.32.0 on; older pins run it in the GPU tests")
    expected = resident("qwen3.5", "--enforce-eager")
    with serve("qwen3.5", "--enforce-eager", "--cpu-offload-gb", "1", **OFFLOADED) as server:
        assert answers(server) == expected
        assert "routed experts 3.00 MiB" in reported(server)


def test_w4a16(serve, resident, release):
    version = tuple(int(n) for n in release.split(".")[:2])
    if version < (0, 26) or (version >= (0, 30) and not torch.cpu._is_amx_tile_supported()):
        pytest.skip("experts in W4A16 run on a CPU from v0.26.0 on, and from v0.30.0 on only with AMX")
    expected = resident("w4a16", "--enforce-eager")
    with serve(
        "w4a16", "--enforce-eager", "--cpu-offload-gb", "1", "--cpu-offload-params", "experts", **OFFLOADED
    ) as server:
        assert answers(server) == expected
        assert "moved to host memory" in reported(server)


@pytest.mark.parametrize(
    "flags, variables, words",
    [
        (("--cpu-offload-params", "expert"), OFFLOADED, ["--cpu-offload-params expert", "Nearest: experts.w"]),
        (("--cpu-offload-params", "mlp.experts.w13_weight", "norm"), OFFLOADED, ["--cpu-offload-params norm"]),
        (("--cpu-offload-params", "experts"), {}, ["no byte left the device", "EXPERT_OFFLOAD_CPU=1"]),
    ],
    ids=["pattern matches nothing", "one of two matches", "nothing to move"],
)
def test_a_flag_that_does_nothing_ends_the_start(serve, release, flags, variables, words):
    if release != WHOLE and len(flags) > 2:
        pytest.skip("a boot saved: the same code as the case before")
    with (
        pytest.raises(ServerError) as error,
        serve("bf16", "--enforce-eager", "--cpu-offload-gb", "1", *flags, **variables),
    ):
        pass
    text = str(error.value)
    assert all(word in text for word in words), text
