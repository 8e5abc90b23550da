#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One start of vLLM on a synthetic model, for figures of loading: seconds, the card's peak, bytes that moved. READY on
a line of its own when the engine is up; one row of bench/results, as JSON, on the last line.

    PYTHONPATH=SITE python3 bench/load.py --model qwen35-40 --quant nvfp4 --offload-gb 16

Host peak per byte offloaded: what the start with offload holds at its peak above the start without, over what moved.

    run() { python3 bench/host_peak.py --until '^READY$' --out $1.json -- \
            python3 bench/load.py --model qwen35-2304 --quant nvfp4 --offload-gb $2; }
    run without 0; run with 8
    python3 bench/load.py --ratio with.json without.json

Models, with their experts' packed weights: qwen35-40, the experts of Qwen3.5-35B-A3B in 40 layers (15 GiB);
qwen35-2304, 2 layers whose w13_weight has exactly 2304 MiB, of which an allocator that rounds to a power of two makes 4
GiB (6.75 GiB); glm53, the experts of GLM-5.3-Flash-AWQ in a Qwen3-MoE body of 42 layers (142 GiB: --layers for fewer).
Weights are dummies, drawn on the card a piece at a time, so that a run's peak is the release's and not ours.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "gpu")]
import rows  # noqa: E402

BEGAN = time.monotonic()
NOTES = "EXPERT_OFFLOAD_LOAD_NOTES"  # the folder where each worker leaves what it measured
PIECE = 16 * 2**20  # bytes of weights drawn at once
LAYERS = {"qwen35-40": 40, "qwen35-2304": 2, "glm53": 42}
BIG = dict(hidden=4096, width=2048, experts=288)  # GLM-5.3-Flash, and 288 * 2 * 2048 * 4096 / 2 bytes are 2304 MiB


def packed(hidden: int, width: int, experts: int) -> dict[str, int]:
    """Bytes of one layer's expert weights in four bits, by name; scales are not counted."""
    return dict(w13_weight=experts * 2 * width * hidden // 2, w2_weight=experts * hidden * width // 2)


def enlarged(config: dict) -> dict:
    """A Qwen3.5-MoE configuration with expert tensors of 2.25 GiB, and attention of both kinds in two layers."""
    text = config["text_config"]
    text.update(
        hidden_size=BIG["hidden"],
        moe_intermediate_size=BIG["width"],
        num_experts=BIG["experts"],
        layer_types=["linear_attention"] * (text["num_hidden_layers"] - 1) + ["full_attention"],
    )
    return config


def glm53(layers: int, quantization: dict | None) -> dict:
    """A Qwen3-MoE of `layers` layers with the experts of GLM-5.3-Flash."""
    return dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=layers,
        hidden_size=BIG["hidden"],
        moe_intermediate_size=BIG["width"],
        num_experts=BIG["experts"],
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=32768,
        vocab_size=151936,
        tie_word_embeddings=False,
        dtype="bfloat16",
        quantization_config=quantization,
    )


def build(model: str, quant: str, layers: int, folder: Path) -> str:
    """The folder of `model`'s configuration, made below `folder`; `harness.start` goes by "qwen35" in its name."""
    import synthetic

    if model == "glm53":
        return synthetic.write(folder / f"glm53-{quant}-{layers}", glm53(layers, synthetic.quantization(quant)))
    path = synthetic.qwen35(folder, quant, layers, experts=256)
    if model == "qwen35-2304":
        config = json.loads((Path(path) / "config.json").read_text())
        return synthetic.write(folder / f"qwen35-2304-{quant}-{layers}", enlarged(config))
    return path


def settings(a: argparse.Namespace) -> dict:
    """What `harness.start` gets."""
    more: dict = dict(mode=a.mode, memory=a.memory)
    if a.tp > 1:
        more["tensor_parallel_size"] = a.tp
    if a.offload_gb:
        more.update(cpu_offload_gb=a.offload_gb, cpu_offload_params=set(filter(None, a.params.split(","))))
    return more


def in_pieces(model: Any, piece: int = PIECE) -> Iterator[tuple[str, str, dict]]:
    """Path, class name and parameters of each module, as views of at most `piece` bytes where a row is no more.

    A view keeps the name that it comes from, a number behind it: names and classes decide what values are drawn.
    """
    for path, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is None or p.device.type == "meta":
                continue
            parts = p.data.split(max(1, piece * len(p) // p.nbytes)) if p.dim() and p.nbytes > piece else [p.data]
            for i, part in enumerate(parts):
                yield path, type(module).__name__, {f"{leaf}.{i}" if i else leaf: part}


def filler(fill: Callable) -> Callable:
    """`fill` of the harness, called piece by piece: it draws a tensor of the parameter's size on the card."""

    def fill_pieces(model: Any, *_: object, **__: object) -> None:
        import torch

        for path, name, tensors in in_pieces(model):
            owner = type(name, (torch.nn.Module,), {})()
            for leaf, tensor in tensors.items():
                owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
            holder = torch.nn.Module()
            holder._modules[path] = owner
            fill(holder)

    return fill_pieces


def watched(load: Callable, peaks: list[int], cuda: Any) -> Callable:
    """A loader's `load_model` that adds the card's peak to `peaks`: what calls it measures memory as well, and starts
    the count of the peak anew as soon as it returns.
    """

    def load_model(*arguments: Any, **named: Any) -> Any:
        out = load(*arguments, **named)
        peaks.append(cuda.max_memory_allocated())
        return out

    return load_model


def measured(load: Callable, folder: Path, peaks: list[int], cuda: Any) -> Callable:
    """A worker's `load_model` that leaves a file of figures: in a worker process nothing else finds its way back.

    From before the model is built until its weights are processed, and with that until the offloader is done. `peaks`:
    what a loader inside of it, `watched`, has seen.
    """

    def load_model(self: Any, *arguments: Any, **named: Any) -> Any:
        gc.collect()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        before, began = cuda.memory_allocated(), time.monotonic()
        out = load(self, *arguments, **named)
        cuda.synchronize()
        seconds, peak = time.monotonic() - began, max([*peaks, cuda.max_memory_allocated()])
        gc.collect()
        note = dict(seconds=seconds, peak=peak, allocated=cuda.memory_allocated(), before=before, **offloaded())
        (folder / f"{getattr(self, 'rank', 0)}-{os.getpid()}.json").write_text(json.dumps(note))
        return out

    return load_model


def offloaded() -> dict:
    """Bytes that our offloader moved (0 without it), and that a release's own one says it moved."""
    from vllm.model_executor.offloader import get_offloader

    found = get_offloader()
    return dict(moved=getattr(found, "moved", 0), claimed=getattr(found, "cpu_offload_bytes", 0))


def prepare(a: argparse.Namespace) -> None:
    """What every process needs that may load weights: a spawned worker comes through here as well."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if a.tp == 1 else "1")
    import harness
    import same_kernels
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.v1.worker.gpu_worker import Worker

    harness.fill = filler(harness.fill)
    if a.tp > 1:  # what `start` sets in the first process alone
        harness.pretend(a.memory == "pageable")
        same_kernels.on_newer_library()
        DummyModelLoader.load_weights = lambda self, model, config: harness.fill(model)
    peaks: list[int] = []
    BaseModelLoader.load_model = watched(BaseModelLoader.load_model, peaks, torch.cuda)
    Worker.load_model = measured(Worker.load_model, Path(os.environ[NOTES]), peaks, torch.cuda)


def case(a: argparse.Namespace) -> str:
    offload = f"offload {a.offload_gb:g} GiB of {a.params or 'anything'}" if a.offload_gb else "resident"
    return f"{a.model} {a.layers} layers {a.quant} {a.mode} tp {a.tp} {offload} {a.memory}: seconds to load"


def figures(a: argparse.Namespace, notes: list[dict], ready: float) -> dict:
    """The row, from what each rank noted: the slowest rank's seconds, the fullest card's bytes, all ranks' moved ones.

    `ready` counts from the start of this program to the engine being up, imports included.
    """
    if len(notes) != a.tp:
        raise SystemExit(f"{len(notes)} of {a.tp} ranks noted how they loaded: the release does not load as expected")
    most = {key: max(note[key] for note in notes) for key in ("seconds", "peak", "allocated", "before")}
    return rows.row(
        case(a),
        round(most["seconds"], 2),
        "s",
        ready_seconds=round(ready, 2),
        gpu_peak=most["peak"],
        gpu_allocated=most["allocated"],
        gpu_before=most["before"],
        moved=sum(note["moved"] for note in notes),
        claimed=sum(note["claimed"] for note in notes),
        patched=not a.unpatched,
        **{k: getattr(a, k) for k in ("model", "layers", "quant", "offload_gb", "params", "tp", "memory", "mode")},
    )


def ratio(with_offload: int, without: int, moved: int) -> float:
    """Bytes of host memory that each byte moved took at the peak: 1.0 when nothing is held twice or rounded up."""
    if moved <= 0:
        raise ValueError("nothing moved: there is nothing to divide by")
    return (with_offload - without) / moved


def ratio_row(with_offload: dict, without: dict) -> dict:
    """The row for two of host_peak.py; both by Pss, or else both by Rss."""
    kind = "pss" if with_offload["method"] == without["method"] == "pss" else "rss"
    moved = with_offload["printed"]["moved"]
    high, low, name = with_offload["peaks"], without["peaks"], with_offload["printed"]["case"].rpartition(":")[0]
    return rows.row(
        f"{name}: host peak / bytes offloaded",
        round(ratio(high[kind], low[kind], moved), 4),
        "host peak / bytes offloaded",
        method=kind,
        with_offload=high[kind],
        without=low[kind],
        moved=moved,
        by_available=round(ratio(high["available_fell"], low["available_fell"], moved), 4),
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*LAYERS])
    parser.add_argument("--quant", default="nvfp4", choices=["nvfp4", "w4a16"])
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--offload-gb", type=float, default=0, metavar="GIB", help="0: without offload")
    parser.add_argument("--params", default="experts", help="patterns, with commas between; empty: no pattern")
    parser.add_argument("--tp", type=int, default=1, choices=[1, 2])
    parser.add_argument("--memory", default="mapped", choices=["mapped", "pinned", "pageable", "unpinned"])
    parser.add_argument("--mode", default="eager", choices=["eager", "compiled", "piecewise"])
    parser.add_argument("--unpatched", action="store_true", help="the release is as published, and must be")
    parser.add_argument("--ratio", nargs=2, metavar=("WITH", "WITHOUT"), help="two files of host_peak.py")
    a = parser.parse_args(arguments)
    if not (a.model or a.ratio):
        parser.error("--model or --ratio")
    if a.model and not a.layers:
        a.layers = LAYERS[a.model]
    return a


def main() -> None:
    a = parse(sys.argv[1:])
    if a.ratio:
        print(json.dumps(ratio_row(*(json.loads(Path(f).read_text())[-1] for f in a.ratio))))
        return
    if rows.patched(rows.installed()) == a.unpatched:
        what = "is patched, and --unpatched was said" if a.unpatched else "is not patched: apply it, or say --unpatched"
        raise SystemExit(f"the vLLM on the path {what}")
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.mkdir()
        os.environ[NOTES] = str(notes)
        prepare(a)
        import harness

        ready: list[float] = []
        generate = harness.Run.generate

        def announce(run: Any) -> Any:
            """The first thing that `start` does with an engine is to generate: a few tokens show that it works."""
            ready.append(time.monotonic() - BEGAN)
            print("READY", flush=True)
            return generate(run, 8)

        harness.Run.generate = announce
        run = harness.start(build(a.model, a.quant, a.layers, Path(folder)), **settings(a))
        found = figures(a, [json.loads(f.read_text()) for f in notes.iterdir()], ready[0])
        found["gpu_used"] = rows.card_bytes(os.getpid())  # None where workers have the cards
        with contextlib.suppress(Exception):  # workers of their own end with this process at the latest
            run.llm.llm_engine.engine_core.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and NOTES in os.environ:  # a spawned worker reads this file again
    prepare(parse(sys.argv[1:]))
