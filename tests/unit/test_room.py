# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused before anything is built; the memory of what is refused later goes back."""

import gc
import json
from pathlib import Path

import pytest
from expert_offload import fit
from expert_offload.fit import GIB, CheckpointError, Free, Limit, TooLittleMemory
from fake_model import ALL_EXPERTS, CPU, W2, W13, Model, pageable

pytestmark = pytest.mark.usefixtures("few_objects", "switched_on")


def checkpoint(folder: Path, experts: int, dense: int = 0, cut: int = 0) -> str:
    """One file with `experts` and `dense` GiB of weights; its bytes are a hole, `cut` of them missing."""
    sizes = {"model.layers.0.mlp.experts.0.down_proj.weight": experts, "model.layers.0.self_attn.q_proj.weight": dense}
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size, GIB], "data_offsets": [at, at + size * GIB]}
        at += size * GIB
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at - cut)
    return str(folder)


@pytest.fixture
def free(monkeypatch):
    """This host has so many GiB free."""

    def set_to(gib: float) -> None:
        size = int(gib * GIB)
        host = Limit("MemAvailable of this host", "host", size, 0)
        monkeypatch.setattr(fit, "free_memory", lambda: Free(size, host.name, (host,)))

    return set_to


@pytest.mark.parametrize("ranks, hosts, gib, fits", [(1, 1, 30, True), (1, 1, 24, False), (2, 1, 35, True)])
@pytest.mark.parametrize("patterns", [("experts",), ()])
def test_a_checkpoint_that_does_not_fit(ranks, hosts, gib, fits, patterns, tmp_path, free):
    folder = checkpoint(tmp_path, experts=24)
    made = pageable(100 * GIB, *patterns)
    free(gib)
    if fits:
        made.check_room(folder, ranks, hosts, CPU)
        return
    with pytest.raises(TooLittleMemory, match=r"--cpu-offload-gb 100 with 1 rank.*takes up to 27\.06 GiB.*24\.00 GiB"):
        made.check_room(folder, ranks, hosts, CPU)
    assert made.arena.held == 0 and not made.items


def test_patterns_decide_what_must_fit(tmp_path, free):
    folder = checkpoint(tmp_path, experts=8, dense=24)
    free(16)
    pageable(100 * GIB, "experts").check_room(folder, 1, 1, CPU)
    pageable(100 * GIB, "self_attn").check_room(folder, 1, 1, CPU)  # can't be told: found out buffer by buffer
    with pytest.raises(TooLittleMemory):
        pageable(100 * GIB).check_room(folder, 1, 1, CPU)
    pageable(0).check_room(folder, 1, 1, CPU)


def test_a_truncated_checkpoint_is_found_before_anything_is_built(tmp_path, free):
    free(100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* 5 are missing; truncated: download it again"):
        pageable(100 * GIB, "experts").check_room(checkpoint(tmp_path, 1, cut=5), 1, 1, CPU)


def test_another_format_is_no_reason_to_refuse(tmp_path, free):
    free(0.1)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    pageable(100 * GIB).check_room(str(tmp_path), 1, 1, CPU)


def test_a_drafters_checkpoint_is_not_counted_again(tmp_path, free):
    free(100)
    made = pageable(2**20, "experts")
    folder = checkpoint(tmp_path, 24)
    made.check_room(folder, 1, 1, CPU)
    free(0)
    made.check_room(folder, 1, 1, CPU)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_memory_that_others_took_meanwhile(layer, monkeypatch):
    """Refused at the buffer that finds no room, with nothing held afterwards."""
    room = fit.RESERVE_BYTES + layer * (W13 + W2) + W13
    made = pageable(2**30, "experts")
    arena = made.arena
    monkeypatch.setattr(fit, "free_memory", lambda: Free(room - arena.held, "MemAvailable of this host"))
    with pytest.raises(TooLittleMemory, match=r"a host buffer of .* is needed"):
        Model(made)
    assert arena.held <= layer * (W13 + W2 + 2 * 4096) + W13 + 4096
    del made
    gc.collect()
    assert arena.held == 0


def test_all_of_it_fits(free):
    free(1)
    made = pageable(2**30, "experts")
    Model(made)
    assert made.moved == ALL_EXPERTS
