# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an official base image, made on this machine without a network.

This Debian's own programs, a CPython and the real wheel, compiled libraries included, at the official image's paths.
What is missing is torch and CUDA, which the build of our image does not touch.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
import vllm_offload as cli  # noqa: E402

NAME = "vllm-offload-images-test"
PINS = tomllib.loads((ROOT / "patches" / "releases.toml").read_text())

PACKAGES = [
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "debianutils",
    "diffutils",
    "findutils",
    "grep",
    "gzip",
    "hostname",
    "libc-bin",
    "libc6",
    "login",
    "mawk",
    "passwd",
    "perl-base",
    "sed",
    "tar",
    "util-linux",
    "libssl3",
    "libffi8",
    "libsqlite3-0",
    "zlib1g",
    "liblzma5",
    "libstdc++6",
    "libgcc-s1",
]
# What python:*-slim has not, and the Dockerfile's slim stage would fetch.
COMPILER = [
    "binutils",
    "binutils-common",
    "binutils-x86-64-linux-gnu",
    "cpp-12",
    "gcc",
    "gcc-12",
    "libc6-dev",
    "libcrypt-dev",
    "libgcc-12-dev",
    "linux-libc-dev",
]
MERGED = ("bin", "sbin", "lib", "lib64")  # links into usr, as Debian and Ubuntu have them
UNUSED = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bash-completion)/")
OURS = "vllm-offload.images-test=1"  # inherited by all that is built on a stand-in; what has it may be removed
CONTAINER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def docker(*arguments: str, data=None) -> str:
    done = subprocess.run(["docker", *arguments], input=data, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout.decode().strip()


def python() -> Path:
    """A Python 3.12, as the official images have; else the one that runs the tests."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*sorted(pyenv.glob("3.12.*/bin/python3.12")), *filter(None, [shutil.which("python3.12")]), sys.executable]
    return Path(found[0])


def asked(interpreter: Path, expression: str) -> str:
    code = f"import sys, sysconfig; print({expression})"
    return subprocess.run([interpreter, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def linked(programs: list[str]) -> set[str]:
    """The shared libraries that programs need, and what their links point to."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    found = set(re.findall(r"(?:=> )?(/\S+) \(0x", said))
    return found | {os.path.realpath(path) for path in found}


class Tar:
    """A tar file for `docker import` or `docker cp`, its folders made on the way."""

    def __init__(self, file) -> None:
        self.tar = tarfile.open(fileobj=file, mode="w|")  # noqa: SIM115
        self.seen: set[str] = set()

    def folder(self, name: str, mode: int = 0o755) -> None:
        if name and name not in self.seen:
            self.folder(os.path.dirname(name))
            self.seen.add(name)
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            self.tar.addfile(info)

    def link(self, name: str, target: str) -> None:
        if name not in self.seen:
            self.folder(os.path.dirname(name))
            self.seen.add(name)
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            self.tar.addfile(info)

    def stream(self, name: str, size: int, file, mode: int = 0o644) -> None:
        if name not in self.seen:
            self.folder(os.path.dirname(name))
            self.seen.add(name)
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, mode
            self.tar.addfile(info, file)

    def text(self, name: str, text: str) -> None:
        self.stream(name, len(text.encode()), io.BytesIO(text.encode()))

    def copy(self, source: str, name: str | None = None) -> None:
        name = (name or source).lstrip("/")
        if name.split("/")[0] in MERGED:
            name = f"usr/{name}"
        if os.path.islink(source):
            self.link(name, os.readlink(source))
        elif os.path.isfile(source):
            with open(source, "rb") as f:
                self.stream(name, os.path.getsize(source), f, os.stat(source).st_mode & 0o755)


def system(file, compiler: bool = False) -> None:
    """Programs and a CPython in /usr/local, without vLLM; with `compiler` also one of C, Python's headers and pip."""
    packages = [*PACKAGES, *(COMPILER if compiler else [])]
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True).stdout.splitlines()
    files = sorted({path for path in listed if path.startswith("/") and not UNUSED.match(path)})
    interpreter = python()
    version = asked(interpreter, "'python%d.%d' % sys.version_info[:2]")
    stdlib = Path(asked(interpreter, "sysconfig.get_path('stdlib')"))
    binary = asked(interpreter, "__import__('os').path.realpath(sys.executable)")
    programs = [p for p in files if re.match(r"/((usr/)?s?bin|usr/lib/gcc)/", p) and os.access(p, os.X_OK)]
    programs = [p for p in programs if os.path.isfile(p)]
    libraries = linked([*programs, binary, *map(str, (stdlib / "lib-dynload").glob("*.so"))])
    tar = Tar(file)
    for name in MERGED:
        tar.folder(f"usr/{name}")
        tar.link(name, f"usr/{name}")
    tar.text("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
    tar.text("etc/group", "root:x:0:\n")
    for name in ("proc", "sys", "dev", "root", "run", "var/log", "home", "vllm-workspace", "usr/local/bin"):
        tar.folder(name)
    tar.folder("tmp", 0o1777)
    for path in [*files, *sorted(libraries), "/etc/login.defs"]:
        tar.copy(path)
    tar.copy(binary, f"/usr/local/bin/{version}")
    tar.link("usr/local/bin/python3", version)
    for path in sorted(stdlib.rglob("*")):
        inside = path.relative_to(stdlib)
        if not {"test", "site-packages", "dist-packages", "__pycache__", "idlelib", "tkinter"} & set(inside.parts):
            tar.copy(str(path), f"/usr/local/lib/{version}/{inside}")
    packages = f"/usr/local/lib/{version}/dist-packages"
    tar.folder(packages[1:])
    tar.text(f"usr/local/lib/{version}/site-packages/official.pth", packages + "\n")
    for path in sorted(Path(stdlib.parent).glob("libpython*.so*")):
        tar.copy(str(path), f"/usr/local/lib/{path.name}")
    if compiler:
        headers = Path(asked(interpreter, "sysconfig.get_path('include')"))
        for path in sorted(headers.rglob("*.h")):
            tar.copy(str(path), f"/usr/local/include/{version}/{path.relative_to(headers)}")
        with zipfile.ZipFile(next((stdlib / "ensurepip" / "_bundled").glob("pip-*.whl"))) as z:
            for info in filter(lambda info: not info.is_dir(), z.infolist()):
                with z.open(info) as f:
                    tar.stream(f"usr/local/lib/{version}/site-packages/{info.filename}", info.file_size, f)
    tar.tar.close()


def vllm(file, wheel: Path, packages: str) -> None:
    """The wheel as pip lays it, and the compatibility libraries' folder that CUDA's images bring."""
    tar = Tar(file)
    with zipfile.ZipFile(wheel) as z:
        for info in z.infolist():
            if not info.is_dir() and ".data/" not in info.filename:
                with z.open(info) as f:
                    tar.stream(f"{packages.lstrip('/')}/{info.filename}", info.file_size, f)
    tar.text("usr/local/cuda-12.9/compat/libcuda.so.575.57.08", "what a newer driver's library would be\n")
    tar.link("usr/local/cuda-12.9/compat/libcuda.so.1", "libcuda.so.575.57.08")
    tar.tar.close()


def change(base: str, tag: str, fill, changes: list[str] = ()) -> None:
    """`tag`: the image `base` with what `fill` writes to a tar file, and with changes of its settings."""
    container = docker("create", base, "true")
    try:
        with subprocess.Popen(["docker", "cp", "-", f"{container}:/"], stdin=subprocess.PIPE) as copy:
            fill(copy.stdin)
            copy.stdin.close()
            if copy.wait():
                raise RuntimeError(f"docker cp into {base} failed")
        docker("commit", *[part for text in changes for part in ("--change", text)], container, tag)
    finally:
        docker("rm", container)


def imported(tag: str, compiler: bool = False, changes: list[str] = ()) -> None:
    """`tag`: an image of what `system` writes."""
    command = ["docker", "import", *[part for text in changes for part in ("--change", text)], "-", tag]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as load:
        system(load.stdin, compiler)
        load.stdin.close()
        if load.wait():
            raise RuntimeError("docker import failed")


def make(tag: str, system_tag: str, wheel: Path) -> None:
    """A base under `tag`, like the official one of the wheel's release."""
    if not docker("image", "ls", "-q", system_tag):
        imported(system_tag)
    where = "import sysconfig; print([p for p in __import__('sys').path if p.endswith('dist-packages')][0])"
    packages = docker("run", "--rm", "--network=none", system_tag, "/usr/local/bin/python3", "-c", where)
    changes = [
        f"ENV PATH={CONTAINER_PATH} NVIDIA_REQUIRE_CUDA=cuda>=12.9 VLLM_IMAGE_TAG={tag}",
        "LABEL org.opencontainers.image.source=https://github.com/vllm-project/vllm",
        "LABEL org.opencontainers.image.title=vLLM",
        f"LABEL {OURS}",
        "WORKDIR /vllm-workspace",
        'ENTRYPOINT ["vllm","serve"]',
    ]
    change(system_tag, tag, lambda file: vllm(file, wheel, packages), changes)


def config(image: str) -> dict:
    return json.loads(docker("image", "inspect", image))[0]


def series(tag: str) -> str:
    """The hash that labels and `status` must name."""
    return cli.pin_for(PINS[tag]["version"]).hash
