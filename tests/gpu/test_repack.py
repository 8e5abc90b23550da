# SPDX-License-Identifier: Apache-2.0
"""Marlin's repack and the other conversions, a few experts at a time: the bytes of the whole layer."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "release"))
import repacks

pytestmark = pytest.mark.gpu
CHUNK = 2 * repacks.HIDDEN * repacks.INNER


@pytest.mark.parametrize("scheme", [*repacks.PLAIN, *repacks.MARLIN])
def test_bytes_are_those_of_the_whole_layer(scheme, figures):
    import torch

    case = {**repacks.PLAIN, **repacks.MARLIN}[scheme]("cuda")
    want = case.run(*(w.clone() for w in case.weights))
    got = repacks.in_chunks(case, "cuda", CHUNK)
    torch.cuda.synchronize()
    equal = [repacks.same_bytes(a, b) for a, b in zip(got, want, strict=True)]
    figures(f"repack {scheme}: bytes equal", int(all(equal)), "bytes equal")
    assert all(equal), equal
    assert not repacks.same_bytes(want[0], case.weights[0]), "void: nothing was changed"
