# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a release's expert quantization methods register is in the role table, by name.

Names are read from the release's source, so methods that need a GPU, ROCm or XPU to be constructed are read too. A
method or a name that is new, or was renamed, fails here by name.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import vllm
from vllm.expert_offload import roles

LAYERS = Path(vllm.__file__).parent / "model_executor" / "layers"
BASE = "FusedMoEMethodBase"
# Bases and wrappers: they register nothing that their subclasses or the wrapped method do not.
ABSTRACT = {
    BASE,
    "FusedMoEModularMethod",
    "CompressedTensorsMoEMethod",
    "QuarkMoEMethod",
    "OnlineMoEMethodBase",
    "_Fp8OnlineMoEBase",
}
# What an f-string in a name stands for.
STANDS_FOR = {"self.weight_scale_name": ("weight_scale", "weight_scale_inv")}


def classes() -> dict[str, tuple[list[str], ast.ClassDef]]:
    found = {}
    for file in LAYERS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = ([ast.unparse(b).split(".")[-1] for b in node.bases], node)
    return found


CLASSES = classes()


def methods() -> list[str]:
    known, grown = {BASE}, True
    while grown:
        new = {name for name, (bases, _) in CLASSES.items() if known & set(bases)} - known
        known |= new
        grown = bool(new)
    return sorted(known - ABSTRACT)


def named(node: ast.expr) -> list[str]:
    """The names that a literal or an f-string can give; nothing for a variable."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        options = [""]
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts: tuple[str, ...] = (str(part.value),)
            else:
                texts = STANDS_FOR.get(ast.unparse(part.value), ())
            options = [a + b for a in options for b in texts]
        return options
    return []


def registered(name: str) -> set[str]:
    """Tensor names that the class and its bases give to a layer."""
    bases, node = CLASSES[name]
    out: set[str] = set().union(*(registered(b) for b in bases if b in CLASSES and b != BASE))
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = ast.unparse(call.func).split(".")[-1]
            at = {"register_parameter": 0, "register_buffer": 0, "replace_parameter": 1, "setattr": 1}.get(function)
            if at is not None and len(call.args) > at:
                out |= set(named(call.args[at]))
        elif isinstance(call, ast.Assign):
            out |= {
                t.attr
                for t in call.targets
                if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "layer" and t.attr in roles.OTHERS
            }
    return {n for n in out if re.match(r"(w13|w2)_", n) or n in roles.OTHERS}


def test_methods_are_found():
    assert len(methods()) >= 25


@pytest.mark.parametrize("method", methods())
def test_every_name_has_a_role(method):
    assert method in roles.METHODS, f"{method} is not in the role table: read what it registers and add it"
    unknown = sorted(n for n in registered(method) if roles.role_of(method, n) is None)
    assert not unknown, f"{method} registers {unknown}, which the role table does not list"


@pytest.mark.parametrize("method", methods())
def test_only_weights_leave_and_one_does(method):
    weights = {n for n in registered(method) if roles.role_of(method, n) is roles.Role.WEIGHT}
    assert weights or not registered(method) - set(roles.OTHERS)  # some take all their names from another library
    assert all(re.fullmatch(r"(w13|w2)_(weight|weight_packed|qweight)", n) for n in weights)


def builds_config_while_processing(name: str) -> bool:
    """Whether loading leaves a config with references to the scales behind, in the class or a base of it."""
    bases, node = CLASSES[name]
    functions = [
        f
        for f in node.body
        if isinstance(f, ast.FunctionDef) and f.name in ("process_weights_after_loading", "_setup_kernel")
    ]
    if any("self.moe_quant_config =" in ast.unparse(f) for f in functions):
        return True
    return any(builds_config_while_processing(b) for b in bases if b in CLASSES and b != BASE)


@pytest.mark.parametrize("method", methods())
def test_captured_column(method):
    """A config that is built while processing keeps the scales of that moment: the table must say "load"."""
    if builds_config_while_processing(method):
        assert "load" in roles.METHODS[method].captured
