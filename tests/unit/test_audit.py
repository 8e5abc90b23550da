# SPDX-License-Identifier: Apache-2.0
"""The audit: what lies where its reader cannot read it ends the start, by name."""

import warnings
from types import ModuleType

import pytest
import torch
import torch._inductor.compile_fx
from expert_offload import Memory, Offloader
from expert_offload.host import Arena
from expert_offload.residency import AuditError, Item, audit
from expert_offload.staging import Staging
from fake_model import (
    CPU,
    EXPERTS,
    HIDDEN,
    INNER,
    NVFP4,
    PLAIN,
    Layer,
    Model,
    has_attention,
    kept,
    load,
    pageable,
    parameter,
    resident,
    started,
    tokens,
    view_elsewhere,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")


class Kernel:
    """A kernel object of the kind that keeps what it was built with."""


def hold_in_attribute(tensor):
    kernel = Kernel()
    kernel.weight = tensor
    return kernel, "Kernel.weight"


def hold_in_used_attribute(tensor):
    kernel = Kernel()
    vars(kernel)["weight"] = tensor
    return kernel, "Kernel.weight"


def hold_in_buffer(tensor):
    module = nn.Linear(1, 1)
    module.register_buffer("stale", tensor)
    return module, "Linear._buffers.stale"


def hold_in_list(tensor):
    kernel = Kernel()
    kernel.weights = [tensor]
    return kernel, "Kernel.weights.0"


def hold_in_dict(tensor):
    kernel = Kernel()
    kernel.config = {"w1": tensor}
    return kernel, "Kernel.config.w1"


def hold_in_module(tensor):
    module = ModuleType("kernels")
    module.captured = {"a": tensor}
    return module, "kernels.captured.a"


def hold_alone(tensor):
    return iter([tensor]), f"a tensor {tuple(tensor.shape)} {tensor.dtype}"


@pytest.mark.parametrize("method", [PLAIN, NVFP4], ids=["same-size", "another-size"])
@pytest.mark.parametrize(
    "hold",
    [hold_in_attribute, hold_in_used_attribute, hold_in_buffer, hold_in_list, hold_in_dict, hold_in_module, hold_alone],
)
def test_a_captured_host_tensor_ends_the_start_and_is_named(hold, method):
    """Taken while another layer is processed, when this one's parameters lie in host memory."""
    made = pageable(2**30, "experts")
    model = Model(made, experts=method)
    experts = model.layers[0].experts
    with made.loading(model.layers[1].experts, CPU):
        holder, name = hold(next(p for n, p in experts.named_parameters() if "w13_weight" in n).data)
    with pytest.raises(AuditError) as error:
        load(model, made)
    text = str(error.value)
    assert "1 tensors lie where they cannot be read" in text and f"\n  {name} " in text, text
    assert "--cpu-offload-params" in text and "Serve without --cpu-offload-gb" in text
    del holder


class InPlace(Layer):
    """Its experts take as many bytes processed as before."""

    def __init__(self, name):
        super().__init__(name)
        self.experts.process = self.reverse

    def reverse(self):
        self.experts.w13_weight = parameter(self.experts.w13_weight.data.flip(1))


@pytest.mark.parametrize("how", [dict(make=InPlace), dict(experts=NVFP4)], ids=["same-size", "another-size"])
def test_a_mapped_view_from_before_processing_ends_the_start(mapped, how):
    """Its bytes would be repacked under it, or belong to nobody: either way its reader is wrong."""
    made = Offloader(2**30, {"experts"}, Memory(None, None, None, view_elsewhere), lambda _: None, has_attention)
    model = Model(made, **how)
    kernel = Kernel()
    experts = model.layers[0].experts
    kernel.captured = next(p for n, p in experts.named_parameters() if "w13_weight" in n).data
    with pytest.raises(AuditError, match=r"Kernel\.captured reads host memory that no parameter owns any more"):
        load(model, made)


def test_a_mapped_view_of_weights_that_processing_leaves_alone_is_right(mapped):
    made = Offloader(2**30, {"experts"}, Memory(None, None, None, view_elsewhere), lambda _: None, has_attention)
    model = Model(made, experts=PLAIN)
    captured = model.layers[0].experts.w13_weight.data
    load(model, made)
    assert captured.data_ptr() == model.layers[0].experts.w13_weight.data_ptr()
    assert torch.equal(tokens(model), resident())


def test_a_weight_that_a_kernel_captured_while_it_was_processed_stays(mapped):
    made = Offloader(2**30, {"experts"}, Memory(None, None, None, view_elsewhere), lambda _: None, has_attention)
    kernel = Kernel()

    class Capturing(InPlace):
        def reverse(self):
            super().reverse()
            if "layers.2" in self.experts.name:
                kernel.captured = self.experts.w13_weight.data

    model = Model(made, make=Capturing)
    load(model, made)
    assert kept(made) == {"model.layers.2.experts.w13_weight": "something else holds a view of it"}
    assert torch.equal(kernel.captured[1], model.layers[2].experts.w13_weight[1])
    assert torch.equal(tokens(model), resident(make=InPlace))


def test_without_the_captured_tensor_the_same_start_succeeds():
    made = pageable(2**30, "experts")
    model = Model(made, experts=NVFP4)
    with made.loading(model.layers[1].experts, CPU):
        holder = [model.layers[0].experts.w13_weight_packed.data]
    holder.clear()
    load(model, made)
    assert torch.equal(tokens(model), resident(experts=NVFP4))


def test_a_scale_on_another_device_ends_the_start():
    made = pageable(2**30, "experts")
    model = Model(made, experts=NVFP4)
    model.layers[1].experts.w2_weight_scale = parameter(torch.empty(3, device="meta"))
    with pytest.raises(AuditError, match=r"model\.layers\.1\.experts\.w2_weight_scale lies on meta") as error:
        load(model, made)
    assert "its kernel reads it on cpu" in str(error.value)


def test_a_buffer_on_another_device_ends_the_start():
    made = pageable(2**30, "experts")
    model = Model(made)
    model.layers[2].experts.register_buffer("expert_map", torch.empty(3, device="meta"))
    with pytest.raises(AuditError, match=r"model\.layers\.2\.experts\.expert_map lies on meta"):
        load(model, made)


def test_an_empty_tensor_may_lie_anywhere():
    made = pageable(2**30, "experts")
    model = Model(made)
    model.layers[2].experts.register_buffer("expert_map", torch.empty(0, device="meta"))
    load(model, made)
    assert torch.equal(tokens(model), resident())


def test_a_parameter_that_someone_moved_away_ends_the_start(monkeypatch):
    made = pageable(2**30, "experts")
    model = Model(made)
    allocate = Staging.allocate

    def then_moved(staging, places):
        allocate(staging, places)
        model.layers[0].experts.w2_weight.data = torch.empty(EXPERTS, HIDDEN, INNER)

    monkeypatch.setattr(Staging, "allocate", then_moved)
    with pytest.raises(AuditError, match=r"layers\.0\.experts\.w2_weight was offloaded, but lies on cpu at another"):
        load(model, made)


@pytest.mark.parametrize("captured", [True, False])
def test_a_host_tensor_beside_mapped_memory_ends_the_start(captured):
    """The device reads its own view; whoever was given the host's tensor instead would read what it can't."""
    device = torch.device("meta")  # stands for one: its tensors lie at address 0
    arena = Arena(0)
    buffer = arena.take(64)
    buffer.mapping.alias = (0, 1)
    host = buffer.tensor_like(torch.empty(16))
    item = Item("a.w13_weight", nn.Module(), 0, 0, True, parameter(torch.empty(16, device=device)), buffer, host)
    holder = hold_in_attribute(buffer.tensor_like(host) if captured else torch.empty(1))
    if captured:
        with pytest.raises(AuditError, match=r"1 tensors lie .*\n  Kernel\.weight is a host tensor that"):
            audit([item], [], device, arena, None)
    else:
        audit([item], [], device, arena, None)
    del holder


def test_an_item_can_be_printed_when_its_memory_is_sealed():
    """A traceback with local variables must not end the process that it explains."""
    _, made = started(2**30)
    assert all("Item" in repr(item) for item in made.items.values())


def test_many_faults_are_counted_and_the_first_are_listed():
    made = pageable(2**30, "experts")
    model = Model(made)
    holders = [hold_in_attribute(model.layers[0].experts.w13_weight.data[i % EXPERTS].data) for i in range(25)]
    with pytest.raises(AuditError, match="25 tensors lie where") as error:
        load(model, made)
    assert str(error.value).count("Kernel.weight") == 20
    del holders


def test_tensors_of_the_rest_of_the_process_do_not_disturb_the_audit():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        others = [torch.empty(4), torch.empty(4, device="cuda")]
    others += [torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.empty(0), nn.Parameter(torch.ones(3))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = started(2**30)
    assert torch.equal(tokens(model), resident())
    assert len(others) == 6
