#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill of a synthetic Qwen3.5-MoE with its experts resident, in host memory, and with slots on the GPU.

    PYTHONPATH=SITE python3 bench/decode.py all --plain UNPATCHED_SITE --out decode.json
    PYTHONPATH=SITE python3 bench/decode.py one --kind pool --slots 0.36 --out pool.json

`all` starts every kind at once, since to load and compile takes minutes of the CPU, and when all are ready lets one at
a time use the card: figures are of one run. Kinds: resident; zero-copy (kernels read host memory); pool (slots for a
share of each layer's experts); full-pool (for all of them); unpatched (the release as published).

Up to 64 tokens are routed by a trace (`routing`) with a stated hit rate, each stream at its own place of it; wider
batches are routed by the model, whose random weights route nearly uniformly. Units: tok/s of all streams; "ratio to
resident"; "ratio to bound", the bound being 1 / (seconds of a resident step + bytes of a step over the link, as the
device counted them, / the link's speed, as a kernel read host memory in the same run).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "gpu")]
import routing  # noqa: E402
import rows  # noqa: E402

EXPERTS, TOPK, TRACE = 256, 8, 600
HITS, AT = 0.62, 0.36  # the trace's hit rate, and the share of experts that have slots for it
SHORT, LONG = 20, 220  # tokens of two runs; what they differ by is decode alone
STRIDE = 17  # tokens of the trace between two streams
NARROW = 64  # tokens that a trace routes
KINDS = {"resident": [], "zero-copy": [], "pool": ["--slots", str(AT)], "full-pool": ["--slots", "1"], "unpatched": []}


def traced(layers: int, uniform: bool) -> tuple[Any, dict]:
    """The trace on the card, int32 [layers, tokens, k], and what is to be said of it."""
    import torch

    slope = 0.0 if uniform else routing.with_hits(HITS, int(AT * EXPERTS), TOPK, EXPERTS)
    made = routing.draw(layers, TRACE, TOPK, EXPERTS, slope)
    few = made[:4]
    rate = {n: round(routing.hits(few, int(AT * EXPERTS), n, STRIDE), 3) for n in (1, 8, 32)}
    said = dict(
        slope=slope, hits_at_36_percent=rate, curve={s: round(routing.hits(few, s), 3) for s in (32, 64, 92, 128, 192)}
    )
    return torch.from_numpy(made).cuda(), said


def route_by(trace: Any) -> None:
    """Have narrow batches routed by `trace`, a token further at each step, which is counted on the device."""
    import torch
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    select = FusedMoERouter.select_experts
    numbers: dict[int, int] = {}
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    apart = torch.arange(NARROW, device="cuda") * STRIDE
    place = torch.zeros(NARROW, dtype=torch.int64, device="cuda")

    def select_traced(self: Any, hidden_states: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        weights, ids = select(self, hidden_states, *given, **named)
        number = numbers.setdefault(id(self), len(numbers))
        if len(ids) > NARROW:
            return weights, ids
        if number == 0:
            step.add_(1)
            torch.remainder(apart + step, TRACE, out=place)
        return weights, trace[number].index_select(0, place[: len(ids)]).to(ids.dtype)

    FusedMoERouter.select_experts = select_traced


def seconds(run: Any, streams: int, tokens: int, prompt: int = 32, seed: int = 0) -> float:
    """Of one call that generates `tokens` tokens for each of `streams` prompts."""
    from vllm.sampling_params import SamplingParams

    words = run.llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [(seed * 31 + i * 7919 + k * 104729) % words for i in range(prompt)]}
        for k in range(streams)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    run.llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def counters(run: Any) -> list[int]:
    pools = getattr(run.offloader, "pools", None)
    return pools.counters.sum(0).tolist() if pools is not None else []


def link() -> float:
    """GB/s of a kernel that reads page-locked memory in place, 1 GiB at a time."""
    import ctypes

    import torch
    from cudart import Runtime
    from link import Card, GiB, make

    cuda = Runtime(ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}"))
    memory, card = make("huge", GiB, cuda), Card(GiB)
    source = card.view(memory.device, GiB)
    found = card.timed(lambda: card.read(source, 0, GiB // 8), 5)
    memory.free()
    return round(GiB / statistics.median(found) / 1e9, 2)


def measure(run: Any, layers: int, streams: list[int], prefill: list[int], note: Callable[..., None]) -> None:
    """Rows of one engine: each figure the median of three."""
    for n in streams:
        seconds(run, n, SHORT)
        steps: list[float] = []
        before = after = counters(run)
        for repeat in range(3):
            short = seconds(run, n, SHORT, seed=repeat)
            before = counters(run)
            whole = seconds(run, n, LONG, seed=repeat)
            after = counters(run)
            steps.append((whole - short) / (LONG - SHORT))
        more = {}
        if after:
            taken = [b - a for a, b in zip(before, after)]  # the last run's, its prompts included where they are short
            passes = taken[0] / layers
            more = dict(
                bytes_a_step=int(taken[5] / passes), hit_rate=round(taken[2] / max(1, taken[1]), 4), rest=taken[4]
            )
        step = statistics.median(steps)
        spread = [round(n / s, 2) for s in (max(steps), min(steps))]
        note(f"decode {n}", round(n / step, 2), "tok/s", step_seconds=step, spread=spread, streams=n, **more)
    for tokens in prefill:
        seconds(run, 1, 1, tokens)
        took = statistics.median(seconds(run, 1, 1, tokens, seed) for seed in (1, 2, 3))
        note(f"prefill {tokens}", round(tokens / took, 1), "tok/s", seconds=took)


@contextlib.contextmanager
def turn(folder: str, kind: str) -> Iterator[None]:
    """The card alone for the block: when every kind is ready, one after the other. Without a folder, at once."""
    if not folder:
        yield
        return
    (Path(folder) / f"{kind}.ready").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.2)
    with open(Path(folder) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def one(a: argparse.Namespace) -> None:
    """One kind, measured while nobody else holds the lock."""
    import harness
    import synthetic
    import torch

    numbers = [int(n) for n in a.streams.split(",")]
    offload: dict = {}
    if a.kind != "resident":
        offload = dict(cpu_offload_gb=64.0, cpu_offload_params={"experts"})
    slots = int(a.slots * EXPERTS)
    if slots:
        weights = 3 * 512 * 2048
        each = weights // 2 + (weights // 16 + 8 if a.quant == "nvfp4" else weights // 128 * 2)
        # And two buffers of a layer, through which wide batches pass.
        offload["expert_cache_gb"] = ((slots + 0.5) * each * a.layers + 2 * EXPERTS * weights // 2) / 2**30
    trace, said = traced(a.layers, a.uniform)
    route_by(trace)
    prefill = [int(n) for n in a.prefill.split(",") if n]
    by_time = dict.fromkeys(("combo_kernels", "benchmark_combo_kernel"), False)
    with tempfile.TemporaryDirectory() as folder:
        path = synthetic.qwen35(Path(folder), a.quant, a.layers, experts=EXPERTS)
        run = harness.start(
            path,
            mode="compiled",
            max_num_seqs=max(numbers),
            max_model_len=max([1024, *(n + 64 for n in prefill)]),
            max_num_batched_tokens=max([1024, *prefill]),
            compilation_config=dict(cudagraph_capture_sizes=numbers, inductor_compile_config=by_time),
            gpu_memory_utilization=0.3,
            **offload,
        )
        found: list[dict] = []
        more = dict(kind=a.kind, slots=slots, layers=a.layers, quant=a.quant, trace=said)

        def note(case: str, value: float, unit: str, **figures: object) -> None:
            found.append(rows.row(f"{a.layers} layers {a.quant} {a.kind} {case}", value, unit, **more, **figures))

        used, torch_has = rows.card_bytes(os.getpid()), torch.cuda.memory_allocated()
        note(
            "card", used or 0, "bytes", allocated=torch_has, loaded=sum(run.made.values()), ready=round(run.seconds, 1)
        )
        with turn(a.turns, a.kind):
            if a.kind != "resident":
                note("link", link(), "GB/s")
            measure(run, a.layers, numbers, prefill, note)
        rows.write(a.out, found)


def compared(found: list[dict]) -> list[dict]:
    """Ratios of the rows of all kinds, to resident and to the bound."""
    of = {(row["kind"], row["case"].split(row["kind"] + " ")[-1]): row for row in found}
    more = []
    for (kind, case), row in of.items():
        base = of.get(("resident", case))
        if base is None or kind == "resident" or row["unit"] != "tok/s":
            continue
        same = {k: row[k] for k in ("kind", "slots", "layers", "quant")}
        more.append(rows.row(f"{row['case']}", round(row["value"] / base["value"], 4), "ratio to resident", **same))
        speed = of.get((kind, "link"))
        if speed and "bytes_a_step" in row:
            bound = 1 / (base["step_seconds"] + row["bytes_a_step"] / speed["value"] / 1e9)
            reached = round(1 / row["step_seconds"] / bound, 4)
            more.append(rows.row(f"{row['case']}", reached, "ratio to bound", bound_steps=round(bound, 2), **same))
    return more


def all_kinds(a: argparse.Namespace) -> int:
    """Every kind in a process of its own, at once; their rows and the ratios between them."""
    kinds = [k for k in a.kinds.split(",") if k != "unpatched" or a.plain]
    shared = ["--layers", str(a.layers), "--quant", a.quant, "--streams", a.streams, "--prefill", a.prefill]
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for kind in kinds:
            Path(f"{a.out}.{kind}.json").unlink(missing_ok=True)
            own = [*KINDS[kind], "--out", f"{a.out}.{kind}.json", "--turns", folder, "--kind", kind]
            env = {**os.environ, **({"PYTHONPATH": a.plain} if kind == "unpatched" else {})}
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "one",
                *shared,
                *own,
                *(["--uniform"] if a.uniform else []),
            ]
            log = open(f"{a.out}.{kind}.log", "w")  # noqa: SIM115
            started[kind] = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        while any(p.poll() is None and not (Path(folder) / f"{k}.ready").exists() for k, p in started.items()):
            time.sleep(0.2)
        (Path(folder) / "go").touch()
        failed = {kind: code for kind, process in started.items() if (code := process.wait())}
        found: list[dict] = []
        for kind in kinds:
            file = Path(f"{a.out}.{kind}.json")
            found += json.loads(file.read_text()) if file.exists() else []
    found += compared(found)
    rows.write(a.out, found)
    for row in found:
        print(f"{row['case']:50} {row['value']:>14} {row['unit']}")
    for kind, code in failed.items():
        print(f"{kind}: ended with {code}; see {a.out}.{kind}.log", file=sys.stderr)
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "one"])
    parser.add_argument("--kind", choices=[*KINDS])
    parser.add_argument("--kinds", default=",".join(KINDS), help="of all, with commas between")
    parser.add_argument("--slots", type=float, default=0, help="share of a layer's experts that have slots")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--quant", default="nvfp4", choices=["nvfp4", "w4a16"])
    parser.add_argument("--streams", default="1,8,32", help="with commas between")
    parser.add_argument("--prefill", default="2048,8192", help="tokens, with commas between; empty: none")
    parser.add_argument("--uniform", action="store_true", help="a trace without locality, the worst case")
    parser.add_argument("--plain", metavar="SITE", help="where the unpatched release lies, for that kind")
    parser.add_argument("--turns", default="", metavar="FOLDER", help="wait there for one's turn on the card")
    parser.add_argument("--out", required=True, metavar="FILE")
    a = parser.parse_args()
    if a.what == "all":
        return all_kinds(a)
    if not a.kind:
        parser.error("one: --kind")
    one(a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
