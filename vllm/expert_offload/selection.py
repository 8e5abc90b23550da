# SPDX-License-Identifier: Apache-2.0
"""Which parameters leave: the user's patterns, the budget, and experts before everything else.

Layers are built one after another and only one may lie whole on the GPU, so the choice is made layer by layer, with
the budget always spent on what is known. Without a pattern, a dense matrix that left early is given back when a later
layer's experts need its place: a dense weight is read for every token, an expert by few.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple


class Candidate(NamedTuple):
    """A parameter of a layer: canonical name, size in bytes, whether routed experts own it, whether it may leave."""

    name: str
    nbytes: int
    experts: bool
    may_leave: bool


class PatternError(ValueError):
    """A pattern of --cpu-offload-params matches nothing that may leave the GPU."""


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names whole dotted segments of `name`: "experts" is in "mlp.experts.w2_weight"."""
    return f".{pattern}." in f".{name}."


class Selection:
    """Spends `budget` bytes on candidates, at least so many and at most one parameter more, as vLLM does.

    Args:
        budget: bytes to move, 0 or more.
        patterns: the user's; when empty, experts are preferred to dense weights.
    """

    def __init__(self, budget: int, patterns: set[str] | frozenset[str]) -> None:
        self.budget = budget
        self.patterns = sorted(patterns)
        self.hits: dict[str, int] = dict.fromkeys(self.patterns, 0)
        self.stays: dict[str, str] = {}
        self.taken = 0
        self._names: dict[str, None] = {}
        self._dense: list[Candidate] = []

    def layer(self, candidates: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Decide about the parameters of one more layer: (those that leave, those of earlier layers that return)."""
        for c in candidates:
            self._names.setdefault(c.name)
            for pattern in self.patterns:
                if matches(pattern, c.name):
                    self.hits[pattern] += c.may_leave
                    if not c.may_leave:
                        self.stays.setdefault(pattern, c.name)
        wanted = [c for c in candidates if c.may_leave and self._asked_for(c.name)]
        if not self.patterns:
            wanted.sort(key=lambda c: not c.experts)
        leave: list[Candidate] = []
        for c in wanted:
            spent = self.taken if self.patterns or not c.experts else self.taken - sum(d.nbytes for d in self._dense)
            if spent >= self.budget:
                continue
            leave.append(c)
            self.taken += c.nbytes
            if not self.patterns and not c.experts:
                self._dense.append(c)
        return leave, self._returns()

    def put_back(self, candidate: Candidate) -> None:
        """A parameter that was to leave had to stay after all: its bytes may be spent on others."""
        self.taken -= candidate.nbytes
        if candidate in self._dense:
            self._dense.remove(candidate)

    def _asked_for(self, name: str) -> bool:
        return not self.patterns or any(matches(p, name) for p in self.patterns)

    def _returns(self) -> list[Candidate]:
        """Dense weights that are no longer needed to reach the budget, the last taken first.

        None of them is of the layer at hand: its experts were taken first, and a dense weight only if that was too
        little.
        """
        back: list[Candidate] = []
        while self._dense and self.taken - self._dense[-1].nbytes >= self.budget:
            back.append(self._dense.pop())
            self.taken -= back[-1].nbytes
        return back

    def check(self, hits: dict[str, int]) -> None:
        """Raise PatternError for the first pattern without a hit; `hits` counts over all ranks."""
        for pattern in self.patterns:
            if hits[pattern]:
                continue
            nearest = sorted({".".join(n.split(".")[-2:]) for n in self._nearest(pattern)})
            held = self.stays.get(pattern)
            if held:
                why = (
                    f"it matches {held}, which must stay on the GPU (quantization metadata, no matrix, or without a "
                    "size until it is loaded, as GGUF's). "
                )
            else:
                why = "no parameter of the decoder layers has that name. "
            raise PatternError(
                f"--cpu-offload-params {pattern}: {why}"
                + (f"Nearest: {', '.join(nearest)}. " if nearest else "")
                + "Give whole dotted segments of a name, such as experts or experts.w2_weight"
            )

    def _nearest(self, pattern: str) -> list[str]:
        """Names whose tail, as long as the pattern, resembles it most; the experts when none does."""
        depth = pattern.count(".") + 1
        tails: dict[str, str] = {}
        for name in self._names:
            parts = name.split(".")
            for i in range(len(parts) - depth + 1):
                tails.setdefault(".".join(parts[i : i + depth]), name)
        close = difflib.get_close_matches(pattern, tails, n=4, cutoff=0.4)
        return [tails[c] for c in close] or [n for n in self._names if ".experts." in f".{n}."][:2]
