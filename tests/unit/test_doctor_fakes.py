# SPDX-License-Identifier: Apache-2.0
"""Machines for the doctor's tests, all in order unless a test breaks something. No test is in this file."""

import hashlib
import json
import struct
from pathlib import Path

from expert_offload.doctor.asked import Asked
from expert_offload.doctor.machine import Machine, Ran

GIB = 2**30
QUERY, APPS, DISPLAY = "--query-gpu=index", "--query-compute-apps", "--query-gpu=display_active"
RTX3090 = "0, NVIDIA GeForce RTX 3090, 8.6, 580.95.05, 24576, 24100"
RTX5090 = "0, NVIDIA GeForce RTX 5090, 12.0, 581.80, 32607, 31000"
H100 = "0, NVIDIA H100 80GB HBM3, 9.0, 550.54.15, 81559, 81000"
WSL_KERNEL = "6.6.114.1-microsoft-standard-WSL2"


def answers(gpus=RTX3090, code=0, apps="", display="Disabled"):
    """A `run` that answers as nvidia-smi; `gpus`: the lines of its table."""

    def run(command):
        assert command[0] == "nvidia-smi"
        texts = {QUERY: gpus, APPS: apps, DISPLAY: display}
        return Ran(code, next(text for part, text in texts.items() if command[1].startswith(part)))

    return run


def no_command(command):
    return Ran(None, f"{command[0]}: not found")


def put(root: Path, path: str, data: str | bytes = "") -> Path:
    """A file of the machine."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


def memory(root: Path, total: float, free: float | None = None) -> None:
    """What /proc/meminfo says; GiB."""
    available = int((total if free is None else free) * 2**20)
    put(root, "/proc/meminfo", f"MemTotal: {int(total * 2**20)} kB\nMemAvailable: {available} kB\n")


def patched(site: Path, version="0.26.0", local="", **changes) -> Path:
    """An installed vllm of two patched files and one added; `changes` go into the journal."""
    put(
        site,
        f"vllm-{version}{local}.dist-info/METADATA",
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}{local}\n",
    )
    files = {}
    for name, before in (("vllm/a.py", b"a\n"), ("vllm/b.py", b"b\n"), ("vllm/expert_offload/c.py", None)):
        put(site, name, b"patched\n")
        digest = None if before is None else hashlib.sha256(before).hexdigest()
        files[name] = {"before": digest, "after": hashlib.sha256(b"patched\n").hexdigest(), "mode": 0o644}
    state = {"state": "applied", "release": f"v{version}", "version": version, "series": "fa3644973a2d", "files": files}
    return put(site, "vllm/.vllm-offload/state.json", json.dumps(state | changes))


def machine(
    tmp_path: Path, run=None, kernel="6.8.0-45-generic", ram=64.0, cuda="13.0", disk=500 * GIB, **environ
) -> Machine:
    """A Linux box with an RTX 3090, 64 GiB of memory and a patched v0.26.0, outside containers."""
    root, site = tmp_path / "root", tmp_path / "site"
    put(root, "/proc/sys/kernel/osrelease", kernel + "\n")
    put(root, "/proc/self/cgroup", "0::/\n")
    memory(root, ram)
    (root / "dev/shm").mkdir(parents=True)
    (root / "usr/local").mkdir(parents=True)
    if "microsoft" in kernel.lower():
        put(root, "/dev/dxg")
        put(root, "/usr/lib/wsl/lib/nvidia-smi")
    patched(site)
    home = tmp_path / "home"
    home.mkdir()
    return Machine(
        root=root,
        environ={"HOME": str(home), "PATH": str(tmp_path / "bin")} | environ,
        run=run or answers(),
        disk_free=lambda folder: disk,
        torch_cuda=lambda: cuda,
        site=site,
    )


def wsl(tmp_path: Path, **changes) -> Machine:
    """Windows with an RTX 5090 and 48 GiB for WSL."""
    return machine(tmp_path, **({"run": answers(RTX5090), "kernel": WSL_KERNEL, "ram": 47.0} | changes))


def asked(**changes) -> Asked:
    return Asked(**changes)


def checkpoint(folder: Path, experts=32, layers=4, hidden=256, width=128, **config) -> Path:
    """A Qwen3-MoE checkpoint in 16 bits, its weights a hole in a file."""
    shapes = {"model.embed_tokens.weight": (512, hidden), "lm_head.weight": (512, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.self_attn.q_proj.weight"] = (hidden, hidden)
        for expert in range(experts):
            for part in ("gate_proj", "up_proj"):
                shapes[f"{at}.mlp.experts.{expert}.{part}.weight"] = (width, hidden)
            shapes[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with put(folder, "model.safetensors", struct.pack("<Q", len(text)) + text).open("ab") as file:
        file.truncate(8 + len(text) + end)
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    put(folder, "config.json", json.dumps(shape | {"hidden_size": hidden, "max_position_embeddings": 2048} | config))
    return folder


def hub_snapshot(home: Path, name="acme/Tiny-MoE") -> Path:
    """Where the hub keeps a downloaded model's files."""
    folder = home / ".cache/huggingface/hub" / f"models--{name.replace('/', '--')}"
    put(folder, "refs/main", "abc")
    (folder / "snapshots/abc").mkdir(parents=True)
    return folder / "snapshots/abc"
