# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of GPU, architecture, driver, WSL and GPU memory: a cause broken, and mended."""

from dataclasses import replace

import pytest
from expert_offload.doctor import architecture, driver, gpu, vram, wsl
from expert_offload.doctor.lines import FAIL, OK, WARN
from test_doctor_fakes import H100, RTX3090, RTX5090, answers, asked, machine, no_command, patched, put
from test_doctor_fakes import wsl as windows

TURING = "0, NVIDIA GeForce RTX 2080 Ti, 7.5, 580.95.05, 11264, 11000"
TWO = f"{RTX3090}\n{RTX3090.replace('0,', '1,', 1)}"


# -- is there a GPU --------------------------------------------------------------------------------------------------


def test_a_gpu_is_named(tmp_path):
    line = gpu.check(machine(tmp_path), asked())
    assert line == ("GPU", OK, "0: NVIDIA GeForce RTX 3090, 24.00 GiB; driver 580.95.05", "")


@pytest.mark.parametrize(
    ("printed", "code", "meaning", "step"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "not loaded", "modprobe"),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "updated under", "Restart the machine"),
        ("No devices were found", 6, "sees no device", "dmesg"),
        ("Failed to initialize NVML: Unknown Error", 255, "lost its devices", "Restart the container"),
        ("Segmentation fault", 139, "exit code 139", "Mend the driver"),
        ("", 0, "lists no GPU", "nvidia-smi"),
    ],
)
def test_what_nvidia_smi_complains_of_is_explained(tmp_path, printed, code, meaning, step):
    broken = machine(tmp_path, run=answers(printed, code))
    line = gpu.check(broken, asked())
    assert line.state == FAIL and meaning in line.found and step in line.step
    assert gpu.check(replace(broken, run=answers()), asked()).state == OK


def test_no_driver_on_linux(tmp_path):
    line = gpu.check(machine(tmp_path, run=no_command), asked())
    assert line.state == FAIL and "no NVIDIA driver is installed" in line.found and "Install" in line.step


@pytest.mark.parametrize("kernel", ["6.8.0-45-generic", "6.6.114.1-microsoft-standard-WSL2"])
def test_a_container_without_gpus_is_told_of_the_toolkit(tmp_path, kernel):
    broken = machine(tmp_path, run=no_command, kernel=kernel)
    for path in ("dev/dxg", "usr/lib/wsl/lib/nvidia-smi"):
        (broken.root / path).unlink(missing_ok=True)
    put(broken.root, "/.dockerenv")
    line = gpu.check(broken, asked())
    assert line.state == FAIL and "this container was given no GPU" in line.found
    assert "--gpus all" in line.step and "could not select device driver" in line.step and "WSL 2 based" in line.step


def test_wsl_without_its_device(tmp_path):
    broken = windows(tmp_path, run=no_command)
    (broken.root / "dev/dxg").unlink()
    line = gpu.check(broken, asked())
    assert line.state == FAIL and "no /dev/dxg" in line.found and "wsl --set-version" in line.step


def test_wsl_without_windows_driver(tmp_path):
    broken = windows(tmp_path, run=no_command)
    (broken.root / "usr/lib/wsl/lib/nvidia-smi").unlink()
    (broken.root / "usr/lib/wsl/lib").rmdir()
    line = gpu.check(broken, asked())
    assert (
        line.state == FAIL and "Windows has no NVIDIA driver" in line.found and "in Windows, none in WSL" in line.step
    )


def test_wsl_with_nvidia_smi_off_the_path(tmp_path):
    line = gpu.check(windows(tmp_path, run=no_command), asked())
    assert line.state == FAIL and line.step == "export PATH=$PATH:/usr/lib/wsl/lib"


def test_windows_refuses_the_gpu(tmp_path):
    text = "Failed to initialize NVML: GPU access blocked by the operating system"
    line = gpu.check(windows(tmp_path, run=answers(text, 17)), asked())
    assert line.state == FAIL and "Windows gives this WSL no GPU" in line.found and "wsl --update" in line.step


def test_as_many_gpus_as_ranks(tmp_path):
    one = machine(tmp_path)
    line = gpu.check(one, asked(ranks=2))
    assert line.state == FAIL and "--tensor-parallel-size 1" in line.step
    assert gpu.check(replace(one, run=answers(TWO)), asked(ranks=2)).state == OK


def test_hidden_gpus_do_not_count(tmp_path):
    two = machine(tmp_path, run=answers(TWO), CUDA_VISIBLE_DEVICES="1")
    assert [card.number for card in gpu.gpus(two)] == [1]
    line = gpu.check(replace(two, environ={"CUDA_VISIBLE_DEVICES": "7"}), asked())
    assert line.state == FAIL and "CUDA_VISIBLE_DEVICES=7" in line.found


def test_a_card_that_shares_the_hosts_memory_has_no_figures(tmp_path):
    shared = machine(tmp_path, run=answers("0, NVIDIA GB10, 12.1, 580.95.05, [N/A], [N/A]"))
    assert gpu.check(shared, asked()).state == OK
    assert vram.check(shared, asked()).state == WARN


def test_the_cpu_backend_needs_none(tmp_path):
    cpu = machine(tmp_path, run=no_command)
    patched(cpu.site, local="+cpu")
    for check in (gpu.check, architecture.check, driver.check, vram.check, vram.check_spill):
        assert check(cpu, asked()).state == OK


def test_without_a_gpu_what_depends_on_it_is_not_known(tmp_path):
    none = machine(tmp_path, run=no_command)
    for check in (architecture.check, driver.check, vram.check):
        line = check(none, asked())
        assert line.state == WARN and line.step and check(replace(none, run=answers()), asked()).state == OK


# -- architecture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "generation"),
    [("GTX 1080", "6.1", "Pascal"), ("TITAN V", "7.0", "Volta"), ("GTX 1660", "7.5", "Turing")],
)
def test_old_cards_are_refused_and_told_what_can_run(tmp_path, name, capability, generation):
    old = machine(tmp_path, run=answers(f"0, NVIDIA {name}, {capability}, 570.10, 8192, 8000"))
    line = architecture.check(old, asked())
    assert line.state == FAIL and generation in line.found and "8.0 and newer" in line.step
    line = architecture.check(replace(old, run=answers()), asked())
    assert line.state == OK and "is not said" in line.found, "unknown is said"


def test_what_the_image_says_decides(tmp_path):
    box = machine(tmp_path, VLLM_OFFLOAD_ARCHS="8.0 8.6", VARIANT="sm86")
    assert architecture.check(box, asked()).found.endswith("holds code for 8.0 8.6 (variant sm86)")
    line = architecture.check(replace(box, run=answers(RTX5090)), asked())
    assert line.state == FAIL and "RTX 5090" in line.found and "other variant" in line.step
    for archs in ("8.0 8.6+PTX", "12.0", "sm_120a"):
        mended = replace(box, environ={"VLLM_OFFLOAD_ARCHS": archs}, run=answers(RTX5090))
        assert architecture.check(mended, asked()).state == OK
    turing = replace(box, environ={"VLLM_OFFLOAD_ARCHS": "7.5 8.0"}, run=answers(TURING))
    assert architecture.check(turing, asked()).state == OK


def test_the_images_name_tells_its_variant(tmp_path):
    box = machine(tmp_path, EXPERT_OFFLOAD_IMAGE="vllm-offload:v0.26.0-sm86", run=answers(RTX5090))
    line = architecture.check(box, asked())
    assert line.state == WARN and "not proved" in line.found and "other variant" in line.step
    mended = replace(box, environ={"EXPERT_OFFLOAD_IMAGE": "vllm-offload:v0.26.0-cu130"})
    assert architecture.check(mended, asked()).state == OK
    assert architecture.check(replace(box, run=answers()), asked()).state == OK


def test_compiled_code_runs_within_its_major_version():
    built = architecture.built_for("8.0 9.0a 12.0")
    assert [architecture.runs(c, built) for c in ((8, 6), (8, 9), (9, 0), (10, 0), (12, 1), (7, 5))] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]


def test_cards_of_two_kinds(tmp_path):
    mixed = machine(tmp_path, run=answers(f"{RTX3090}\n{RTX5090.replace('0,', '1,', 1)}"))
    assert architecture.check(mixed, asked(ranks=2)).state == WARN
    assert architecture.check(mixed, asked(ranks=1)).state == OK
    assert architecture.check(replace(mixed, run=answers("0, X, [N/A], 1, 2, 3")), asked()).state == WARN


# -- driver and compat libraries -------------------------------------------------------------------------------------


def with_driver(version, card=RTX3090):
    cells = card.split(", ")
    return answers(", ".join([*cells[:3], version, *cells[4:]]))


@pytest.mark.parametrize(
    ("cuda", "version", "state", "needs"),
    [
        ("13.0", "580.65.06", OK, "580.65.06"),
        ("13.0", "575.57.08", FAIL, "580.65.06"),
        ("12.9", "575.57.08", OK, "575.57.08"),
        ("12.9", "550.54.15", WARN, "575.57.08"),
        ("12.9", "520.61", FAIL, "575.57.08"),
        ("14.0", "580.65.06", WARN, "not in the doctor's table"),
        ("", "580.65.06", WARN, "CUDA_VERSION is not set"),
    ],
)
def test_the_driver_against_cuda(tmp_path, cuda, version, state, needs):
    line = driver.check(machine(tmp_path, run=with_driver(version), cuda=cuda), asked())
    assert line.state == state and needs in line.found
    assert bool(line.step) == (state != OK)


@pytest.mark.parametrize(
    ("card", "cuda", "other"), [(RTX3090, "13.0", True), (RTX3090, "12.9", False), (RTX5090, "13.0", False)]
)
def test_an_older_driver_has_an_image_on_an_older_card(tmp_path, card, cuda, other):
    line = driver.check(machine(tmp_path, run=with_driver("470.10", card), cuda=cuda), asked())
    assert line.state == FAIL and "Install driver" in line.step
    assert ("RELEASE=v0.32.0 VARIANT=sm86" in line.step) is other


def test_a_5090_needs_the_driver_of_its_ptx(tmp_path):
    old = machine(tmp_path, run=with_driver("570.86", RTX5090), cuda="12.9")
    line = driver.check(old, asked())
    assert line.state == FAIL and "PTX" in line.found and "575.57.08" in line.step
    assert driver.check(replace(old, run=with_driver("576.57", RTX5090)), asked()).state == OK


def test_without_torch_the_image_names_cuda(tmp_path):
    def missing():
        raise ImportError("No module named 'torch'")

    box = replace(machine(tmp_path, CUDA_VERSION="13.0.2"), torch_cuda=missing)
    assert driver.check(box, asked()).found == "driver 580.95.05, and CUDA 13.0.2 needs 580.65.06"


def test_under_wsl_the_driver_is_windows(tmp_path):
    line = driver.check(windows(tmp_path, run=with_driver("566.36", RTX5090)), asked())
    assert line.state == FAIL and "in Windows" in line.step


def compat(box):
    put(box.root, "/usr/local/cuda-13.0/compat/libcuda.so.580.95.05")
    (box.root / "usr/local/cuda").symlink_to("cuda-13.0")


def test_a_data_centre_card_may_use_compat_libraries(tmp_path):
    box = machine(tmp_path, run=answers(H100), LD_LIBRARY_PATH="/usr/local/cuda/compat:/usr/lib")
    assert driver.check(box, asked()).state == FAIL, "no compat libraries"
    compat(box)
    assert driver.check(box, asked()).state == WARN
    assert driver.check_compat(box, asked()).state == OK


@pytest.mark.parametrize("way", ["LD_LIBRARY_PATH", "/etc/ld.so.conf.d/00.conf", "/etc/ld.so.cache", "VLLM"])
def test_compat_libraries_before_a_geforce_cards_driver(tmp_path, way):
    box = machine(tmp_path)
    assert "has none" in driver.check_compat(box, asked()).found
    compat(box)
    assert driver.check_compat(box, asked()).state == OK, "there and not in the path"
    if way == "LD_LIBRARY_PATH":
        box = replace(box, environ={way: "/usr/lib:/usr/local/cuda/compat"})
    elif way == "VLLM":
        box = replace(box, environ={"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"})
    elif way.endswith(".conf"):
        put(box.root, way, "# first\n/usr/local/cuda-13.0/compat\n")
    else:
        put(box.root, way, b"glibc-ld.so.cache1.1\0libcuda.so.1\0/usr/local/cuda-13.0/compat/libcuda.so.1\0")
    line = driver.check_compat(box, asked())
    assert line.state == WARN and "803 or 804" in line.found and "/usr/local/cuda" in line.found and line.step
    file = box.root / way.lstrip("/")
    mended = replace(box, environ={})
    if file.is_file():
        file.unlink()
    assert driver.check_compat(mended, asked()).state == OK


# -- WSL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "said", "step"),
    [
        ("4.4.0-19041-Microsoft", "WSL 1", "--set-version"),
        ("4.19.84-microsoft-standard-WSL2", "page-lock", "wsl --update"),
        ("6.6.87.2-microsoft-standard-WSL2", "CUDA graphs", "wsl --update"),
        ("6.10.14-linuxkit", "Docker Desktop", "WSL 2 based engine"),
    ],
)
def test_an_old_wsl(tmp_path, kernel, said, step):
    box = windows(tmp_path, kernel=kernel)
    line = wsl.check(box, asked())
    assert line.state == WARN and said in line.found and step in line.step
    put(box.root, "/proc/sys/kernel/osrelease", "6.6.114.1-microsoft-standard-WSL2\n")
    assert wsl.check(box, asked()).state == OK


def test_older_cards_capture_graphs_on_an_older_wsl(tmp_path):
    assert wsl.check(windows(tmp_path, kernel="6.6.87.2-microsoft-standard-WSL2", run=answers()), asked()).state == OK
    assert wsl.check(machine(tmp_path / "linux"), asked()).found.startswith("not WSL")


def test_two_gpus_under_wsl(tmp_path):
    line = wsl.check(windows(tmp_path, run=answers(TWO)), asked(ranks=2))
    assert line.state == WARN and line.step == "Set NCCL_P2P_DISABLE=1"
    assert wsl.check(windows(tmp_path / "b", run=answers(TWO), NCCL_P2P_DISABLE="1"), asked(ranks=2)).state == OK


# -- GPU memory ------------------------------------------------------------------------------------------------------


def test_who_uses_the_gpu(tmp_path):
    busy = RTX3090.replace("24100", "9000")
    box = machine(tmp_path, run=answers(busy, apps="1234, /usr/bin/ollama, 14800", display="Enabled"))
    line = vram.check(box, asked())
    assert line.state == WARN
    assert "8.79 GiB of 24.00 GiB; used by /usr/bin/ollama (pid 1234, 14800 MiB); a display is in use" in line.found
    share = float(line.step.rsplit(" ", 1)[1])
    assert share == 0.34 and vram.check(box, asked(utilization=share)).state == OK
    assert vram.check(replace(box, run=answers()), asked()).state == OK


def test_on_wsl_processes_are_not_told(tmp_path):
    assert "not told on WSL" in vram.check(windows(tmp_path), asked()).found


def test_the_releases_default_share(tmp_path):
    box = machine(tmp_path)
    assert vram.utilization(box, asked()) == 0.92
    for part in box.site.glob("*.dist-info"):
        (part / "METADATA").unlink()
        part.rmdir()
    patched(box.site, version="0.18.0")
    assert vram.utilization(box, asked()) == 0.9 and vram.utilization(box, asked(utilization=0.5)) == 0.5


def test_spilling_under_wsl(tmp_path):
    box = windows(tmp_path)
    line = vram.check_spill(box, asked(utilization=0.95))
    assert line.state == WARN and "Sysmem Fallback" in line.step
    share = float(line.step.split()[3])
    assert 0.85 < share <= 0.91 and vram.check_spill(box, asked(utilization=share)).state == OK
    assert vram.check_spill(machine(tmp_path / "linux"), asked()).state == OK
    assert vram.check_spill(replace(box, run=no_command), asked()).state == WARN
