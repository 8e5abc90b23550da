# SPDX-License-Identifier: Apache-2.0
"""The doctor's command line: what it prints, its exit code, and what it takes for the server's flags."""

import json
import sys

import pytest
from expert_offload.doctor import cli
from expert_offload.doctor import machine as machines
from expert_offload.doctor.asked import served, tokens
from expert_offload.doctor.lines import FAIL, WARN, Line, screen
from expert_offload.doctor.machine import Ran, run
from test_doctor_fakes import GIB, RTX3090, answers, checkpoint, machine, no_command, wsl

FINE = ["--cpu-offload-gb", "2", "--max-model-len", "32k"]


def test_one_screen(tmp_path, capsys, runtime):
    runtime()
    assert cli.main(FINE, machine(tmp_path)) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 40 and all(len(line) <= 120 for line in out.splitlines())
    assert "15 ok, 0 warn, 0 FAIL: nothing fatal" in out


def test_warnings_are_not_fatal(tmp_path, capsys, runtime):
    runtime(quota=0)
    assert cli.main(FINE, wsl(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "warn page-locking" in out and " -> " in out and "nothing fatal" in out


def test_something_fatal(tmp_path, capsys, runtime):
    runtime()
    assert cli.main([], machine(tmp_path, run=no_command)) == 1
    out = capsys.readouterr().out
    assert "FAIL GPU" in out and "serving is pointless" in out


def test_json(tmp_path, capsys, runtime):
    runtime()
    assert cli.main(["--json"], machine(tmp_path, run=no_command)) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["fatal"] is True and len(data["checks"]) == len(cli.ALL)
    assert all(check["step"] for check in data["checks"] if check["state"] != "ok"), "all but ok say the next step"


def test_the_entrypoint_is_silent_when_all_is_well(tmp_path, capfd):
    serve = ["acme/Tiny", "--cpu_offload_gb=4", "--max-model-len", "32k", "--port", "8000", "--enable-prefix-caching"]
    box = machine(tmp_path)
    assert cli.main(["--fatal", "--", *serve], box) == 0
    assert capfd.readouterr() == ("", "")
    assert cli.main(["--fatal", "--", "/nowhere", *serve[1:]], box) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("This can't be served") and "no folder /nowhere" in err


def test_every_fatal_cause_ends_the_entrypoint(tmp_path, capsys):
    causes = {
        "GPU": machine(tmp_path / "a", run=no_command),
        "driver": machine(tmp_path / "b", run=answers(RTX3090.replace("580.95", "550.95"))),
        "plan": machine(tmp_path / "c", ram=5),
        "architecture": machine(tmp_path / "d", run=answers(RTX3090.replace("8.6", "6.1"))),
    }
    for name, box in causes.items():
        assert cli.main(["--fatal", "--cpu-offload-gb", "4"], box) == 1
        assert f"FAIL {name}" in capsys.readouterr().err


def test_a_check_that_breaks_keeps_no_server_from_starting(tmp_path):
    def broken(machine, asked):
        raise RuntimeError("oops")

    (line,) = cli.answers([broken], machine(tmp_path), cli.Asked())
    assert line.state == WARN and "oops" in line.found and line.step


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_flags_stand_above_variables(tmp_path):
    box = machine(tmp_path, MODEL="acme/a", CPU_OFFLOAD_GB="8", MAX_MODEL_LEN="", TENSOR_PARALLEL_SIZE="2")
    _, wanted = cli.arguments(["--cpu-offload-gb", "1.5", "--pin-quota"], box)
    assert (wanted.model, wanted.budget, wanted.context, wanted.ranks) == ("acme/a", GIB * 3 // 2, None, 2)
    assert wanted.pin_quota
    _, wanted = cli.arguments(["--fatal", "--", "serve", "acme/b", "-tp", "4"], box)
    assert (wanted.model, wanted.budget, wanted.ranks) == ("acme/b", 8 * GIB, 4)


def test_what_is_taken_of_vllm_serves_arguments():
    words = (
        "vllm serve m --max-num-seqs 4 --cpu-offload-params experts x --no-y --kv_cache_dtype fp8 --max-model-len -1"
    )
    assert served(words.split()) == [
        "--model",
        "m",
        "--cpu-offload-params",
        "experts",
        "x",
        "--kv-cache-dtype",
        "fp8",
        "--max-model-len",
        "-1",
    ]


@pytest.mark.parametrize(
    ("text", "number"), [("131072", 131072), ("128K", 131072), ("32k", 32000), ("1.5k", 1500), ("auto", None)]
)
def test_lengths(text, number):
    assert tokens(text) == number


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--cpu-offload-gb", "-1", "'-1' is no number of GiB from 0 up, such as 6 or 4.5"),
        ("--cpu-offload-gb", "nan", "'nan' is no number of GiB"),
        ("--max-model-len", "long", "'long' is no number of tokens, such as 65536, 64K or auto"),
        ("--gpu-memory-utilization", "0", "'0' is no share of the GPU's memory above 0 and up to 1, such as 0.88"),
        ("-tp", "0", "'0' is no number of GPUs from 1 up"),
        ("-tp", "1.5", "'1.5' is no whole number of GPUs"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path, flag, value, said, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([flag, value], machine(tmp_path))
    printed = capsys.readouterr().err
    assert error.value.code == 2 and flag in printed and said in printed


# -- what lies below -------------------------------------------------------------------------------------------------


def test_long_lines_are_wrapped():
    text = screen([Line("GPU", FAIL, "word " * 60, "step " * 40)])
    assert all(len(row) <= 120 for row in text.splitlines()) and text.startswith("FAIL GPU")


def test_commands_that_do_not_answer(monkeypatch):
    assert run(["no-such-command-here"]).code is None
    assert run([sys.executable, "-c", "import sys; print('a'); sys.exit(3)"]) == Ran(3, "a")
    monkeypatch.setattr(machines, "_PATIENCE", 0.2)
    assert run([sys.executable, "-c", "import time; time.sleep(9)"]).code == 124


def test_this_machine_as_it_is(tmp_path):
    """The real thing on whatever machine runs the tests: no check breaks."""
    folder = checkpoint(tmp_path / "model")
    lines = cli.answers(cli.ALL, machines.Machine(), cli.Asked(str(folder)))
    assert not [line for line in lines if "the check itself failed" in line.found]
