# SPDX-License-Identifier: Apache-2.0
"""What a release lets an offloader do with the host's memory."""

from __future__ import annotations

import os
from typing import NamedTuple

from .host import PIN_SWITCH, memory_total, pin_limit
from .residency import MappedView


class Memory(NamedTuple):
    """What may be done with the host's memory; what can be is found out as buffers are made.

    `limit`: bytes that this rank may page-lock, None without a limit; `why`: what sets it, in words. `unmapped`: why
    the device may not read page-locked memory in place, or None. `view`: the release's function from a page-locked CPU
    tensor to the device's view of it.
    """

    limit: int | None
    why: str | None
    unmapped: str | None
    view: MappedView

    @classmethod
    def found(
        cls, *, cpu: bool, wsl: bool, pin_disabled: bool, uva_disabled: bool, ranks: int, view: MappedView
    ) -> Memory:
        """From what the release says: its platform, its two variables, and how many ranks share this host."""
        limit: int | None = 0
        why: str | None = "this is the CPU backend"
        if pin_disabled and not cpu:
            why = "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY is set"
        elif not cpu:
            asked, switch = os.environ.get(PIN_SWITCH), os.environ.get("VLLM_WSL2_ENABLE_PIN_MEMORY")
            limit, why = pin_limit(asked=asked, wsl=wsl, wsl_switch=switch, total=memory_total(), ranks=ranks)
        return cls(limit, why, "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set" if uva_disabled else None, view)

    @property
    def copies(self) -> bool:
        """Whether it is certain beforehand that every weight is copied from memory that is not page-locked."""
        return self.limit == 0
