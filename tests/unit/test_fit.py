# SPDX-License-Identifier: Apache-2.0
"""What is free: the least of the machine and every group above this process."""

import re
from pathlib import Path

import pytest
from expert_offload import fit
from expert_offload.fit import GIB, UNKNOWN, Free, Limit
from hypothesis import given
from hypothesis import strategies as st

MIB = 2**20
NATIVE = "6.8.0-45-generic\n"


def meminfo(total: int, available: int) -> dict[str, str]:
    """Sizes in GiB, among lines as the kernel writes them."""
    return {
        "proc/meminfo": f"MemTotal:       {total * MIB} kB\nMemFree:          123 kB\n"
        f"MemAvailable:   {available * MIB} kB\nActive(anon):     77 kB\nHugePages_Total:       0\n"
    }


def v2(path: str, limit: object, used: int, high: object = "max", **stat: int) -> dict[str, str]:
    """The files of one cgroup of version 2; sizes in GiB."""
    folder = f"sys/fs/cgroup{path}".rstrip("/")
    lines = [f"{key} {value * GIB}\n" for key, value in {"anon": used, "file": 40, "shmem": 30, **stat}.items()]
    return {
        f"{folder}/memory.max": f"{limit * GIB if isinstance(limit, int) else limit}\n",
        f"{folder}/memory.high": f"{high * GIB if isinstance(high, int) else high}\n",
        f"{folder}/memory.current": f"{used * GIB}\n",
        f"{folder}/memory.stat": "".join(lines),
    }


def v1(path: str, limit: int, used: int, **stat: int) -> dict[str, str]:
    """The files of one cgroup of version 1; `limit` in bytes, the rest in GiB."""
    folder = f"sys/fs/cgroup/memory{path}".rstrip("/")
    lines = [f"{key} {value * GIB}\n" for key, value in {"inactive_file": 9, **stat}.items()]
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used * GIB}\n",
        f"{folder}/memory.stat": "".join(lines),
    }


def host(root: Path, *parts: dict[str, str], own: str = "", release: str = NATIVE) -> Path:
    """A root with the files of `parts`, /proc/self/cgroup of `own`, and the kernel's `release`."""
    files = {"proc/self/cgroup": own, "proc/sys/kernel/osrelease": release}
    for part in parts:
        files |= part
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- what is free ----------------------------------------------------------------------------------------------------


def test_without_a_cgroup_what_is_available_is_free(tmp_path):
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), own="0::/\n"))
    assert free == Free(
        50 * GIB,
        "MemAvailable of this host (64.00 GiB, 14.00 GiB used)",
        (Limit("MemAvailable of this host", "host", 64 * GIB, 14 * GIB),),
    )


@pytest.mark.parametrize("release", ["5.15.153.1-microsoft-standard-WSL2\n", "4.4.0-19041-Microsoft\n"])
def test_wsl_is_told_by_the_kernels_name(tmp_path, release):
    free = fit.free_memory(host(tmp_path, meminfo(31, 28), release=release))
    assert free.nbytes == 28 * GIB
    assert free.source.startswith("MemAvailable of the WSL virtual machine (31.00 GiB, 3.00 GiB used)")
    assert [limit.kind for limit in free.limits] == ["wsl"]


def test_each_level_of_v2_counts_and_page_cache_is_free(tmp_path):
    levels = [
        v2("/a/b/c", "max", 3),
        v2("/a/b", 24, 10, inactive_file=2, active_file=4, slab_reclaimable=1),
        v2("/a", 40, 20, inactive_file=1),
        v2("/beside", 1, 1),
    ]
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), *levels, own="1:name=systemd:/x\n0::/a/b/c\n"))
    assert free.nbytes == (24 - 10 + 2 + 4 + 1) * GIB, "shmem and file are not reclaimable, the two lists and slab are"
    assert free.source == "memory.max of the cgroup /a/b (24.00 GiB, 3.00 GiB used)"
    assert sorted((limit.size - limit.used) // GIB for limit in free.limits) == [21, 21, 50]


@pytest.mark.parametrize(("outer", "least"), [(22, 3), (19, 0), (15, -4)])
def test_the_outer_level_may_be_the_tighter_one_and_overdrawn(tmp_path, outer, least):
    levels = [v2("/a/b", 24, 10), v2("/a", outer, 19)]
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), *levels, own="0::/a/b\n"))
    assert free.nbytes == max(0, least) * GIB
    assert free.source == f"memory.max of the cgroup /a ({outer}.00 GiB, 19.00 GiB used)"
    assert min(limit.size - limit.used for limit in free.limits) == least * GIB


def test_memory_high_is_a_limit_too(tmp_path):
    free = fit.free_memory(host(tmp_path, v2("/a", 24, 10, high=16), own="0::/a\n"))
    assert free.nbytes == 6 * GIB
    assert free.source.startswith("memory.high of the cgroup /a (16.00 GiB")
    assert "docker" not in free.limits[1].raised(7 * GIB)[0]


def test_page_cache_never_makes_more_free_than_the_limit(tmp_path):
    free = fit.free_memory(host(tmp_path, v2("/a", 24, 3, inactive_file=9), own="0::/a\n"))
    assert free.nbytes == 24 * GIB


@pytest.mark.parametrize("own", ["0::/\n", "0::/docker/ab12\n", "0::/../../docker/ab12\n", "", "0::/a (deleted)\n"])
def test_a_containers_limit_stands_at_the_root_of_its_mount(tmp_path, own):
    """A private namespace, a host's path that is not in the mount, one outside the namespace, and none to be read."""
    inner = v2("/docker", 1, 1)  # containers in this container: no parent of ours
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), v2("/", 24, 4), inner, own=own))
    assert free.nbytes == 20 * GIB
    assert free.source == "memory.max of the cgroup / (24.00 GiB, 4.00 GiB used)"


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory", "memory,hugetlb"])
def test_v1_counts_each_level_and_its_hierarchys_cache(tmp_path, controllers):
    levels = [
        v1("/docker/ab12", 30 * GIB, 12, total_inactive_file=3, total_active_file=2),
        v1("/docker", 28 * GIB, 13, total_inactive_file=1, total_active_file=2),
        v1("/", 2**63 - 4096, 60),
    ]
    own = f"9:name=systemd:/\n4:{controllers}:/docker/ab12\n3:cpuset:/\n0::/\n"
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), *levels, own=own))
    assert free.nbytes == (28 - 13 + 3) * GIB
    assert free.source == "memory.limit_in_bytes of the cgroup /docker (28.00 GiB, 10.00 GiB used)"
    assert [limit.size // GIB for limit in free.limits] == [30, 28, 64], "nearly 2**63 is no limit"


def test_v1_in_a_container(tmp_path):
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), v1("/", 16 * GIB, 1), own="4:memory:/docker/ab12\n"))
    assert free.nbytes == 15 * GIB
    assert free.source.startswith("memory.limit_in_bytes of the cgroup / (")


def test_a_controller_that_is_not_memory_is_no_limit(tmp_path):
    other = v1("/docker/ab12", GIB, 1)
    free = fit.free_memory(host(tmp_path, meminfo(64, 50), other, own="4:cpu,memory2:/docker/ab12\n5:pids:/\n"))
    assert free.nbytes == 50 * GIB


def test_nothing_readable_is_no_limit(tmp_path):
    free = fit.free_memory(tmp_path / "nowhere")
    assert free == (UNKNOWN, "no limit that could be read", ())
    fit.check(fit.Plan(2**50, 8, 2**60, 0, largest=GIB), free)


@pytest.mark.parametrize("garbage", ["", "max", "-5", "12.5", "1e9", "0x10", "9" * 30, "nan\n\n", "\0", "12abc"])
def test_garbage_is_skipped(tmp_path, garbage):
    root = host(tmp_path, meminfo(64, 50), v2("/a", 24, 4), v2("/", 40, 4), own="0::/a\n")
    for name in ("memory.max", "memory.current"):
        file = root / "sys/fs/cgroup/a" / name
        good = file.read_text()
        file.write_text(garbage)
        assert fit.free_memory(root).nbytes == 36 * GIB, name
        file.write_text(good)
    (root / "sys/fs/cgroup/a/memory.stat").write_text(f"inactive_file {garbage}\nactive_file {GIB}\n{garbage}\n")
    assert fit.free_memory(root).nbytes == 21 * GIB
    (root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert fit.free_memory(root).nbytes == 20 * GIB
    (root / "proc/meminfo").write_text(f"MemTotal: {garbage}\nMemAvailable: {garbage} kB\n")
    assert [limit.kind for limit in fit.free_memory(root).limits] == ["cgroup"] * 2


@given(st.binary(max_size=60) | st.text("0:/.\nmemory,max", max_size=40).map(str.encode))
def test_a_strange_cgroup_file_is_no_reason_to_fail(tmp_path_factory, content):
    root = host(tmp_path_factory.mktemp("root"), meminfo(64, 50), v2("/", 24, 4))
    (root / "proc/self/cgroup").write_bytes(content)
    assert fit.free_memory(root).nbytes in (20 * GIB, 50 * GIB)


def test_files_that_may_not_be_read(tmp_path):
    root = host(tmp_path, meminfo(64, 50), own="0::/a\n")
    (root / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
    (root / "sys/fs/cgroup/a/memory.current").mkdir()
    assert fit.free_memory(root).nbytes == 50 * GIB


def test_this_machine_has_memory():
    free = fit.free_memory()
    total = int(re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert 0 < free.nbytes <= total
    assert free.source
