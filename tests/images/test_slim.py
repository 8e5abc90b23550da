# SPDX-License-Identifier: Apache-2.0
"""The variant `slim`: its locks, what is taken out of the wheel, and its stages of the Dockerfile.

A whole slim image is gigabytes of packages, which no test here downloads. Its install step runs for real on the pin's
own wheel, and what stands on that step on a stand-in that has the wheel.
"""

import ast
import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import standin
from standin import NAME, PINS, ROOT

sys.path[:0] = [str(ROOT / "docker"), str(ROOT / "docker" / "slim"), str(ROOT / "tools")]
import arch  # noqa: E402
import images  # noqa: E402
import prune  # noqa: E402

pytestmark = pytest.mark.images
LOCKS = {path.stem: path for path in sorted((ROOT / "docker" / "slim").glob("*.txt"))}
WHEELS = Path.home() / ".cache" / "vllm-offload" / "wheels"
GONE = [*prune.LIBRARIES, *prune.FOLDERS]


@pytest.fixture(params=[*LOCKS])
def wheel(request):
    path = WHEELS / PINS[request.param]["wheel"]["file"]
    if not path.is_file():
        pytest.skip(f"{path} is not there: make fetch")
    return path


@pytest.fixture
def tree(wheel, tmp_path):
    """The wheel's libraries, and the folders that go."""
    with zipfile.ZipFile(wheel) as z:
        names = [n for n in z.namelist() if n.endswith(".so") or n.startswith(tuple(f"{f}/" for f in prune.FOLDERS))]
        z.extractall(tmp_path, names)
    return tmp_path


# -- locks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tag", LOCKS)
def test_a_lock_names_every_package_once_by_hash_and_no_index(tag):
    text = LOCKS[tag].read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    named = {}
    for line in lines:
        found = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+) *", line)
        assert found, f"not name==version with hashes: {line[:100]}"
        assert found[1] not in named
        named[found[1]] = (found[2], set(re.findall(r"[0-9a-f]{64}", found[3])))
    version, hashes = named["vllm"]
    assert version == PINS[tag]["version"] and PINS[tag]["wheel"]["sha256"] in hashes
    assert named["torch"][0] == PINS[tag]["torch"]
    assert "://" not in text and "index" not in re.sub(r"#.*", "", text)
    assert "uv pip compile" in text and "--exclude-newer" in text, "the comment says how it was made"


def test_the_dockerfile_and_the_tool_name_the_same_pins_and_base():
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"(?m)^FROM slim AS base-(\S+)-slim$", text) == [*LOCKS]
    assert re.findall(r"(?m)^ARG SLIM_BASE=(\S+)$", text) == [images.SLIM_BASE]
    assert not set(images.NO_SLIM) & set(LOCKS), "a pin has a slim image or a reason against it"


def test_pins_without_a_lock_are_refused_with_what_to_build_instead():
    for tag in [tag for tag in PINS if tag not in LOCKS]:
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / "images.py", "build", "--variant", "slim", "--release", tag],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and done.stderr.startswith(f"images: {tag} has no slim image: "), done.stderr
        assert "--variant sm86" in done.stderr and ", ".join(LOCKS) in done.stderr


def test_slim_comes_only_when_it_is_named():
    assert {image.variant for image in images.chosen("all", None)} == {"cu130", "sm86"}
    assert [image.release for image in images.chosen("all", "slim")] == [*LOCKS]
    assert images.chosen(None, "slim")[0].tag("n") == f"n:{[*LOCKS][-1]}-slim"


# -- what is taken out -------------------------------------------------------------------------------------------------
def test_what_goes_has_no_code_for_the_cards_and_what_stays_has(tree):
    before = set(tree.rglob("*.so"))
    removed = dict(prune.prune(tree))
    assert removed["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"] > 100e6 and set(prune.FOLDERS) <= set(removed)
    assert not any((tree / folder).exists() for folder in prune.FOLDERS)
    assert all(str(path.relative_to(tree)).startswith(tuple(GONE)) for path in before - {*tree.rglob("*.so")})
    assert arch.check(tree, "slim")[1] == []


def test_a_library_with_code_for_the_cards_is_kept_by_refusing(tree):
    fa2 = tree / "vllm" / "vllm_flash_attn" / "_vllm_fa2_C.abi3.so"
    fa2.replace(tree / "vllm" / "_flashmla_C.abi3.so")
    files = {*tree.rglob("*")}
    said = r"vllm/_flashmla_C\.abi3\.so has code for 8\.0, 8\.6, 8\.9, which slim serves"
    with pytest.raises(arch.Damaged, match=said):
        prune.prune(tree)
    assert {*tree.rglob("*")} == files


def test_a_tree_without_any_of_it_is_refused(tmp_path, capsys):
    (tmp_path / "vllm").mkdir()
    assert prune.main(["--tree", str(tmp_path)]) == 1
    assert "is it a CUDA build of vLLM?" in capsys.readouterr().err


def unguarded(tree: ast.Module):
    """Modules that importing a file imports, come what may: not in a function, a `try`, an `if` or a `suppress`."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            yield from unguarded(node)


def test_nothing_that_stays_imports_what_goes(wheel):
    # FlashMLA's Python part stays, and is of no use without its library: nothing may import that either.
    useless = "vllm/third_party/flashmla"
    gone = tuple(name.replace("/", ".") for name in (*GONE, useless))
    found, files = [], 0
    with zipfile.ZipFile(wheel) as z:
        for name in z.namelist():
            if name.endswith(".py") and not name.startswith(
                tuple(f"{folder}/" for folder in (*prune.FOLDERS, useless))
            ):
                files += 1
                found += [(name, m) for m in unguarded(ast.parse(z.read(name))) if m.startswith(gone)]
    assert files > 1000 and found == []


# -- the Dockerfile's stages -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tag", LOCKS)
def test_the_variant_on_a_base_that_has_the_wheel(base, build, tag):
    made = build(tag, "slim", base(tag), more=["--build-arg", f"BASE={base(tag)}"])
    assert made.rc == 0, made.said
    env = json.loads(made.run("python3", "-c", "import json, os; print(json.dumps(dict(os.environ)))"))
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "there is no nvcc to compile it"
    assert env["VLLM_OFFLOAD_ARCHS"] == " ".join(arch.VARIANTS["slim"][0]) == env["TORCH_CUDA_ARCH_LIST"]
    assert env["EXPERT_OFFLOAD_IMAGE"].endswith("-slim")


@pytest.fixture
def python_base(engine, wheel):
    """A Python with a compiler, as the slim stage leaves it, and the pin's wheel in a folder for pip."""
    tag = f"{NAME}/python:latest"
    if not standin.docker("image", "ls", "-q", tag):
        standin.imported(tag, compiler=True, changes=[f"ENV PATH={standin.CONTAINER_PATH}", f"LABEL {standin.OURS}"])

    def fill(file):
        tar = standin.Tar(file)
        tar.stream(f"wheels/{wheel.name}", wheel.stat().st_size, io.BytesIO(wheel.read_bytes()))
        tar.tar.close()

    standin.change(tag, f"{NAME}/python:wheel", fill)
    return f"{NAME}/python:wheel"


@pytest.mark.parametrize("right", [True, False])
def test_the_install_step_holds_to_hashes_and_to_what_packages_ask_for(python_base, build, checkout, tmp_path, right):
    """With a lock of vLLM alone: its own bytes are taken, others are not, and what it asks for is missed."""
    tag = [*LOCKS][-1]
    pin = PINS[tag]
    tree = checkout()
    digest = pin["wheel"]["sha256"] if right else "0" * 64
    (tree / "docker" / "slim" / f"{tag}.txt").write_text(f"vllm=={pin['version']} --hash=sha256:{digest}\n")
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    made = build(tag, "slim", python_base, tree=tree, more=["--secret", f"id=pip,src={tmp_path / 'pip.conf'}"])
    assert made.rc == 1
    if right:
        assert f"vllm {pin['version']} requires torch, which is not installed" in made.said, made.said
    else:
        assert "DO NOT MATCH THE HASHES" in made.said and f"Got        {pin['wheel']['sha256']}" in made.said, made.said
