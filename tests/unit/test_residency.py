# SPDX-License-Identifier: Apache-2.0
"""Weights through processing and after it: what goes down again, what stays and why."""

import gc

import pytest
import torch
import torch._inductor.compile_fx
from expert_offload import Memory, Offloader, residency
from expert_offload.residency import AuditError, DamagedError
from fake_model import (
    ALL_EXPERTS,
    CPU,
    EVERYTHING,
    EXPERTS,
    HIDDEN,
    INNER,
    NVFP4,
    QKV,
    W2,
    W13,
    Experts,
    Layer,
    Linear,
    Model,
    has_attention,
    kept,
    load,
    out_names,
    pageable,
    parameter,
    resident,
    shares_across_layers,
    started,
    tokens,
    view_elsewhere,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")


# -- processing ------------------------------------------------------------------------------------------------------


def test_processing_renames_and_resizes_and_the_weights_go_down_again():
    said = []
    model, made = started(2**30, "experts", experts=NVFP4, said=said)
    assert set(made.items) == {
        (id(la.experts), f"model.layers.{i}.experts.{w}_weight")
        for i, la in enumerate(model.layers)
        for w in ("w13", "w2")
    }
    for item in made.items.values():
        leaf = item.name.split(".")[-1]
        assert item.parameter is item.owner._parameters[leaf] and item.parameter.dtype is torch.bfloat16
        assert item.buffer.nbytes == item.parameter.nbytes == 2 * item.parameter.numel()
    assert made.moved == ALL_EXPERTS // 2
    assert (
        f"{ALL_EXPERTS / 2 / 2**20:.2f} MiB moved to host memory, 1.00 GiB asked for (6 tensors of 3 layers)" in said[0]
    )


def test_the_same_host_memory_serves_before_and_after_processing_of_equal_size():
    made = pageable(2**30, "experts")
    model = Model(made)
    before = {name: item.buffer.bytes.data_ptr() for (_, name), item in made.items.items()}
    load(model, made)
    assert {name: item.buffer.bytes.data_ptr() for (_, name), item in made.items.items()} == before


def test_parameters_are_on_the_device_while_they_are_processed_and_only_then():
    made = pageable(2**30, "experts")
    model = Model(made)
    experts, other = model.layers[0].experts, model.layers[1].experts
    for _ in range(2):  # a module may come by again as part of another
        assert made.arena.holding(experts.w13_weight.data) is not None
        with made.loading(model.layers[0], CPU):
            assert made.arena.holding(experts.w13_weight.data) is None
            assert made.arena.holding(other.w13_weight.data) is not None, "not asked for"
            assert torch.equal(experts.w13_weight, Layer("model.layers.0").experts.w13_weight)
        with made.loading(nn.Module(), CPU):
            assert made.arena.holding(experts.w13_weight.data) is not None
    load(model, made)
    assert torch.equal(tokens(model), resident())


def test_processing_after_the_start_serves_the_new_weights():
    """Weights may be loaded anew into a running engine, whose host memory is sealed by then."""
    model, made = started(2**30)
    with made.loading(model, CPU):
        for layer in model.layers:
            layer.experts.w13_weight.data *= 2
    made.finish(CPU)
    plain = Model()
    for layer in plain.layers:
        layer.experts.w13_weight.data *= 2
    assert torch.equal(tokens(model), tokens(plain))


def test_two_tensors_under_one_canonical_name_both_leave():
    class Both(Experts):
        def process(self):
            super().process()
            self.w13_weight_packed = parameter(torch.full((8, 8), 7, dtype=torch.uint8))

    class WithBoth(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.experts = Both(f"{name}.experts", NVFP4)

    want = resident(make=WithBoth)
    model, made = started(2**30, "experts", make=WithBoth)
    with made.loading(model, CPU):  # and they stay two when they come by again
        pass
    made.finish(CPU)
    assert len(out_names(made)) == 9 and made.moved == ALL_EXPERTS // 2 + 3 * 64
    assert torch.equal(tokens(model), want)


def test_one_parameter_under_two_names_leaves_once():
    made = pageable(2**30, "experts")
    model = Model(made, experts=NVFP4)
    for layer in model.layers:
        with made.loading(layer.experts, CPU):
            layer.experts.process()
            layer.experts.w13_weight_packed = layer.experts.w13_weight
    made.finish(CPU)
    assert made.moved == ALL_EXPERTS // 2 and len(made.items) == 6 and not kept(made)
    assert torch.equal(tokens(model), resident(experts=NVFP4))


def test_weights_that_processing_takes_away_are_reported():
    """A flag that does nothing for some weights must not do it silently."""
    said = []
    made = pageable(2**30, "experts", said=said)
    model = Model(made)
    gone = model.layers[1].experts
    with made.loading(gone, CPU):
        gone.kept_elsewhere = gone.w13_weight.data
        del gone.w13_weight
        gone.w13_weight = gone.kept_elsewhere
    made.finish(CPU)
    assert torch.equal(tokens(model), resident())
    line = next(text for text in said if "stay on the GPU" in text)
    assert "1 tensors" in line and "model.layers.1.experts.w13_weight" in line and "processing" in line


def test_weights_that_are_made_on_the_meta_device_leave_when_they_exist():
    """Methods that quantize while loading have no weights before."""

    class Later(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.real = self.experts.w13_weight.data
            self.experts.w13_weight = parameter(torch.empty_like(self.real, device="meta"))

    made = pageable(2**30, "experts")
    model = Model(made, make=Later)
    assert made.moved == 3 * W2
    for layer in model.layers:
        with made.loading(layer, CPU):  # a module around it comes by first
            pass
        assert layer.experts.w13_weight.device.type == "meta"
        with made.loading(layer.experts, CPU):
            layer.experts.w13_weight = parameter(layer.real)
            del layer.real
    made.finish(CPU)
    assert made.moved == ALL_EXPERTS
    assert torch.equal(tokens(model), resident())


def test_a_dense_weight_that_does_not_exist_yet_can_be_given_back():
    class Later(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.real = self.qkv.weight.data
            self.qkv.weight = parameter(torch.empty_like(self.real, device="meta"))

    made = pageable(ALL_EXPERTS)
    model = Model(made, make=Later)
    for layer in model.layers:
        with made.loading(layer.qkv, CPU):
            layer.qkv.weight = parameter(layer.real)
            del layer.real
    made.finish(CPU)
    assert made.moved == ALL_EXPERTS and not any("qkv" in name for name in out_names(made))
    assert torch.equal(tokens(model), resident())


class NormLater(Layer):
    """Its first parameter does not exist yet, and says "meta" when asked for the layer's device."""

    def __init__(self, name):
        super().__init__(name)
        self.norm.weight = parameter(torch.empty(HIDDEN, device="meta"))


@pytest.mark.parametrize("make", [Layer, NormLater])
def test_a_weight_comes_back_to_the_device_it_left_and_not_to_meta(make):
    made, first = pageable(W13 + W2 + 1), make("a")
    made.wrap_modules([first, NormLater("b")])
    assert out_names(made) == ["0.experts.w13_weight", "0.experts.w2_weight", "1.experts.w13_weight"]
    assert torch.equal(first.qkv.weight, Layer("a").qkv.weight)


def test_a_tensor_that_became_something_else_stays():
    """Under the same name, but not of a kind that leaves: a matrix made one-dimensional, a name the method lacks."""
    made = pageable(2**30)
    model = Model(made)
    for layer in model.layers:
        with made.loading(layer.qkv, CPU):
            layer.qkv.weight = parameter(layer.qkv.weight.flatten())
        with made.loading(layer.experts, CPU):
            layer.experts.w13_weight_packed = parameter(layer.experts.w13_weight.data)
            del layer.experts.w13_weight
    made.finish(CPU)
    assert made.moved == EVERYTHING - 3 * (QKV + W13)
    gone = [f"model.layers.{i}.{n}" for i in range(3) for n in ("qkv.weight", "experts.w13_weight")]
    assert kept(made) == dict.fromkeys(gone, "processing left no weight of that name")


def test_a_weight_without_elements_stays():
    class Empty(Layer):
        def __init__(self, name):
            super().__init__(name)
            self.empty = nn.Module()
            self.empty.weight = parameter(torch.empty(0, 4))

    model, made = started(2**30, make=Empty)
    assert not any("empty" in name for name in out_names(made))
    assert torch.equal(tokens(model), resident())


def test_a_scale_that_is_not_a_number_ends_the_start():
    made = pageable(2**30, "experts")
    model = Model(made, experts=NVFP4)
    model.layers[1].experts.w2_weight_scale[2, 3] = float("nan")
    with pytest.raises(DamagedError) as error:
        load(model, made)
    text = str(error.value)
    assert "1 of 64 values of the scale model.layers.1.experts.w2_weight_scale are NaN, the first at (2, 3, 0)" in text
    assert "Download it again" in text


@pytest.mark.parametrize("at_once", [1, 20, 64])
def test_not_a_number_is_found_a_few_rows_at_a_time(at_once, monkeypatch):
    """Widened all at once, a scale of 8 bits takes four times its size."""
    monkeypatch.setattr(residency, "_AT_ONCE", at_once)
    scale = torch.ones(8, 4, 2)
    scale[3, 1, 1] = scale[6, 0, 0] = scale[6, 2, 1] = float("nan")
    assert residency._nans(scale) == (3, (3, 1, 1))
    assert residency._nans(torch.tensor(float("nan"))) == (1, ())
    assert residency._nans(torch.ones(3))[0] == residency._nans(torch.empty(0, 2))[0] == 0


# -- what stays ------------------------------------------------------------------------------------------------------


def test_a_weight_with_a_view_stays_and_is_reported():
    said = []
    model, made = started(2**30, mixer=True, said=said)
    assert kept(made) == {
        f"model.layers.{i}.mixer.conv1d.weight": "something else holds a view of it" for i in range(3)
    }
    for layer in model.layers:
        assert layer.mixer.conv1d.weight.data_ptr() == layer.mixer.conv_weights.data_ptr()
        assert layer.mixer.conv1d.weight.shape == (HIDDEN, 1, 1)
    assert made.moved == EVERYTHING, "it is not counted as moved"
    line = next(text for text in said if "stay on the GPU" in text)
    assert line.endswith(
        "3 tensors stay on the GPU: something else holds a view of it (model.layers.0.mixer.conv1d.weight, "
        "model.layers.1.mixer.conv1d.weight, model.layers.2.mixer.conv1d.weight)"
    )
    want = resident(mixer=True)
    assert torch.equal(tokens(model), want)
    model.layers[1].mixer.conv1d.weight.data.mul_(2)  # the view is live: a later load of weights reaches it
    assert not torch.equal(tokens(model), want)


def test_a_weight_with_a_view_does_not_count_against_the_budget():
    """It seemed needed and could not leave: what it would have freed is spent on others."""
    model, made = started(ALL_EXPERTS, mixer=True)
    assert made.moved == ALL_EXPERTS and all("conv1d" in name for name in kept(made))
    assert torch.equal(tokens(model), resident(mixer=True))


def test_a_view_that_nobody_reaches_any_more_holds_nothing():
    made = pageable(2**30, "experts")
    layer = Layer("a")
    cycle = [layer.experts.w13_weight.data]
    cycle.append(cycle)
    del cycle
    gc.disable()
    try:
        made.wrap_modules([layer])
    finally:
        gc.enable()
    assert not kept(made) and made.moved == W13 + W2


def test_a_reference_taken_while_processing_keeps_the_weight_on_the_device():
    """A kernel object that stores what it was given reads that forever; moving the weight would not reach it."""
    said = []
    made = pageable(2**30, "experts", said=said)
    model = Model(made)
    first = model.layers[0].experts
    with made.loading(first, CPU):
        kernel = [first.w13_weight.data[1:]]
    load(model, made)
    assert kept(made) == {"model.layers.0.experts.w13_weight": "something else holds a view of it"}
    assert kernel[0].data_ptr() == first.w13_weight[1:].data_ptr() and made.moved == ALL_EXPERTS - W13
    assert any("1 tensors stay on the GPU" in line and "layers.0.experts.w13_weight" in line for line in said)
    want = resident()
    assert torch.equal(tokens(model), want)
    kernel[0].zero_()
    assert not torch.equal(tokens(model), want)


def test_a_kept_weight_leaves_once_its_holder_is_gone():
    made = pageable(2**30, "experts")
    model = Model(made)
    with made.loading(model.layers[0].experts, CPU):
        kernel = [model.layers[0].experts.w13_weight.data]
    assert len(kept(made)) == 1
    kernel.clear()
    load(model, made)
    assert not kept(made) and made.moved == ALL_EXPERTS
    assert torch.equal(tokens(model), resident())


@pytest.mark.parametrize("view", ["transposed", "offset"])
def test_a_kept_weight_has_its_old_layout(view):
    made = pageable(2**30, "experts")
    layer = Layer("a")
    base = torch.randn(1 + W13 // 4)
    data = base[1:].view(EXPERTS, 2 * INNER, HIDDEN)
    layer.experts.w13_weight.data = data.transpose(1, 2) if view == "transposed" else data
    before = (layer.experts.w13_weight.data_ptr(), layer.experts.w13_weight.stride(), layer.experts.w13_weight.shape)
    made.wrap_modules([layer])
    assert len(kept(made)) == 1
    after = (layer.experts.w13_weight.data_ptr(), layer.experts.w13_weight.stride(), layer.experts.w13_weight.shape)
    assert after == before
    base.fill_(3)
    assert layer.experts.w13_weight.eq(3).all()


def test_a_transposed_weight_moves_with_its_strides():
    made = pageable(2**30, "experts")
    layer = Layer("a")
    layer.experts.w13_weight.data = layer.experts.w13_weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    stride = layer.experts.w13_weight.stride()
    made.wrap_modules([layer])
    made.finish(CPU)
    assert layer.experts.w13_weight.stride() == stride and made.moved == W13 + W2
    x, logits = torch.ones(2, HIDDEN), torch.ones(2, EXPERTS)
    assert torch.equal(layer.experts(x, logits), Layer("a").experts(x, logits))


class Tied(Layer):
    """Two projections with one Parameter."""

    def __init__(self, name):
        super().__init__(name)
        self.again = Linear(f"{name}.again", HIDDEN, HIDDEN)
        self.again.weight = self.qkv.weight

    def forward(self, positions, hidden_states, residual=None):
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return self.again(hidden_states), residual


def test_a_parameter_that_two_modules_share_moves_once_and_both_read_it():
    want = resident(make=Tied)
    model, made = started(2**30, make=Tied)
    assert made.moved == EVERYTHING
    with made.loading(model.layers[0].again, CPU):
        assert not made.staging.holds(model.layers[0].again.weight), "processed where its kernel does not read"
    made.finish(CPU)
    for layer in model.layers:
        assert layer.again.weight is layer.qkv.weight and made.staging.holds(layer.again.weight)
    assert torch.equal(tokens(model), want)


def test_a_parameter_that_two_layers_share_stays_where_each_layer_is_staged():
    """The first layer's hook would fetch it, and the second layer would read what the first left behind."""
    want = tokens(shares_across_layers(None))
    said = []
    made = pageable(2**30, said=said)
    model = shares_across_layers(made)
    load(model, made)
    assert torch.equal(tokens(model), want)
    assert list(kept(made)) == ["l.0.qkv.weight"] and "two layers" in kept(made)["l.0.qkv.weight"]
    assert any("l.0.qkv.weight" in line for line in said)
    assert made.moved == EVERYTHING * 2 // 3 - 2 * QKV


def test_page_locked_memory_that_stops_delivering_ends_the_start(mapped):
    made = Offloader(2**30, {"experts"}, Memory(None, None, None, view_elsewhere), print, has_attention)
    model = Model(made)
    for layer in model.layers:
        with made.loading(layer.experts, CPU):
            layer.experts.process()
    mapped.delivers = "nothing"
    with pytest.raises(AuditError, match=r"experts\.w13_weight lies in page-locked memory, and a copy"):
        made.finish(CPU)
