# SPDX-License-Identifier: Apache-2.0
"""What the tests of host memory share."""

import faulthandler
import os
import re
import signal
from pathlib import Path

import torch
from expert_offload.host import (
    Arena,
    HostBuffer,
)

SIZES = [5000, 1, 4096, 20000, 12288, 12289, 3 * 2**20, 7777]
ALL = sum(SIZES)


def ours() -> int:
    """Bytes that this process maps with MADV_DONTFORK, as the kernel counts them: our buffers, and nobody else's."""
    return sum(
        int(re.search(r"^Size: +(\d+) kB", area, re.M)[1]) * 1024
        for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
        if re.search(r"^VmFlags:.* dc( |$)", area, re.M)
    )


def child(function) -> int:
    """Signal that ended a forked child which called `function`, or 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        signal.alarm(20)
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1


def lies_in(arena: Arena, tensor: torch.Tensor, buffer: HostBuffer) -> bool:
    return arena.holding(tensor) is buffer.mapping


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def filled(arena: Arena, sizes=SIZES) -> list[tuple[HostBuffer, torch.Tensor]]:
    """A buffer of each size, which must come empty, and what was then written to it."""
    made = []
    for nbytes in sizes:
        buffer, content = arena.take(nbytes), random_bytes(nbytes)
        assert not buffer.bytes.any(), "a trial left something behind"
        buffer.bytes.copy_(content)
        made.append((buffer, content))
    return made


def intact(made: list[tuple[HostBuffer, torch.Tensor]]) -> bool:
    return all(torch.equal(buffer.bytes, content) for buffer, content in made)
