# SPDX-License-Identifier: Apache-2.0
"""What the server is asked to do: from the doctor's flags, the variables of .env, or `vllm serve`'s arguments."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_MODEL = "Qwen3.5-35B-A3B-NVFP4"  # the one that the compose file serves


class Asked(NamedTuple):
    """What the server is asked for.

    `budget`: bytes per rank (`--cpu-offload-gb`), None when it is left open; `context`: tokens, None for as many as
    the model has; `utilization`: share of the GPU's memory, None for the release's default; `kv_dtype`: as vLLM names
    it; `pin_quota`: find the whole quota of page-locked memory, however long it takes.
    """

    model: str = DEFAULT_MODEL
    budget: int | None = None
    ranks: int = 1
    context: int | None = None
    utilization: float | None = None
    patterns: frozenset[str] = frozenset()
    kv_dtype: str = "auto"
    backend: str = "auto"
    pin_quota: bool = False


def _number(text: str, what: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return number


def gib_to_bytes(text: str) -> int:
    """Bytes of a number of GiB, from 0 up."""
    return int(_number(text, "number of GiB from 0 up, such as 6 or 4.5", 0, 2**20) * 2**30)


def tokens(text: str) -> int | None:
    """A length as vLLM takes it: 131072, 128K, 131k; "auto" and -1 leave it to the model."""
    if text in ("auto", "-1"):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 65536, 64K or auto")
    return int(float(found[1]) * {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]])


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    return _number(text, "share of the GPU's memory above 0 and up to 1, such as 0.88", 1e-6, 1)


def ranks(text: str) -> int:
    """A number from 1 up."""
    number = _number(text, "number of GPUs from 1 up", 1, 2**20)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of GPUs")
    return int(number)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `vllm serve` that the doctor understands, by their names there. None: not given."""
    parser.add_argument("--model", metavar="FOLDER_OR_NAME")
    parser.add_argument("--cpu-offload-gb", type=gib_to_bytes, metavar="GIB", help="per rank, as given to vllm serve")
    parser.add_argument("--cpu-offload-params", nargs="+", default=None, metavar="PATTERN")
    parser.add_argument("--tensor-parallel-size", "-tp", type=ranks, metavar="N")
    parser.add_argument("--max-model-len", type=tokens, metavar="TOKENS")
    parser.add_argument("--gpu-memory-utilization", type=share, metavar="SHARE")
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE")
    parser.add_argument("--moe-backend", metavar="NAME")


# Variables of the compose file's .env that stand for flags which are not given.
VARIABLES = {
    "MODEL": "--model",
    "CPU_OFFLOAD_GB": "--cpu-offload-gb",
    "TENSOR_PARALLEL_SIZE": "--tensor-parallel-size",
    "MAX_MODEL_LEN": "--max-model-len",
    "GPU_MEMORY_UTILIZATION": "--gpu-memory-utilization",
}


def served(arguments: Sequence[str]) -> list[str]:
    """The flags that `add_flags` knows, out of the arguments of `vllm serve`, whose first may be the model's name."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(known)
    words = [word for word in arguments if word not in ("vllm", "serve")]
    out = ["--model", words[0]] if words and not words[0].startswith("-") else []
    names = set(known._option_string_actions)
    taking = False
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+", word):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            taking = name in names
            out += [name + equals + value] if taking else []
        elif taking:
            out.append(word)
    return out


def asked(given: argparse.Namespace, pin_quota: bool) -> Asked:
    """From parsed flags."""
    default = Asked()
    return Asked(
        model=given.model or default.model,
        budget=given.cpu_offload_gb,
        ranks=given.tensor_parallel_size or 1,
        context=given.max_model_len,
        utilization=given.gpu_memory_utilization,
        patterns=frozenset(given.cpu_offload_params or ()),
        kv_dtype=given.kv_cache_dtype or default.kv_dtype,
        backend=given.moe_backend or default.backend,
        pin_quota=pin_quota,
    )
