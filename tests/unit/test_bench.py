# SPDX-License-Identifier: Apache-2.0
"""bench/host_peak.py: what is parsed, counted, divided, and measured for real."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import cgroups  # noqa: E402
import host_peak  # noqa: E402
import rows  # noqa: E402

MiB = 2**20
GPU = BENCH.parent / "tests" / "gpu"


# what only a GPU can run


def test_what_gpu_code_takes_of_its_modules_is_there():
    """Its imports stand in functions and run on a card alone, where a name that moved would cost an hour of it."""
    modules = ("harness", "same_kernels", "synthetic")
    trees = {name: ast.parse((GPU / f"{name}.py").read_text()) for name in modules}
    there = {
        name: {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        | {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        for name, tree in trees.items()
    }
    users = [*trees.values(), *(ast.parse(f.read_text()) for f in (BENCH / "load.py", *GPU.glob("*.py")))]
    taken = {
        (node.value.id, node.attr)
        for tree in users
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }
    assert len(taken) > 10
    assert not {(module, name) for module, name in taken if name not in there[module]}


# rows


def test_a_release_is_told_by_its_files(tmp_path):
    (tmp_path / "_version.py").write_text("__version__: str\n__version__ = version = '0.26.0'\n")
    assert rows.release(tmp_path) == "0.26.0" and not rows.patched(tmp_path)
    (tmp_path / "expert_offload_adapter.py").touch()
    assert rows.patched(tmp_path)
    assert rows.release(None) == rows.release(tmp_path / "none") == "" and not rows.patched(None)


def test_a_row_has_what_results_have():
    known = json.loads(sorted((BENCH / "results").glob("*.json"))[0].read_text())[0]
    assert list(rows.row("a", 1.5, "s", more=2))[:6] == list(known)[:6]


# host_peak: what is counted


def fake_process(proc: Path, pid: int, parent: int, *, pss=0, anon=0, file=0, shmem=0, name="sh"):
    """A process in a /proc of our own; sizes in kB."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    (folder / "status").write_text(
        f"Name:\t{name}\nVmHWM:\t{2 * (anon + file + shmem):8} kB\nRssAnon:\t{anon:8} kB\nRssFile:\t{file} kB\n"
        f"RssShmem:\t{shmem} kB\nThreads:\t3\n"
    )
    (folder / "smaps_rollup").write_text(
        f"00400000-7fff ---p 00000000 00:00 0   [rollup]\nRss:  {anon + file + shmem} kB\nPss:  {pss} kB\n"
        f"Pss_Anon:  {anon} kB\nPss_File:  {pss - anon} kB\nPss_Shmem:  0 kB\n"
    )


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:  900 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/smaps_rollup").touch()
    fake_process(tmp_path, 10, 1)
    return tmp_path


def test_the_tree_has_all_descendants_and_nobody_else(proc):
    fake_process(proc, 11, 10)
    fake_process(proc, 12, 11, name="a) R 99 (b")  # a name may look like the fields behind it
    fake_process(proc, 99, 1)
    (proc / "13").mkdir()  # gone between the listing and the look
    assert host_peak.tree(proc, 10) == [10, 11, 12]


def test_each_kind_keeps_its_own_peak(proc):
    sampler = host_peak.Sampler(10, proc)
    fake_process(proc, 11, 10, pss=130, anon=100, file=60)
    fake_process(proc, 12, 11, pss=40, anon=30, file=20, shmem=5)
    (proc / "meminfo").write_text("MemAvailable:  700 kB\n")
    sampler.sample()
    (proc / "meminfo").write_text("MemAvailable:  800 kB\n")
    for name in ("stat", "status", "smaps_rollup"):
        (proc / "11" / name).unlink()
    sampler.sample()
    found = sampler.figures()
    assert {kind: n // 1024 for kind, n in found["peaks"].items()} == dict(
        rss_anon=130, rss_file=80, rss_shmem=5, hwm=430, rss=215, pss=170, pss_anon=130, pss_file=40, pss_shmem=0,
        available_fell=200,
    )  # fmt: skip
    assert (found["method"], found["pss_until"], found["samples"]) == ("pss", None, 2) and "unreadable" not in found


def test_what_cannot_be_read_counts_with_what_is_surely_its_own(proc, monkeypatch):
    fake_process(proc, 11, 10, pss=130, anon=100, file=60)
    read = Path.read_text

    def refused(path, *a, **k):
        if path.name == "smaps_rollup":
            raise PermissionError(13, "no")
        return read(path, *a, **k)

    monkeypatch.setattr(Path, "read_text", refused)
    sampler = host_peak.Sampler(10, proc)
    sampler.sample()
    assert sampler.peaks["pss"] == 100 * 1024 and sampler.figures()["unreadable"] == 1


def test_without_kinds_in_status_statm_tells(proc):
    fake_process(proc, 11, 10)
    (proc / "11/status").write_text("Name:\tx\nVmRSS:\t 1 kB\n")
    (proc / "11/statm").write_text("1000 50 20 1 0 400 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert host_peak.resident(proc, 11) == dict(rss_anon=30 * page, rss_file=20 * page, rss_shmem=0)
    assert host_peak.resident(proc, 77) == {}


def test_pss_that_costs_too_much_is_left_out_from_the_second_time_on(proc):
    fake_process(proc, 11, 10, pss=130, anon=100, file=60)
    sampler = host_peak.Sampler(10, proc, slow=-1.0)
    sampler.sample()
    assert sampler.pss
    sampler.sample()
    assert not sampler.pss and sampler.figures()["method"] == "rss" and sampler.figures()["pss_until"] is not None
    (proc / "self/smaps_rollup").unlink()
    assert host_peak.Sampler(10, proc).figures()["method"] == "rss"


# host_peak: for real

CHILD = """
    import os, subprocess, sys, time
    kept = bytearray(int(sys.argv[1]) * 2**20)
    kept[::4096] = b"x" * len(kept[::4096])
    if len(sys.argv) > 2:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        other = subprocess.Popen([sys.executable, __file__, *sys.argv[2:]], **pipes, env={**os.environ, "STAY": "1"})
        other.stdout.readline()
    time.sleep(0.4)
    print("READY", flush=True)
    time.sleep(0.4)
    if len(sys.argv) > 2:
        kept.extend(bytes(100 * 2**20))  # behind the line: not to be counted
        time.sleep(0.3)
        print('{"moved": 7}')
        other.communicate()
        sys.exit(other.returncode)
    if "STAY" in os.environ:
        sys.stdin.read()
"""


def peak(tmp_path, *command, flags=()):
    """The row of one run of host_peak.py, and its exit status."""
    script, out = tmp_path / "child.py", tmp_path / "out.json"
    script.write_text(textwrap.dedent(CHILD))
    out.unlink(missing_ok=True)
    tool = [sys.executable, str(BENCH / "host_peak.py"), "--out", str(out), *flags, "--", sys.executable, str(script)]
    done = subprocess.run([*tool, *map(str, command)], capture_output=True, text=True, timeout=60)
    assert out.exists(), done.stderr
    (row,) = json.loads(out.read_text())
    return row, done


def test_two_processes_that_touch_300_mib_are_measured_at_300_mib(tmp_path):
    flags = ("--until", "^READY$", "--case", "child")
    small, _ = peak(tmp_path, 0, 0, flags=flags)
    large, done = peak(tmp_path, 100, 200, flags=flags)
    assert done.returncode == 0 and "READY\n" in done.stdout
    for kind in ("rss", "rss_anon", *(["pss", "pss_anon"] if large["method"] == small["method"] == "pss" else [])):
        assert abs(large["peaks"][kind] - small["peaks"][kind] - 300 * MiB) < 3 * MiB, kind
    assert large["line_seen"] and large["printed"] == {"moved": 7} and large["exit_status"] == 0
    assert large["value"] == large["peaks"][large["method"]] and large["unit"] == "bytes"
    assert large["samples"] >= 4 and large["peaks"]["hwm"] >= large["peaks"]["rss_anon"]


def test_the_end_the_signal_and_a_line_that_never_came(tmp_path):
    row, done = peak(tmp_path, "no number")
    assert done.returncode == row["exit_status"] == 1 and "line_seen" not in row
    row, done = peak(tmp_path, 1, flags=("--until", "NEVER"))
    assert done.returncode == 3 and not row["line_seen"] and "NEVER" in done.stderr
    row, done = peak(tmp_path, 1, 1, flags=("--until", "READY", "--stop"))
    assert row["exit_status"] == -15 and done.returncode == 143 and row["seconds"] < 30


def test_an_orphan_is_still_counted(tmp_path):
    """Its parent is gone, as that of a daemon is: it becomes the child of the one that measures."""
    script = f"{sys.executable} {tmp_path}/child.py 150 & sleep 0.1"
    (tmp_path / "child.py").write_text(textwrap.dedent(CHILD))
    out = tmp_path / "out.json"
    tool = [sys.executable, str(BENCH / "host_peak.py"), "--until", "READY", "--stop", "--out", str(out), "--"]
    subprocess.run([*tool, "bash", "-c", f"({script}); sleep 30"], capture_output=True, timeout=60)
    assert json.loads(out.read_text())[0]["peaks"]["rss_anon"] > 150 * MiB


def limited(tmp_path, gib, *command):
    try:
        group = cgroups.Group.make(2**30, f"test-bench-{os.getpid()}")
    except (cgroups.NoGroup, OSError) as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    group.remove()
    row, done = peak(tmp_path, *command, flags=("--memory", str(gib)))
    assert not Path(row["cgroup"]).exists()
    assert row["limit"] == int(gib * 2**30) // 4096 * 4096
    return row, done


def test_a_group_counts_what_lies_in_it(tmp_path):
    row, done = limited(tmp_path, 1, 100, 200)
    assert done.returncode == 0 and row["oom_kills"] == 0 and row["oom_killed"] is False
    # 100 more behind the line, which was not asked for; the interpreters and page tables too.
    assert 400 * MiB < row["cgroup_peak"] < 450 * MiB, row
    assert row["peaks"]["cgroup_held"] <= row["cgroup_peak"]


def test_the_oom_killer_ends_what_takes_more_than_its_group_has(tmp_path):
    row, done = limited(tmp_path, 0.125, 200)
    assert row["exit_status"] == -9 and done.returncode == 137 and row["oom_killed"] is True
    assert row["cgroup_peak"] <= 0.125 * 2**30


# cgroups: which group, and what if there is none


def fake_root(tmp_path, cgroup: str, mountinfo: str, *groups: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/self/mountinfo").write_text(mountinfo)
    for group in groups:
        (tmp_path / group).mkdir(parents=True)
    return tmp_path


V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    "cgroup,mounts,version,own",
    [
        ("0::/user.slice/a.scope\n", V2.format(top="/"), 2, "sys/fs/cgroup/user.slice/a.scope"),
        ("0::/\n", V2.format(top="/"), 2, "sys/fs/cgroup"),
        # A container with the host's view of its path.
        ("0::/docker/1\n", V2.format(top="/docker/1"), 2, "sys/fs/cgroup"),
        # Both are mounted, and version 1 has the controller.
        ("4:memory:/job\n0::/\n", V1 + V2.format(top="/").replace("cgroup rw", "cgroup/unified rw"), 1,
         "sys/fs/cgroup/memory/job"),
        # The path is not visible here.
        ("4:cpu,memory:/elsewhere/2\n", V1, 1, "sys/fs/cgroup/memory"),
    ],
)  # fmt: skip
def test_the_group_of_this_process(tmp_path, cgroup, mounts, version, own):
    root = fake_root(
        tmp_path,
        cgroup,
        mounts,
        "sys/fs/cgroup/user.slice/a.scope",
        "sys/fs/cgroup/memory/job",
        "sys/fs/cgroup/unified",
    )
    found = cgroups.own_group(root)
    assert (found[0], found[2]) == (version, root / own)


def test_no_groups_at_all(tmp_path):
    with pytest.raises(cgroups.NoGroup, match="names none"):
        cgroups.own_group(fake_root(tmp_path, "", ""))
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    with pytest.raises(cgroups.NoGroup, match="not mounted"):
        cgroups.own_group(tmp_path)
    with pytest.raises(cgroups.NoGroup, match="no memory control group"):
        cgroups.Group.given(tmp_path)


def controlled(folder: Path, controllers: str, given: str):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(given)


def test_version_2_takes_the_nearest_group_that_may_limit_its_children(tmp_path, monkeypatch):
    mount, own = tmp_path / "m", tmp_path / "m/slice/scope"
    for folder, given in ((mount, "cpu memory"), (mount / "slice", "cpu memory"), (own, "")):
        controlled(folder, "cpu memory", given)
    write = Path.write_text

    def busy(path, text, *a, **k):
        if text == "+memory":
            raise OSError(16, "Device or resource busy")
        return write(path, text, *a, **k)

    monkeypatch.setattr(Path, "write_text", busy)
    assert cgroups.parent_of_limited(own, mount) == mount / "slice"
    controlled(mount / "slice", "cpu memory", "cpu")
    controlled(mount, "cpu memory", "")
    with pytest.raises(cgroups.NoGroup, match=r"busy(.|\n)*echo \+memory >"):
        cgroups.parent_of_limited(own, mount)
    monkeypatch.undo()
    assert cgroups.parent_of_limited(own, mount) == own
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    controlled(mount, "cpu", "")
    with pytest.raises(cgroups.NoGroup, match="delegate"):
        cgroups.parent_of_limited(own, mount)


def test_figures_of_a_version_2_group(tmp_path):
    for name, text in (("max", "4096\n"), ("current", "100\n"), ("events", "oom 4\noom_kill 3\noom_group_kill 0\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    group = cgroups.Group.given(tmp_path)
    assert group.held() == 100
    # No memory.peak before Linux 5.19.
    wanted = dict(cgroup=str(tmp_path), cgroup_version=2, limit=4096, cgroup_peak=None, oom_kills=3)
    assert group.figures() == wanted
    group.remove()
    assert tmp_path.exists(), "it is somebody else's"


# link
