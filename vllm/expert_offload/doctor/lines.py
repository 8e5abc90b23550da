# SPDX-License-Identifier: Apache-2.0
"""What a check answers, and how answers are printed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "FAIL"
_WIDTH = 120  # columns


class Line(NamedTuple):
    """One check's answer: its name, ok, warn or FAIL, what was found, and the next step (empty only when ok).

    FAIL is fatal: serving is pointless until it is mended. All that a start survives is warn.
    """

    name: str
    state: str
    found: str
    step: str = ""


def gib(nbytes: float) -> str:
    """`nbytes` in GiB, or in MiB below a tenth of one."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 0.1 * 2**30 else f"{nbytes / 2**20:.0f} MiB"


def screen(lines: Iterable[Line]) -> str:
    """The lines for a person: state, name and what was found, and the next step below it, indented."""
    rows = []
    for line in lines:
        head = f"{line.state:<5}{line.name:<14}"
        rows += textwrap.wrap(line.found, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if line.step:
            rows += textwrap.wrap(line.step, _WIDTH, initial_indent=" " * 16 + "-> ", subsequent_indent=" " * len(head))
    return "\n".join(rows)


def as_json(lines: Iterable[Line]) -> str:
    """{"fatal": bool, "checks": [{"name", "state", "found", "step"}]}."""
    rows = [line._asdict() for line in lines]
    return json.dumps({"fatal": any(row["state"] == FAIL for row in rows), "checks": rows}, indent=1)
