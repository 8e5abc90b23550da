# SPDX-License-Identifier: Apache-2.0
"""Is the installed vLLM patched, with what, and has nobody changed it since? From the journal of `vllm_offload.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .asked import Asked
from .lines import FAIL, OK, Line
from .machine import Machine

NAME = "installation"
JOURNAL = "vllm/.vllm-offload/state.json"  # as in vllm_offload.py: files, and their sha256 before and after


def journal(machine: Machine) -> dict[str, Any]:
    """What `apply` has written down; empty when the installation is not patched. Raises ValueError when damaged."""
    file = machine.site / JOURNAL
    if not file.is_file():
        return {}
    data = json.loads(file.read_text())
    if not isinstance(data, dict) or not isinstance(data.get("files"), dict):
        raise ValueError("no table of files")
    return data


def _changed(machine: Machine, files: Mapping[str, Mapping[str, str | None]]) -> tuple[list[str], list[str]]:
    """(files as they were before the patch, files that are neither as before nor as after it)."""
    original: list[str] = []
    foreign: list[str] = []
    for path, digests in files.items():
        file = machine.site / path
        now = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        if now != digests["after"]:
            (original if now == digests["before"] else foreign).append(path)
    return original, foreign


def check(machine: Machine, asked: Asked) -> Line:
    """Patched whole, by the release that is installed, and unchanged since."""
    here, release = machine.site, machine.release
    again = f"Reinstall: pip install --force-reinstall --no-deps vllm=={release or 'PIN'}, then vllm_offload.py apply"
    try:
        data = journal(machine)
        original, foreign = _changed(machine, data.get("files", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"the record of the patch is damaged: {here / JOURNAL}: {error!r}"
        return Line(NAME, FAIL, found, f"Remove {(here / JOURNAL).parent}. {again}")
    if not data:
        found = f"vllm {release or '(version unclear)'} in {here} is not patched: --cpu-offload-gb would be vLLM's own"
        return Line(NAME, FAIL, found, "python3 vllm_offload.py apply, or start the image that was built patched")
    if release and data.get("version") != release:
        found = f"patched as {data.get('release')}, then vllm {release} was installed over it in {here}"
        return Line(NAME, FAIL, found, "python3 vllm_offload.py revert, then apply")
    if foreign:
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        return Line(NAME, FAIL, f"changed by somebody else since the patch: {names} in {here}", again)
    if data.get("state") != "applied" or original:
        found = f"the patch is not whole in {here}: {data.get('state')}, {len(original)} files are as before it"
        return Line(NAME, FAIL, found, "python3 vllm_offload.py apply finishes it, revert undoes it")
    return Line(NAME, OK, f"{data['release']}, series {data['series']}, {len(data['files'])} files in {here}")
