# SPDX-License-Identifier: Apache-2.0
"""Every method that quantizes experts, run: what it registers, and what it, its config and its kernel keep, has a role.

`test_roles.py` reads names out of sources; here the release's own code makes a layer out of a checkpoint's config and
processes it. A tensor that nobody has classified, or that a release has renamed, fails here by name.
"""

from __future__ import annotations

import pretend
import pytest
import torch
import twins
import walk
from schemes import SCHEMES, Scheme
from test_roles import ABSTRACT, methods

from vllm.expert_offload import roles

# Methods that no config can make here, and why. What is on it must not run, and what does not run must be on it.
NOT_BUILT = {
    "CompressedTensorsW4A16FlydslMoEMethod": "imports aiter: ROCm",
    "CompressedTensorsWNA16RDNA3MoEMethod": "RDNA 3, and ROCm's platform to ask for it",
    "DeepseekV4HeterogeneousMxfp4MoEMethod": "a model's own layer makes it, on ROCm",
    "INCARKWNA16MoEMethod": "XPU, and the auto_round_lib library",
    "MuseSparkModelOptNvFp4FusedMoE": "a model's own layer makes it, with CUTLASS DSL",
    "MuseSparkOnlineMXFP4FusedMoE": "a model's own layer makes it, on ROCm",
    "MuseSparkQuarkOCPMXFusedMoE": "a model's own layer makes it, on ROCm",
    "MuseSparkQuarkW8A8Fp8FusedMoE": "a model's own layer makes it, on ROCm",
    "MuseSparkUnquantizedFusedMoE": "a model's own layer makes it",
}


def here() -> dict[str, Scheme]:
    """The schemes of this pin."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    return {
        name: scheme
        for name, scheme in SCHEMES.items()
        if scheme.since <= walk.VERSION < scheme.until
        and (scheme.quantization is None or scheme.quantization in QUANTIZATION_METHODS)
    }


RUN = {name: scheme for name, scheme in here().items() if scheme.needs is None}
MISSING = {name: scheme for name, scheme in here().items() if scheme.needs is not None}


@pytest.fixture(scope="module")
def release(patched):
    """The release's configuration, and every module imported that has a method."""
    pretend.import_below("vllm.model_executor.layers", lambda name: "quantization" in name or "fused_moe" in name)
    with walk.engine() as config, walk.frozen():
        yield config


class Ran:
    """A layer that was built and processed, and what was wrong with its tensors then."""

    def __init__(self, config, scheme: Scheme) -> None:
        self.wrong: list[str] = []
        before = {id(tensor): tensor for tensor in walk.tensors()}
        with pretend.on(scheme.device):
            layer, owner = walk.build(config, scheme)
            self.method = type(owner.quant_method).__name__
            self.weights = self._registered(owner, "before processing")
            walk.fill(owner)
            walk.process(owner)
            if getattr(owner.quant_method, "moe_quant_config", None) is None:  # made at the first forward pass
                owner.quant_method.moe_quant_config = owner.quant_method.get_fused_moe_quant_config(owner)
            self.weights &= self._registered(owner, "after processing")
            self._captured(layer, owner, [t for t in walk.tensors() if id(t) not in before])
            self.twin = twins.faults(owner) if walk.VERSION >= (0, 26) else "slots come with v0.26.0"

    def _registered(self, owner, when: str) -> bool:
        """Look at every parameter and buffer; whether a routed expert's weight is among them."""
        found = {n: t for n, t in [*owner._parameters.items(), *owner._buffers.items()] if t is not None}
        for name, tensor in found.items():
            self._classified(name, tensor, f"{name} {when}", roles.role_of(self.method, name))
        return roles.Role.WEIGHT in {roles.role_of(self.method, name) for name in found}

    def _classified(self, name: str, tensor: torch.Tensor, label: str, role: roles.Role | None) -> None:
        if role is None:
            self.wrong.append(f"{label}: not in the role table of {self.method}")
        elif isinstance(tensor, torch.nn.UninitializedParameter) or not tensor.numel():
            return
        elif roles.per_expert(name, role, tensor.dim()) != (tensor.shape[:1] == (walk.EXPERTS,)):
            self.wrong.append(f"{label}: of shape {tuple(tensor.shape)}, {role.value}")

    def _captured(self, layer, owner, tensors: list[torch.Tensor]) -> None:
        """Every tensor that is alive because of the layer is one that it registers, or one with a role of its own.

        None but the parameter itself lies in a weight's memory: it would be left behind when the weight leaves.
        """
        registered = {n: t for n, t in [*owner._parameters.items(), *owner._buffers.items()] if t is not None}
        known = {id(t) for t in registered.values()}
        weights = {
            t.untyped_storage()._cdata: name
            for name, t in registered.items()
            if roles.role_of(self.method, name) is roles.Role.WEIGHT and t.numel()
        }
        attributes = {id(value): name for name, value in vars(owner).items()}
        for path, tensor in walk.held(layer).items():
            if id(tensor) in known:
                continue
            known.add(id(tensor))
            name = attributes.get(id(tensor), path)
            if weight := weights.get(tensor.untyped_storage()._cdata):
                self.wrong.append(f"{path}: lies in the memory of {weight}")
            elif not path.endswith("._base"):
                role = roles.role_of(self.method, name) if name in vars(owner) else roles.captured_role(path)
                self._classified(name, tensor, path, role)
        lost = [t for t in tensors if id(t) not in known]
        self.wrong += [f"a tensor {tuple(t.shape)} {t.dtype} is held by nothing that was walked" for t in lost]


RAN: dict[str, Ran] = {}


def run(config, name: str) -> Ran:
    """A scheme is run once, whichever test asks first."""
    if name not in RAN:
        RAN[name] = Ran(config, SCHEMES[name])
    return RAN[name]


@pytest.mark.parametrize("name", RUN)
def test_every_tensor_has_a_role(name, release):
    got = run(release, name)
    assert not got.wrong, f"{name}, {got.method}:\n  " + "\n  ".join(got.wrong)
    assert got.weights, f"{name}, {got.method}: none of its tensors is a routed expert's weight"


@pytest.mark.parametrize("name", RUN)
def test_the_layer_has_a_twin_that_is_its_own(name, release):
    found = run(release, name).twin
    if isinstance(found, str):
        pytest.skip(found)
    assert not found, f"{name}:\n  " + "\n  ".join(found)


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_here_is_still_missing(name, release):
    """A scheme that runs after all belongs among those that are run."""
    with pytest.raises((ImportError, AssertionError, ValueError, TypeError)):
        Ran(release, SCHEMES[name])


def test_every_method_runs_or_is_listed(release):
    """By name, in both directions; found in sources and among classes, whichever has more."""
    every = (set(methods()) | set(walk.classes())) - ABSTRACT
    runs = {run(release, name).method for name in RUN}
    cannot = {scheme.needs.split(":")[0] for scheme in MISSING.values()} | (set(NOT_BUILT) & every)
    assert every - runs - cannot == set(), "neither run nor listed with a reason"
    assert cannot & runs == set(), "listed, and yet they run"
    assert cannot - every == set(), "listed, and this release has them not"


MUTANT = "gptq"


@pytest.mark.parametrize("suffix", ["qweight", "scales", "qzeros"])
def test_a_name_that_is_not_in_the_table_fails(suffix, release, monkeypatch):
    method = run(release, MUTANT).method
    entry = roles.METHODS[method]
    less = entry._replace(suffixes=tuple(s for s in entry.suffixes if s != suffix))
    monkeypatch.setitem(roles.METHODS, method, less)
    wrong = Ran(release, SCHEMES[MUTANT]).wrong
    assert {w.split()[0].rstrip(":") for w in wrong} == {f"w13_{suffix}", f"w2_{suffix}"}


def mutated(release, monkeypatch, function: str, after) -> list[str]:
    """What is wrong when the release's method does `after` to its layer as well."""
    cls = walk.classes()[run(release, MUTANT).method]
    real = getattr(cls, function)

    def mutant(self, layer, *args, **kwargs):
        real(self, layer, *args, **kwargs)
        after(self, layer)

    monkeypatch.setattr(cls, function, mutant)
    return Ran(release, SCHEMES[MUTANT]).wrong


def test_a_name_that_is_renamed_fails(release, monkeypatch):
    def rename(method, layer):
        layer.register_parameter("w2_packed_scales", layer.w2_scales)

    wrong = mutated(release, monkeypatch, "create_weights", rename)
    assert any(w.startswith("w2_packed_scales before processing: not in the role table") for w in wrong)


def test_a_shape_without_experts_fails(release, monkeypatch):
    def flatten(method, layer):
        layer.w2_scales = torch.nn.Parameter(layer.w2_scales.data.flatten(), requires_grad=False)

    wrong = mutated(release, monkeypatch, "process_weights_after_loading", flatten)
    assert any(w.startswith("w2_scales after processing: of shape") for w in wrong)


def test_what_a_kernel_captures_without_a_role_fails(release, monkeypatch):
    def capture(method, layer):
        method.a_copy = layer.w2_scales + 0
        weight = next(p for n, p in layer.named_parameters() if n in ("w2_weight", "w2_qweight"))
        method.a_view = weight.data[1:]
        hidden.append(torch.zeros(3, dtype=torch.float64))

    hidden: list[torch.Tensor] = []
    wrong = "\n".join(mutated(release, monkeypatch, "process_weights_after_loading", capture))
    assert "a_copy: not in the role table" in wrong
    assert "a_view: lies in the memory of w2_" in wrong
    assert "a tensor (3,) torch.float64 is held by nothing" in wrong
