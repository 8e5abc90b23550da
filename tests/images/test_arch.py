# SPDX-License-Identifier: Apache-2.0
"""The check of GPU code: made-up libraries for each way to be wrong, and the real ones of the pins' wheels."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import fatbin
import pytest
from fatbin import FAMILY, LZ4, ONE_GPU, PTX, SASS, ZSTD, container, entry, library

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path.home() / ".cache" / "vllm-offload" / "wheels"
spec = importlib.util.spec_from_file_location("arch", ROOT / "docker" / "arch.py")
arch = importlib.util.module_from_spec(spec)
sys.modules["arch"] = arch
spec.loader.exec_module(arch)

EXTENSIONS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn/_vllm_fa2_C",
    "vllm_flash_attn/_vllm_fa3_C",
)
ALL = "8.0, 8.6, 8.9, 9.0, 10.0, 12.0"
EVERYWHERE = container(*(entry(SASS, n) for n in (80, 86, 89, 90, 100, 120)))


@pytest.fixture
def tree(tmp_path):
    """An installed vLLM whose libraries run on every GPU of both variants."""

    def make(**replaced):
        for name in EXTENSIONS:
            path = tmp_path / "vllm" / f"{name}.abi3.so"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(library(EVERYWHERE))
        for name, data in replaced.items():
            file = tmp_path / "vllm" / f"{name}.abi3.so"
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
        return tmp_path

    return make


def errors(tree, variant):
    return arch.check(tree, variant)[1]


def test_code_for_every_gpu_is_enough(tree):
    assert errors(tree(), "cu130") == errors(tree(), "sm86") == []


@pytest.mark.parametrize(
    "entries, sm86, cu130",
    [
        pytest.param([entry(SASS, 80)], "", "9.0, 10.0, 12.0", id="sm_80 only"),
        pytest.param([entry(SASS, 86)], "", "8.0, 9.0, 10.0, 12.0", id="sm_86 only"),
        pytest.param([entry(SASS, 90)], "8.6", "8.0, 8.6, 8.9, 10.0, 12.0", id="sm_90 only"),
        pytest.param([entry(SASS, 89)], "8.6", "8.0, 8.6, 9.0, 10.0, 12.0", id="minor above"),
        pytest.param([entry(PTX, 80)], "8.6", "", id="PTX only: an old driver can't compile it"),
        pytest.param([entry(PTX, 90)], "8.6", "8.0, 8.6, 8.9", id="PTX of a later version"),
        pytest.param([entry(PTX, 52), entry(SASS, 52)], "8.6", ALL, id="nvcc's default target alone"),
        pytest.param([entry(SASS, 80, ZSTD), entry(PTX, 80, LZ4)], "", "", id="compressed"),
        pytest.param([entry(SASS, n, ONE_GPU) for n in (80, 90, 100)], "8.6", "8.6, 8.9, 12.0", id="for one GPU each"),
        pytest.param([entry(PTX, 80, ONE_GPU)], "8.6", ALL, id="PTX for one GPU"),
        pytest.param([entry(SASS, 80, FAMILY)], "", "9.0, 10.0, 12.0", id="a family"),
    ],
)
def test_which_gpus_find_code(tree, entries, sm86, cu130):
    made = tree(_C_stable_libtorch=library(container(*entries)))
    for variant, missing in (("sm86", sm86), ("cu130", cu130)):
        found = [e.split(": ")[0] for e in errors(made, variant)]
        assert found == ([f"vllm/_C_stable_libtorch.abi3.so has no code for {missing}"] if missing else [])


def test_code_is_found_in_any_of_several_binaries(tree):
    made = library(container(entry(SASS, 90)), b"\0" * 16, container(entry(SASS, 75), entry(SASS, 80)))
    assert errors(tree(_C_stable_libtorch=made), "sm86") == []


@pytest.mark.parametrize("section", ["__nv_relfatbin", ".nv_fatbin"])
def test_both_sections_count(tree, section):
    made = library(EVERYWHERE, section=section)
    assert errors(tree(_C_stable_libtorch=made), "cu130") == []


def test_no_gpu_code_and_no_library(tree):
    assert "no GPU code at all" in errors(tree(_C_stable_libtorch=library(b"\0" * 8)), "sm86")[0]
    missing = errors(tree(_moe_C_stable_libtorch=None), "sm86")
    assert len(missing) == 1 and "no compiled extension vllm/_moe_C or vllm/_moe_C_stable_libtorch" in missing[0]


def test_nothing_compiled_at_all(tmp_path, capsys):
    (tmp_path / "vllm").mkdir()
    assert arch.main(["sm86", "--tree", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("no compiled extension") == 3 and "patches/releases.toml" in said


def test_an_old_and_a_new_name_side_by_side_must_both_fit(tree):
    made = tree()
    (made / "vllm" / "_C.abi3.so").write_bytes(library(container(entry(SASS, 90))))
    assert "vllm/_C.abi3.so has no code for 8.6" in errors(made, "sm86")[0]


@pytest.mark.parametrize("length", [0, 3, 40, 64, 100, 200, -1, -100])
def test_a_truncated_library_is_refused_by_name(tree, length):
    whole = library(EVERYWHERE)
    made = tree(_C_stable_libtorch=whole[: length if length >= 0 else len(whole) + length])
    assert "vllm/_C_stable_libtorch.abi3.so can't be read" in errors(made, "sm86")[0]


def test_headers_that_lie_are_refused(tree):
    inner = bytearray(container(entry(SASS, 80)))
    inner[8:16] = (10**9).to_bytes(8, "little")
    assert "reaches behind its section" in errors(tree(_C_stable_libtorch=library(bytes(inner))), "sm86")[0]
    inner = bytearray(container(entry(SASS, 80), entry(SASS, 86)))
    inner[24:32] = (10**9).to_bytes(8, "little")
    assert "reaches behind its fat binary" in errors(tree(_C_stable_libtorch=library(bytes(inner))), "sm86")[0]


def test_flashinfer_counts_where_it_is(tree):
    made = tree()
    folder = made / "flashinfer_jit_cache" / "jit_cache" / "sampling"
    folder.mkdir(parents=True)
    assert "flashinfer_jit_cache's sampling" in errors(made, "sm86")[0]
    (folder / "sampling.so").write_bytes(library(container(entry(SASS, 90))))
    assert "sampling.so has no code for 8.6" in errors(made, "sm86")[0]
    (folder / "sampling.so").write_bytes(library(EVERYWHERE))
    assert errors(made, "sm86") == []


def test_it_runs_alone_and_says_what_it_found(tree):
    done = subprocess.run(
        [sys.executable, "-I", ROOT / "docker" / "arch.py", "sm86", "--tree", tree()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "vllm/_C_stable_libtorch.abi3.so: 1 fat binaries, usable on 8.6: 1 (sm_80" in done.stdout


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.26.0", "0.32.0"])
def test_real_wheels(version, tmp_path):
    """Every pin's libraries run on the cards of both variants, and would not pass where their code is taken away."""
    wheel = next(WHEELS.glob(f"vllm-{version}-*.whl"), None)
    if wheel is None:
        pytest.skip(f"{WHEELS} has no wheel of {version}: make fetch")
    with zipfile.ZipFile(wheel) as z:
        names = [n for n in z.namelist() if n.endswith(".so") and "third_party" not in n and "flashmla" not in n]
        z.extractall(tmp_path, names)
    assert errors(tmp_path, "sm86") == errors(tmp_path, "cu130") == []
    # FA3 has code for Hopper alone: in the place of FA2, it is what a wheel without code for 8.6 looks like.
    fa = tmp_path / "vllm" / "vllm_flash_attn"
    (fa / "_vllm_fa3_C.abi3.so").replace(fa / "_vllm_fa2_C.abi3.so")
    assert "_vllm_fa2_C.abi3.so has no code for 8.6" in errors(tmp_path, "sm86")[0]


def test_the_builder_of_these_files_agrees_with_nvcc():
    """Sizes and places in `fatbin` are those of the real files: the reader finds what was put in."""
    data = fatbin.library(container(entry(SASS, 90, ONE_GPU), entry(PTX, 80)), container(entry(SASS, 120, FAMILY)))
    assert [[str(c) for c in found] for found in arch.containers(data)] == [["sm_90a", "ptx_80"], ["sm_120f"]]
