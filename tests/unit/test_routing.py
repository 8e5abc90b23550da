# SPDX-License-Identifier: Apache-2.0
"""The traces of bench/decode.py: experts of a token differ, and the hit rate is what was asked for."""

import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import routing  # noqa: E402


def test_the_hit_rate_is_the_one_asked_for():
    slope = routing.with_hits(0.62, 92, 8, 256)
    found = routing.hits(routing.draw(4, 600, 8, 256, slope), 92)
    assert abs(found - 0.62) < 0.02


def test_a_tokens_experts_differ_and_repeat_with_the_seed():
    made = routing.draw(2, 50, 8, 32, 1.0, seed=3)
    assert made.shape == (2, 50, 8) and made.dtype == np.int32 and made.min() >= 0 and made.max() < 32
    assert all(len(set(row)) == 8 for row in made.reshape(-1, 8).tolist())
    assert (made == routing.draw(2, 50, 8, 32, 1.0, seed=3)).all() and (made != routing.draw(2, 50, 8, 32, 1.0)).any()


def test_hits_against_a_cache_written_down_by_hand():
    trace = np.array([[[0], [1], [0], [2], [1], [2], [2], [0]]], dtype=np.int32)
    # Two slots, from step 4 on: 1 was pushed out by 2; 2 is there, and again; 0 was pushed out by 1.
    assert routing.hits(trace, 2) == 2 / 4
    assert routing.hits(trace, 3) == 1.0
    # Two streams, four steps apart, from step 4 on: {1, 0}, {2, 1}, {2, 0}, {0, 2} with two slots.
    assert routing.hits(trace, 2, streams=2, stride=4) == 5 / 8


def test_without_locality_a_cache_holds_its_share():
    found = routing.hits(routing.draw(4, 600, 8, 256, 0.0), 92)
    assert abs(found - 92 / 256) < 0.03
