# SPDX-License-Identifier: Apache-2.0
"""Every image of every pin, built on a stand-in of its base and looked into; and what must not build."""

import io
import json
import re
import subprocess
import tarfile
import time
import uuid

import fatbin
import pytest
import standin
from standin import NAME, PINS, ROOT, series

pytestmark = pytest.mark.images
IMAGES = [(tag, variant) for tag, pin in PINS.items() for variant in pin["images"]]
CUDA_13 = {"v0.33.0"}  # pins without a base of CUDA 12
OFFLOAD = "/opt/vllm-offload/vllm_offload.py"
INSPECT = """
import importlib.util, json, os, pathlib, sys
tree = pathlib.Path(importlib.util.find_spec("vllm").origin).parents[1]
state = json.loads((tree / "vllm/.vllm-offload/state.json").read_text())
flags = {}
for path in state["files"]:
    compiled = pathlib.Path(importlib.util.cache_from_source(str(tree / path)))
    flags[path] = compiled.read_bytes()[4] if compiled.is_file() else None
print(json.dumps({"tree": str(tree), "state": state["state"], "flags": flags, "uid": os.getuid(), "gid": os.getgid(),
    "cache": os.access("/cache", os.W_OK), "tree_writable": os.access(tree / "vllm", os.W_OK),
    "env": dict(os.environ), "compat": [str(p) for p in pathlib.Path("/usr/local").glob("cuda*/compat/*")],
    "texts": sorted(p.name for p in pathlib.Path("/usr/share/doc/vllm-offload").iterdir())}))
"""


@pytest.mark.parametrize("tag, variant", IMAGES, ids=lambda x: x)
def test_every_image(base, build, tag, variant):
    made = build(tag, variant, base(tag))
    assert made.rc == 0, made.said
    assert made.run("python3", OFFLOAD, "status").startswith(f"patched: {tag}, series {series(tag)}, ")
    checked = [cached for text, cached in made.steps().items() if "/tmp/arch.py" in text]
    assert checked == [True] or re.search(r"_vllm_fa2_C\S*: \d+ fat binaries, usable on .*8\.6: \d+", made.said)
    found = json.loads(made.run("python3", "-c", INSPECT))
    assert found["state"] == "applied" and found["tree"].endswith("/dist-packages")
    assert set(found["flags"].values()) == {3}, "bytecode is there, and checked by the source's hash"
    assert (found["uid"], found["gid"], found["cache"], found["tree_writable"]) == (2000, 0, True, False)
    assert found["texts"] == ["LICENSE", "NOTICE"]
    env = found["env"]
    assert env["VLLM_IMAGE_TAG"] == f"vllm-offload:{tag}-{variant}"
    if variant == "sm86":
        asked = "cuda>=13.0" if tag in CUDA_13 else "cuda>=12.0 driver>=525.60.13"
        assert env["NVIDIA_REQUIRE_CUDA"] == asked and env["TORCH_CUDA_ARCH_LIST"] == "8.6"
        assert found["compat"] == []
    else:
        assert env["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.9" and "7.0" not in env["TORCH_CUDA_ARCH_LIST"]
        assert len(found["compat"]) == 2
    config = standin.config(made.image)["Config"]
    labels = {k.removeprefix("org.opencontainers.image."): v for k, v in config["Labels"].items()}
    assert labels["vllm-offload.series"] == series(tag) and labels["vllm-offload.release"] == tag
    assert labels["base.name"] == base(tag) and labels["base.digest"] == standin.config(base(tag))["Id"]
    assert labels["title"] == "vllm-offload" and labels["licenses"] == "Apache-2.0"
    assert "vllm-project" not in json.dumps(labels), "the base's own labels would say that this is the official image"
    assert config["User"] == "2000:0" and "/cache" in config["Volumes"]
    assert config["Entrypoint"] == ["/usr/local/bin/vllm-offload-entrypoint"] and not config["Cmd"]


def test_what_it_adds_is_small(base, build):
    made = build("v0.26.0", "sm86", base("v0.26.0"))
    below = standin.config(base("v0.26.0"))
    assert made.layers()[: len(below["RootFS"]["Layers"])] == below["RootFS"]["Layers"]
    assert standin.config(made.image)["Size"] - below["Size"] < 6e6, "4.1 MB for v0.26.0, of 26 GB"


def test_a_base_of_another_release_is_refused(base, build):
    made = build("v0.26.0", "sm86", base("v0.32.0"))
    assert made.rc == 1
    assert "install: RELEASE=v0.26.0 asked for vllm 0.26.0, and the base holds 0.32.0 in " in made.said
    assert "give a BASE of that release" in made.said and "v0.26.0-cu129" in made.said


@pytest.fixture
def changed(base):
    """A base with one file changed by a command."""
    tag = f"{NAME}/changed:latest"

    def change(release, path, edit):
        container = standin.docker("create", base(release), "true")
        packages = standin.docker(
            "run", "--rm", "--entrypoint", "python3", base(release), "-c",
            "import importlib.util as u; print(u.find_spec('vllm').origin.removesuffix('/vllm/__init__.py'))",
        )  # fmt: skip
        try:
            command = ["docker", "cp", f"{container}:{packages}/{path}", "-"]
            raw = subprocess.run(command, capture_output=True, check=True).stdout
        finally:
            standin.docker("rm", container)
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            data = edit(tar.extractfile(tar.getmembers()[0]).read())

        def fill(file):
            tar = standin.Tar(file)
            tar.stream(f"{packages.lstrip('/')}/{path}", len(data), io.BytesIO(data))
            tar.tar.close()

        standin.change(base(release), tag, fill)
        return tag

    return change


def test_one_byte_of_a_touched_file_is_enough_to_refuse(build, changed):
    path = "vllm/model_executor/models/utils.py"
    made = build("v0.26.0", "sm86", changed("v0.26.0", path, lambda data: data.replace(b"import", b"imporT", 1)))
    assert made.rc == 1 and f"{path} is not v0.26.0's" in made.said and "Nothing was changed" in made.said


def test_a_library_without_code_for_the_card_is_refused(build, changed):
    hopper = fatbin.library(fatbin.container(fatbin.entry(fatbin.SASS, 90)))
    path = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
    made = build("v0.26.0", "sm86", changed("v0.26.0", path, lambda _: hopper))
    assert made.rc == 1 and f"arch: {path} has no code for 8.6: 1 fat binaries" in made.said
    assert "variant sm86 is for GPUs 8.6: take the base that patches/releases.toml names" in made.said


def test_a_checkout_with_crlf_builds_the_same(base, build, checkout):
    """git on Windows writes CRLF into what .gitattributes does not protect."""
    tree = checkout("core.autocrlf=true", "core.eol=crlf")
    assert b"\r\n" in (tree / "LICENSE").read_bytes(), "the clone is as on Windows"
    assert b"\r\n" not in (tree / "docker" / "entrypoint.sh").read_bytes()
    made = build("v0.32.0", "sm86", base("v0.32.0"), tree=tree, name=f"{NAME}-crlf")
    assert made.rc == 0, made.said
    assert made.run("python3", OFFLOAD, "status").startswith(f"patched: v0.32.0, series {series('v0.32.0')}, ")


def test_an_edited_patch_rebuilds_the_last_layers_alone(base, build, checkout):
    tree = checkout()
    before = build("v0.26.0", "sm86", base("v0.26.0"), tree=tree, name=f"{NAME}-edit")
    assert before.rc == 0, before.said
    layers = before.layers()
    patch = min((tree / "patches" / "v0.26.0").glob("*.patch"))
    edit = f"Subject: Edited {uuid.uuid4()}: ".encode()  # never built before, so in no cache
    patch.write_bytes(patch.read_bytes().replace(b"Subject: ", edit, 1))
    began = time.monotonic()
    after = build("v0.26.0", "sm86", base("v0.26.0"), tree=tree, name=f"{NAME}-edit")
    seconds = time.monotonic() - began
    assert after.rc == 0, after.said
    run_again = [text for text, cached in after.steps().items() if not cached]
    assert len(run_again) <= 3, run_again
    assert any("patches/v0.26.0" in text for text in run_again) and any("install.py" in text for text in run_again)
    assert not any("arch.py" in text or "entrypoint" in text or "ldconfig" in text for text in run_again)
    kept = sum(a == b for a, b in zip(layers, after.layers()))
    print(f"{seconds:.1f} s, {kept} of {len(layers)} layers as before")
    assert kept >= len(layers) - 3
    now = after.run("python3", OFFLOAD, "status")
    assert now.startswith("patched: v0.26.0, series ") and series("v0.26.0") not in now


def test_revert_inside_gives_the_release_back(base, build):
    made = build("v0.26.0", "sm86", base("v0.26.0"))
    said = made.run("bash", "-c", f"python3 {OFFLOAD} revert && python3 {OFFLOAD} status", user="0:0")
    assert "reverted v0.26.0" in said and "clean: v0.26.0" in said


def test_the_dockerfile_names_the_bases_of_the_pins():
    """Compose builds with RELEASE and VARIANT alone, and the Dockerfile can't read a table."""
    text = (ROOT / "Dockerfile").read_text()
    named = {m[2]: m[1] for m in re.finditer(r"(?m)^FROM (\S+/\S+) AS base-(\S+)$", text)}
    assert named == {f"{tag}-{variant}": PINS[tag]["images"][variant] for tag, variant in IMAGES}
    stages = {m[2]: m[1] for m in re.finditer(r"(?m)^FROM (base|cuda12) AS sm86-(\S+)$", text)}
    wanted = {tag: "base" if tag in CUDA_13 else "cuda12" for tag, variant in IMAGES if variant == "sm86"}
    assert stages == wanted, "which driver an sm86 image asks for"


def test_a_release_without_the_variant_and_one_that_is_no_pin(engine, build):
    assert "v0.32.0 names no cu130" in build("v0.32.0", "cu130", "any").said
    assert "v9 is no pin; pins: v0.17.1" in build("v9", "cu130", "any").said


def test_a_base_that_is_nowhere_is_named(build):
    made = build("v0.26.0", "cu130", "vllm-offload-test.invalid/none:v1")
    assert made.rc == 1 and "the base vllm-offload-test.invalid/none:v1 is neither here nor in a registry" in made.said
