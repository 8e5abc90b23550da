# SPDX-License-Identifier: Apache-2.0
"""The command line: which checks run, in which order, and what comes of them.

    doctor [--model FOLDER_OR_NAME] [--cpu-offload-gb N] [--tensor-parallel-size N] [--max-model-len N] ...
    doctor --fatal -- ARGUMENTS OF vllm serve      an entrypoint's: silent when all is well, exit code 1 when not

Flags that are not given are taken from the variables of .env (`asked.VARIABLES`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import architecture, backend, caches, disk, driver, gpu, installation, memory, pinned, plan, vram, wsl
from .asked import VARIABLES, Asked, add_flags, asked, served
from .lines import FAIL, OK, WARN, Line, as_json, screen
from .machine import Machine

Check = Callable[[Machine, Asked], Line]
# Those that may answer FAIL. They make no CUDA context and take a second.
FATAL: list[Check] = [
    installation.check,
    gpu.check,
    architecture.check,
    driver.check,
    disk.check,
    plan.check,
]
ALL: list[Check] = [
    installation.check,
    gpu.check,
    architecture.check,
    driver.check,
    driver.check_compat,
    wsl.check,
    memory.check,
    memory.check_shm,
    pinned.check,
    vram.check,
    vram.check_spill,
    caches.check,
    disk.check,
    backend.check,
    plan.check,
]


def answers(checks: Sequence[Check], machine: Machine, wanted: Asked) -> list[Line]:
    """Each check's line. A check that breaks is a warning: a fault of the doctor keeps no server from starting."""
    lines = []
    for check in checks:
        try:
            lines.append(check(machine, wanted))
        except Exception as error:
            name = check.__module__.rsplit(".", 1)[-1]
            lines.append(Line(name, WARN, f"the check itself failed: {error!r}", "Please report this"))
    return lines


def parser() -> argparse.ArgumentParser:
    """The doctor's flags."""
    made = argparse.ArgumentParser(prog="doctor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_flags(made)
    made.add_argument("--json", action="store_true", help="the lines as JSON")
    made.add_argument("--fatal", action="store_true", help="only what makes serving pointless; silent when all is well")
    made.add_argument("--pin-quota", action="store_true", help="page-lock as much as the server may, to find the limit")
    return made


def arguments(argv: Sequence[str], machine: Machine) -> tuple[argparse.Namespace, Asked]:
    """Parsed flags, with .env's variables below them and `vllm serve`'s arguments behind `--` above them."""
    own, rest = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], served(own[at + 1 :])
    variables = [f"{flag}={value}" for name, flag in VARIABLES.items() if (value := machine.env(name))]
    given = parser().parse_args([*variables, *own, *rest])
    return given, asked(given, given.pin_quota)


def main(argv: Sequence[str], machine: Machine | None = None) -> int:
    """0: nothing fatal; 1: something fatal; 2 (argparse): a flag is wrong."""
    machine = machine or Machine()
    given, wanted = arguments(argv, machine)
    lines = answers(FATAL if given.fatal else ALL, machine, wanted)
    fatal = [line for line in lines if line.state == FAIL]
    if given.json:
        print(as_json(fatal if given.fatal else lines))
    elif given.fatal:
        if fatal:
            print(f"This can't be served as asked:\n{screen(fatal)}", file=sys.stderr)
    else:
        print(f"{screen(lines)}\n{_verdict(lines)}")
    return int(bool(fatal))


def _verdict(lines: Sequence[Line]) -> str:
    count = {state: sum(line.state == state for line in lines) for state in (OK, WARN, FAIL)}
    serving = "serving is pointless before the FAILs are mended" if count[FAIL] else "nothing fatal"
    return f"\n{count[OK]} ok, {count[WARN]} warn, {count[FAIL]} FAIL: {serving}"
