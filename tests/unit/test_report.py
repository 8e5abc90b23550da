# SPDX-License-Identifier: Apache-2.0
"""What a user reads: the report of a start, and the errors that end one."""

import pytest
import torch
import torch._inductor.compile_fx
from expert_offload import Memory, Offloader, cache_factor, memory, offloader, report
from expert_offload.host import PIN_SWITCH
from expert_offload.offloader import CPU_SWITCH, POISON_SWITCH, NothingMoved
from expert_offload.selection import PatternError
from fake_model import (
    ALL_EXPERTS,
    CPU,
    EVERYTHING,
    GATE,
    HIDDEN,
    NVFP4,
    PLAIN,
    QKV,
    W2,
    W13,
    Layer,
    Linear,
    Model,
    has_attention,
    load,
    out_names,
    pageable,
    parameter,
    resident,
    started,
    tokens,
    view_elsewhere,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")


# -- what a user reads -----------------------------------------------------------------------------------------------


FOUND = dict(cpu=False, wsl=False, pin_disabled=False, uva_disabled=False, ranks=1, view=view_elsewhere)


@pytest.mark.parametrize(
    "told, switch, limit, why",
    [
        ({}, None, None, None),
        (dict(cpu=True), None, 0, "this is the CPU backend"),
        (dict(pin_disabled=True), None, 0, "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY is set"),
        (dict(pin_disabled=True, wsl=True), "4", 0, "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY is set"),
        ({}, "0", 0, PIN_SWITCH),
        ({}, "4", 4 * 2**30, PIN_SWITCH),
        (dict(ranks=2), "4", 2 * 2**30, PIN_SWITCH),
        (dict(wsl=True, ranks=2), "4", 2 * 2**30, PIN_SWITCH),
    ],
)
def test_what_may_be_page_locked(told, switch, limit, why, monkeypatch):
    monkeypatch.delenv(PIN_SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(PIN_SWITCH, switch)
    memory = Memory.found(**{**FOUND, **told})
    assert memory.limit == limit and memory.copies is (limit == 0) and memory.view is view_elsewhere
    assert (memory.why is None) if why is None else why in memory.why
    assert memory.unmapped is None


def test_wsl_page_locks_a_part_of_the_machines_memory(monkeypatch):
    monkeypatch.delenv(PIN_SWITCH, raising=False)
    monkeypatch.setattr(memory, "memory_total", lambda: 100 * 2**30)
    found = Memory.found(**{**FOUND, "wsl": True})
    assert found.limit == 40 * 2**30 and "WSL" in found.why and not found.copies


def test_memory_that_may_not_be_read_in_place():
    memory = Memory.found(**{**FOUND, "uva_disabled": True})
    assert memory.unmapped == "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set"
    assert Offloader(1, set(), memory, print, has_attention).view is None
    assert Offloader(1, set(), Memory.found(**FOUND), print, has_attention).view is view_elsewhere


def test_pinned_memory_that_may_not_be_mapped_is_staged(mapped):
    said = []
    memory = Memory(None, None, "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set", view_elsewhere)
    made = Offloader(2**30, set(), memory, said.append, has_attention)
    model = Model(made)
    load(model, made)
    assert "in stream order, into a staging buffer" in said[1] and not made.blocking
    assert said[1].endswith("because VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set")
    assert torch.equal(tokens(model), resident())


def test_what_may_not_be_page_locked_is_copied_and_the_rest_is_read_in_place(mapped):
    """The experts of the first two layers, and then the limit is reached."""
    said = []
    memory = Memory(2 * (W13 + W2), "a limit for this test", None, view_elsewhere)
    made = Offloader(2**30, {"experts"}, memory, said.append, has_attention)
    model = Model(made)
    load(model, made)
    out = [i for i in made.items.values() if i.out]
    assert [i.mapped for i in sorted(out, key=lambda i: i.layer)] == [True, True, True, True, False, False]
    assert made.blocking and list(made.staging.groups) == [out[-1].group]
    assert made.moved == ALL_EXPERTS and made.arena.locked >= 2 * (W13 + W2)
    assert f"kernels read {report.gib(2 * (W13 + W2))} of host memory in place" in said[1]
    assert f"each layer of the other {report.gib(W13 + W2)} is copied before it runs, blocking" in said[2]
    assert "a limit for this test" in said[2]
    assert torch.equal(tokens(model), resident())


def test_the_compile_cache_key_tells_every_decision_apart(monkeypatch, mapped):
    keys = [cache_factor(None)]
    limits = [(None, None), (2 * (W13 + W2), None), (0, None), (None, "not in place")]
    for limit, unmapped in limits:
        made = Offloader(2**30, {"experts"}, Memory(limit, "x", unmapped, view_elsewhere), print, has_attention)
        load(Model(made), made)
        keys.append(cache_factor(made))
    assert keys[0] == keys[1], "all is read in place: the resident model's graph"
    monkeypatch.setenv(POISON_SWITCH, "1")
    assert len({*keys[1:], cache_factor(None)}) == 5


def test_the_report():
    said = []
    _, made = started(2**30, said=said)
    staging = -(-W13 // 512) * 512 + -(-W2 // 512) * 512 + 2 * (QKV + 512)
    assert made.staging.bytes.numel() == staging
    assert said == [
        f"expert offload: {report.gib(EVERYTHING)} moved to host memory, 1.00 GiB asked for (12 tensors of 3 layers): "
        f"routed experts {report.gib(ALL_EXPERTS)}, dense weights {report.gib(3 * (QKV + GATE))}; host memory held "
        f"{report.gib(EVERYTHING)}, page-locked 0.00 MiB",
        f"expert offload: each layer is copied before it runs, blocking, into a staging buffer of "
        f"{report.gib(staging)} on the device, so {report.gib(EVERYTHING - staging)} are free for other use; because "
        "this is a test",
    ]


def test_the_report_warns_when_nothing_is_gained():
    said = []
    started(1, said=said)
    assert said[-1].startswith("expert offload: WARNING: one layer is offloaded and staging takes as much")
    more = []
    started(2**30, said=more)
    assert not any("WARNING" in line for line in more)


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0.00 MiB"),
        (2**20, "1.00 MiB"),
        (102 * 2**20, "102.00 MiB"),
        (103 * 2**20, "0.10 GiB"),
        (3 * 2**30, "3.00 GiB"),
    ],
)
def test_sizes(nbytes, text):
    assert report.gib(nbytes) == text


def test_a_rank_on_which_nothing_moved_claims_nothing(monkeypatch):
    """Another rank of a pipeline has all that the pattern names."""
    monkeypatch.setattr(offloader, "_over_ranks", lambda counts, device: {k: n + 1 for k, n in counts.items()})
    said = []
    model, made = started(2**30, "layers.40", said=said)
    assert made.moved == 0 and made.staging is None
    assert not any("zero copy" in line or "staging" in line for line in said)
    assert said[0].startswith(
        "expert offload: 0.00 MiB moved to host memory, 1.00 GiB asked for (0 tensors of 0 layers)"
    )
    assert torch.equal(tokens(model), resident())


def test_counts_are_summed_over_ranks(monkeypatch):
    assert offloader._over_ranks({"a": 1, "b": 2}, CPU) == {"a": 1, "b": 2}
    world, distributed = [2], torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: world[0])
    monkeypatch.setattr(distributed, "all_reduce", lambda t: t.mul_(10))
    assert offloader._over_ranks({"a": 1, "b": 2}, CPU) == {"a": 10, "b": 20}
    assert offloader._over_ranks({}, CPU) == {}
    world[0] = 1
    assert offloader._over_ranks({"a": 1}, CPU) == {"a": 1}


def test_a_pattern_that_matches_nothing_ends_the_start_before_weights_are_read():
    made = pageable(2**30, "experts", "expertz")
    Model(made)
    with pytest.raises(PatternError, match=r"--cpu-offload-params expertz: .*Nearest: .*experts\.w13_weight"):
        made.built(torch.device("cpu"))


def test_a_pattern_for_a_scale_ends_the_start():
    made = pageable(2**30, "w13_weight_scale")
    Model(made, experts=NVFP4)
    with pytest.raises(PatternError, match=r"layers\.0\.experts\.w13_weight_scale, which must stay on the GPU"):
        made.built(torch.device("cpu"))


def test_patterns_hit_before_processing_whatever_the_packing():
    for method in (PLAIN, NVFP4):
        _, made = started(2**30, "experts.w2_weight", experts=method)
        assert out_names(made) == [f"model.layers.{i}.experts.w2_weight" for i in range(3)]


def test_a_drafter_is_not_asked_for_the_patterns_again(monkeypatch):
    """Nor are ranks: only some have a drafter, and the others would not answer."""
    asked = []
    monkeypatch.setattr(offloader, "_over_ranks", lambda counts, device: (asked.append(counts), counts)[1])
    model, made = started(2**30, "layers.1")
    assert asked == [{"layers.1": 4}, {"moved": EVERYTHING // 3, "blocking": 1}]
    draft = Model(made, layers=1, prefix="draft")
    made.built(torch.device("cpu"))
    load(draft, made)
    assert len(asked) == 2
    assert torch.equal(tokens(model), resident())


def test_nothing_moved_because_views_are_held():
    made = pageable(2**30, "conv1d")
    Model(made, mixer=True)
    made.built(torch.device("cpu"))
    with pytest.raises(NothingMoved) as error:
        made.finish(CPU)
    assert str(error.value) == (
        "--cpu-offload-gb was given and no byte left the device on any rank: all 3 candidates stay on the GPU, since "
        "something else holds a view of it (model.layers.0.mixer.conv1d.weight, model.layers.1.mixer.conv1d.weight, "
        "model.layers.2.mixer.conv1d.weight). Start without the flag, or name other weights with --cpu-offload-params"
    )


def test_weights_without_a_size_are_named_as_the_reason():
    """GGUF's, which get their shape from the checkpoint: nothing moves, and the error says why."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant_method = type("GGUFMoEMethod", (), {})()
            self.w13_qweight = nn.UninitializedParameter(requires_grad=False)
            self.norm = nn.Parameter(torch.ones(4), requires_grad=False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Late()

    made = pageable(2**30)
    made.wrap_modules([Block(), Block()], "model.layers")
    with pytest.raises(
        NothingMoved, match="2 candidates stay on the GPU, since their size is known only when"
    ) as error:
        made.finish(CPU)
    assert "model.layers.0.experts.w13_weight" in str(error.value)
    made = pageable(2**30, "experts")
    made.wrap_modules([Block()], "model.layers")
    with pytest.raises(PatternError, match="or without a size until it is loaded, as GGUF's"):
        made.built(CPU)


def test_nothing_moved_on_the_cpu_backend(monkeypatch):
    monkeypatch.delenv(CPU_SWITCH)
    made = pageable(2**30)
    model = Model(made)
    assert not made.items and all("forward" not in vars(m) for m in model.modules())
    with pytest.raises(NothingMoved, match=rf"the CPU backend, where weights are in host memory.*{CPU_SWITCH}=1"):
        load(model, made)


def test_nothing_moved_in_a_model_without_matrices():
    made = pageable(2**30)
    made.wrap_modules([nn.Module(), nn.LayerNorm(4)])
    text = report.nothing_moved([], torch.device("cuda"), CPU_SWITCH)
    assert "the model has no decoder layer with a weight that may leave" in text
    with pytest.raises(NothingMoved):
        made.finish(CPU)


def test_a_tensor_of_unknown_role_stays_and_is_reported():
    class Odd(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.experts.w13_weight_lut = parameter(torch.ones(4, 4))
            self.experts.w2_weight_scale = parameter(torch.ones(4, 4))  # known elsewhere, not in this method

    said = []
    model, made = started(2**30, make=Odd, said=said)
    assert made.unclassified[:2] == [
        f"model.layers.0.experts.w13_weight_lut ({PLAIN})",
        f"model.layers.0.experts.w2_weight_scale ({PLAIN})",
    ]
    assert len(made.unclassified) == 6 and made.moved == EVERYTHING
    line = next(text for text in said if "role is not known" in text)
    assert "6 tensors stay on the GPU" in line and "w13_weight_lut" in line
    assert torch.equal(model.layers[0].experts.w13_weight_lut, torch.ones(4, 4))


def test_experts_of_an_unknown_method_stay_and_are_reported():
    """The next release's method: nothing is guessed about it, and nothing is silent."""
    said = []
    model, made = started(2**30, experts="NewMoEMethod", said=said)
    assert made.moved == 3 * (QKV + GATE)
    line = next(text for text in said if "role is not known" in text)
    assert "6 tensors" in line and "model.layers.0.experts.w13_weight (NewMoEMethod)" in line
    assert torch.equal(tokens(model), resident())


def test_two_tensors_of_one_name_in_a_layer_do_not_overwrite_each_other():
    class Clash(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.experts.gate = Linear(f"{name}.inner", HIDDEN, HIDDEN)

        def forward(self, positions, hidden_states, residual=None):
            hidden_states, residual = super().forward(positions, hidden_states, residual)
            return self.experts.gate(hidden_states), residual

    want = resident(make=Clash)
    model, made = started(2**30, make=Clash)
    assert made.moved == made.selection.taken == EVERYTHING
    assert torch.equal(tokens(model), want)
