# SPDX-License-Identifier: Apache-2.0
"""A second expert layer beside the real one, with tensors for other experts, that runs the same kernels.

A pool's slots are an expert layer of their own: as many experts as slots, the same kinds of tensors, one row each. The
release's method object knows how to run it, but holds the real layer's scales in a config, a kernel or an experts
object that it made while weights were processed. None of these is changed. A twin is a copy of that object graph, as
far down as a tensor with a row per expert lies in it; whatever has none is shared with the original. The layer itself
is stood for by a `View`, which answers with the twin's tensors and leaves all other questions to the layer.

To kernels a twin looks like one rank of expert parallelism: fewer experts than the router knows, and an `expert_map`
from the router's numbers to rows, -1 for what this rank does not compute. That is how kernels skip rows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

# What the twin never walks into: nothing below these holds a tensor of this layer's experts.
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size)
_MADE_WHOLE = (tuple, types.FunctionType, types.MethodType, functools.partial)
_DEPTH = 8  # method, kernel, its implementation, experts object, config, description, tensor; containers count too


class NoTwin(ValueError):
    """The layer holds a tensor that no twin can be made of, in words."""


class View:
    """A layer with some of its attributes replaced, for the code that runs it and only reads."""

    def __init__(self, layer: nn.Module | View, replaced: dict[str, object]) -> None:
        self.__dict__.update(replaced, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class Rows:
    """The tensors with a row per expert of one layer, and for each of them the twin's.

    Args:
        experts: rows of the real layer's tensors.
        count: rows of the twin's.
        make: called once for each piece of memory, with the first tensor seen on it: the twin's tensor, of the same
            dtype, row shape and strides but `count` rows; None to have the twin share the real one's.

    `pairs`: (real, twin's) of all that `make` made.
    """

    def __init__(self, experts: int, count: int, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self.experts, self.count, self._make = experts, count, make
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def named(self, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """The twin's tensors for those of the layer that have a row per expert, by name."""
        made = ((name, tensor, self.twin(tensor)) for name, tensor in tensors if tensor is not None)
        return {name: twin for name, tensor, twin in made if twin is not tensor}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin's tensor for one that the layer or its method holds; itself when it has no row per expert.

        A view of memory that has a twin (another dtype, transposed rows) becomes the same view of that twin.
        Raises NoTwin for a tensor whose rows are not the experts' memory, one after the other.
        """
        if tensor.dim() == 0 or tensor.shape[0] != self.experts:
            return tensor
        shape = (self.count, *tensor.shape[1:])
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        if tensor.stride(0) == 0:  # one row that all experts share
            return tensor.detach().as_strided(shape, tensor.stride())
        key = tensor.untyped_storage().data_ptr()
        if key not in self._of:
            one = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:]))
            if tensor.storage_offset() or one > tensor.stride(0):
                raise NoTwin(f"the memory of a tensor {tuple(tensor.shape)} is not one expert after the other")
            source = tensor.detach()
            made = self._make(source)
            self._of[key] = (source, made)
            if made is not None:
                self.pairs.append((source, made))
        source, made = self._of[key]
        if row_bytes(tensor) != row_bytes(source) or tensor.storage_offset() * tensor.element_size() >= row_bytes(
            tensor
        ):
            raise NoTwin(f"a tensor {tuple(tensor.shape)} has other rows than the memory that it lies in")
        if made is None:
            return tensor
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(made.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes from one expert's row to the next one's."""
    return tensor.stride(0) * tensor.element_size()


def slots_for(source: torch.Tensor, count: int) -> torch.Tensor:
    """An uninitialised tensor like `source`, strides too, with `count` rows, on the device that reads `source`."""
    flat = torch.empty(count * source.stride(0), dtype=source.dtype, device=source.device)
    return flat.as_strided((count, *source.shape[1:]), source.stride())


def twin_of(method: Any, rows: Rows, layer: nn.Module, view: View) -> Any:
    """`method` with every tensor of a row per expert replaced and `layer` by `view`; itself where it holds neither.

    Raises NoTwin as `Rows.twin` does, and for a tensor that a function's closure keeps.
    """
    graph = _Graph(rows, layer, view)
    graph.look(method, _DEPTH)
    return graph.copied(method)


class _Graph:
    """What hangs on a method: objects by id, what each is replaced by, and who holds whom. Cycles are allowed."""

    def __init__(self, rows: Rows, layer: nn.Module, view: View) -> None:
        self.rows = rows
        self.new: dict[int, object] = {id(layer): view}
        self._alive: list[object] = [layer]  # so that no other object gets the id of one that was seen
        self._depth: dict[int, int] = {}
        self._holders: dict[int, list[object]] = {}

    def look(self, thing: Any, depth: int) -> None:
        """Note the twins of all tensors below `thing`, and of each object by whom it is held."""
        if id(thing) in self.new or self._depth.get(id(thing), -1) >= depth:
            return
        self._alive.append(thing)
        self._depth[id(thing)] = depth
        if isinstance(thing, torch.Tensor):
            twin = self.rows.twin(thing)
            if twin is not thing:
                self.new[id(thing)] = twin
        elif depth:
            for part in _parts(thing).values():
                if not isinstance(part, _LEAVES):
                    self._holders.setdefault(id(part), []).append(thing)
                    self.look(part, depth - 1)

    def copied(self, thing: Any) -> Any:
        """`thing`, or a copy where anything below it has a twin."""
        changing, todo = {}, list(self.new)
        while todo:
            for holder in self._holders.get(todo.pop(), ()):
                if id(holder) not in changing:
                    changing[id(holder)] = holder
                    todo.append(id(holder))
        # Objects first, so that a cycle finds its copy; what cannot be changed once it is made is made when it is met.
        shells = [old for old in changing.values() if not isinstance(old, _MADE_WHOLE)]
        for old in shells:
            self.new[id(old)] = {} if isinstance(old, dict) else copy.copy(old)
        for old in shells:
            made: Any = self.new[id(old)]
            for name, part in _parts(old).items():
                if isinstance(old, (dict, list)):
                    made[name] = self._of(part, changing)
                elif id(part) in changing or id(part) in self.new:
                    object.__setattr__(made, name, self._of(part, changing))
        return self._of(thing, changing)

    def _of(self, part: Any, changing: dict[int, object]) -> Any:
        if id(part) not in self.new and id(part) in changing:
            parts = {name: self._of(x, changing) for name, x in _parts(part).items()}
            self.new[id(part)] = _made_whole(part, parts)
        return self.new.get(id(part), part)


def _made_whole(old: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(old, types.FunctionType):
        raise NoTwin(f"the function {old.__qualname__} keeps a tensor of its experts")
    if isinstance(old, types.MethodType):
        return types.MethodType(parts["__func__"], parts["__self__"])
    if isinstance(old, functools.partial):
        return functools.partial(parts["func"], *parts["args"], **parts["keywords"])
    new = list(parts.values())
    return type(old)(*new) if hasattr(old, "_fields") else type(old)(new)


def _parts(thing: Any) -> dict[Any, Any]:
    """What an object holds: entries of a container, or attributes, those of a dataclass with slots too."""
    if isinstance(thing, dict):
        return thing
    if isinstance(thing, (list, tuple)):
        return dict(enumerate(thing))
    if isinstance(thing, types.FunctionType):
        return dict(enumerate(_closure(thing)))
    for kind, names in (
        (types.MethodType, ("__func__", "__self__")),
        (functools.partial, ("func", "args", "keywords")),
    ):
        if isinstance(thing, kind):
            return {name: getattr(thing, name) for name in names}
    found = dict(getattr(thing, "__dict__", {}))
    if dataclasses.is_dataclass(thing):
        found |= {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if hasattr(thing, f.name)}
    return found


def _closure(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that was not filled yet
            yield cell.cell_contents
