# SPDX-License-Identifier: Apache-2.0
"""The chosen model: its files on this machine, its config.json, and its sizes, known or estimated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import fit
from .asked import Asked
from .machine import Machine


class Model(NamedTuple):
    """A model as far as it is known here. Sizes in bytes, of all ranks together.

    `folder`: with its files, None when it is not here; `given`: the user has named a folder, which no download
    completes; `fault`: why its files can't be read; `total`: of all weights that are loaded, 0 when not known;
    `experts`, `dense`: that may leave the GPU; `largest`: one parameter; `layer`: the experts of one layer;
    `estimate`: sizes are from the table below.
    """

    name: str
    folder: Path | None = None
    given: bool = False
    fault: str = ""
    config: Mapping[str, Any] = MappingProxyType({})
    entries: Mapping[str, fit.Entry] = MappingProxyType({})
    total: int = 0
    experts: int = 0
    dense: int = 0
    largest: int = 0
    layer: int = 0
    estimate: bool = False

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of config.json that describes the decoder; multimodal models have it below."""
        inner = self.config.get("text_config") or self.config.get("llm_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The `quantization_config`, wherever it stands; empty for a plain checkpoint."""
        found = self.config.get("quantization_config") or self.text.get("quantization_config")
        return found if isinstance(found, dict) else {}


# Shape: transformers' Qwen3_5MoeTextConfig. Experts: 40 layers x 256 x 3 matrices of 2048 x 512 at 4 bits. Total: about
# 22 GB to download; the dense part is what the rest leaves beside scales and the two embeddings, a guess.
_QWEN = Model(
    name="Qwen3.5-35B-A3B-NVFP4",
    config={
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size": 2048,
        "max_position_embeddings": 262144,
        "num_experts": 256,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    },
    total=22 * 10**9,
    experts=40 * 256 * 3 * 2048 * 512 // 2,
    dense=18 * 10**8,
    largest=256 * 2 * 2048 * 512 // 2,
    layer=256 * 3 * 2048 * 512 // 2,
    estimate=True,
)
KNOWN = {_QWEN.name.lower(): _QWEN}


def hub(machine: Machine) -> Path:
    """The folder into which models are downloaded, as huggingface_hub chooses it."""
    if cache := machine.env("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    if home := machine.env("HF_HOME"):
        return Path(home) / "hub"
    return Path(machine.env("XDG_CACHE_HOME") or machine.home / ".cache") / "huggingface" / "hub"


def downloads(machine: Machine, name: str) -> list[Path]:
    """The hub's folders for `name`; for a name without its owner, of whoever owns one so called."""
    return sorted(hub(machine).glob(f"models--{name.replace('/', '--') if '/' in name else '*--' + name}"))


def _snapshot(folder: Path) -> Path | None:
    """The checked out files of a hub's folder: those of main, else the newest."""
    main = folder / "refs" / "main"
    if main.is_file() and (found := folder / "snapshots" / main.read_text().strip()).is_dir():
        return found
    return max(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, default=None)


def find(machine: Machine, asked: Asked) -> Model:
    """What is known of the model that the server is asked for. Never raises: `fault` says what is wrong."""
    path = Path(asked.model).expanduser()
    given = path.is_dir() or asked.model.startswith(("/", "./", "../", "~"))
    if given:
        if not path.is_dir():
            return Model(asked.model, given=True, fault=f"there is no folder {path}: mount it, or mend --model")
        return _read(asked.model, path, given)
    known = KNOWN.get(asked.model.rsplit("/", 1)[-1].lower(), Model(asked.model))._replace(name=asked.model)
    folder = next((found for place in downloads(machine, asked.model) if (found := _snapshot(place))), None)
    here = _read(asked.model, folder, given) if folder else None
    if here is None or (known.total and not here.entries):
        return known
    return here


def _read(name: str, folder: Path, given: bool) -> Model:
    bare, file = Model(name, folder, given), folder / "config.json"
    config: dict[str, Any] = {}
    try:
        if file.is_file():
            config = json.loads(file.read_bytes())
            if not isinstance(config, dict):
                raise ValueError("no table")
        elif given and not (folder / "params.json").is_file() and not any(folder.glob("*.gguf")):
            return bare._replace(fault=f"{folder} holds no config.json: name the folder with the model's files")
        entries = fit.tensors(folder)
    except fit.CheckpointError as error:
        return bare._replace(config=config, fault=str(error))
    except (OSError, ValueError) as error:
        return bare._replace(fault=f"{file}: {error!r}: download it again")
    return _sized(bare._replace(config=config, entries=entries))


def _sized(model: Model) -> Model:
    """With the sizes of what is loaded: a drafter's layers (`mtp.`) are only when it is asked for."""
    loaded = {name: entry for name, entry in model.entries.items() if not name.startswith("mtp.")}
    experts, dense = fit.expert_bytes(loaded)
    layers = int(model.text.get("num_hidden_layers") or 0)
    return model._replace(
        total=sum(entry.nbytes for entry in loaded.values()),
        experts=experts,
        dense=dense,
        largest=fit.largest_parameter(loaded),
        layer=experts // layers if layers else experts,
    )
