# SPDX-License-Identifier: Apache-2.0
"""A tensor that stands for one whose bytes are not there: it has the shape, type and device, and a number on a tape.

Whatever is done to it is told to its tape (`deferred`). When the bytes are there after all, it can become the tensor
that it stands for, in place: whoever holds it, a kernel's config for instance, then holds that.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .tape import leaves

if TYPE_CHECKING:
    from .deferred import Tape

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, type

# What each one stands for, by its id. Attributes a release carries over to the tensor that replaces it, and an object
# with slots can't take the class of a parameter.
_STANDS_FOR: dict[int, tuple[Tape, int, int | None]] = {}


class Deferred(torch.Tensor):
    """A tensor of all experts (`expert` None), or of one, whose bytes are not there.

    `measured` False: not even its shape is known; who asks for it gets the tensor itself.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tape: Tape, number: int, expert: int | None, form: Form, measured: bool = True) -> Deferred:
        shape, stride, dtype = form
        how = {} if measured else {"dispatch_sizes_strides_policy": "sizes"}
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=stride, dtype=dtype, device=tape.device, **how
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # native code that goes past the dispatcher: an error, no crash
        made._stand_for(tape, number, expert)
        return made

    def __init__(self, *_: object) -> None:
        """All is done by `__new__`."""

    def _stand_for(self, tape: Tape, number: int, expert: int | None) -> None:
        _STANDS_FOR[id(self)] = tape, number, expert
        tape.made.append(weakref.ref(self, partial(_forget, id(self))))

    @property
    def tape(self) -> Tape:
        """Where what is done to it is written."""
        return _STANDS_FOR[id(self)][0]

    @property
    def number(self) -> int:
        """Its number there."""
        return _STANDS_FOR[id(self)][1]

    @property
    def expert(self) -> int | None:
        """The expert that it is of; None: of all."""
        return _STANDS_FOR[id(self)][2]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return note(function, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Deferred({self.dtype}, expert={self.expert})"

    def become(self, real: torch.Tensor, kind: type | None = None) -> None:
        """Be `real`, or a parameter of it, from now on, wherever this object is held, with what hangs on it.

        `kind` is the class of parameter, where the release has its own.

        Raises RuntimeError when native code holds it too.
        """
        kept = self.__dict__.pop("_is_param", False)
        other = nn.Parameter(real, requires_grad=False) if kept else real.detach()
        try:
            torch._C._swap_tensor_impl(self, other)  # type: ignore[attr-defined]
        except RuntimeError:
            if kept:
                self.__dict__["_is_param"] = True
            raise
        _STANDS_FOR.pop(id(self))
        self.__class__ = kind or type(other)  # type: ignore[assignment]

    # What reaches for bytes without an operation gets real ones.

    def real(self) -> torch.Tensor:
        """The tensor, played for all experts at once; the tape gives up."""
        return self.tape.give_up("something asked for its address")[self.number]

    def data_ptr(self) -> int:
        return self.real().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return _Storage(self)  # type: ignore[return-value]

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
        if value.tape is self.tape:
            _STANDS_FOR[id(self)] = value.tape, value.number, value.expert
        else:
            self._stand_for(value.tape, value.number, value.expert)


class _Storage:
    """The storage of a Deferred: there is none, but its size may be asked for. Anything else is the real one's."""

    def __init__(self, owner: Deferred) -> None:
        self._owner = owner

    def nbytes(self) -> int:
        shape, strides = self._owner.shape, self._owner.stride()
        extent = sum((n - 1) * s for n, s in zip(shape, strides)) + 1 if self._owner.numel() else 0
        return _Bytes(extent * self._owner.element_size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.real().untyped_storage(), name)


class _Bytes(int):
    """How many bytes a Deferred has. Equal to no other number, not even to the same.

    Releases ask whether a parameter and what shall replace it are of one type and as large, and overwrite the one with
    the other then. A parameter and a tensor are of two types, but not while both are Deferred.
    """

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def note(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell an operation on Deferred tensors to their tape; where there are two, the lesser one gives up first."""
    here = found(args, kwargs)
    tape = next((d.tape for d in here if not d.tape.lesser), here[0].tape)
    for other in {id(d.tape): d.tape for d in here if d.tape is not tape}.values():
        args, kwargs = other.made_real(f"{function} mixes weights and scales", args, kwargs)
    return tape.note(function, args, kwargs)


def found(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Deferred]:
    """The Deferred tensors among the arguments of an operation."""
    return [x for x in leaves(args, kwargs) if isinstance(x, Deferred)]


def _forget(key: int, _: object) -> None:
    _STANDS_FOR.pop(key, None)
