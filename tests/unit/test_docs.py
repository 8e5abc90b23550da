# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say of this repository is so: messages, settings, links, presets.

A code block whose info string is `text ours` quotes our own messages: `<...>` and `...` stand for what varies. A line
that goes on is indented; one of the doctor's begins with its state and the check's name, the next step with `->`.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
LEAST = 12  # characters of a constant part that is looked for

FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
VARIES = re.compile(r"<[^<>\n]+>|\.\.\.")
# Variables that docs speak of and that are other programs': not ours to set by .env.
THEIRS = {"LOCALAPPDATA", "PYTORCH_CUDA_ALLOC_CONF", "USERPROFILE"}


def page(path):
    return pytest.param(path, id=path.relative_to(ROOT).as_posix())


def flat(text):
    return " ".join(text.split())


# -- messages ----------------------------------------------------------------------------------------------------------


def python_sources():
    files = [*(ROOT / "vllm/expert_offload").rglob("*.py"), *(ROOT / "docker").glob("*.py")]
    return sorted([*files, ROOT / "vllm_offload.py", ROOT / "tools/images.py"])


def shared_names(trees):
    """Text constants of modules by name, where all modules that have the name agree."""
    found = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in (t for t in node.targets if isinstance(t, ast.Name)):
                    found.setdefault(target.id, set()).add(node.value.value)
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def constant_parts(tree, names):
    """The constant parts of each text of a module, cut where a value is put in; adjacent texts are one already."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            part = ""
            for value in node.values:
                put_in = value.value  # a text, or an expression
                known = names.get(put_in.id) if isinstance(put_in, ast.Name) else put_in
                if isinstance(known, str):
                    part += known
                else:
                    yield part
                    part = ""
            yield part
            # What is put in may be empty.
            yield "".join(value.value for value in node.values if isinstance(value, ast.Constant))


def added_by_patches():
    """Texts in the lines that the series add, adjacent ones joined: no whole Python, so no parser."""
    for patch in sorted((ROOT / "patches").glob("*/*.patch")):
        added = "\n".join(line[1:] for line in patch.read_text().splitlines() if re.match(r"\+(?!\+\+ )", line))
        for run in re.findall(r'(?:f?"(?:[^"\\\n]|\\.)*"\s*)+', added):
            yield "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', run))


def joined_sources():
    """Every constant part of our messages, in one text, a line each."""
    trees = [ast.parse(path.read_text()) for path in python_sources()]
    names = shared_names(trees)
    parts = [part for tree in trees for part in constant_parts(tree, names)]
    parts += added_by_patches()
    parts.append((ROOT / "docker/entrypoint.sh").read_text())
    return "\n".join(flat(part) for part in parts)


def check_names():
    """What the doctor calls its checks."""
    names = set()
    for path in (ROOT / "vllm/expert_offload/doctor").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
                targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                pairs = zip(targets, values)
                names |= {v.value for t, v in pairs if t.id in ("NAME", "SHM", "COMPAT", "SPILL")}
    return names


def quoted(block):
    """(messages of a block, one text each; names of checks in it)."""
    messages, checks = [""], []
    for line in block.splitlines():
        head = re.match(r"(?:ok   |warn |FAIL )(.{13}) ", line)
        if head:
            checks.append(head[1].strip())
            line = line[head.end() :]
        if head or line.lstrip().startswith("-> ") or not line.startswith(" "):
            messages.append("")
        messages[-1] += " " + line.lstrip().removeprefix("-> ")
    return [message for message in map(flat, messages) if message], checks


def fragments(message, sources):
    """The constant parts of a quoted message that are long enough to be looked for.

    Messages are put together of clauses, so one that is not there whole is looked for clause by clause.
    """
    whole = [part.strip(" :;,.()") for part in VARIES.split(message)]
    parts = [[part] if part in sources else re.split(r"[:;.] ", part) for part in whole]
    return [part for clauses in parts for part in clauses if len(part) > LEAST]


def wrong_quotes(text, sources, checks):
    """What a page quotes as ours and is not."""
    wrong = []
    for info, block in FENCE.findall(text):
        if info.split() != ["text", "ours"]:
            continue
        messages, named = quoted(block)
        wrong += [f"no check: {name}" for name in named if name not in checks]
        parts = [part for message in messages for part in fragments(message, sources)]
        wrong += [f"no message: {part}" for part in parts if part not in sources]
        wrong += [] if parts else [f"nothing to look for: {flat(block)}"]
    return wrong


@pytest.mark.parametrize("path", [page(path) for path in PAGES])
def test_messages_are_ours(path):
    assert not wrong_quotes(path.read_text(), joined_sources(), check_names())


def test_pages_that_tell_of_messages_quote_them():
    quoting = {path.name for path in DOCS if "```text ours\n" in path.read_text()}
    assert quoting == {"linux.md", "troubleshooting.md", "windows.md"}


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ("--cpu-offload-gb <n> with <n> rank(s) takes up to <n> of\n  host memory and <n> are free by <limit>.", 0),
        ("--cpu-offload-gb <n> with <n> rank(s) takes at most <n> of host memory", 1),
        (
            "FAIL GPU           no nvidia-smi: this container was given no GPU\n                -> Start the container",
            0,
        ),
        ("FAIL GPUs          no nvidia-smi: this container was given no GPU", 1),
        ("FAIL GPU           no nvidia-smi: this container was given no GPU Start the container with", 1),
        ("EXPERT_OFFLOAD_PIN_GIB=<value>: it takes a number of GiB", 0),
        ("entrypoint: the doctor itself ended with status <n>; serving all the same", 0),
        ("entrypoint: the doctor itself ended with status 2", 1),
        ("Model Runner V2 needs mapped host memory, which WSL offers only with VLLM_WSL2_ENABLE_PIN_MEMORY=1;", 0),
        ("<n> of <n>", 1),
    ],
)
def test_a_quote_that_is_not_ours_is_found(block, wrong):
    found = wrong_quotes(f"```text ours\n{block}\n```\n", joined_sources(), check_names())
    assert len(found) == wrong, found


# -- settings and files ------------------------------------------------------------------------------------------------


def settings():
    """Names in .env.example, and in README's table."""
    example = re.findall(r"^#([A-Z][A-Z0-9_]*)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    table = re.findall(r"^\| `([A-Z][A-Z0-9_]*)[=`]", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {*example, *table}


def named_settings(text):
    """Names of variables in a page: `NAME`, NAME=value, $env:NAME; not those in quoted messages."""
    found = set()
    for info, block in FENCE.findall(text):
        if not info.startswith("text"):
            found |= set(re.findall(r"(?<![\w.-])([A-Z][A-Z0-9_]{2,})=", block)) | set(
                re.findall(r"\$env:(\w+)", block)
            )
    for code in INLINE.findall(FENCE.sub("", text)):
        found |= set(re.findall(r"(?<![\w.-])([A-Z][A-Z0-9_]{2,})=", code)) | set(re.findall(r"\$env:(\w+)", code))
        found |= set(re.findall(r"^[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+$|^[A-Z]{2,}$", code))
    return found


@pytest.mark.parametrize("path", [page(path) for path in DOCS])
def test_settings_exist(path):
    assert named_settings(path.read_text()) - settings() - THEIRS == set()


def test_a_setting_that_is_not_there_is_found():
    text = "`OFFLOAD_GIB=4`, `PORTS`, `VLLM_SPEED`\n```powershell\n$env:VARIANTS = 1\nRELEASES=2\n```\n"
    assert named_settings(text) - settings() == {"OFFLOAD_GIB", "PORTS", "VLLM_SPEED", "VARIANTS", "RELEASES"}
    assert {"MODEL", "OFFLOAD_GB", "EXPERT_OFFLOAD_PIN_GIB", "EXPERT_OFFLOAD_POISON"} <= settings()


def env_files(text):
    return set(re.findall(r"--env-file[ =]([^\s`]+)", text))


@pytest.mark.parametrize("path", [page(path) for path in PAGES])
def test_presets_exist(path):
    missing = {name for name in env_files(path.read_text()) if not (ROOT / name).is_file()}
    assert missing <= {".env"}, "that one is the reader's own"


def slug(heading):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(file):
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", file.read_text()), re.MULTILINE)}


def broken_links(path, text):
    broken = []
    for target in re.findall(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", [page(path) for path in PAGES])
def test_links_lead_somewhere(path):
    assert not broken_links(path, path.read_text())


def test_a_broken_link_is_found():
    text = "[a](nowhere.md) [b](../README.md#no-such-part) [c](../README.md#how-it-works) [d](windows.md)"
    assert broken_links(ROOT / "docs/troubleshooting.md", text) == ["nowhere.md", "../README.md#no-such-part"]


def test_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert all(f"(docs/{path.name})" in text for path in DOCS)


@pytest.mark.parametrize("path", [page(path) for path in DOCS])
def test_lines_are_short(path):
    # A table's row cannot be wrapped.
    assert [line for line in path.read_text().splitlines() if len(line) > 120 and not line.startswith("|")] == []
