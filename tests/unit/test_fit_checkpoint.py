# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, from the headers of its files alone."""

import json
from pathlib import Path

import pytest
from expert_offload import fit
from expert_offload.fit import CheckpointError, Entry

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
