# SPDX-License-Identifier: Apache-2.0
"""bench/link.py and bench/load.py, as far as they go without a GPU."""

import ctypes
import json
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import cudart  # noqa: E402
import link  # noqa: E402
import load  # noqa: E402

MiB = 2**20


class Library:
    """A CUDA runtime without a card: "device" memory is the host's, and `refused` is the call that fails."""

    def __init__(self, refused: str = ""):
        self.calls: list[str] = []
        self.live: dict[int, object] = {}
        for name in (*cudart.SIGNATURES, "cudaGetLastError", "cudaGetErrorName", "cudaGetErrorString"):
            setattr(self, name, self.function(name, refused))

    def function(self, name, refused):
        def call(*arguments):
            self.calls.append(name)
            if name == refused:
                return 2
            return getattr(self, f"_{name}", lambda *_: 0)(*arguments) or 0

        return call

    def _cudaGetErrorName(self, status):
        return b"cudaErrorMemoryAllocation"

    def _cudaGetErrorString(self, status):
        return b"out of memory"

    def _cudaHostAlloc(self, pointer, nbytes, flags):
        assert flags == 2 | 4
        kept = ctypes.create_string_buffer(nbytes + 4096)
        pointer._obj.value = -(-ctypes.addressof(kept) // 4096) * 4096
        self.live[pointer._obj.value] = kept

    def _cudaFreeHost(self, address):
        del self.live[address]

    def _cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1 | 2
        self.live[address] = nbytes

    def _cudaHostUnregister(self, address):
        del self.live[address]

    def _cudaHostGetDevicePointer(self, pointer, address, flags):
        pointer._obj.value = address

    def _cudaMemcpyAsync(self, destination, source, nbytes, kind, stream):
        ctypes.memmove(destination, source, nbytes)


class FakeCard(link.Card):
    stream = 0

    def view(self, device_pointer, nbytes):
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(device_pointer), dtype=torch.int64)

    def timed(self, work, repeats):
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return seconds


@pytest.mark.parametrize("kind", link.KINDS)
def test_every_row_of_a_kind(kind):
    library, nbytes = Library(), 8 * MiB
    found = link.measure(kind, nbytes, FakeCard(nbytes, "cpu"), cudart.Runtime(library), repeats=2)
    kernel = [] if kind == "plain" else ["kernel reads"]
    wanted = [f"memory {kind} {step}" for step in ("allocate", "touch", "register")]
    wanted.append(f"cpu writes {kind}")
    wanted += [
        f"link {kind} {way} {size}"
        for way in ("copy to device", *kernel, "copy to host")
        for size in ("whole", "64 MiB", "2 MiB pieces")
    ]
    assert [row["case"] for row in found] == [*wanted, f"cpu reads {kind}"]
    assert all(row["value"] >= 0 and row["unit"] in ("GB/s", "s/GiB") for row in found)
    assert {row["pieces"] for row in found if "2 MiB" in row["case"]} == {4}
    assert not library.live, "given back"
    assert ("huge_bytes" in found[0]) is (kind != "write-combined")
    if kind in ("plain", "registered"):
        assert found[0]["huge_bytes"] == 0


def test_bytes_that_do_not_arrive_end_it():
    library = Library()
    library._cudaMemcpyAsync = lambda *_: 0
    with pytest.raises(AssertionError, match="plain copy to device"):
        link.measure("plain", 2 * MiB, FakeCard(2 * MiB, "cpu"), cudart.Runtime(library))


def test_an_error_of_the_runtime_has_its_name_and_is_taken_off():
    library = Library("cudaHostRegister")
    with pytest.raises(cudart.CudaError, match=r"cudaHostRegister: cudaErrorMemoryAllocation .2., out of memory"):
        link.make("registered", MiB, cudart.Runtime(library))
    assert "cudaGetLastError" in library.calls


def test_huge_pages_are_those_of_the_area():
    smaps = textwrap.dedent("""\
        1000-3000 rw-p 00000000 00:00 0 [heap]
        Size:          8 kB
        AnonHugePages:      2048 kB
        VmFlags: rd wr
        3000-5000 rw-p 00000000 00:00 0
        AnonHugePages:      4096 kB
        """)
    assert link.huge_bytes(smaps, 0x3000, 0x4000) == 4096 * 1024
    assert link.huge_bytes(smaps, 0x2000, 0x4000) == 6144 * 1024
    assert link.huge_bytes(smaps, 0x6000, 0x7000) is None
    memory = link.make("huge", 8 * MiB, cudart.Runtime(Library()))
    assert memory.address % (2 * MiB) == 0 and memory.huge in range(0, 10 * MiB + 1, 2 * MiB)
    memory.free()


def test_pieces_cover_everything_once_in_the_same_order():
    cut = link.pieces(7 * MiB + 8, 2 * MiB)
    assert cut == link.pieces(7 * MiB + 8, 2 * MiB) != sorted(cut)
    assert sum(b - a for a, b in cut) == 7 * MiB + 8 and len({a for a, _ in cut}) == 4


def test_a_rate_is_the_median():
    row = link.rate("x", 10**9, [0.1, 0.2, 1.0], way="w")
    assert (row["value"], row["spread"], row["unit"], row["way"]) == (5.0, [1.0, 10.0], "GB/s", "w")


# load


def arguments(*more: str):
    return load.parse(["--model", "qwen35-2304", *more])


def test_the_rounding_case_has_tensors_of_two_and_a_quarter_gib():
    assert load.packed(**load.BIG) == dict(w13_weight=2304 * MiB, w2_weight=1152 * MiB)


@pytest.mark.parametrize("model", [*load.LAYERS])
@pytest.mark.parametrize("quant", ["nvfp4", "w4a16"])
def test_models_have_their_shapes(tmp_path, model, quant):
    layers = load.parse(["--model", model]).layers
    path = load.build(model, quant, layers, tmp_path)
    config = json.loads((Path(path) / "config.json").read_text())
    text = config.get("text_config", config)
    shape = dict(hidden=text["hidden_size"], width=text["moe_intermediate_size"], experts=text["num_experts"])
    packed = load.packed(**shape)
    total = layers * sum(packed.values()) / 2**30
    assert (packed["w13_weight"] // MiB, total) == {
        "qwen35-40": (256, 15), "qwen35-2304": (2304, 6.75), "glm53": (2304, 141.75)
    }[model]  # fmt: skip
    assert text["num_hidden_layers"] == layers and ("qwen35" in path) is (model != "glm53")
    assert "full_attention" in text.get("layer_types", ["full_attention"])
    assert len(text.get("layer_types", [0] * layers)) == layers
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert group["num_bits"] == 4 and group["type"] == ("float" if quant == "nvfp4" else "int")


def test_settings_of_a_start():
    assert load.settings(arguments()) == dict(mode="eager", memory="mapped")
    more = load.settings(arguments("--offload-gb", "1.5", "--params", "experts,lm_head", "--tp", "2"))
    assert more["cpu_offload_params"] == {"experts", "lm_head"} and more["tensor_parallel_size"] == 2
    assert load.settings(arguments("--offload-gb", "1", "--params", ""))["cpu_offload_params"] == set()
    for wrong in ([], ["--model", "none"], ["--model", "glm53", "--tp", "3"]):
        with pytest.raises(SystemExit):
            load.parse(wrong)


def test_weights_are_drawn_in_pieces_that_reach_every_byte():
    class SomeNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(100))

    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.zeros(()))
    model.register_parameter("absent", None)
    model.mlp = torch.nn.Module()
    model.mlp.norm = SomeNorm()
    # Not contiguous, as a release leaves some; integers; one row is more than a piece.
    weight = torch.zeros(6, 40, 50, dtype=torch.uint8).transpose(1, 2)
    model.mlp.w13_weight = torch.nn.Parameter(weight, requires_grad=False)
    model.mlp.w2_weight = torch.nn.Parameter(torch.zeros(3, 9000, dtype=torch.int32), requires_grad=False)
    model.mlp.later = torch.nn.Parameter(torch.zeros(9, device="meta"))
    seen = []

    def fill(holder, *_):
        for path, module in holder.named_modules():
            for leaf, p in module._parameters.items():
                seen.append((path, type(module).__name__, leaf, p.nbytes))
                p.data.fill_(1)

    old, load.in_pieces.__defaults__ = load.in_pieces.__defaults__, (4000,)
    try:
        load.filler(fill)(model, None)
    finally:
        load.in_pieces.__defaults__ = old
    assert all(bool((p == 1).all()) for p in model.parameters() if p.device.type != "meta")
    assert ("mlp.norm", "SomeNorm", "weight", 400) in seen and ("", "Module", "scale", 4) in seen
    leaves = [leaf for path, _, leaf, _ in seen if path == "mlp"]
    assert leaves == [
        "w13_weight",
        *(f"w13_weight.{i}" for i in range(1, 3)),
        "w2_weight",
        "w2_weight.1",
        "w2_weight.2",
    ]


def test_a_worker_notes_what_loading_took(tmp_path, monkeypatch):
    class Cuda:
        held, most = 5, 0

        def __getattr__(self, name):
            return lambda: None

        def memory_allocated(self):
            return self.held

        def max_memory_allocated(self):
            return self.most

    cuda, peaks = Cuda(), []

    def load_weights():
        cuda.held, cuda.most = 30, 70

    def load_model(self, *, load_dummy_weights=False):
        load.watched(load_weights, peaks, cuda)()
        cuda.most = 30  # what vLLM measures itself starts the count of the peak anew
        return "model"

    monkeypatch.setattr(load, "offloaded", lambda: dict(moved=11, claimed=0))
    worker = type("Worker", (), dict(rank=1, load_model=load.measured(load_model, tmp_path, peaks, cuda)))
    assert worker().load_model(load_dummy_weights=True) == "model"
    (file,) = tmp_path.iterdir()
    note = json.loads(file.read_text())
    assert note.pop("seconds") < 1
    assert file.name.startswith("1-") and note == dict(peak=70, allocated=30, before=5, moved=11, claimed=0)


def test_the_row_of_a_start():
    a = arguments("--offload-gb", "2", "--tp", "2")
    notes = [
        dict(seconds=s, peak=p, allocated=1, before=0, moved=10, claimed=0) for s, p in ((2.0, 5), (3.5, 4))
    ]  # fmt: skip
    row = load.figures(a, notes, 9.0)
    assert row["case"] == "qwen35-2304 2 layers nvfp4 eager tp 2 offload 2 GiB of experts mapped: seconds to load"
    assert (row["value"], row["gpu_peak"], row["moved"], row["ready_seconds"]) == (3.5, 5, 20, 9.0)
    assert row["patched"] is True and json.dumps(row)
    assert "resident" in load.case(arguments())
    with pytest.raises(SystemExit, match="1 of 2 ranks"):
        load.figures(a, notes[:1], 9.0)


def test_ratio():
    assert load.ratio(with_offload=15, without=5, moved=10) == 1.0
    assert load.ratio(23, 5, 10) == 1.8
    with pytest.raises(ValueError, match="nothing moved"):
        load.ratio(1, 1, 0)


def test_ratio_of_two_files(tmp_path, capsys, monkeypatch):
    def one(name, method, pss, rss, fell, moved):
        row = dict(method=method, peaks=dict(pss=pss, rss=rss, available_fell=fell))
        row["printed"] = dict(moved=moved, case="m offload: seconds to load")
        (tmp_path / name).write_text(json.dumps([row]))
        return str(tmp_path / name)

    without = one("without.json", "pss", 100, 130, 90, 0)
    for method, value in (("pss", 1.0), ("rss", 1.1)):
        monkeypatch.setattr(sys, "argv", ["load.py", "--ratio", one("with.json", method, 200, 240, 185, 100), without])
        load.main()
        row = json.loads(capsys.readouterr().out)
        assert (row["value"], row["method"], row["by_available"]) == (value, method, 0.95)
        assert row["case"] == "m offload: host peak / bytes offloaded"


def test_numpy_sees_the_bytes_where_they_lie():
    kept = np.zeros(16, np.uint8)
    link.array(kept.ctypes.data, 16)[::4] = 1
    assert kept.sum() == 4
