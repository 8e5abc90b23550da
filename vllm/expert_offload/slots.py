# SPDX-License-Identifier: Apache-2.0
"""How much of a model's experts goes to host memory, and how many slots a card has for them: sizes in, numbers out.

Nothing is measured here and nothing is allocated. Sizes are bytes of one rank, on its GPU where nothing else is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .fit import GIB, TooLittleMemory, gib

CACHE_FLAG = "--expert-cache-gb"
# Of what is free; beyond, the driver of Windows puts memory of the GPU into the host's without a word.
WSL_PERCENT = 55


class Card(NamedTuple):
    """What decides how many slots fit.

    `free`: GPU memory that the KV cache, staging and slots share. `kv_cache`: for the context that was asked for.
    `staging`: what streaming takes. `layers`: of each offloaded layer, bytes of one slot, weights and scales.
    `experts`, `top_k`: of a layer, and of a token. `break_even`: slots below which a pool was measured to cost more
    than it gives.
    """

    free: int
    kv_cache: int
    staging: int
    layers: tuple[int, ...]
    experts: int
    top_k: int
    wsl: bool = False
    break_even: int = 0

    @property
    def slot(self) -> int:
        """Bytes of one slot in every layer."""
        return sum(self.layers)

    @property
    def room(self) -> int:
        """Bytes that slots may take."""
        room = self.free - self.kv_cache - self.staging
        if self.wsl:
            room = min(room, self.free * WSL_PERCENT // 100 - self.staging)
        return max(0, room)

    def __str__(self) -> str:
        staging = f" and {gib(self.staging)} for staging" if self.staging else ""
        limit = f" (on WSL at most {WSL_PERCENT} % of what is free)" if self.wsl else ""
        return (
            f"{gib(self.free)} free on the GPU less {gib(self.kv_cache)} for the KV cache of the context asked "
            f"for{staging} leave {gib(self.room)}{limit}"
        )


@dataclass(frozen=True)
class Slots:
    """`slots` in every offloaded layer, 0: no pool; `nbytes` of GPU memory that they take together; why, in a line."""

    slots: int
    nbytes: int
    reason: str


def asked_cache(text: str) -> float | None:
    """The GiB that `--expert-cache-gb` names, None for "auto"; raises ValueError."""
    if text.strip().lower() == "auto":
        return None
    try:
        asked = float(text)
    except ValueError:
        asked = math.nan
    if not 0 <= asked < math.inf:
        raise ValueError(f"{CACHE_FLAG} {text}: it takes auto, a number of GiB, or 0 for no pool")
    return asked


def plan_slots(asked: float | None, card: Card) -> Slots:
    """The slots of each offloaded layer, as many in one as in the other.

    Args:
        asked: GiB for slots; 0: no pool; None: what is free, and no pool where that is less than the break-even or
            than one token's experts.

    Raises:
        TooLittleMemory: a number was asked for and does not fit, or gives fewer slots than one token's experts.
    """
    if not card.slot or asked == 0:
        return Slots(0, 0, f"expert pool: off, {'no layer is offloaded' if not card.slot else f'{CACHE_FLAG} 0'}")
    limit = card.room if asked is None else int(asked * GIB)
    slots = min(card.experts, limit // card.slot)
    least = card.top_k if asked is not None else max(card.top_k, card.break_even)
    takes = f"{slots} slots a layer for {card.experts} experts in {len(card.layers)} layers"
    if slots < least:
        why = (
            f"one token needs {card.top_k}" if least == card.top_k else f"below {least} a pool costs more than it gives"
        )
        if asked is None:
            return Slots(0, 0, f"expert pool: off, {card}: {takes}, and {why}")
        raise TooLittleMemory(
            f"{CACHE_FLAG} {asked:g} gives {takes}, and {why}: {CACHE_FLAG} {_up(least * card.slot)} or more, or 0"
        )
    if slots * card.slot > card.room:
        fits = card.room // card.slot
        less = f"{CACHE_FLAG} auto ({gib(card.room)})" if fits >= card.top_k else f"{CACHE_FLAG} 0"
        raise TooLittleMemory(
            f"{CACHE_FLAG} {asked:g} takes {gib(slots * card.slot)} ({takes}), and {card}: {less}, or a smaller "
            "--max-model-len"
        )
    how = str(card) if asked is None else f"{CACHE_FLAG} {asked:g}"
    enough = "; more would stay empty" if slots == card.experts else ""
    return Slots(slots, slots * card.slot, f"expert pool: {takes}, {gib(slots * card.slot)}: {how}{enough}")


class Sizes(NamedTuple):
    """What decides how much goes to host memory.

    `card`: GPU memory that this rank may use. `experts`: weights that may leave it; `layer`: those of one layer, which
    leave together; `largest`: of these, the largest parameter. `resident`: everything else that lies there but for the
    KV cache: other weights, scales, activations, graphs. `kv_cache`: for the context that was asked for. `beside`: what
    offloading itself takes there: staging, the fewest slots. `host`: host memory for weights of this rank.
    """

    card: int
    resident: int
    experts: int
    layer: int
    largest: int
    kv_cache: int
    beside: int
    host: int


def host_bytes(sizes: Sizes) -> int:
    """Bytes of experts that have to go to the host (`--cpu-offload-gb auto`), whole layers; 0 where all fits the card.

    Raises:
        TooLittleMemory: not even without any expert does the card hold the rest, or the host does not hold what goes.
    """
    over = sizes.resident + sizes.experts + sizes.kv_cache - sizes.card
    if over <= 0:
        return 0
    need = over + sizes.beside
    context = f"{gib(sizes.kv_cache)} for the KV cache of the context asked for"
    if need > sizes.experts:
        raise TooLittleMemory(
            f"--cpu-offload-gb auto: with all experts in host memory the GPU would still hold {gib(sizes.resident)} of "
            f"the model, {context} and {gib(sizes.beside)} for the experts' way, {gib(need - sizes.experts)} more than "
            f"the {gib(sizes.card)} that may be used of it: a smaller --max-model-len, a checkpoint of fewer bits, or "
            "more GPUs (--tensor-parallel-size)"
        )
    need = min(-(-need // sizes.layer) * sizes.layer, sizes.experts)
    held = min(need + sizes.largest, sizes.experts)  # the offload may move a parameter more
    if held > sizes.host:
        raise TooLittleMemory(
            f"--cpu-offload-gb auto: beside {gib(sizes.resident)} of the model and {context}, {gib(need)} of the "
            f"experts have to go to host memory, up to {gib(held)}, and {gib(sizes.host)} are free for them: free or "
            f"add {gib(held - sizes.host)} of host memory, or a smaller --max-model-len, or a checkpoint of fewer bits"
        )
    return need


def _up(nbytes: int) -> str:
    """GiB as an option takes them, no fewer than `nbytes`."""
    return f"{math.ceil(nbytes / GIB * 1000) / 1000:g}"
