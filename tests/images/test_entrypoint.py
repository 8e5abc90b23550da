# SPDX-License-Identifier: Apache-2.0
"""What the entrypoint runs, and how it ends: the script itself, with a `vllm` and a doctor that note their calls."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "docker" / "entrypoint.sh"
RECORD = """#!/bin/bash
printf '%s\\n' vllm "$@" > "$RECORD"; echo "$$" > "$RECORD.pid"; env > "$RECORD.env"
[ -z "$WAIT" ] || { trap 'exit 42' TERM; echo ready; while :; do sleep 0.1; done; }
"""
DOCTOR = """
import json, os, sys
json.dump(sys.argv[1:], open(os.environ["RECORD"] + ".doctor", "w"))
sys.exit(int(os.environ.get("DOCTOR_SAYS", "0")))
"""


@pytest.fixture
def start(tmp_path):
    """Start the entrypoint; gives the process, and a function for what was written down."""
    programs, package = tmp_path / "bin", tmp_path / "lib" / "vllm" / "expert_offload" / "doctor"
    programs.mkdir()
    package.mkdir(parents=True)
    (programs / "vllm").write_text(RECORD)
    (programs / "vllm").chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(DOCTOR)
    record = tmp_path / "record"

    def run(*arguments, doctor=True, wait=False, **settings):
        if not doctor:
            (package / "__main__.py").unlink(missing_ok=True)
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "PYTHONPATH": str(tmp_path / "lib"),
            "RECORD": str(record),
            "WAIT": "1" if wait else "",
            **settings,
        }
        for old in tmp_path.glob("record*"):
            old.unlink()
        process = subprocess.Popen(
            ["bash", ENTRYPOINT, *arguments],
            env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        if wait:
            return process, record
        out, err = process.communicate(timeout=60)
        asked = Path(f"{record}.doctor")
        return {
            "status": process.returncode,
            "vllm": record.read_text().splitlines() if record.exists() else None,
            "doctor": json.loads(asked.read_text()) if asked.exists() else None,
            "env": Path(f"{record}.env").read_text() if record.exists() else "",
            "out": out,
            "err": err,
        }

    return run


@pytest.mark.parametrize(
    "given, served",
    [
        (["serve", "org/model", "--port", "8000"], ["org/model", "--port", "8000"]),
        (["org/model", "--port", "8000"], ["org/model", "--port", "8000"]),
        (["--model", "org/model"], ["--model", "org/model"]),
        ([], []),
        (["/models/tiny"], ["/models/tiny"]),
    ],
)
def test_serving(start, given, served):
    found = start(*given)
    assert found["status"] == 0 and found["vllm"] == ["vllm", "serve", *served]
    assert found["doctor"] == ["--fatal", "--", *served]


def test_the_doctor_and_other_programs_run_as_given(start):
    found = start("doctor", "--json", DOCTOR_SAYS="1")
    assert (found["status"], found["doctor"], found["vllm"]) == (1, ["--json"], None)
    assert start("bash", "-c", "echo $0 $((6*7)); exit 3")["out"] == "bash 42\n"
    assert start("vllm", "bench", "serve")["vllm"] == ["vllm", "bench", "serve"]


@pytest.mark.parametrize("settings, status", [({}, 78), ({"EXPERT_OFFLOAD_FATAL_EXIT": "0"}, 0)])
def test_a_fatal_finding_ends_the_start_with_the_status_that_was_set(start, settings, status):
    found = start("serve", "m", DOCTOR_SAYS="1", **settings)
    assert found["status"] == status and found["vllm"] is None and "not serving" in found["err"]


def test_a_doctor_that_breaks_or_is_missing_or_switched_off_stops_nobody(start):
    found = start("serve", "m", DOCTOR_SAYS="3")
    assert found["vllm"] == ["vllm", "serve", "m"] and "the doctor itself ended with status 3" in found["err"]
    found = start("serve", "m", EXPERT_OFFLOAD_DOCTOR="0")
    assert found["vllm"] == ["vllm", "serve", "m"] and found["doctor"] is None
    found = start("serve", "m", doctor=False)
    assert found["vllm"] == ["vllm", "serve", "m"] and found["doctor"] is None
    found = start("doctor", doctor=False)
    assert found["status"] == 1 and "no doctor" in found["err"]


def test_the_moe_backend_is_a_default(start):
    assert start("serve", "m", EXPERT_OFFLOAD_MOE_BACKEND="marlin")["vllm"][2:] == ["m", "--moe-backend", "marlin"]
    for own in (["--moe-backend", "triton"], ["--moe-backend=auto"], ["--moe_backend=auto"]):
        assert start("serve", "m", *own, EXPERT_OFFLOAD_MOE_BACKEND="marlin")["vllm"][2:] == ["m", *own]


def test_what_the_base_says_of_its_build_is_replaced_only_where_it_says_it(start):
    assert "VLLM_IMAGE_TAG" not in start("m", EXPERT_OFFLOAD_IMAGE="ours:1")["env"]
    assert "VLLM_IMAGE_TAG=ours:1\n" in start("m", EXPERT_OFFLOAD_IMAGE="ours:1", VLLM_IMAGE_TAG="theirs")["env"]


def test_vllm_takes_the_place_of_the_script_and_gets_its_signals(start):
    process, record = start("serve", "m", wait=True)
    assert process.stdout.readline() == "ready\n"
    assert Path(f"{record}.pid").read_text().strip() == str(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 42
    process.stdout.close()
    process.stderr.close()
