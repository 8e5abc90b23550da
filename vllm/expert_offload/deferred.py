# SPDX-License-Identifier: Apache-2.0
"""Post-load processing of experts that lie in host memory, a chunk of experts at a time.

A release processes a layer whole: it repacks, reorders and pads tensors whose first dimension counts the experts. What
it does to one expert does not depend on the others, so it can be done to a few at a time: up, processed, down again.
No release offers that, and to write each repack anew would be to copy it. So the release's own code runs once over
`Deferred` tensors, which have the shape, type and device of the weights and no bytes: every operation is written on a
tape. Then the tape is played for one range of experts after another, on real tensors, in the order and with the
aliasing that it was written in, so what comes out is what the release would have made, bit for bit.

Two kinds of operation are written down: those on one expert (whatever `weight[e]` goes through), and those on all of
them that are known to keep experts apart (`apart`). At anything else, also at a look at the bytes,
the tape gives up: it is played for all experts at once, and from there on the release works on real tensors as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .apart import EMPTY, SHAPED, keeps_apart

aten = torch.ops.aten
Read = Callable[[int, int], torch.Tensor]


class Together(Exception):
    """The experts can't be kept apart in an operation; the text says which."""


class Ref(NamedTuple):
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


class Deferred(torch.Tensor):
    """A tensor of all experts, or of one, whose bytes are not there: a number on a tape, and a meta tensor."""

    tape: Tape
    number: int
    expert: int | None
    shadow: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tape: Tape, number: int, expert: int | None, shadow: torch.Tensor) -> Deferred:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shadow.shape, strides=shadow.stride(), dtype=shadow.dtype, device=tape.device
        )
        made.tape, made.number, made.expert, made.shadow = tape, number, expert, shadow
        torch._C._set_throw_on_mutable_data_ptr(made)  # native code that goes past the dispatcher: an error, no crash
        tape.made.append(weakref.ref(made))
        return made

    def __init__(self, *_: object) -> None:
        """All is done by `__new__`."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        first = next(t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Deferred))
        return first.tape.note(function, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype}, expert={self.expert})"

    # What reaches for bytes without an operation gets real ones.

    def real(self) -> torch.Tensor:
        """The tensor, played for all experts at once; the tape gives up."""
        return self.tape.give_up("something asked for its address")[self.number]

    def data_ptr(self) -> int:
        return self.real().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.real().untyped_storage()

    def numpy(self, **kwargs: Any) -> Any:
        return self.real().numpy(**kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.real().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.real().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.real().__cuda_array_interface__

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        value = value if isinstance(value, Deferred) else self.tape.given(value)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape and strides
        self.number, self.expert, self.shadow = value.number, value.expert, value.shadow


class Tape:
    """The operations on the experts of one layer.

    Args:
        experts: how many there are; the first dimension of every tensor of all of them.
        device: where they are processed.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.experts = experts
        self.device = device
        self.steps: list[Step] = []
        self.sources: dict[int, Read] = {}
        self.made: list[weakref.ref[Deferred]] = []  # no set: to compare tensors is an operation
        self.why: str | None = None
        self._values: dict[int, torch.Tensor] | None = None
        self._count = 0
        self._least = 0

    def alive(self) -> list[Deferred]:
        """Every Deferred of this tape that somebody holds."""
        self.made = [ref for ref in self.made if ref() is not None]
        return [d for ref in self.made if (d := ref()) is not None]

    # -- writing -----------------------------------------------------------------------------------------------------

    def source(self, shadow: torch.Tensor, read: Read) -> Deferred:
        """A tensor of all experts that lies elsewhere: `read(a, b)` gives a new copy of experts a to b on the device.

        `shadow` has its shape, strides and type; its device does not matter.
        """
        assert shadow.size(0) == self.experts
        made = self._new(_meta(shadow), None)
        self.sources[made.number] = read
        self._least = min(self._least or shadow.nbytes, shadow.nbytes)
        return made

    def given(self, real: torch.Tensor) -> Deferred:
        """A real tensor as a value of the tape."""
        if real.dim() == 0 or real.size(0) != self.experts:
            self.give_up(f"a tensor of shape {tuple(real.shape)} took the place of all experts")
        made = self._new(_meta(real), None)
        if self._values is not None:
            self._values[made.number] = real
        else:
            self.sources[made.number] = lambda a, b: real[a:b]
        return made

    def writing(self) -> TorchDispatchMode:
        """While this mode is on, large new tensors of all experts are Deferred too, so that a loop may fill them."""
        return _Writing(self)

    def makes_room(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation without a Deferred makes a tensor that will hold processed weights."""
        if function not in EMPTY or self._values is not None or len(args[0]) < 2 or args[0][0] != self.experts:
            return False
        device = torch.device(kwargs.get("device") or "cpu")
        shadow = function(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        return device.type == self.device.type and 2 * shadow.nbytes >= self._least > 0

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write one operation down and return what it will make, or do it when the tape has given up."""
        if self._values is None:
            if function is aten.unbind.int and _dimension(args, 1, args[0]) == 0 and args[0].expert is None:
                return [args[0].select(0, expert) for expert in range(self.experts)]
            try:
                return self._write(function, args, kwargs)
            except (Together, RuntimeError) as why:  # RuntimeError: it can't be done on meta tensors
                self.give_up(str(why).splitlines()[0])
        values = self._values
        assert values is not None
        out = function(*_map(lambda d: values[d.number], args), **_map(lambda d: values[d.number], kwargs))
        if function is not aten.detach.default:
            return out
        made = self._new(_meta(out), args[0].expert)  # nn.Parameter asks for its own kind back
        values[made.number] = out
        return made

    def _write(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expert, special = self._kind(function, args, kwargs)
        held = {id(d.shadow): d for d in _found((args, kwargs))}
        on_meta = {**_shadows(kwargs), **({"device": "meta"} if "device" in kwargs else {})}
        if kwargs.get("pin_memory"):
            raise Together(f"{function} makes page-locked memory")
        out = function(*_shadows(args), **on_meta)
        leaves = tree_flatten(out)[0]
        if not leaves or not all(isinstance(t, torch.Tensor) for t in leaves):
            raise Together(f"{function} gives something that is no tensor")
        if expert is None and any(t.dim() == 0 or t.size(0) != self.experts for t in leaves):
            raise Together(f"{function} puts experts together")
        if special == "shaped":
            where = SHAPED.get(function, 0)
            args = (*args[:where], list(leaves[0].shape), *args[where + 1 :])
        made: list[int] = []

        def value(shadow: torch.Tensor) -> Deferred:
            old = held.get(id(shadow))  # an operation in place gives back what it was given
            new = old if old is not None else self._new(shadow, expert)
            made.append(new.number)
            return new

        result = tree_map(value, out)
        self.steps.append(Step(function, _refs(args), _refs(kwargs), tuple(made), expert, special))
        return result

    def _kind(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """(the expert, or None for all; how it is played); raises Together when experts can't be kept apart."""
        deferred = _found((args, kwargs))
        scopes = [d.expert for d in deferred]
        if scopes and len(set(scopes)) == 1 and scopes[0] is not None:
            return scopes[0], ""
        if any(scope is not None for scope in scopes):
            joins = function in (aten.cat.default, aten.stack.default) and _dimension(args, 1, args[0][0]) == 0
            whole = joins and function is aten.cat.default and all(d.size(0) == 1 for d in deferred)
            if scopes == list(range(self.experts)) and (whole or (joins and function is aten.stack.default)):
                return None, "joined"
            raise Together(f"{function} mixes experts")
        if function is aten.select.int and _dimension(args, 1, args[0]) == 0:
            return int(args[2]) % self.experts, "selected"
        leaves = tree_flatten((args, kwargs))[0]
        others = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, Deferred)]
        if any(t.numel() > 1 for t in others) and function is not aten.index_select.default:
            raise Together(f"{function} takes a tensor beside the experts'")
        if function in SHAPED or function in EMPTY:
            return None, "shaped"
        if keeps_apart(function, args, {d.dim() for d in deferred}):
            return None, ""
        raise Together(f"{function} is not known to keep experts apart")

    def _new(self, shadow: torch.Tensor, expert: int | None) -> Deferred:
        self._count += 1
        return Deferred(self, self._count, expert, shadow)

    # -- playing -----------------------------------------------------------------------------------------------------

    def give_up(self, why: str) -> dict[int, torch.Tensor]:
        """Play everything for all experts at once; from now on every Deferred stands for a real tensor."""
        if self._values is None:
            self.why = why
            self._values = self.play(0, self.experts, self.steps, {d.number for d in self.alive()})
            self.steps.clear()
            self.sources.clear()
        return self._values

    def whole(self, deferred: Deferred) -> torch.Tensor:
        """The real tensor of all experts that `deferred` stands for."""
        if self._values is not None:
            return self._values[deferred.number]
        steps, _ = self.related(deferred)
        return self.play(0, self.experts, steps, {deferred.number})[deferred.number]

    def forget(self) -> None:
        """Where the tape has given up, hold only the real tensors that somebody can still ask for."""
        if self._values is not None:
            self._values = {d.number: self._values[d.number] for d in self.alive()}

    def related(self, output: Deferred) -> tuple[list[Step], set[int]]:
        """(the steps that `output` has to do with, in order; the sources that they read)."""
        known: set[int] = {output.number}
        steps: list[Step] = []
        while True:
            found = [s for s in self.steps if known & {*s.made, *_numbers(s)}]
            known |= {n for s in found for n in (*s.made, *_numbers(s))}
            if len(found) == len(steps):
                return found, known & set(self.sources)
            steps = found

    def play(self, first: int, last: int, steps: list[Step], wanted: set[int]) -> dict[int, torch.Tensor]:
        """The values numbered `wanted` for experts `first` to `last` (exclusive)."""
        values = _Values(self.sources, first, last)
        left = [*_last_uses(steps, wanted)]
        for step, over in zip(steps, left):
            if step.expert is None or first <= step.expert < last:
                self._do(step, values, first, last)
            for number in over:
                values.pop(number, None)
        return {number: values[number] for number in wanted if number in values or number in self.sources}

    def _do(self, step: Step, values: _Values, first: int, last: int) -> None:
        args, kwargs = step.args, step.kwargs
        if step.special == "selected":
            assert step.expert is not None
            args = (args[0], 0, step.expert - first)
        elif step.special == "joined":
            args = (list(args[0][first:last]), *args[1:])
        elif step.special == "shaped":
            where = SHAPED.get(step.function, 0)  # type: ignore[arg-type]
            args = (*args[:where], [last - first, *args[where][1:]], *args[where + 1 :])
        out = step.function(*values.of(args), **values.of(kwargs))
        values.update(zip(step.made, tree_flatten(out)[0]))


class _Values(dict[int, torch.Tensor]):
    """Values by number while a tape is played; a source is read when it is first asked for."""

    def __init__(self, sources: dict[int, Read], first: int, last: int) -> None:
        self.sources, self.first, self.last = sources, first, last

    def __missing__(self, number: int) -> torch.Tensor:
        self[number] = value = self.sources[number](self.first, self.last)
        return value

    def of(self, tree: Any) -> Any:
        return tree_map(lambda x: self[x.number] if isinstance(x, Ref) else x, tree, is_leaf=_is_ref)


class _Writing(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _found((args, kwargs)) or self.tape.makes_room(function, args, kwargs):
            return self.tape.note(function, args, kwargs)
        return function(*args, **kwargs)


def chunks(experts: int, row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of experts of at most `limit` bytes each, `row` bytes an expert, at least one."""
    step = max(1, limit // max(1, row))
    for first in range(0, experts, step):
        yield first, min(experts, first + step)


def _is_ref(x: object) -> bool:
    return isinstance(x, Ref)


def _found(tree: Any) -> list[Deferred]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, Deferred)]


def _map(change: Callable[[Deferred], Any], tree: Any) -> Any:
    return tree_map(lambda x: change(x) if isinstance(x, Deferred) else x, tree)


def _refs(tree: Any) -> Any:
    return _map(lambda d: Ref(d.number), tree)


def _shadows(tree: Any) -> Any:
    def shadow(x: Any) -> Any:
        if isinstance(x, Deferred):
            return x.shadow
        return _meta(x) if isinstance(x, torch.Tensor) else x

    return tree_map(shadow, tree)


def _meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def _dimension(args: tuple[Any, ...], where: int, of: torch.Tensor) -> int:
    """The dimension that argument `where` names, counted from the front; 0 when it is left out."""
    return args[where] % max(1, of.dim()) if len(args) > where else 0


def _numbers(step: Step) -> list[int]:
    return [x.number for x in tree_flatten((step.args, step.kwargs), is_leaf=_is_ref)[0] if isinstance(x, Ref)]


def _last_uses(steps: list[Step], wanted: set[int]) -> list[set[int]]:
    """For each step, the values that no later step needs."""
    needed, over = set(wanted), []
    for step in reversed(steps):
        here = {*step.made, *_numbers(step)}
        over.append(here - needed)
        needed |= here
    return over[::-1]
