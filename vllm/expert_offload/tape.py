# SPDX-License-Identifier: Apache-2.0
"""Operations that were written down, and how they are played for a few experts.

A value has a number. Steps are played in the order and with the aliasing that they were written in: views are views of
the few experts' tensors, and what changes a tensor in place changes it for later steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .apart import SHAPED

Read = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)  # no tuple, which an operation may be given for a list
class Ref:
    """Stands on the tape for a value of an earlier step."""

    number: int


class Step(NamedTuple):
    """One operation: for all experts (`expert` None) or one of them. `special` says how its arguments are played."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]
    expert: int | None
    special: str


class Program(NamedTuple):
    """Steps to play in order, after each the values that no later one needs, and the values that they are for."""

    steps: list[Step]
    over: list[set[int]]
    wanted: set[int]


def program_for(steps: list[Step], wanted: set[int]) -> Program:
    """`steps` to be played for the values `wanted`."""
    needed, over = set(wanted), []
    for step in reversed(steps):
        here = {*step.made, *(x.number for x in leaves(step.args, step.kwargs) if type(x) is Ref)}
        over.append(here - needed)
        needed |= here
    return Program(list(steps), over[::-1], wanted)


def play(first: int, last: int, program: Program, sources: dict[int, Read]) -> dict[int, torch.Tensor]:
    """The values that `program` is for, of experts `first` to `last` (exclusive), by number.

    `sources` gives those of the values that no step makes, when they are first asked for.
    """
    values = _Values(sources, first, last)
    for step, over in zip(program.steps, program.over):
        if step.expert is None or first <= step.expert < last:
            _do(step, values, first, last)
        for number in over:
            values.pop(number, None)
    return {number: values[number] for number in program.wanted if number in values or number in sources}


def _do(step: Step, values: _Values, first: int, last: int) -> None:
    args, kwargs = step.args, step.kwargs
    if step.special == "selected":
        assert step.expert is not None
        args = (args[0], 0, step.expert - first)
    elif step.special == "joined":
        args = (list(args[0][first:last]), *args[1:])
    elif step.special == "shaped":
        where = SHAPED.get(step.function, 0)  # type: ignore[arg-type]
        args = (*args[:where], [last - first, *args[where][1:]], *args[where + 1 :])
    real_args, real_kwargs = values.of(args, kwargs)
    out = step.function(*real_args, **real_kwargs)
    values.update(zip(step.made, (out,) if isinstance(out, torch.Tensor) else out))


class _Values(dict[int, torch.Tensor]):
    """Values by number while a tape is played; a source is read when it is first asked for."""

    def __init__(self, sources: dict[int, Read], first: int, last: int) -> None:
        self.sources, self.first, self.last = sources, first, last

    def __missing__(self, number: int) -> torch.Tensor:
        self[number] = value = self.sources[number](self.first, self.last)
        return value

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [self._one(x) for x in args], {name: self._one(x) for name, x in kwargs.items()}

    def _one(self, x: Any) -> Any:
        if type(x) is Ref:
            return self[x.number]
        return [self[y.number] if type(y) is Ref else y for y in x] if type(x) is list else x


def leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments, those in lists too (operations have no deeper ones), each list led by its length."""
    found: list[Any] = []
    for x in (*args, *kwargs.values()):
        found.extend((len(x), *x) if isinstance(x, (list, tuple)) else (x,))
    return found
