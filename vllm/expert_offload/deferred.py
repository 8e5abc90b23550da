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

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .apart import EMPTY, SHAPED, keeps_apart
from .standin import Deferred, Form, found, note
from .tape import Program, Read, Ref, Step, leaves, play, program_for

aten = torch.ops.aten


class Together(Exception):
    """The experts can't be kept apart in an operation; the text says which."""


class Tape:
    """The operations on the experts of one layer.

    Attributes:
        lesser: where an operation has to do with another tape too, this one gives up.

    Args:
        experts: how many there are; the first dimension of every tensor of all of them.
        device: where they are processed.
    """

    lesser = False

    def __init__(self, experts: int, device: torch.device) -> None:
        self.experts = experts
        # Tensors name the card they are on, and are compared with these.
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self.device = torch.device(device.type, index) if index is not None else device
        self.steps: list[Step] = []
        self.sources: dict[int, Read] = {}
        self.made: list[ref[Deferred]] = []  # no set: to compare tensors is an operation
        self.why: str | None = None
        self._values: dict[int, torch.Tensor] | None = None
        self._count = 0
        self._least = 0
        self._borrowed: list[tuple[torch.Tensor, int]] = []  # real tensors on the tape, and how often they had changed
        self._forms: dict[Any, tuple[bool, list[Form | int]]] = {}
        self._leader: dict[int, int] = {}  # of values that have to do with each other; union-find

    def alive(self) -> list[Deferred]:
        """Every Deferred of this tape that somebody holds."""
        held = [(made, d) for made in self.made if (d := made()) is not None]
        held = [(m, d) for m, d in held if isinstance(d, Deferred) and d.tape is self]  # one may have become another
        self.made = [made for made, _ in held]
        return [d for _, d in held]

    # -- writing -----------------------------------------------------------------------------------------------------

    def source(self, like: torch.Tensor, read: Read) -> Deferred:
        """A tensor of all experts that lies elsewhere: `read(a, b)` gives a new copy of experts a to b on the device.

        `like` has its shape, strides and type; its device does not matter.
        """
        assert like.size(0) == self.experts
        made = self._new(_form(like), None)
        self.sources[made.number] = read
        self._least = min(self._least or like.nbytes, like.nbytes)
        return made

    def given(self, real: torch.Tensor) -> Deferred:
        """A real tensor as a value of the tape."""
        if real.dim() == 0 or real.size(0) != self.experts:
            self.give_up(f"a tensor of shape {tuple(real.shape)} took the place of all experts")
        made = self._new(_form(real), None)
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
        # As large as the smaller of the weights: scales, even where they are widened to 16 bits, are half of that.
        return device.type == self.device.type and shadow.nbytes >= self._least > 0

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write one operation down and return what it will make, or do it when the tape has given up."""
        if self._values is None:
            if function is aten.unbind.int and dimension(args, 1, args[0]) == 0 and args[0].expert is None:
                return [args[0].select(0, expert) for expert in range(self.experts)]
            try:
                return self._write(function, args, kwargs)
            except (Together, RuntimeError) as why:  # RuntimeError: it can't be done on meta tensors
                self.give_up(str(why).splitlines()[0])
        values = self._values
        assert values is not None
        real_args, real_kwargs = changed(lambda d: values[d.number], args, kwargs)
        out = function(*real_args, **real_kwargs)
        if function is not aten.detach.default:
            return out
        made = self._new(_form(out), args[0].expert)  # nn.Parameter asks for its own kind back
        values[made.number] = out
        return made

    def _write(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deferred = found(args, kwargs)
        expert, special = self._kind(function, args, kwargs, deferred)
        single, forms = self._makes(function, args, kwargs, special)
        outs = []
        for form in forms:
            if isinstance(form, int):  # an operation in place gives back what it was given
                outs.append(deferred[form])
                continue
            if expert is None and (not form[0] or form[0][0] != self.experts):
                raise Together(f"{function} puts experts together")
            outs.append(self._new(form, expert))
        if special == "shaped":
            where = SHAPED.get(function, 0)
            args = (*args[:where], list(outs[0].shape), *args[where + 1 :])
        made = tuple(d.number for d in outs)
        refs, named = changed(lambda d: Ref(d.number), args, kwargs)
        self.steps.append(Step(function, refs, named, made, expert, special))
        self._borrowed += [(x, x._version) for x in leaves(refs, named) if isinstance(x, torch.Tensor)]
        for number in (*made, *(d.number for d in deferred)):
            self._leader[self._lead(number)] = self._lead(made[0])
        return outs[0] if single else outs

    def _makes(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], special: str
    ) -> tuple[bool, list[Form | int]]:
        """(does it give one tensor?, the form of each, or which Deferred of its arguments it gives back)."""
        if special == "selected":
            shape, stride, dtype = _form(args[0])
            return True, [(shape[1:], stride[1:], dtype)]
        # For each expert comes the same operation on the same shapes.
        given = [(*_form(x), type(x)) if isinstance(x, torch.Tensor) else x for x in leaves(args, kwargs)]
        key = (function, *given)
        if key not in self._forms:
            if kwargs.get("pin_memory"):
                raise Together(f"{function} makes page-locked memory")
            metas = {id(d): _meta(d) for d in found(args, kwargs)}
            on_meta, named = changed(lambda d: metas[id(d)], args, kwargs, others=_meta)
            out = function(*on_meta, **{**named, **({"device": "meta"} if "device" in kwargs else {})})
            single = isinstance(out, torch.Tensor)
            inputs = [metas[id(d)] for d in found(args, kwargs)]
            if any(_form(d) != _form(metas[id(d)]) for d in found(args, kwargs)):
                raise Together(f"{function} changes a shape in place")
            outs = [out] if single else list(out or ())
            if not outs or not all(isinstance(t, torch.Tensor) for t in outs):
                raise Together(f"{function} gives something that is no tensor")
            self._forms[key] = single, [next((i for i, m in enumerate(inputs) if m is t), _form(t)) for t in outs]
        return self._forms[key]

    def _kind(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], deferred: list[Deferred]
    ) -> tuple[int | None, str]:
        """(the expert, or None for all; how it is played); raises Together when experts can't be kept apart."""
        if any(not isinstance(x, Deferred) for x in _written(function, args, kwargs)):
            raise Together(f"{function} writes into a tensor that is there")
        scopes = [d.expert for d in deferred]
        if scopes and len(set(scopes)) == 1 and scopes[0] is not None:
            return scopes[0], ""
        if any(scope is not None for scope in scopes):
            joins = function in (aten.cat.default, aten.stack.default) and dimension(args, 1, args[0][0]) == 0
            whole = joins and function is aten.cat.default and all(d.size(0) == 1 for d in deferred)
            if scopes == list(range(self.experts)) and (whole or (joins and function is aten.stack.default)):
                return None, "joined"
            raise Together(f"{function} mixes experts")
        if function is aten.select.int and dimension(args, 1, args[0]) == 0:
            return int(args[2]) % self.experts, "selected"
        others = [t for t in leaves(args, kwargs) if isinstance(t, torch.Tensor) and not isinstance(t, Deferred)]
        if any(t.numel() > 1 for t in others) and function is not aten.index_select.default:
            raise Together(f"{function} takes a tensor beside the experts'")
        if function in SHAPED or function in EMPTY:
            return None, "shaped"
        if keeps_apart(function, args, {d.dim() for d in deferred}):
            return None, ""
        raise Together(f"{function} is not known to keep experts apart")

    def _new(self, form: Form, expert: int | None) -> Deferred:
        self._count += 1
        return Deferred(self, self._count, expert, form)

    def _lead(self, number: int) -> int:
        while (leader := self._leader.get(number, number)) != number:
            self._leader[number] = self._leader.get(leader, leader)
            number = leader
        return number

    # -- and playing -------------------------------------------------------------------------------------------------

    def give_up(self, why: str) -> dict[int, torch.Tensor]:
        """Play everything for all experts at once; from now on every Deferred stands for a real tensor."""
        if self._values is None:
            self.why = why
            self._check_borrowed()
            self._values = {}  # `makes_room` has nothing to make any more: what is played is real
            self._values = self.play(0, self.experts, program_for(self.steps, {d.number for d in self.alive()}))
            self.steps.clear()
            self.sources.clear()
            self._borrowed.clear()
        return self._values

    def made_real(
        self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give up, and put what this tape's Deferred stand for among the arguments into their places."""
        values = self.give_up(why)
        return changed(lambda d: values[d.number] if d.tape is self else d, args, kwargs)

    def whole(self, deferred: Deferred) -> torch.Tensor:
        """The real tensor of all experts that `deferred` stands for."""
        if self._values is not None:
            return self._values[deferred.number]
        return self.play(0, self.experts, self.program(deferred))[deferred.number]

    def forget(self) -> None:
        """Where the tape has given up, hold only the real tensors that somebody can still ask for."""
        if self._values is not None:
            self._values = {d.number: self._values[d.number] for d in self.alive()}

    def related(self, output: Deferred) -> tuple[list[Step], set[int]]:
        """(the steps that `output` has to do with, in order; the sources that they read)."""
        leader = self._lead(output.number)
        steps = [step for step in self.steps if self._lead(step.made[0]) == leader]
        return steps, {number for number in self.sources if self._lead(number) == leader}

    def program(self, output: Deferred) -> Program:
        """What is to be played for `output`."""
        self._check_borrowed()
        return program_for(self.related(output)[0], {output.number})

    def _check_borrowed(self) -> None:
        """What is read when a tape is played must be what was there when it was written."""
        for tensor, version in self._borrowed:
            if tensor._version != version:
                raise RuntimeError(
                    f"expert offload: a tensor {tuple(tensor.shape)} {tensor.dtype} that the experts are processed "
                    "with was changed after it was used, so they can't be processed later. Serve without "
                    "--cpu-offload-gb, and report the model and its quantization"
                )

    def play(self, first: int, last: int, program: Program) -> dict[int, torch.Tensor]:
        """The values that `program` is for, of experts `first` to `last` (exclusive), by number."""
        return play(first, last, program, self.sources)


class _Writing(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if found(args, kwargs):
            return note(function, args, kwargs)
        if self.tape.makes_room(function, args, kwargs):
            return self.tape.note(function, args, kwargs)
        return function(*args, **kwargs)


def _written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operation changes in place."""
    for index, argument in enumerate(function._schema.arguments):  # type: ignore[attr-defined]
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        x = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from x if isinstance(x, (list, tuple)) else (x,) if x is not None else ()


def changed(
    change: Callable[[Deferred], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    others: Callable[[torch.Tensor], Any] = lambda tensor: tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every Deferred changed, and every other tensor by `others`."""

    def one(x: Any) -> Any:
        if isinstance(x, Deferred):
            return change(x)
        return others(x) if isinstance(x, torch.Tensor) else x

    def many(x: Any) -> Any:
        return [one(y) for y in x] if isinstance(x, (list, tuple)) else one(x)

    return tuple(many(x) for x in args), {name: many(x) for name, x in kwargs.items()}


def _form(like: torch.Tensor) -> Form:
    return tuple(like.shape), like.stride(), like.dtype


def _meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def dimension(args: tuple[Any, ...], where: int, of: torch.Tensor) -> int:
    """The dimension that argument `where` names, counted from the front; 0 when it is left out."""
    return args[where] % max(1, of.dim()) if len(args) > where else 0
