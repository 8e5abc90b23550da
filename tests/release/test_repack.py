# SPDX-License-Identifier: Apache-2.0
"""The release's processing of experts, a few at a time, gives the bytes of its processing of all.

Plain torch runs as it is. Marlin's repack is a kernel that a CPU lacks: a stand-in with its signature shuffles bits
here, so that the release's own loops around it are what is tested; `tests/gpu/test_repack.py` runs the kernel.
"""

import pytest
import repacks
import torch

CHUNK = 2 * repacks.HIDDEN * repacks.INNER  # two or four experts' worth


@pytest.fixture(scope="module")
def kernels(patched):
    """Stand-ins for Marlin's repack, where the release's library has none."""

    def gptq(b_q_weight, *rest):
        perm, (size_k, size_n, num_bits) = (rest[0], rest[1:4]) if repacks.takes_order() else (None, rest[:3])
        ordered = perm is not None and perm.numel() > 0
        found = b_q_weight.t() + perm[: b_q_weight.size(0)] if ordered else b_q_weight.t().flip(0)
        return found.reshape(size_k // 16, size_n * num_bits // 2).clone()

    def awq(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
        return b_q_weight.flip(1).reshape(size_k // 16, size_n * num_bits // 2).clone()

    library = torch.library.Library("_C", "FRAGMENT")
    order = "Tensor perm, " if repacks.takes_order() else ""
    rest = "SymInt size_k, SymInt size_n, int num_bits, bool is_a_8bit) -> Tensor"
    for name, arguments, function in (
        ("gptq_marlin_repack", f"Tensor b_q_weight, {order}", gptq),
        ("awq_marlin_repack", "Tensor b_q_weight, ", awq),
    ):
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}({arguments}{rest}")
            library.impl(name, function, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def no_workspace(patched, monkeypatch):
    """A kernel's workspace is as large as the card has processors, and a CPU has none."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    monkeypatch.setattr(marlin_utils_fp4, "marlin_make_workspace_new", lambda *_, **__: torch.zeros(4), raising=False)


@pytest.mark.parametrize("scheme", [*repacks.PLAIN, *repacks.MARLIN])
def test_bytes_are_those_of_the_whole_layer(scheme, kernels):
    case = {**repacks.PLAIN, **repacks.MARLIN}[scheme]("cpu")
    want = case.run(*(w.clone() for w in case.weights))
    got = repacks.in_chunks(case, "cpu", CHUNK)
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want)):
        assert repacks.same_bytes(a, b), f"output {index} of {scheme}"
    assert not repacks.same_bytes(want[0], case.weights[0]), "void: nothing was changed"
