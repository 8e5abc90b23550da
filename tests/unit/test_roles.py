# SPDX-License-Identifier: Apache-2.0
"""What each tensor is, and the names that patterns see."""

import pytest
from expert_offload import roles
from expert_offload.roles import METHODS, OTHERS, SUFFIXES, Role


def owner(method: str | None, base: str | None = None):
    """A module-like object whose `quant_method` is of a class named `method`, perhaps derived from one named `base`."""
    bases = (type(base, (), {}),) if base else ()
    return type("Owner", (), {"quant_method": type(method, bases, {})() if method else None})()


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_of_a_method_has_a_role(method):
    entry = METHODS[method]
    for suffix in entry.suffixes:
        for projection in ("w13", "w2"):
            assert roles.role_of(method, f"{projection}_{suffix}") is SUFFIXES[suffix]
    for name in entry.others:
        assert roles.role_of(method, name) is OTHERS[name]
    assert len(set(entry.suffixes)) == len(entry.suffixes)
    assert any(SUFFIXES[s] is Role.WEIGHT for s in entry.suffixes), "a method without weights offloads nothing"
    for moment in entry.captured.split("; "):
        assert moment.split(" from ")[0] in ("load", "first", "call")


@pytest.mark.parametrize("method", METHODS)
def test_only_weights_leave(method):
    entry, module = METHODS[method], owner(method)
    leaves = [f"{p}_{s}" for p in ("w13", "w2") for s in entry.suffixes] + list(entry.others)
    left = {leaf for leaf in leaves if roles.may_leave(module, leaf, 3)}
    assert left == {f"{p}_{s}" for p in ("w13", "w2") for s in entry.suffixes if SUFFIXES[s] is Role.WEIGHT}
    for leaf in left:
        assert not any(word in leaf for word in ("scale", "zero", "qzeros", "bias", "idx", "shape", "type"))


@pytest.mark.parametrize(
    "leaf",
    ["w13_weight_scale_9", "w1_weight", "w13", "w13_", "w3_weight", "xw13_weight", "w13_weight_packed_", "weight"],
)
def test_an_unknown_name_has_no_role_and_stays(leaf):
    for method in METHODS:
        assert roles.role_of(method, leaf) is None
        assert not roles.may_leave(owner(method), leaf, 3)


def test_a_suffix_of_another_method_has_no_role():
    assert "qzeros" in METHODS["MoeWNA16Method"].suffixes
    assert roles.role_of("UnquantizedFusedMoEMethod", "w13_qzeros") is None
    assert roles.role_of("UnquantizedFusedMoEMethod", "workspace") is None


def test_method_of_finds_classes_and_their_heirs_only():
    assert roles.method_of(owner("Fp8MoEMethod")) == "Fp8MoEMethod"
    assert roles.method_of(owner("MyOwn", base="Fp8MoEMethod")) == "Fp8MoEMethod"
    assert roles.method_of(owner("UnquantizedLinearMethod")) is None
    assert roles.method_of(owner(None)) is None
    assert roles.method_of(object()) is None


@pytest.mark.parametrize(
    "leaf, ndim, leaves",
    [
        ("weight", 2, True),
        ("weight", 3, True),  # a convolution
        ("weight", 1, False),  # a norm
        ("weight_packed", 2, True),
        ("qweight", 2, True),
        ("bias", 2, False),
        ("weight_scale", 2, False),
        ("weight_zero_point", 2, False),
        ("scales", 2, False),
        ("qzeros", 2, False),
        ("A_log", 2, False),
        ("w13_weight", 3, False),  # experts of a method that is not in the table
    ],
)
def test_dense_layers(leaf, ndim, leaves):
    assert roles.may_leave(owner("UnquantizedLinearMethod"), leaf, ndim) is leaves


EXPERTS = [
    ("mlp.experts.w13_weight", "mlp.experts.w13_weight"),
    ("mlp.experts.w13_weight_packed", "mlp.experts.w13_weight"),
    ("mlp.experts.w13_qweight", "mlp.experts.w13_weight"),
    ("mlp.experts.routed_experts.w13_weight", "mlp.experts.w13_weight"),
    ("mlp.experts.routed_experts.w13_weight_packed", "mlp.experts.w13_weight"),
    ("mlp.experts.routed_experts.w2_qweight", "mlp.experts.w2_weight"),
    ("mlp.experts.routed_experts.w2_weight_scale", "mlp.experts.w2_weight_scale"),
    ("mlp.experts.w2_weight_scale_2", "mlp.experts.w2_weight_scale_2"),
    ("w13_weight_packed", "w13_weight"),
]
DENSE = [
    ("self_attn.qkv_proj.weight", "self_attn.qkv_proj.weight"),
    ("self_attn.qkv_proj.weight_packed", "self_attn.qkv_proj.weight"),
    ("self_attn.qkv_proj.qweight", "self_attn.qkv_proj.weight"),
    ("mlp.gate.weight", "mlp.gate.weight"),
    ("mlp.experts.gate.weight", "mlp.gate.weight"),
    ("mlp.experts.shared_experts.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ("mlp.experts._shared_experts.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ("mlp.experts.routed_experts.gate.weight", "mlp.gate.weight"),
    ("mlp.experts.3.up_proj.weight", "mlp.experts.3.up_proj.weight"),
    ("mlp.experts.17.down_proj.qweight", "mlp.experts.17.down_proj.weight"),
    ("mlp.shared_experts.down_proj.weight", "mlp.shared_experts.down_proj.weight"),
]


@pytest.mark.parametrize("name, want, of_experts", [(*c, True) for c in EXPERTS] + [(*c, False) for c in DENSE])
def test_canonical_names_are_the_same_in_every_pin(name, want, of_experts):
    name, want = f"model.layers.3.{name}", f"model.layers.3.{want}"
    assert roles.canonical(name, of_experts) == want
    assert roles.canonical(want, of_experts) == want, "not stable when processing comes by again"


def test_a_router_named_experts_gate_is_no_routed_expert():
    """The pattern "experts" must not reach what a release hangs below the expert layer."""
    for name, _ in DENSE:
        numbered = name.split(".")[1] == "experts" and name.split(".")[2].isdigit()
        assert ("experts" in roles.canonical(name, False).split(".")) is numbered


@pytest.mark.parametrize(
    "path, want",
    [
        ("mlp.experts", "mlp.experts"),
        ("mlp.experts.routed_experts", "mlp.experts"),
        ("routed_experts", "routed_experts"),
        ("", ""),
    ],
)
def test_the_module_that_a_model_calls(path, want):
    assert roles.expert_layer(path) == want
