# SPDX-License-Identifier: Apache-2.0
"""A small project, a small vllm, and a way to let vllm_offload.py fail on purpose.

Run as a program, this file is a server that forks a child for every command: the child can be killed or given an error
at any step that changes the disk, and what it leaves behind is what a dead process leaves. Starting Python each time
would take most of a test's time, and forking pytest would drag its threads along.
"""

import contextlib
import difflib
import errno
import gc
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
JOURNAL = "vllm/.vllm-offload"
STEPS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")  # Python audits each; reads are left out
ERRORS = {"full": errno.ENOSPC, "denied": errno.EACCES, "io": errno.EIO}


def load(name: str, file: Path):
    """The module at `file`, once, under `name`: tools/series.py imports vllm_offload by that name and must get this."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# -- a project and a release -----------------------------------------------------------------------------------------
def unified(path: str, old: bytes | None, new: bytes, context: int = 1) -> bytes:
    """The diff of one file as git writes it: difflib alone glues a last line without an end to the next one."""
    before, after = (list(io.BytesIO(data or b"")) for data in (old, new))
    names = [b"/dev/null" if old is None else b"a/" + path.encode(), b"b/" + path.encode()]
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, *names, n=context)
    return b"".join(x if x.endswith(b"\n") else x + b"\n\\ No newline at end of file\n" for x in lines)


def installed(tree: Path, name: str, version: str) -> None:
    info = tree / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def snapshot(folder: Path, journal: bool = True) -> dict[str, tuple[int, bytes | None]]:
    """Mode and bytes of all under `folder`, None for a folder's bytes; `journal` says whether with the journal."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if journal or not name.startswith(JOURNAL):
            found[name] = (path.stat().st_mode, None if path.is_dir() else path.read_bytes())
    return found


CONFIG = "".join(f"value_{i} = {i}\n" for i in range(60)).encode()
RELEASE = {
    "vllm/__init__.py": b'raise RuntimeError("the tool must find vllm without importing it")\n',
    "vllm/config.py": CONFIG,
    "vllm/last.py": b"first = 1\nlast = 2",  # its last line has no end
    "vllm/untouched.py": b"untouched = True\n",
    "vllm/worker/__init__.py": b"",  # empty, and the series puts a line into it
    "vllm/worker/runner.py": b"def run():\n    return 1\n" + b"".join(b"# filler %d\n" % i for i in range(300)),
}
MODES = {"vllm/config.py": 0o600, "vllm/worker/runner.py": 0o755}
ADAPTER = {"vllm/adapter.py": b"import vllm\n"}
FIRST = {"vllm/config.py": CONFIG.replace(b"value_20 = 20\n", b"value_20 = 21\nmore = 1\n"), **ADAPTER}
SECOND = {
    "vllm/config.py": FIRST["vllm/config.py"].replace(b"value_3 = 3\n", b"").replace(b"value_50 = 50", b"value_50 = 0"),
    "vllm/adapter.py": ADAPTER["vllm/adapter.py"] + b"x = 1\n",
    "vllm/last.py": b"first = 1\nlast = 3",
    "vllm/worker/__init__.py": b"inside = 1\n",
    "vllm/worker/runner.py": RELEASE["vllm/worker/runner.py"].replace(b"return 1", b"return 2"),
    "vllm/new/deep/added.py": b"added = True\n",  # in folders that the release does not have
}
SERIES = [("Change the config", FIRST), ("Change the rest", SECOND)]
MODULES = {
    "__init__.py": b'"""Ours."""\n',
    "host.py": b"memory = 'host'\n" * 40,
    "twin.py": b"memory = 'host'\n" * 40,
    "doctor/__init__.py": b'"""Below."""\n',
    "doctor/checks.py": b"checks = ()\n",
}


@dataclass
class Result:
    code: int
    text: str
    steps: list[list[str]] = field(default_factory=list)  # [what, path] of everything that changed the disk
    peak: int = 0  # most bytes that lay in the tree, with `room` given


class Project:
    """A checkout with pins in `root/project`, and trees that they are for in `root/NAME`."""

    def __init__(self, root: Path, server: "Server") -> None:
        self.root, self.here, self.server = root, root / "project", server
        self.patches = self.here / "patches"
        for name, data in MODULES.items():
            file = self.here / "vllm" / "expert_offload" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        self.patches.mkdir()
        (self.patches / "releases.toml").touch()

    def pin(
        self, version: str, series: list[tuple[str, dict[str, bytes]]], release: dict[str, bytes] = RELEASE
    ) -> Path:
        """patches/vVERSION, from the files after each patch; gives the folder."""
        folder, current, changed = self.patches / f"v{version}", dict(release), set()
        folder.mkdir()
        for number, (subject, files) in enumerate(series, 1):
            changed |= files.keys()
            diffs = b"".join(unified(path, current.get(path), new) for path, new in sorted(files.items()))
            current |= files
            name = f"{number:04}-{subject.lower().replace(' ', '-')}.patch"
            (folder / name).write_bytes(f"Subject: {subject}\n\nDescription: a reason\n\n".encode() + diffs)
        (folder / "series").write_text("".join(f"{p.name}\n" for p in sorted(folder.glob("*.patch"))) + "# no more\n")
        sha256 = load("vllm_offload", REPOSITORY / "vllm_offload.py").sha256
        hashes = {path: sha256(release[path]) for path in changed & release.keys()}
        table = "".join(f'"{path}" = "{digest}"\n' for path, digest in sorted(hashes.items()))
        with open(self.patches / "releases.toml", "a") as pins:
            pins.write(f'["v{version}"]\nversion = "{version}"\n["v{version}".files]\n{table}\n')
        return folder

    def tree(self, name: str = "tree", version: str = "1.2.3", release: dict[str, bytes] = RELEASE) -> Path:
        tree = self.root / name
        for path, data in release.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
            (tree / path).chmod(MODES.get(path, 0o644))
        installed(tree, "vllm", version)
        return tree

    def edit_patch(self, old: bytes, new: bytes) -> None:
        """In the one patch of v1.2.3 that holds `old`, once."""
        patch, *others = [p for p in (self.patches / "v1.2.3").glob("*.patch") if old in p.read_bytes()]
        assert not others and patch.read_bytes().count(old) == 1
        patch.write_bytes(patch.read_bytes().replace(old, new))

    def run(self, command: str, tree: Path, **fault) -> Result:
        """`vllm_offload.py command --tree tree` of this project. Faults: see `Faults`."""
        return self.server.ask(
            here=str(self.here), arguments=[command, "--tree", str(tree)], tree=str(tree), fault=fault
        )


def copy(tree: Path, name: str) -> Path:
    target = tree.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(tree, target))


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request) -> Result:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Result(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)


# -- the server's side -----------------------------------------------------------------------------------------------
class Faults:
    """Counts every step that changes the disk, and fails as asked.

    kind="kill", at=N        SIGKILL before step N
    kind="io", at=N          an error at step N alone; likewise "full" and "denied"
    kind="denied", where=R   an error at every step on a path that the expression R finds
    kind="full", room=N      the tree's files can't hold more than N bytes
    """

    def __init__(self, tree: str, kind: str = "", at: int = 0, where: str = "", room: int | None = None) -> None:
        self.tree, self.kind, self.at, self.where, self.room = tree, kind, at, where, room
        self.steps: list[list[str]] = []
        self.peak = 0

    def audit(self, event: str, arguments: tuple) -> None:
        if event in STEPS and (event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self.step(event, str(arguments[0]))

    def step(self, what: str, path: str) -> None:
        self.steps.append([what, path])
        if len(self.steps) == self.at or (self.where and re.search(self.where, path)):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]), path)

    def fsync(self, handle: int) -> None:
        """Nothing here outlives the machine, so only that it is asked for matters."""
        self.step("fsync", os.readlink(f"/proc/self/fd/{handle}"))

    def written(self, path: str, more: int) -> None:
        if self.room is not None:
            lying = sum(file.stat().st_size for file in Path(self.tree).rglob("*") if file.is_file()) + more
            self.peak = max(self.peak, lying)
            if lying > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.step("write", path)


class TornFile(io.BufferedWriter):
    """Half of what is written is in the file when the step comes."""

    faults: Faults

    def write(self, data) -> int:
        half = len(data) // 2
        super().write(data[:half])
        self.flush()
        self.faults.written(str(self.raw.name), len(data) - half)  # type: ignore[attr-defined]
        return half + super().write(data[half:])


def answer(cli, request: dict) -> dict:
    """In the child: run the command, with what was asked to fail failing."""
    faults = TornFile.faults = Faults(request["tree"], **request["fault"])
    cli.HERE, cli.PATCHES = Path(request["here"]), Path(request["here"], "patches")
    cli.open = lambda path, mode: TornFile(io.FileIO(path, mode.replace("b", "")))
    os.fsync = faults.fsync
    said = io.StringIO()
    sys.addaudithook(faults.audit)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(request["arguments"])
    except BaseException:
        return {"code": 70, "text": traceback.format_exc()}
    return {"code": code, "text": said.getvalue(), "steps": faults.steps, "peak": faults.peak}


def serve() -> None:
    cli = load("vllm_offload", REPOSITORY / "vllm_offload.py")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        tree = Path(folder)  # the children find imported and compiled what this one command needs
        (tree / "vllm").mkdir()
        (tree / "vllm" / "__init__.py").touch()
        version = next(iter(cli.releases().values()))["version"]
        installed(tree, "vllm", version)
        cli.main(["status", "--tree", folder])
    gc.freeze()
    gc.disable()  # a collection would copy pages in every child
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(answer(cli, json.loads(line)), pipe)
                pipe.flush()
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(text or json.dumps({"code": end, "text": ""}), flush=True)


if __name__ == "__main__":
    serve()
