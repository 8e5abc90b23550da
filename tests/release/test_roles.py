# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a release's expert quantization methods register is in the role table, by name.

Names are read from the release's source, so methods that need a GPU, ROCm or XPU to be constructed are read too. A
method or a name that is new, or was renamed, fails here by name.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest

import vllm
from vllm.expert_offload import roles

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(vllm.__file__).parent
# Where methods are, and those of single models (from v0.32.0 on).
SOURCES = [f for folder in ("model_executor/layers", "models") for f in (PACKAGE / folder).rglob("*.py")]
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
# What the humming library makes of a layer's tensors, under names of its own that no release's source has: read in
# humming-kernels 0.1.19 (`HummingWeightSchema`, `transform`).
HUMMING = "convert_to_humming_moe_kernel_format"
OF_HUMMING = ("weight", "weight_scale", "weight_scale_2", "zero_point", "bias", "input_scale", "input_scale_2")
# From v0.33.0 on: the checkpoint's tensors, registered by the method of the checkpoint, are quantized anew.
REQUANTIZED = "OnlineRequantizationMixin"
# What an f-string in a name stands for.
STANDS_FOR = {"self.weight_scale_name": ("weight_scale", "weight_scale_inv")}


TREES = [ast.parse(text) for text in (file.read_text() for file in SOURCES) if "MoE" in text or "humming" in text]
CLASSES = {
    node.name: ([ast.unparse(b).split(".")[-1] for b in node.bases], node)
    for tree in TREES
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}


def called(node: ast.AST) -> set[str]:
    return {ast.unparse(call.func).split(".")[-1] for call in ast.walk(node) if isinstance(call, ast.Call)}


def reaching(target: str) -> set[str]:
    """Functions of modules that call `target`, or one that does."""
    calls = {node.name: called(node) for tree in TREES for node in tree.body if isinstance(node, ast.FunctionDef)}
    found, grown = {target}, True
    while grown:
        new = {name for name, names in calls.items() if found & names} - found
        found |= new
        grown = bool(new)
    return found


TO_HUMMING = reaching(HUMMING)


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


def defines(name: str, function: str) -> bool:
    return any(isinstance(f, ast.FunctionDef) and f.name == function for f in CLASSES[name][1].body)


def registered(name: str) -> set[str]:
    """Tensor names that the class and its bases give to a layer."""
    if name == REQUANTIZED:
        return set().union(*(registered(m) for m in methods() if defines(m, "dequantize_weight")))
    bases, node = CLASSES[name]
    out: set[str] = set().union(*(registered(b) for b in bases if b in CLASSES and b != BASE))
    if called(node) & TO_HUMMING:
        out |= {f"{projection}_{suffix}" for projection in ("w13", "w2") for suffix in OF_HUMMING}
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


def test_the_table_of_the_docs():
    """docs/schemes.md: a row per method, and an x where a pin has it."""
    header, _, *rows = re.findall(r"(?m)^\|(.*)\|$", (ROOT / "docs" / "schemes.md").read_text())
    table = {row[0]: row for row in ([cell.strip() for cell in line.split("|")] for line in rows)}
    assert set(table) == set(roles.METHODS)
    version = "v" + importlib.metadata.version("vllm").split("+")[0]
    column = [cell.strip() for cell in header.split("|")].index(version)
    assert {method for method, row in table.items() if row[column] == "x"} == set(methods())
    apart = {method for method, row in table.items() if row[-2] == "chunks"}
    assert apart == {m for m in roles.METHODS if roles.processed_apart(Layer(m))}


class Layer:
    """As `roles` sees a layer: the class of its method has a name."""

    def __init__(self, method: str) -> None:
        self.quant_method = type(method, (), {})()
