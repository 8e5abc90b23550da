# SPDX-License-Identifier: Apache-2.0
"""Whether the offload fits: fake hosts and containers, hand-written checkpoints, and settings fed back as given."""

import json
import re
from pathlib import Path

import pytest
from expert_offload import fit
from expert_offload.fit import GIB, UNKNOWN, CheckpointError, Entry, Free, Limit, TooLittleMemory
from expert_offload.selection import Candidate, Selection
from hypothesis import assume, given
from hypothesis import strategies as st

MIB = 2**20
NATIVE = "6.8.0-45-generic\n"


def meminfo(total: int, available: int) -> dict[str, str]:
    """Sizes in GiB, among lines as the kernel writes them."""
    return {
        "proc/meminfo": f"MemTotal:       {total * MIB} kB\nMemFree:          123 kB\n"
        f"MemAvailable:   {available * MIB} kB\nActive(anon):     77 kB\nHugePages_Total:       0\n"
    }


def v2(path: str, limit: object, used: int, high: object = "max", **stat: int) -> dict[str, str]:
    """The files of one cgroup of version 2; sizes in GiB."""
    folder = f"sys/fs/cgroup{path}".rstrip("/")
    lines = [f"{key} {value * GIB}\n" for key, value in {"anon": used, "file": 40, "shmem": 30, **stat}.items()]
    return {
        f"{folder}/memory.max": f"{limit * GIB if isinstance(limit, int) else limit}\n",
        f"{folder}/memory.high": f"{high * GIB if isinstance(high, int) else high}\n",
        f"{folder}/memory.current": f"{used * GIB}\n",
        f"{folder}/memory.stat": "".join(lines),
    }


def v1(path: str, limit: int, used: int, **stat: int) -> dict[str, str]:
    """The files of one cgroup of version 1; `limit` in bytes, the rest in GiB."""
    folder = f"sys/fs/cgroup/memory{path}".rstrip("/")
    lines = [f"{key} {value * GIB}\n" for key, value in {"inactive_file": 9, **stat}.items()]
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used * GIB}\n",
        f"{folder}/memory.stat": "".join(lines),
    }


def host(root: Path, *parts: dict[str, str], own: str = "", release: str = NATIVE) -> Path:
    """A root with the files of `parts`, /proc/self/cgroup of `own`, and the kernel's `release`."""
    files = {"proc/self/cgroup": own, "proc/sys/kernel/osrelease": release}
    for part in parts:
        files |= part
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- what is free ----------------------------------------------------------------------------------------------------


def test_without_a_cgroup_what_is_available_is_free(tmp_path):
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), own="0::/\n"))
    assert free == Free(
        50 * GIB,
        "MemAvailable of this host (64.00 GiB, 14.00 GiB used)",
        (Limit("MemAvailable of this host", "host", 64 * GIB, 14 * GIB),),
    )


@pytest.mark.parametrize("release", ["5.15.153.1-microsoft-standard-WSL2\n", "4.4.0-19041-Microsoft\n"])
def test_wsl_is_told_by_the_kernels_name(tmp_path, release):
    free = fit.free_memory(host(tmp_path, meminfo(31, 28), release=release))
    assert free.nbytes == 28 * GIB
    assert free.source.startswith("MemAvailable of the WSL virtual machine (31.00 GiB, 3.00 GiB used)")
    assert [limit.kind for limit in free.limits] == ["wsl"]


def test_each_level_of_v2_counts_and_page_cache_is_free(tmp_path):
    levels = [
        v2("/a/b/c", "max", 3),
        v2("/a/b", 24, 10, inactive_file=2, active_file=4, slab_reclaimable=1),
        v2("/a", 40, 20, inactive_file=1),
        v2("/beside", 1, 1),
    ]
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), *levels, own="1:name=systemd:/x\n0::/a/b/c\n"))
    assert free.nbytes == (24 - 10 + 2 + 4 + 1) * GIB, "shmem and file are not reclaimable, the two lists and slab are"
    assert free.source == "memory.max of the cgroup /a/b (24.00 GiB, 3.00 GiB used)"
    assert sorted((limit.size - limit.used) // GIB for limit in free.limits) == [21, 21, 50]


@pytest.mark.parametrize(("outer", "least"), [(22, 3), (19, 0), (15, -4)])
def test_the_outer_level_may_be_the_tighter_one_and_overdrawn(tmp_path, outer, least):
    levels = [v2("/a/b", 24, 10), v2("/a", outer, 19)]
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), *levels, own="0::/a/b\n"))
    assert free.nbytes == max(0, least) * GIB
    assert free.source == f"memory.max of the cgroup /a ({outer}.00 GiB, 19.00 GiB used)"
    assert min(limit.size - limit.used for limit in free.limits) == least * GIB


def test_memory_high_is_a_limit_too(tmp_path):
    free = fit.free_memory(host(tmp_path, v2("/a", 24, 10, high=16), own="0::/a\n"))
    assert free.nbytes == 6 * GIB
    assert free.source.startswith("memory.high of the cgroup /a (16.00 GiB")
    assert "docker" not in free.limits[1].raised(7 * GIB)[0]


def test_page_cache_never_makes_more_free_than_the_limit(tmp_path):
    free = fit.free_memory(host(tmp_path, v2("/a", 24, 3, inactive_file=9), own="0::/a\n"))
    assert free.nbytes == 24 * GIB


@pytest.mark.parametrize("own", ["0::/\n", "0::/docker/ab12\n", "0::/../../docker/ab12\n", "", "0::/a (deleted)\n"])
def test_a_containers_limit_stands_at_the_root_of_its_mount(tmp_path, own):
    """A private namespace, a host's path that is not in the mount, one outside the namespace, and none to be read."""
    inner = v2("/docker", 1, 1)  # containers in this container: no parent of ours
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), v2("/", 24, 4), inner, own=own))
    assert free.nbytes == 20 * GIB
    assert free.source == "memory.max of the cgroup / (24.00 GiB, 4.00 GiB used)"


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory", "memory,hugetlb"])
def test_v1_counts_each_level_and_its_hierarchys_cache(tmp_path, controllers):
    levels = [
        v1("/docker/ab12", 30 * GIB, 12, total_inactive_file=3, total_active_file=2),
        v1("/docker", 28 * GIB, 13, total_inactive_file=1, total_active_file=2),
        v1("/", 2**63 - 4096, 60),
    ]
    own = f"9:name=systemd:/\n4:{controllers}:/docker/ab12\n3:cpuset:/\n0::/\n"
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), *levels, own=own))
    assert free.nbytes == (28 - 13 + 3) * GIB
    assert free.source == "memory.limit_in_bytes of the cgroup /docker (28.00 GiB, 10.00 GiB used)"
    assert [limit.size // GIB for limit in free.limits] == [30, 28, 64], "nearly 2**63 is no limit"


def test_v1_in_a_container(tmp_path):
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), v1("/", 16 * GIB, 1), own="4:memory:/docker/ab12\n"))
    assert free.nbytes == 15 * GIB
    assert free.source.startswith("memory.limit_in_bytes of the cgroup / (")


def test_a_controller_that_is_not_memory_is_no_limit(tmp_path):
    other = v1("/docker/ab12", GIB, 1)
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), other, own="4:cpu,memory2:/docker/ab12\n5:pids:/\n"))
    assert free.nbytes == 50 * GIB


def test_nothing_readable_is_no_limit(tmp_path):
    free = fit.free_memory(tmp_path / "nowhere")
    assert free == (UNKNOWN, "no limit that could be read", ())
    fit.check(fit.plan(2**50, 8, 2**60, 0, largest=GIB), free)


@pytest.mark.parametrize("garbage", ["", "max", "-5", "12.5", "1e9", "0x10", "9" * 30, "nan\n\n", "\0", "12abc"])
def test_garbage_is_skipped(tmp_path, garbage):
    root = host(tmp_path, meminfo(64, 50), v2("/a", 24, 4), v2("/", 40, 4), own="0::/a\n")
    for name in ("memory.max", "memory.current"):
        file = root / "sys/fs/cgroup/a" / name
        good = file.read_text()
        file.write_text(garbage)
        assert fit.free_memory(root).nbytes == 36 * GIB, name
        file.write_text(good)
    (root / "sys/fs/cgroup/a/memory.stat").write_text(f"inactive_file {garbage}\nactive_file {GIB}\n{garbage}\n")
    assert fit.free_memory(root).nbytes == 21 * GIB
    (root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert fit.free_memory(root).nbytes == 20 * GIB
    (root / "proc/meminfo").write_text(f"MemTotal: {garbage}\nMemAvailable: {garbage} kB\n")
    assert [limit.kind for limit in fit.free_memory(root).limits] == ["cgroup"] * 2


@given(st.binary(max_size=60) | st.text("0:/.\nmemory,max", max_size=40).map(str.encode))
def test_a_strange_cgroup_file_is_no_reason_to_fail(tmp_path_factory, content):
    root = host(tmp_path_factory.mktemp("root"), meminfo(64, 50), v2("/", 24, 4))
    (root / "proc/self/cgroup").write_bytes(content)
    assert fit.free_memory(root).nbytes in (20 * GIB, 50 * GIB)


def test_files_that_may_not_be_read(tmp_path):
    root = host(tmp_path, meminfo(64, 50), own="0::/a\n")
    (root / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
    (root / "sys/fs/cgroup/a/memory.current").mkdir()
    assert fit.free_memory(root).nbytes == 50 * GIB


def test_this_machine_has_memory():
    free = fit.free_memory()
    total = int(re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert 0 < free.nbytes <= total
    assert free.source


# -- what the checkpoint holds ---------------------------------------------------------------------------------------


GOOD = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def safetensors(sizes: dict[str, tuple[int, ...]], metadata: bool = True) -> bytes:
    """A file of BF16 tensors of these shapes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for name, shape in sizes.items():
        start, end = end, end + 2 * _product(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def _product(shape):
    result = 1
    for n in shape:
        result *= n
    return result


def raw(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def write(folder: Path, **files: bytes | dict) -> Path:
    for name, content in files.items():
        suffix = ".safetensors.index.json" if isinstance(content, dict) else ".safetensors"
        data = json.dumps({"weight_map": content}).encode() if isinstance(content, dict) else content
        (folder / f"{name}{suffix}").write_bytes(data)
    return folder


@pytest.mark.parametrize("metadata", [True, False])
def test_every_file_without_an_index(tmp_path, metadata):
    write(tmp_path, one=safetensors({"a": (3, 5), "scalar": ()}, metadata), two=safetensors({"b": (0, 4)}, metadata))
    assert fit.tensors(tmp_path) == {
        "a": Entry(30, (3, 5), "BF16"),
        "scalar": Entry(2, (), "BF16"),
        "b": Entry(0, (0, 4), "BF16"),
    }


def test_only_the_files_of_the_index(tmp_path):
    write(tmp_path, one=safetensors({"a": (3,)}), other=b"not read", model={"a": "one.safetensors"})
    assert fit.tensors(tmp_path) == {"a": Entry(6, (3,), "BF16")}


def test_mistrals_own_files_win_as_in_vllm(tmp_path):
    write(tmp_path, consolidated=safetensors({"a": (3,)}), model={"x": "gone.safetensors"}, other=b"not read")
    assert fit.tensors(tmp_path) == {"a": Entry(6, (3,), "BF16")}
    (tmp_path / "consolidated.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    write(tmp_path, part=safetensors({"b": (1,)}))
    assert fit.tensors(tmp_path) == {"b": Entry(2, (1,), "BF16")}


def test_other_formats_and_no_folder_have_no_tensors(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert fit.tensors(tmp_path) == {}
    assert fit.tensors(tmp_path / "Qwen/Qwen3.5-35B-A3B") == {}


def test_a_missing_file_is_named(tmp_path):
    index = {"a": "m1.safetensors", "b": "m2.safetensors", "c": "m3.safetensors"}
    write(tmp_path, m1=safetensors({"a": (3,)}), model=index)
    with pytest.raises(CheckpointError, match=r"2 of 3 files are missing \(m2.safetensors, m3.safetensors\)"):
        fit.tensors(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map":'])
def test_a_malformed_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors\.index\.json: a weight_map was expected.*download it"
    ):
        fit.tensors(tmp_path)


def test_truncated_data_says_how_much_is_missing(tmp_path):
    whole = safetensors({"a": (3, 5), "b": (4,)})
    write(tmp_path, m=whole[:-11])
    with pytest.raises(CheckpointError) as error:
        fit.tensors(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/m.safetensors: its header tells of {len(whole)} bytes, the file has {len(whole) - 11}, 11 are "
        "missing; truncated: download it again"
    )


def test_the_last_byte_counts_whichever_tensor_has_it(tmp_path):
    header = {"a": GOOD | {"data_offsets": [2, 4]}, "b": GOOD}
    write(tmp_path, m=raw(header) + bytes(4))
    assert len(fit.tensors(tmp_path)) == 2
    write(tmp_path, m=raw(header) + bytes(3))
    with pytest.raises(CheckpointError, match=r" 1 are missing; truncated"):
        fit.tensors(tmp_path)


def test_truncated_header_says_how_much_is_missing(tmp_path):
    write(tmp_path, m=safetensors({"a": (3, 5)})[:20])
    length = int.from_bytes((tmp_path / "m.safetensors").read_bytes()[:8], "little")
    with pytest.raises(CheckpointError) as error:
        fit.tensors(tmp_path)
    assert f"m.safetensors: its header alone tells of {length + 8} bytes, the file has 20, " in str(error.value)
    assert f" {length - 12} are missing" in str(error.value)


def test_wherever_a_file_is_cut_it_is_refused(tmp_path):
    whole = safetensors({"a": (3, 5), "b": (4,)})
    for length in range(len(whole)):
        write(tmp_path, m=whole[:length])
        with pytest.raises(CheckpointError, match=r"m\.safetensors: "):
            fit.tensors(tmp_path)
    write(tmp_path, m=whole + b"more")
    assert len(fit.tensors(tmp_path)) == 2


def test_a_pointer_of_git_lfs_is_told(tmp_path):
    write(tmp_path, m=b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4967\n")
    with pytest.raises(CheckpointError, match=r"pointer of Git LFS: git lfs pull"):
        fit.tensors(tmp_path)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, [], 3, {"a": 3}, {"a": {}}]
    + [{"a": {k: v for k, v in GOOD.items() if k != gone}} for gone in GOOD]
    + [{"a": GOOD | {"data_offsets": o}} for o in ([0], [2, 0], [-2, 0], [0, 2.5], ["0", "2"], None, [0, 1, 2])]
    + [{"a": GOOD | {"shape": s}} for s in ([-1], ["2"], None, 2, [2.0])],
    ids=lambda header: repr(header)[:50],
)
def test_a_malformed_header_is_refused(tmp_path, header):
    write(tmp_path, m=raw(header) + bytes(8))
    with pytest.raises(CheckpointError, match=r"m\.safetensors: malformed header.*download it again"):
        fit.tensors(tmp_path)


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "m.safetensors").symlink_to(tmp_path / "blob")  # as in a cache of which the blobs are gone
    with pytest.raises(CheckpointError, match=r"1 of 1 files are missing \(m\.safetensors\)"):
        fit.tensors(tmp_path)


QWEN35 = "model.language_model.layers.0"
EXPERTS = [
    # Qwen3.5-MoE, and compressed-tensors of it
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_packed", (512, 256)),
    (f"{QWEN35}.mlp.experts.3.up_proj.weight", (512, 2048)),
    (f"{QWEN35}.mlp.experts.gate_up_proj", (256, 1024, 2048)),
    (f"{QWEN35}.mlp.experts.down_proj", (256, 2048, 512)),
    ("mtp.layers.0.mlp.experts.255.down_proj.weight_packed", (2048, 64)),
    # Qwen3-MoE fused
    ("model.layers.47.mlp.experts.gate_up_proj", (128, 2048, 1536)),
    ("model.layers.47.mlp.experts.down_proj.weight_packed", (128, 768, 256)),
    # gpt-oss
    ("model.layers.0.mlp.experts.gate_up_proj_blocks", (32, 5760, 90, 16)),
    ("model.layers.0.mlp.experts.down_proj_blocks", (32, 2880, 90, 16)),
    # GLM, DeepSeek; GPTQ and AWQ
    ("model.layers.3.mlp.experts.7.down_proj.qweight", (192, 5120)),
    ("model.layers.61.mlp.experts.0.gate_proj.weight", (2048, 7168)),
    # Mixtral, Mistral's own names, Nemotron-H
    ("model.layers.0.block_sparse_moe.experts.0.w1.weight", (14336, 4096)),
    ("layers.0.experts.3.w2.weight", (4096, 14336)),
    ("backbone.layers.1.mixer.experts.0.up_proj.weight", (1856, 2688)),
    # vLLM's own names, Aria, DBRX, Granite, Step3
    ("model.layers.0.mlp.experts.w13_weight", (8, 64, 32)),
    ("model.layers.0.mlp.experts.w2_weight_packed", (8, 32, 4)),
    ("language_model.model.layers.0.mlp.experts.fc1.weight", (64, 2560, 3328)),
    ("transformer.blocks.0.ffn.experts.mlp.v1", (172032, 6144)),
    ("model.layers.0.block_sparse_moe.input_linear.weight", (40, 1024, 1536)),
    ("model.layers.4.moe.down_proj.weight", (48, 7168, 5120)),
]
DENSE = [
    (f"{QWEN35}.mlp.shared_expert.up_proj.weight", (512, 2048)),
    (f"{QWEN35}.mlp.shared_expert_gate.weight", (1, 2048)),
    (f"{QWEN35}.mlp.gate.weight", (256, 2048)),
    (f"{QWEN35}.linear_attn.conv1d.weight", (8192, 1, 4)),
    (f"{QWEN35}.linear_attn.in_proj_qkv.weight", (8192, 2048)),
    ("mtp.layers.0.self_attn.q_proj.weight", (8192, 2048)),
    ("model.layers.3.mlp.shared_experts.down_proj.weight_packed", (5120, 192)),
    ("model.layers.3.mlp.shared_experts.0.down_proj.qweight", (5120, 192)),
    ("model.layers.0.self_attn.q_proj.weight", (4096, 2880)),
    ("transformer.h.0.attn.c_attn.weight", (768, 2304)),
    ("transformer.blocks.0.ffn.router.layer.weight", (16, 6144)),
    ("model.layers.0.block_sparse_moe.router.layer.weight", (40, 1536)),
    ("model.layers.4.moe.gate_proj.weight", (5120, 7168)),  # no expert's: of two dimensions
]
NEITHER = [
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_scale", (512, 16)),
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_shape", (2,)),
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_scale_2", ()),
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_global_scale", (1,)),
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_zero_point", (64, 16)),
    (f"{QWEN35}.mlp.experts.3.gate_proj.input_scale", (1,)),
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight_g_idx", (2048,)),
    (f"{QWEN35}.mlp.experts.3.gate_proj.weight", (2048,)),
    (f"{QWEN35}.mlp.experts.gate_up_proj_scale", (256, 1, 1024)),
    (f"{QWEN35}.mlp.experts.gate_up_proj.weight_scale", (256, 1024, 16)),
    (f"{QWEN35}.input_layernorm.weight", (2048,)),
    (f"{QWEN35}.linear_attn.A_log", (32,)),
    ("model.layers.0.mlp.experts.gate_up_proj_scales", (32, 5760, 90)),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", (32, 5760)),
    ("model.layers.0.mlp.experts.down_proj", (2880,)),
    ("model.layers.0.mlp.router.bias", (32,)),
    ("model.layers.0.self_attn.sinks", (64,)),
    ("model.layers.3.mlp.experts.7.down_proj.qzeros", (12, 640)),
    ("model.layers.3.mlp.experts.7.down_proj.scales", (12, 5120)),
    ("model.layers.3.mlp.experts.7.down_proj.g_idx", (1536,)),
    ("model.layers.3.mlp.experts.7.down_proj.weight.absmax", (64, 64)),
    ("model.layers.3.mlp.experts.7.down_proj.weight_scale_inv", (12, 40)),
    ("model.layers.3.self_attn.q_proj.qzeros", (12, 640)),
    ("model.layers.3.mlp.experts.e_score_correction_bias", (2, 256)),
    ("model.embed_tokens.weight", (151936, 2048)),
    ("mtp.fc.weight", (2048, 4096)),
    ("lm_head.weight", (151936, 2048)),
    ("model.visual.blocks.0.attn.qkv.weight", (3456, 1152)),
    ("vision_tower.encoder.layers.0.mlp.fc1.weight", (3456, 1152)),
    ("model.layers.weight", (3, 3)),
]


@pytest.mark.parametrize(("name", "shape"), EXPERTS)
def test_weights_of_routed_experts(name, shape):
    assert fit.expert_bytes({name: Entry(7, shape, "BF16")}) == (7, 0)


@pytest.mark.parametrize(("name", "shape"), DENSE)
def test_dense_matrices(name, shape):
    assert fit.expert_bytes({name: Entry(7, shape, "BF16")}) == (0, 7)


@pytest.mark.parametrize(("name", "shape"), NEITHER)
def test_what_stays(name, shape):
    assert fit.expert_bytes({name: Entry(7, shape, "BF16")}) == (0, 0)
    assert fit.largest_parameter({name: Entry(7, shape, "BF16")}) == 0


def test_a_checkpoint_as_a_whole(tmp_path):
    """Two layers of four experts of 16 x 8, written and read."""
    shapes = {"model.embed_tokens.weight": (100, 8)}
    for layer in range(2):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.mlp.gate.weight": (4, 8), f"{start}.input_layernorm.weight": (8,)}
        shapes |= {f"{start}.self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"}
        for expert in range(4):
            at = f"{start}.mlp.experts.{expert}"
            shapes |= {f"{at}.gate_proj.weight": (16, 8), f"{at}.up_proj.weight": (16, 8)}
            shapes |= {f"{at}.down_proj.weight": (8, 16), f"{at}.down_proj.weight_scale": (8, 1)}
    entries = fit.tensors(write(tmp_path, model=safetensors(shapes)))
    assert fit.expert_bytes(entries) == (2 * 4 * 3 * 128 * 2, 2 * (32 + 4 * 64) * 2)
    assert fit.largest_parameter(entries) == 4 * 2 * 128 * 2, "gate and up of a layer's four experts"
    dense = {name: entry for name, entry in entries.items() if "experts" not in name}
    assert fit.largest_parameter(dense) == 4 * 64 * 2
    assert fit.largest_parameter({}) == 0


def test_the_largest_parameter_may_be_the_down_projection():
    entries = {
        "layers.0.experts.w2_weight": Entry(50, (8, 2, 2), "U8"),
        "layers.0.experts.w13_weight": Entry(20, (8, 2, 2), "U8"),
        "layers.1.experts.w13_weight": Entry(40, (8, 2, 2), "U8"),
    }
    assert fit.largest_parameter(entries) == 50


# -- what a start takes, and whether it fits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "held"),
    [(0, 0), (1, 8), (10, 17), (12, 19), (13, 20), (14, 20), (1000, 20)],
)
def test_a_rank_holds_its_budget_and_a_parameter_or_all_there_is(budget, held):
    plan = fit.plan(budget, 3, experts=50, dense=9, largest=7, chunk=2, other=5)
    assert plan.held == held
    assert plan.peak == 3 * (held + 7)


def test_with_only_experts_dense_weights_stay():
    plan = fit.plan(100, 2, experts=50, dense=9, largest=0, only_experts=True, chunk=0, other=0)
    assert (plan.leaves, plan.held, plan.peak) == (50, 25, 50)


def test_the_table():
    plan = fit.plan(40 * GIB, 2, experts=200 * GIB, dense=8 * GIB, largest=GIB // 2)
    assert str(plan).splitlines() == [
        "                                    per rank      ranks: 2",
        "  weights held in host memory      40.50 GiB     81.00 GiB",
        "  a layer while it is repacked     64.00 MiB      0.12 GiB",
        "  worker beside its weights         3.00 GiB      6.00 GiB",
        "  at the peak                      43.56 GiB     87.12 GiB",
    ]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=5), min_size=1, max_size=5),
    st.integers(0, 300),
    st.booleans(),
)
def test_what_the_selection_takes_is_never_more_than_planned(layers, budget, only_experts):
    selection = Selection(budget, {"experts"} if only_experts else set())
    sizes = {True: 0, False: 0}
    for i, layer in enumerate(layers):
        kinds = {True: f"layers.{i}.experts.w", False: f"layers.{i}.dense.w"}
        selection.layer([Candidate(f"{kinds[e]}{j}", size, e, True) for j, (size, e) in enumerate(layer)])
        for size, experts in layer:
            sizes[experts] += size
    largest = max((size for layer in layers for size, _ in layer), default=0)
    plan = fit.plan(budget, 1, sizes[True], sizes[False], largest, only_experts=only_experts, chunk=0, other=0)
    assert selection.taken <= plan.held


HOST = Limit("MemAvailable of this host", "host", 128 * GIB, 8 * GIB)
VM = Limit("MemAvailable of the WSL virtual machine", "wsl", 31 * GIB, 3 * GIB)
DOCKER = Limit("memory.max of the cgroup /docker/ab12", "cgroup", 64 * GIB, 4 * GIB)


def refusal(plan: fit.Plan, free: Free) -> str:
    with pytest.raises(TooLittleMemory) as error:
        fit.check(plan, free)
    return str(error.value)


def test_what_a_user_reads_in_a_container():
    plan = fit.plan(40 * GIB, 2, experts=200 * GIB, dense=8 * GIB, largest=GIB // 2)
    free = Free(60 * GIB, "memory.max of the cgroup /docker/ab12 (64.00 GiB, 4.00 GiB used)", (DOCKER, HOST))
    assert refusal(plan, free).splitlines() == [
        "--cpu-offload-gb 40 with 2 rank(s) takes up to 87.12 GiB of host memory and 60.00 GiB are free by memory.max "
        "of the cgroup /docker/ab12 (64.00 GiB, 4.00 GiB used). No weight was read.",
        *str(plan).splitlines(),
        "What fits:",
        "  1. --cpu-offload-gb 26: 14.00 GiB more per rank stay on the GPU",
        "  2. raise memory.max of the cgroup /docker/ab12 to 92 GiB (docker run --memory 92g)",
        "  3. --cpu-offload-gb 26 and a checkpoint of fewer bits, 86 % of this one's or less: the GPU holds no more",
    ]


def test_what_a_user_reads_on_wsl():
    plan = fit.plan(30 * GIB, 1, experts=60 * GIB, dense=0, largest=GIB)
    text = refusal(plan, Free(28 * GIB, "x", (VM,)))
    assert "  1. --cpu-offload-gb 23.5: 6.50 GiB more per rank stay on the GPU\n" in text
    assert "  2. memory=39GB in Windows' .wslconfig and wsl --shutdown (the VM sees 31.00 GiB now)\n" in text
    assert "  3. --cpu-offload-gb 23.5 and a checkpoint of fewer bits, 89 % of this one's or less" in text


def test_all_limits_that_are_too_tight_are_raised():
    plan = fit.plan(290 * GIB, 1, experts=300 * GIB, dense=0, largest=0, chunk=0, other=0)
    docker = "raise memory.max of the cgroup /docker/ab12 to 294 GiB (docker run --memory 294g)"
    text = refusal(plan, Free(60 * GIB, "x", (DOCKER, HOST)))
    assert text.endswith(f"\n  2. {docker}, and free or add 170 GiB of memory"), "nobody quantizes to a fifth"


def test_where_workers_alone_take_too_much():
    plan = fit.plan(GIB, 4, experts=40 * GIB, dense=0, largest=0)
    text = refusal(plan, Free(8 * GIB, "x"))
    assert "What fits (no smaller --cpu-offload-gb does, not even 0.5):\n  1. free or add 9 GiB of memory\n" in text
    assert text.endswith("  2. --tensor-parallel-size 1, not 4: each GPU holds more")
    text = refusal(plan, Free(25 * GIB // 2, "x"))
    assert text.endswith("  2. --tensor-parallel-size 2, not 4: each GPU holds more"), (
        "3 would fit, and divides nothing"
    )
    plan = fit.plan(GIB // 4, 4, experts=40 * GIB, dense=0, largest=GIB // 2)
    text = refusal(plan, Free(8 * GIB, "x"))
    assert text.endswith("  2. --tensor-parallel-size 1, not 4: each GPU holds more"), "parameters' shares grow as well"
    assert "  2." not in refusal(plan, Free(4 * GIB, "x")), "one worker is too much: no settings are made up"


def test_a_model_smaller_than_the_budget_fits_where_it_fits():
    plan = fit.plan(1000 * GIB, 2, experts=40 * GIB, dense=0, largest=GIB, chunk=0, other=0)
    fit.check(plan, Free(40 * GIB, "x"))
    text = refusal(plan, Free(40 * GIB - 1, "x"))
    assert "--cpu-offload-gb 18.5: 1.50 GiB more per rank stay" in text


def test_nothing_held_nothing_refused():
    fit.check(fit.plan(0, 8, 40 * GIB, 0, largest=GIB), Free(0, "x"))
    fit.check(fit.plan(8 * GIB, 8, 0, 0, largest=GIB), Free(0, "x"))


SIZES = st.integers(0, 400 * GIB) | st.integers(0, 800).map(lambda n: n * GIB // 2)
LIMITS = st.builds(
    Limit,
    st.sampled_from(["memory.max of the cgroup /a", "memory.high of the cgroup /b"]),
    st.sampled_from(["host", "wsl", "cgroup"]),
    SIZES,
    st.integers(0, 50 * GIB),
)
PLANS = st.builds(
    fit.plan,
    SIZES.filter(bool),
    st.integers(1, 8),
    SIZES,
    SIZES,
    st.integers(0, 4 * GIB),
    st.booleans(),
    st.sampled_from([0, fit.CHUNK_BYTES, GIB]),
    st.sampled_from([0, GIB, fit.WORKER_BYTES]),
)


@st.composite
def frees(draw):
    limits = draw(st.lists(LIMITS, max_size=3))
    return fit._least(limits) if limits else Free(draw(SIZES), "of a caller's own")


def fits(plan, free):
    try:
        fit.check(plan, free)
    except TooLittleMemory:
        return False
    return True


@given(PLANS, frees())
def test_check_is_what_the_numbers_say(plan, free):
    per_rank = min(plan.budget + plan.largest, -(-plan.leaves // plan.ranks))
    taken = plan.ranks * (per_rank + plan.chunk + plan.other)
    assert fits(plan, free) == (per_rank == 0 or taken <= free.nbytes)


@given(PLANS, frees())
def test_every_setting_fits(plan, free):
    assume(not fits(plan, free))
    ways = fit.settings(plan, free)
    assert 1 <= len(ways) <= 3
    assert len({text for text, _, _ in ways}) == len(ways)
    for text, changed, after in ways:
        assert fits(changed, after), text
        if "fewer bits" in text:
            share, was = changed.leaves / plan.ranks, plan.leaves / plan.ranks
            assert share - changed.held <= max(0, was - plan.budget) + 1, "more would lie on the GPU"
        assert (changed, after) != (plan, free)
        assert changed.largest * changed.ranks >= plan.largest * plan.ranks
        assert changed.held or plan.leaves < 1000, "it fits with weights held, not because none are"


@given(PLANS, frees())
def test_the_suggested_budget_is_the_largest_half_gib_that_fits(plan, free):
    """Read from the text, as a user does."""
    assume(not fits(plan, free))
    found = re.search(r"^  1\. --cpu-offload-gb ([\d.]+): ", refusal(plan, free), re.MULTILINE)
    budget = float(found[1]) if found else 0.0
    assert budget * 2 == int(budget * 2)
    assert budget * GIB < plan.budget
    assert fits(plan._replace(budget=int(budget * GIB)), free)
    assert not fits(plan._replace(budget=int((budget + 0.5) * GIB)), free)
    assert (found is None) == ("no smaller --cpu-offload-gb does" in refusal(plan, free))


@given(PLANS, frees())
def test_memory_that_is_asked_for_is_enough_and_hardly_more(plan, free):
    assume(not fits(plan, free))
    (after,) = [after for _, changed, after in fit.settings(plan, free) if changed == plan]
    assert after.nbytes >= plan.peak
    before = free.limits or (Limit("", "host", free.nbytes, 0),)
    assert len(after.limits) == len(before)
    for old, new in zip(before, after.limits):
        if old.size - old.used >= plan.peak:
            assert new == old
        else:
            assert new.size - new.used - plan.peak < 1.01 * GIB, "no more than a GiB of rounding"
            assert new.used == old.used


@given(st.integers(1, 300), st.integers(0, 20), st.integers(1, 4))
def test_a_containers_new_limit_read_from_the_text(budget, used, ranks):
    plan = fit.plan(budget * GIB + 12345, ranks, 2000 * GIB, 0, largest=MIB)
    limit = Limit("memory.max of the cgroup /", "cgroup", (used + 1) * GIB, used * GIB)
    gib = int(re.search(r"docker run --memory (\d+)g", refusal(plan, Free(GIB, "x", (limit,))))[1])
    assert fits(plan, fit._least([limit._replace(size=gib * GIB)]))
    assert not fits(plan, fit._least([limit._replace(size=(gib - 1) * GIB)]))


@given(PLANS, frees(), st.integers(0, 8 * GIB))
def test_more_free_memory_never_refuses_what_fitted(plan, free, more):
    assume(fits(plan, free))
    assert fits(plan, free._replace(nbytes=free.nbytes + more))


# -- what patterns name, and room for one buffer ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "patterns, want",
    [
        (set(), (900, 50)),
        ({"experts"}, (900, 0)),
        ({"mlp.experts"}, (900, 0)),
        ({"experts.w2_weight"}, (300, 0)),
        ({"w13_weight"}, (600, 0)),
        ({"w13_weight", "experts.w2_weight"}, (900, 0)),
        ({"experts", "w2_weight"}, (900, 0)),
        ({"layers.3.mlp.experts"}, None),
        ({"experts", "self_attn"}, None),
    ],
)
def test_what_patterns_leave(patterns, want):
    entries = {
        "model.layers.0.mlp.experts.0.gate_proj.weight": Entry(300, (3, 4), "BF16"),
        "model.layers.0.mlp.experts.0.up_proj.weight": Entry(300, (3, 4), "BF16"),
        "model.layers.0.mlp.experts.0.down_proj.weight": Entry(300, (4, 3), "BF16"),
        "model.layers.0.self_attn.q_proj.weight": Entry(50, (3, 4), "BF16"),
    }
    assert fit.leaving(entries, patterns) == want


def test_room_for_one_buffer(monkeypatch):
    monkeypatch.setattr(fit, "free_memory", lambda: Free(GIB, HOST.name, (HOST._replace(size=GIB, used=0),)))
    fit.make_room(GIB - fit.RESERVE_BYTES)
    with pytest.raises(TooLittleMemory) as error:
        fit.make_room(GIB - fit.RESERVE_BYTES + 1)
    text = str(error.value)
    assert "768.00 MiB is needed" in text or "0.75 GiB is needed" in text
    assert "1.00 GiB are free by MemAvailable of this host" in text and "Lower --cpu-offload-gb, or free or add" in text
    narrow = Limit("MemAvailable of this host", "host", 64 * GIB, 60 * GIB)
    monkeypatch.setattr(fit, "free_memory", lambda: Free(4 * GIB, narrow.name, (DOCKER, narrow)))
    with pytest.raises(TooLittleMemory, match=r"or free or add 1 GiB of memory$"):
        fit.make_room(4 * GIB)
