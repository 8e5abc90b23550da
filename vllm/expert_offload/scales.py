# SPDX-License-Identifier: Apache-2.0
"""Conversion of experts' scales, which stay on the device, without a second copy of all of them beside it.

Scales are an eighth of 4-bit weights, and releases widen them: to 16 bits to permute them, to 32 to look for the
largest, and by a mask, which takes 24 bytes for each. So they are `Deferred` too, on a tape of their own: what gives up
here leaves the weights' alone. It differs from theirs in what it does at once, a few experts at a time:

- One expert of it is real: the release's loop over experts runs on plain tensors, and what it collects is real too.
- So is what a reduction makes of all experts: any, all, the largest, the smallest, of a selection by a mask as well.

Afterwards each Deferred that somebody holds becomes the real tensor, in place, since kernels' configs take hold of
scales while they are processed. Views of one tensor become views of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from .apart import BY_ELEMENT
from .deferred import Tape, Together, changed, dimension
from .standin import Deferred, Form, found
from .tape import Program, Read, Ref, Step, leaves, play, program_for

aten = torch.ops.aten
# Of the bytes of weights that are processed at once, what scales take: their conversion holds forty times as much.
SHARE = 16
# Smaller ones are not worth it.
LEAST = 2**20
# Of all experts' values one, which is that of the parts' values.
_REDUCES = (
    aten.all.default,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.max.default,
    aten.min.default,
)


_LATE = (
    "expert offload: scales of an expert were changed in place, long after the release took them out of all experts'. "
    "Serve without --cpu-offload-gb, and report the model and its quantization"
)


class _Chunk(NamedTuple):
    """Values of experts `first` to `last`, of which the release has been given some.

    What it is given are views of `of` to torch, so that changes of them in place are counted there.
    """

    number: int
    first: int
    last: int
    values: torch.Tensor
    of: Deferred
    version: int


class Scales(Tape):
    """The operations on the scales of one layer's experts.

    Args:
        experts: how many there are.
        device: where the scales are.
        limit: bytes of scales to convert at once.
    """

    lesser = True

    def __init__(self, experts: int, device: torch.device, limit: int) -> None:
        super().__init__(experts, device)
        self.limit = limit
        self._there: dict[int, torch.Tensor] = {}  # the sources
        self._kinds: list[tuple[ref[Deferred], type]] = []  # of parameters for which others stand in
        self._form_of: dict[int, Form] = {}
        self._base: dict[int, int] = {}  # views, and whose bytes they show
        self._picked: set[int] = set()  # selections by a mask: how large they are is not known
        self._chunk: _Chunk | None = None
        self._given_out: list[tuple[ref[Deferred], int]] = []  # of whom earlier chunks were, and their versions
        self._at_work = False
        self._programs: dict[tuple[int, int], Program] = {}

    def defer(self, owner: nn.Module, leaves: Iterable[str]) -> None:
        """Have Deferred ones stand for those of the owner's parameters `leaves` that are worth it."""
        if torch.is_inference_mode_enabled():  # nothing counts changes in place there
            return
        for leaf in leaves:
            old = owner._parameters[leaf]
            if old is None or old.dim() < 2 or old.size(0) != self.experts:
                continue
            if old.nbytes < LEAST or not old.is_contiguous() or old.device.type != self.device.type:
                continue
            proxy = nn.Parameter(self._taken(old.data), requires_grad=False)
            proxy.__dict__.update(old.__dict__)
            self._kinds.append((ref(proxy), type(old)))
            self._least = min(self._least or old.nbytes, old.nbytes)
            for name, other in owner._parameters.items():
                if other is old:
                    owner._parameters[name] = proxy

    def _taken(self, real: torch.Tensor) -> Deferred:
        made = self._new((tuple(real.shape), real.stride(), real.dtype), None)
        self.sources[made.number] = lambda a, b: real[a:b].clone()
        self._there[made.number] = real
        return made

    # -- writing -----------------------------------------------------------------------------------------------------

    def given(self, real: torch.Tensor) -> Deferred:
        if self._values is not None or real.dim() == 0 or real.size(0) != self.experts:
            return super().given(real)
        return self._taken(real)

    def makes_room(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Of zeros, into which smaller scales are laid; what is not cleared is filled expert by expert, so real."""
        return function is aten.zeros.default and not self._at_work and super().makes_room(function, args, kwargs)

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_given_out()
        if self._values is None:
            if function._schema.is_mutable:  # type: ignore[attr-defined]
                self._chunk, self._given_out = None, []  # from here on versions count other changes too
            try:
                if (answer := self._at_once(function, args, kwargs)) is not None:
                    return answer
            except (Together, RuntimeError, IndexError) as why:
                self.give_up(str(why).splitlines()[0])
        return super().note(function, args, kwargs)

    def _at_once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives that need not wait; None when it is to be written down."""
        if function in _REDUCES and len(args) == 1 and not kwargs:
            return self._reduced(function, args[0])
        if any(d.number in self._picked for d in found(args, kwargs)):
            raise Together(f"{function} takes a selection of scales")
        if function is aten.select.int and dimension(args, 1, args[0]) == 0:
            return self._one(args[0], int(args[2]) % self.experts)
        if function is aten.detach.default:  # the same value, so that a loop over `.data[expert]` has one chunk
            return Deferred(self, args[0].number, None, self._form_of[args[0].number])
        if function is aten.empty_like.default:  # as what is empty from the start: it is filled expert by expert
            return function(_on_meta(args[0]), **{**kwargs, "device": kwargs.get("device") or self.device})
        if function is aten.index.Tensor:
            return self._selected(*args)
        if function is aten.copy_.default and not isinstance(args[0], Deferred):
            return self._copied(args[0], args[1])
        if "device" in kwargs and torch.device(kwargs["device"] or self.device).type != self.device.type:
            raise Together(f"{function} copies scales to another device")
        if function is aten.copy_.default or function in BY_ELEMENT:
            dims = {d.dim() for d in found(args, kwargs)}
            lifted, _ = changed(lambda d: d, args, {}, others=lambda t: self._lifted(t, dims))
            if any(a is not b for a, b in zip(args, lifted)):
                return super().note(function, lifted, kwargs)
        return None

    def _lifted(self, real: torch.Tensor, dims: set[int]) -> torch.Tensor:
        """A real tensor of all experts, as a value of the tape."""
        if {real.dim()} != dims or real.size(0) != self.experts:
            return real
        self._borrowed.append((real, real._version))
        return self._taken(real)

    def _selected(self, values: torch.Tensor, masks: list[Any]) -> Deferred | None:
        mask = masks[0]
        if len(masks) > 1 or not isinstance(mask, Deferred) or not isinstance(values, Deferred):
            return None
        if mask.dtype is not torch.bool or mask.shape != values.shape:
            return None
        made = Deferred(self, self._numbered(((0,), (1,), values.dtype)), None, ((0,), (1,), values.dtype), False)
        self._picked.add(made.number)
        refs, _ = changed(lambda d: Ref(d.number), (values, masks), {})
        self.steps.append(Step(aten.index.Tensor, refs, {}, (made.number,), None, ""))
        return made

    def _write(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super()._write(function, args, kwargs)
        if function.is_view:  # type: ignore[attr-defined]
            step = self.steps[-1]
            shown = next(x.number for x in leaves(step.args, step.kwargs) if type(x) is Ref)
            self._base.update(dict.fromkeys(step.made, self._base_of(shown)))
        return out

    def _new(self, form: Form, expert: int | None) -> Deferred:
        return Deferred(self, self._numbered(form), expert, form)

    def _numbered(self, form: Form) -> int:
        self._count += 1
        self._form_of[self._count] = form
        return self._count

    def _base_of(self, number: int) -> int:
        return self._base.get(number, number)

    # -- what is real at once ----------------------------------------------------------------------------------------

    def _one(self, of: Deferred, expert: int) -> torch.Tensor:
        """The values of one expert, of a chunk that is made when the release comes to its first."""
        chunk = self._chunk
        if chunk is None or chunk.number != of.number or not chunk.first <= expert < chunk.last:
            if chunk is not None:
                self._given_out.append((ref(chunk.of), chunk.version))
            self._chunk = chunk = None  # its memory is free for the next
            first, last = next((a, b) for a, b in self._chunks(of.number) if a <= expert < b)
            values = self._play(first, last, of.number)
            self._chunk = chunk = _Chunk(of.number, first, last, values, of, of._version)
        return chunk.values[expert - chunk.first]

    def _check_given_out(self) -> None:
        """An expert's values are a copy: who changes them means all of them."""
        if self._chunk is not None and self._chunk.of._version != self._chunk.version:
            self.give_up("one expert's scales are changed in place")
        self._given_out = [(held, version) for held, version in self._given_out if held() is not None]
        if any((of := held()) is not None and of._version != version for held, version in self._given_out):
            raise RuntimeError(_LATE)

    def _bring_back(self, chunk: _Chunk, values: torch.Tensor) -> None:
        """Have the changes of a chunk in all experts' values."""
        place = values[chunk.first : chunk.last]
        if any(held() is chunk.of for held, _ in self._given_out) and _same(place, chunk.values):
            raise RuntimeError(_LATE)  # it was one of an earlier chunk
        place.copy_(chunk.values)

    def _reduced(self, function: Callable[..., Any], of: Deferred) -> torch.Tensor:
        parts = []
        for first, last in self._chunks(of.number):
            values = self._play(first, last, of.number)
            if values.numel():
                parts.append(function(values))
        return function(torch.stack(parts) if parts else values)

    def _copied(self, into: torch.Tensor, source: Deferred) -> torch.Tensor:
        if into.shape != source.shape:
            raise Together("scales are copied to more than their own places")
        for first, last in self._chunks(source.number):
            into[first:last].copy_(self._play(first, last, source.number))
        return into

    # -- playing -----------------------------------------------------------------------------------------------------

    def _chunks(self, number: int) -> Iterator[tuple[int, int]]:
        """Ranges of experts, by how large an expert is in what is read for the value."""
        program = self._needed(number)
        read = {x.number for s in program.steps for x in leaves(s.args, s.kwargs) if type(x) is Ref} | {number}
        row = max([1, *(self._there[n].nbytes // self.experts for n in read if n in self._there)])
        step = max(1, self.limit // row)
        return ((first, min(self.experts, first + step)) for first in range(0, self.experts, step))

    def _play(self, first: int, last: int, number: int) -> torch.Tensor:
        self._at_work = True
        try:
            return play(first, last, self._needed(number), self.sources)[number]
        finally:
            self._at_work = False

    def _needed(self, number: int) -> Program:
        """The steps that have to do with a value; a selection, which takes most, only where it is asked for."""
        key = number, len(self.steps)
        if key not in self._programs:
            self._check_borrowed()
            bases, steps = {self._base_of(number)}, []
            for step in reversed(self.steps):
                if bases & {self._base_of(n) for n in step.made}:
                    steps.append(step)
                    bases |= {self._base_of(x.number) for x in leaves(step.args, step.kwargs) if type(x) is Ref}
            self._programs[key] = program_for(steps[::-1], {number})
        return self._programs[key]

    def give_up(self, why: str) -> dict[int, torch.Tensor]:
        """As any tape; the sources themselves are what is worked on from now on."""
        if self._values is None:
            self.why = why
            self._check_borrowed()
            self._values = {}
            chunk, self._chunk = self._chunk, None
            wanted = {d.number for d in self.alive()} | ({chunk.number} if chunk else set())
            steps = [s for s in self.steps if not self._picked.intersection(s.made) - wanted]
            themselves = {number: _itself(real) for number, real in self._there.items()}
            self._values = play(0, self.experts, program_for(steps, wanted), themselves)
            if chunk is not None and chunk.of._version != chunk.version:
                self._bring_back(chunk, self._values[chunk.number])
            self._drop()
        return self._values

    def _drop(self) -> None:
        self.steps.clear()
        self.sources.clear()
        self._there.clear()
        self._borrowed.clear()
        self._programs.clear()
        self._given_out.clear()
        self._chunk = None

    def settle(self) -> None:
        """The layer is processed: have every Deferred that is held become real, and hold nothing."""
        if self._values is None:
            self._check_given_out()
        self._chunk = None
        alive = self.alive()
        if self._values is None:
            self._values = self._made(alive)
            self._drop()
        for deferred in alive:
            try:
                kind = next((kind for held, kind in self._kinds if held() is deferred), None)
                deferred.become(self._values[deferred.number], kind)
            except RuntimeError as why:
                self.why = f"native code holds them ({str(why).splitlines()[0]})"
        self.forget()

    def _made(self, held: list[Deferred]) -> dict[int, torch.Tensor]:
        """The real tensors of `held`, by number; those that show the same bytes show them again."""
        bases = {self._base_of(d.number) for d in held}
        written = {
            self._base_of(s.made[0])
            for s in self.steps
            if s.function._schema.is_mutable  # type: ignore[attr-defined]
        } & set(self._there)
        if any(written & self._sources_of(base) - {base} for base in written):
            return self.give_up("scales that are changed in place are made of each other")
        made: dict[int, torch.Tensor] = {}
        # What is changed in place last: others are made of what was there before.
        order = sorted(bases, key=lambda base: base in written)
        for index, base in enumerate(order):
            made[base] = self._assembled(base, base in written)
            later = set[int]().union(*(self._sources_of(b) for b in order[index + 1 :]))
            for number in set(self._there) - later:
                del self._there[number], self.sources[number]
        views = [s for s in self.steps if s.function.is_view]  # type: ignore[attr-defined]
        return {d.number: self._shown(d.number, made, views) for d in held}

    def _sources_of(self, base: int) -> set[int]:
        read = {x.number for s in self._needed(base).steps for x in leaves(s.args, s.kwargs) if type(x) is Ref}
        return (read | {base}) & set(self._there)

    def _assembled(self, base: int, written: bool) -> torch.Tensor:
        if base in self._there and not written:
            return self._there[base]
        shape, stride, dtype = self._form_of[base]
        made = self._there.get(base)
        if made is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        for first, last in list(self._chunks(base)):
            made[first:last].copy_(self._play(first, last, base))
        return made

    def _shown(self, number: int, made: dict[int, torch.Tensor], views: list[Any]) -> torch.Tensor:
        base = self._base_of(number)
        steps = [s for s in views if self._base_of(s.made[0]) == base]
        return play(0, self.experts, program_for(steps, {number}), {base: _itself(made[base])})[number]


def _on_meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def _itself(real: torch.Tensor) -> Read:
    return lambda first, last: real


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
