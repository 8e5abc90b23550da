# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of memory, page-locking, disk, compile cache and installation: a cause broken, and mended."""

import os
from dataclasses import replace

import pytest
from expert_offload.doctor import caches, disk, installation, memory, pinned
from expert_offload.doctor.lines import FAIL, OK, WARN
from expert_offload.doctor.model import find
from expert_offload.host import PIN_SWITCH
from test_doctor_fakes import GIB, asked, checkpoint, hub_snapshot, machine, no_command, patched, put, wsl
from test_doctor_fakes import memory as meminfo

# -- memory ----------------------------------------------------------------------------------------------------------


def test_ram_and_what_mends_it_on_linux(tmp_path):
    box = machine(tmp_path, ram=8)
    line = memory.check(box, asked(budget=10 * GIB))
    assert line.state == WARN and "8.00 GiB free" in line.found
    assert line.step == "Make room: free or add 6 GiB of memory"
    meminfo(box.root, 14)
    assert memory.check(box, asked(budget=10 * GIB)).state == OK


def test_ram_and_wslconfig(tmp_path):
    box = wsl(tmp_path, ram=15.5)
    line = memory.check(box, asked(budget=16 * GIB))
    assert line.state == WARN and "memory=20GB in Windows' .wslconfig" in line.step
    meminfo(box.root, 20 * 31 / 32)
    assert memory.check(box, asked(budget=16 * GIB)).state == OK


def test_a_containers_limit(tmp_path):
    box = machine(tmp_path)
    limit = put(box.root, "/sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    put(box.root, "/sys/fs/cgroup/memory.current", "0\n")
    line = memory.check(box, asked())
    assert line.state == WARN and "cgroup" in line.found and "docker run --memory 4g" in line.step
    limit.write_text(f"{4 * GIB}\n")
    assert memory.check(box, asked()).state == OK


def test_without_proc_nothing_is_known(tmp_path):
    box = machine(tmp_path)
    (box.root / "proc/meminfo").unlink()
    assert memory.check(box, asked()).state == WARN


def test_shared_memory_of_two_ranks(tmp_path):
    box = machine(tmp_path, disk=64 * 2**20)
    assert memory.check_shm(box, asked()).state == OK
    line = memory.check_shm(box, asked(ranks=2))
    assert line.state == WARN and "64 MiB free" in line.found and "--shm-size" in line.step and "ipc: host" in line.step
    assert memory.check_shm(replace(box, disk_free=lambda folder: 8 * GIB), asked(ranks=2)).state == OK
    (box.root / "dev/shm").rmdir()
    assert memory.check_shm(box, asked(ranks=2)).state == WARN


# -- page-locking ----------------------------------------------------------------------------------------------------

MIB = 2**20


def test_a_quick_try_locks_little(tmp_path, runtime):
    driver = runtime()
    line = pinned.check(machine(tmp_path, ram=1), asked(budget=8 * GIB))
    assert line.state == OK and line.found.startswith("102 MiB page-locked"), "a tenth of what is free"
    assert "8.00 GiB planned: --pin-quota" in line.found
    assert driver.asked[:2] == [16 * MIB, 32 * MIB] and not driver.registered, "growing, and given back"


def test_the_planned_amount_is_enough(tmp_path, runtime):
    runtime()
    line = pinned.check(machine(tmp_path), asked(budget=64 * MIB))
    assert line == ("page-locking", OK, "64 MiB page-locked and read back through the device", "")


def test_a_quota_of_the_driver(tmp_path, runtime):
    runtime(quota=100 * MIB)
    box = wsl(tmp_path)
    line = pinned.check(box, asked(budget=256 * MIB))
    assert line.state == WARN and line.found.startswith(
        "48 MiB of 0.25 GiB planned page-locked, then: the driver refused"
    )
    assert "memlock" in line.step and PIN_SWITCH in line.step
    runtime()
    assert pinned.check(box, asked(budget=256 * MIB)).state == OK


def test_memory_that_delivers_nothing(tmp_path, runtime):
    runtime(delivers="nothing")
    line = pinned.check(wsl(tmp_path), asked())
    assert line.state == WARN and "delivered other bytes" in line.found


def test_pin_quota_goes_on_to_the_limit(tmp_path, runtime):
    driver = runtime(quota=300 * MIB)
    box = machine(tmp_path, ram=2)
    assert pinned.check(box, asked()).state == OK, "the quick try saw nothing of it"
    line = pinned.check(box, asked(pin_quota=True))
    assert line.state == WARN and "then: the driver refused" in line.found
    driver.quota = None
    line = pinned.check(box, asked(pin_quota=True))
    assert line.state == OK and "0.75 GiB page-locked" in line.found, "half of what is free"


def test_a_limit_of_ours(tmp_path, runtime):
    runtime()
    box = machine(tmp_path, **{PIN_SWITCH: "0.0625"})
    line = pinned.check(box, asked(budget=GIB))
    assert line.state == WARN and "no more than 64 MiB" in line.found and PIN_SWITCH in line.step
    for value, said in (("0", "turned off"), ("lots", "takes a number of GiB")):
        line = pinned.check(replace(box, environ={PIN_SWITCH: value}), asked())
        assert line.state == WARN and said in line.found and line.step
    assert pinned.check(replace(box, environ={}), asked(budget=GIB)).state == OK
    off = replace(box, environ={"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"})
    assert pinned.check(off, asked()).state == WARN


def test_without_a_device_nothing_is_tried(tmp_path, runtime):
    driver = runtime()
    line = pinned.check(machine(tmp_path, run=no_command), asked())
    assert line.state == WARN and "not tried" in line.found and not driver.asked


def test_too_little_memory_to_try(tmp_path, runtime):
    runtime()
    box = machine(tmp_path, ram=0.1)
    line = pinned.check(box, asked())
    assert line.state == WARN and "too little to try" in line.found and line.step
    meminfo(box.root, 1)
    assert pinned.check(box, asked()).state == OK


# -- disk ------------------------------------------------------------------------------------------------------------


def test_room_for_the_download(tmp_path):
    box = machine(tmp_path, disk=10 * GIB)
    line = disk.check(box, asked(model="nvidia/Qwen3.5-35B-A3B-NVFP4"))
    assert line.state == WARN and "20.49 GiB in all, an estimate" in line.found
    assert line.step.startswith("Free 12.49 GiB more")
    assert disk.check(replace(box, disk_free=lambda folder: 23 * GIB), asked()).state == OK


def test_what_is_downloaded_counts(tmp_path):
    box = machine(tmp_path, disk=13 * GIB)
    hub = box.home / ".cache/huggingface/hub/models--nvidia--Qwen3.5-35B-A3B-NVFP4"
    assert disk.check(box, asked()).state == WARN
    with put(hub, "blobs/abc.incomplete").open("wb") as file:
        file.truncate(10 * GIB)
    assert disk.check(box, asked()).state == OK


def test_a_model_whose_size_is_not_known(tmp_path):
    box = machine(tmp_path)
    assert "size is not known" in disk.check(box, asked(model="acme/Tiny-MoE")).found
    snapshot = checkpoint(hub_snapshot(box.home))
    line = disk.check(box, asked(model="acme/Tiny-MoE"))
    assert line.state == OK and str(snapshot) in line.found
    (snapshot / "model.safetensors").write_bytes(b"\0" * 4)
    assert disk.check(box, asked(model="acme/Tiny-MoE")).state == WARN, "a download is gone on with"


def test_a_broken_folder_is_fatal(tmp_path):
    box, folder = machine(tmp_path), tmp_path / "model"
    line = disk.check(box, asked(model=str(folder)))
    assert line.state == FAIL and "there is no folder" in line.found and line.step
    folder.mkdir()
    assert "no config.json" in disk.check(box, asked(model=str(folder))).found
    checkpoint(folder)
    assert disk.check(box, asked(model=str(folder))).state == OK
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    line = disk.check(box, asked(model=str(folder)))
    assert line.state == FAIL and "100 are missing" in line.found
    put(folder, "model.safetensors", whole)
    put(folder, "config.json", "{")
    assert disk.check(box, asked(model=str(folder))).state == FAIL
    put(folder, "config.json", "{}")
    (folder / "model.safetensors").unlink()
    assert disk.check(box, asked(model=str(folder))).state == WARN, "other formats"


def test_a_windows_disk(tmp_path):
    box = wsl(tmp_path)
    mounts = put(box.root, "/proc/mounts", f"/dev/sdc / ext4 rw 0 0\nC:\\\\ {tmp_path} 9p rw 0 0\n")
    line = disk.check(box, asked())
    assert line.state == WARN and "Windows disk" in line.found
    mounts.write_text("/dev/sdc / ext4 rw 0 0\n")
    assert disk.check(box, asked()).state == OK


def test_the_hubs_folder_is_where_the_variables_say(tmp_path):
    checkpoint(hub_snapshot(tmp_path / "other"))
    moved = {"HF_HOME": str(tmp_path / "other/.cache/huggingface")}
    assert find(machine(tmp_path, **moved), asked(model="acme/Tiny-MoE")).total
    assert find(machine(tmp_path / "b"), asked(model="acme/Tiny-MoE")).total == 0


# -- compile cache ---------------------------------------------------------------------------------------------------


def test_graphs_of_another_release(tmp_path):
    box = machine(tmp_path)
    assert "the first start compiles" in caches.check(box, asked()).found
    cache = box.home / ".cache/vllm/torch_compile_cache"
    put(cache, "0123456789/rank_0_0/backbone/a.py", "x")
    put(cache, "torch_aot_compile/abcdef/rank_0_0/model", "x")
    assert caches.check(box, asked()).found.startswith("2 compiled graphs")
    old = cache / "0123456789"
    os.utime(old, (1, 1))
    line = caches.check(box, asked())
    assert line.state == OK and "1 (0 MiB) are older than this patch: harmless" in line.found
    with (old / "big").open("wb") as file:
        file.truncate(3 * GIB)
    os.utime(old, (1, 1))
    line = caches.check(box, asked())
    assert line.state == WARN and "rm -r" in line.step
    (old / "big").unlink()
    assert caches.check(box, asked()).state == OK


def test_a_cache_that_can_not_be_read(tmp_path, monkeypatch):
    box = machine(tmp_path)
    put(box.home, ".cache/vllm/torch_compile_cache/0123456789/a.py", "x")

    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(caches, "_size", refused)
        line = caches.check(box, asked())
    assert line.state == WARN and "Permission denied" in line.found and "chown" in line.step
    assert caches.check(box, asked()).state == OK


# -- installation ----------------------------------------------------------------------------------------------------


def test_a_patched_installation(tmp_path):
    box = machine(tmp_path)
    line = installation.check(box, asked())
    assert line.state == OK and line.found.startswith("v0.26.0, series fa3644973a2d, 3 files")


def test_one_that_is_not_patched(tmp_path):
    box = machine(tmp_path)
    (box.site / installation.JOURNAL).unlink()
    line = installation.check(box, asked())
    assert line.state == FAIL and "vllm 0.26.0" in line.found and "vllm_offload.py apply" in line.step


def test_one_that_somebody_changed(tmp_path):
    box = machine(tmp_path)
    put(box.site, "vllm/a.py", "edited\n")
    (box.site / "vllm/expert_offload/c.py").write_text("edited\n")
    line = installation.check(box, asked())
    assert line.state == FAIL and "vllm/a.py, vllm/expert_offload/c.py" in line.found and "Reinstall" in line.step
    put(box.site, "vllm/a.py", "patched\n")
    put(box.site, "vllm/expert_offload/c.py", "patched\n")
    assert installation.check(box, asked()).state == OK


@pytest.mark.parametrize("broken", ["original", "state", "version", "damaged", "no table"])
def test_one_that_is_not_whole(tmp_path, broken):
    box = machine(tmp_path)
    if broken == "original":
        put(box.site, "vllm/a.py", "a\n")
    elif broken == "state":
        patched(box.site, state="applying")
    elif broken == "version":
        patched(box.site, version="0.26.0")
        box.site.joinpath("vllm-0.26.0.dist-info/METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    else:
        put(box.site, installation.JOURNAL, "{" if broken == "damaged" else "[]")
    line = installation.check(box, asked())
    assert line.state == FAIL and line.step
    put(box.site, "vllm-0.26.0.dist-info/METADATA", "Name: vllm\nVersion: 0.26.0\n")
    patched(box.site)
    assert installation.check(box, asked()).state == OK
