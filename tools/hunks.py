# SPDX-License-Identifier: Apache-2.0
"""What became of a series in a started checkout (`tools/series.py start`), for somebody to read: `tools/bump.py`."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import series  # noqa: E402

import vllm_offload as cli  # noqa: E402

# As git writes it with merge.conflictStyle=diff3: the new release's, what both started from, the patch's.
REGION = re.compile(r"(?ms)^<<<<<<< [^\n]*\n(.*?)^\|\|\|\|\|\|\| [^\n]*\n(.*?)^=======\n(.*?)^>>>>>>> [^\n]*\n")
AROUND = 3  # lines of context: more than a patch keeps, to judge by


def subjects(folder: Path, span: str) -> dict[str, str]:
    """Commits of `span` by their first line, in order."""
    lines = series.git(folder, "log", "--reverse", "--format=%H %s", span).decode().splitlines()
    return {subject: commit for commit, _, subject in (line.partition(" ") for line in lines)}


def of(folder: Path, commit: str, context: int) -> dict[str, cli.Hunks]:
    diff = series.git(folder, "diff", "--no-color", f"-U{context}", "--no-renames", f"{commit}~", commit)
    return {path: hunks for path, _, hunks in cli.parse_patch(commit, diff)}


def text(hunks: cli.Hunks) -> list[str]:
    return [
        line if line.endswith("\n") else f"{line}\n"
        for first, body in hunks
        for line in [f"@@ line {first} @@\n", *(x.decode(errors="replace") for x in body)]
    ]


def reanchored(folder: Path, like: str, tag: str) -> dict[str, list[str] | None]:
    """By the subject of each patch of `like`: a text for every hunk that is not exactly as it was; None: left out.

    A text is a diff of the hunk as it was and as it is now: `-` before `@@` is the old place, `+` the new one.
    """
    now, found = subjects(folder, f"{series.BASE}..series"), dict[str, list[str] | None]()
    for subject, commit in subjects(folder, f"old..{like}").items():
        if subject not in now:
            found[subject] = None
            continue
        exact = [of(folder, c, 1) for c in (commit, now[subject])]
        shown = [of(folder, c, AROUND) for c in (commit, now[subject])]
        texts = []
        for path in sorted(exact[0] | exact[1]):
            if exact[0].get(path) == exact[1].get(path):
                continue
            old, new = (side.get(path, []) for side in shown)
            pairs = [([a], [b]) for a, b in zip(old, new)] if len(old) == len(new) else [(old, new)]
            for a, b in pairs:
                diff = [*difflib.unified_diff(text(a), text(b), f"{like}: {path}", f"{tag}: {path}", n=1000)]
                if diff:
                    texts.append("".join(diff[:2] + diff[3:]))  # less its own @@: the hunks' are in it
        found[subject] = texts
    return found


def conflict(folder: Path, like: str, tag: str) -> str:
    """Where git stopped, with both sides."""
    subject = series.git(folder, "log", "-1", "--format=%s", "CHERRY_PICK_HEAD").decode().strip()
    out = [f'"{subject}" needs a hand:\n']
    for path in series.conflicts(folder):
        if not series.git(folder, "ls-tree", "HEAD", "--", path):
            out.append(
                f"-- {path}: {tag} has no such file. Find where its code went, put the change there, then\n"
                f"   git -C {folder} rm {path}; what the patch does to it:\n"
                + series.git(folder, "show", f"-U{AROUND}", "--format=", "CHERRY_PICK_HEAD", "--", path).decode()
            )
            continue
        content = (folder / path).read_text()
        for region in REGION.finditer(content):
            theirs, base, ours = region.groups()
            above = content[: region.start()].splitlines()
            below = content[region.end() :].splitlines()
            out.append(
                f"-- {path}, line {len(above) + 1}, between\n{quoted(above[-AROUND:])}and\n{quoted(below[:AROUND])}"
                f"the new release's ({tag}):\n{quoted(theirs.splitlines())}"
                f"what the patch was made for ({like}):\n{quoted(base.splitlines())}"
                f"ours (with the patch on {like}):\n{quoted(ours.splitlines())}"
            )
    return "".join(out)


def quoted(lines: list[str]) -> str:
    return "".join(f"  | {line}\n" for line in lines) or "  | (nothing)\n"
