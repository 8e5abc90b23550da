# SPDX-License-Identifier: Apache-2.0
"""What a release can do beside offload gives the same tokens as with every expert resident, on a card.

Here is what runs on no CPU (tests/serve has the rest). Each test also asserts that what it is about took place, and
that two experts that change places in host memory show. Baselines are shared by processes (`pytest -n 6`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runners import runners
from test_tokens import graphs, places

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "tests" / "models" / "tiny-moe"
ALL = dict(cpu_offload_gb=8.0, cpu_offload_params={"experts"})
by_runner = pytest.mark.parametrize("runner", runners())


@pytest.fixture
def compare(once, figures):
    """compare(case, path, use, ask, ...) -> the answers of `use`, equal on a resident and an offloaded engine.

    Args (of the function):
        use: what is done with a started engine; its answers are a dict that JSON can hold.
        ask: one generation the way the feature has it, to see two swapped experts in.
        lowered: settings of the resident engine that differ from `settings`, for the graphs that a start ends with.
    """
    import harness

    def go(case, path, use, ask=None, *, memory, runner, mode="compiled", base_mode=None, lowered=None, **settings):
        v2 = runner == "v2"
        base_mode = base_mode or graphs(mode, memory)

        def resident():
            run = harness.start(path, mode=base_mode, v2=v2, **(settings | (lowered or {})))
            try:
                assert run.v2 is v2
                return use(run)
            finally:
                harness.end(run)

        # The graphs that the baseline runs are in its name: what differs in memory alone shares it.
        which = "-".join(str(value) for value in (lowered or {}).values()).translate(str.maketrans("", "", "{}':, "))
        want = once(f"{case}-{base_mode}-{which}-{runner}".replace(" ", "-"), resident)
        run = harness.start(path, mode=mode, memory=memory, v2=v2, **settings, **ALL)
        try:
            assert run.v2 is v2
            got = use(run)
            figures(f"{case} {memory} {runner}: tokens equal", int(got == want), "tokens equal", graphs=run.graphs)
            assert got == want, {name: (got[name], want[name]) for name in want if got[name] != want[name]}
            places(run.offloader, memory)
            before = ask(run) if ask else run.generate()
            run.swap_two_experts()
            assert (ask(run) if ask else run.generate()) != before, "void: two experts changed places, no token did"
            return want
        finally:
            harness.end(run)

    return go


def drafted(run) -> dict:
    """Tokens, and whether the drafter was asked for some of them."""
    propose, asked = run.drafter.propose, []

    def counted(*args, **named):
        asked.append(1)
        return propose(*args, **named)

    run.drafter.propose = counted
    assert run.replays > 0
    return {"tokens": run.tokens, "again": run.generate(), "asked": bool(asked), "graphs": run.graphs}


@by_runner
@pytest.mark.parametrize("memory", ["mapped", "pageable", "part"])
def test_mtp(memory, runner, folder, compare):
    """Qwen3.5's own drafter, whose layer is never offloaded; full graphs are lowered before ("pageable") or after
    loading ("part", when a buffer turns out not to be page-locked), and the drafter's with them."""
    import synthetic

    path = synthetic.qwen35(folder, "nvfp4", drafts=True)
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    # V1 rounds to multiples of three and drops what is larger than the largest: two requests must find a graph.
    settings = dict(speculative_config=speculation, compilation_config={"cudagraph_capture_sizes": [1, 2, 3, 6, 12]})
    found = compare("mtp", path, drafted, memory=memory, runner=runner, **settings)
    assert found["asked"], "void: nothing was drafted"
    assert found["tokens"] == found["again"], "void: a resident engine that drafts does not repeat itself"
    assert (found["graphs"] == "PIECEWISE") is (memory != "mapped")


@by_runner
@pytest.mark.parametrize("memory", ["mapped", "pageable"])
def test_lora_on_attention(memory, runner, folder, compare):
    """An adapter for queries and outputs of attention; where a release can, LoRA is kept off the experts."""
    import synthetic
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest

    kept_off = hasattr(EngineArgs, "lora_target_modules")  # not in v0.17.1, whose LoRA wraps experts: not in Marlin
    path = synthetic.qwen3(folder, "w4a16" if kept_off else "bf16")
    request = LoRARequest("attention", 1, synthetic.adapter(folder, path))
    settings = dict(enable_lora=True, max_loras=1, max_lora_rank=16)
    if kept_off:
        settings["lora_target_modules"] = ["q_proj", "o_proj"]

    def ask(run):
        return run.generate(lora_request=request)

    def use(run):
        return {"plain": run.tokens, "adapted": ask(run), "plain again": run.generate()}

    found = compare("lora", path, use, ask, memory=memory, runner=runner, **settings)
    assert found["adapted"] != found["plain"] == found["plain again"], "void: the adapter changed nothing"


MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@by_runner
@pytest.mark.parametrize(
    "memory, mode", [*((m, g) for m in ("mapped", "pageable") for g in MODES), ("part", "FULL_AND_PIECEWISE")]
)
def test_every_mode_of_graphs(mode, memory, runner, folder, compare):
    """As asked for where copies can be captured; else full graphs become piecewise, as the resident baseline's are."""
    import synthetic

    lower = memory != "mapped" and mode != "NONE"
    ends = "PIECEWISE" if lower else mode
    path = synthetic.qwen3(folder, "w4a16")

    def use(run):
        assert (run.replays > 0) is (mode != "NONE"), run.replays
        return {"tokens": run.tokens, "graphs": run.graphs}

    found = compare(
        "graphs",
        path,
        use,
        memory=memory,
        runner=runner,
        base_mode="compiled",
        compilation_config={"cudagraph_mode": mode},
        lowered={"compilation_config": {"cudagraph_mode": ends}},
    )
    assert found["graphs"] == ends or memory == "mapped", found["graphs"]


@pytest.fixture(scope="module")
def checkpoints(folder, once) -> dict[str, tuple[str, str]]:
    """By scheme, the trained model and one of the same shapes whose layer 1 has its experts in another order."""
    import synthetic

    def make():
        quantize = [sys.executable, str(ROOT / "tools" / "quantize.py")]
        subprocess.run([*quantize, "bf16", str(COMMITTED), str(folder / "trained-bf16")], check=True)
        subprocess.run([*quantize, "nvfp4", str(folder / "trained-bf16"), str(folder / "trained-nvfp4")], check=True)
        originals = {"w4a16": COMMITTED, "nvfp4": folder / "trained-nvfp4"}
        return {
            scheme: (str(path), str(synthetic.reversed_experts(path, folder / f"reversed-{scheme}")))
            for scheme, path in originals.items()
        }

    return once("checkpoints", make)


@by_runner
@pytest.mark.parametrize("memory", ["mapped", "pageable"])
@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4"])
def test_reload(scheme, memory, runner, checkpoints, compare):
    """Other weights while serving, repacked by Marlin into memory that graphs read; then the first ones again."""
    path, other = checkpoints[scheme]

    def use(run):
        found = {"before": run.tokens}
        for name, folder in (("other", other), ("same", path)):
            run.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            found[name] = run.generate()
        return found

    found = compare(f"reload {scheme}", path, use, memory=memory, runner=runner, load_format="auto")
    assert found["other"] != found["before"], "void: the reload changed nothing"
    assert found["same"] == found["before"], "equal to a resident engine, which the release's reload damages"


@by_runner
@pytest.mark.parametrize("memory", ["mapped", "pageable"])
def test_sleep(memory, runner, folder, once, figures, checkpoints):
    """Level 1 copies what is on the card to the host and back, level 2 drops it; host memory of ours stays as it is."""
    import importlib.util

    if importlib.util.find_spec("vllm.cumem_allocator") is None:
        pytest.skip("this installation lacks sleep's allocator")

    def made(kind):
        out = folder / f"slept-{kind}-{runner}.out"
        command = [sys.executable, str(Path(__file__).with_name("sleeper.py")), checkpoints["w4a16"][0], kind, runner]
        done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return json.loads(out.read_text())

    want = once(f"slept-{runner}", lambda: made("resident"))
    got = made(memory)
    assert want["level 1"] == want["before"], "void: the release's own sleep changes tokens"
    assert got["before"] == want["before"]
    figures(f"sleep level 1 {memory} {runner}: tokens equal", int(got["level 1"] == want["level 1"]), "tokens equal")
    assert got["level 1"] == want["level 1"]
    assert got["moved"] > 0 and got["swapped"] != got["level 2"], "void: two swapped experts do not show"
    figures(
        f"sleep level 2 {memory} {runner}: tokens equal",
        int(got["level 2"] == want["before"]),
        "tokens equal",
        resident=int(want["level 2"] == want["before"]),
    )
    if want["level 2"] != want["before"]:
        pytest.skip("level 1 is right; after level 2 and a reload this release's resident engine says other tokens too")
    assert got["level 2"] == want["level 2"]


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_prefetch_ring(group, figures):
    """The release's other backend, layers alone: each finds its own weights, for every number and step of a group."""
    import harness
    import torch
    from vllm.model_executor.offloader import base
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    harness.pretend(wsl=False)
    layers, wrong = 8, []
    x = torch.randn(4, 64, device="cuda")
    for number in range(1, group + 1):
        offloaded = sum(i % group >= group - number for i in range(layers))
        for step in range(1, offloaded + 2):
            torch.manual_seed(0)
            chain = [torch.nn.Linear(64, 64, bias=False, device="cuda").requires_grad_(False) for _ in range(layers)]
            want = x
            for layer in chain:
                want = layer(want)
            offloader = PrefetchOffloader(group, number, step)
            base.set_offloader(offloader)
            wrapped = offloader.wrap_modules(iter(chain))
            offloader.post_init()
            assert len(offloader.module_offloaders) == offloaded
            for turn in range(3):
                got = x.clone()
                for layer in wrapped:
                    got = layer(got)
                torch.cuda.synchronize()
                if not torch.equal(got, want):
                    wrong.append((number, step, turn))
    base.set_offloader(base.NoopOffloader())
    figures(f"prefetch ring of groups of {group}: wrong passes", len(wrong), "passes")
    assert not wrong, f"(number, step, pass): {wrong}"


@by_runner
@pytest.mark.parametrize(
    "mode, group, number, step", [("compiled", 2, 1, 1), ("compiled", 4, 2, 2), ("eager", 4, 3, 4)]
)
def test_prefetch(mode, group, number, step, runner, folder, once, figures):
    """The release's other backend beside our patches; in bf16, since it loses weights that change their names."""
    import harness
    import synthetic
    import torch

    v2 = runner == "v2"
    path = synthetic.qwen3(folder, "bf16")

    def resident():
        run = harness.start(path, mode=mode, v2=v2)
        harness.end(run)
        return run.tokens

    want = once(f"prefetch-{mode}-{runner}", resident)
    more = dict(offload_group_size=group, offload_num_in_group=number, offload_prefetch_step=step)
    run = harness.start(path, mode=mode, v2=v2, offload_params={"experts"}, **more)
    try:
        assert run.v2 is v2 and type(run.offloader).__name__ == "PrefetchOffloader"
        assert (run.replays > 0) is (mode != "eager")
        moved = [m for m in run.offloader.module_offloaders if m._param_offloaders]
        assert len(moved) == 8 // group * number
        case = f"prefetch group {group} number {number} step {step} {mode} {runner}: tokens equal"
        figures(case, int(run.tokens == want), "tokens equal", graphs=run.graphs)
        assert run.tokens == want
        (first,) = (p for name, p in moved[0]._param_offloaders.items() if name.endswith("w13_weight"))
        torch.cuda.synchronize()
        first._cpu_storage[:2] = first._cpu_storage[:2].flip(0)
        assert run.generate() != want, "void: two experts changed places and no token did"
    finally:
        harness.end(run)
