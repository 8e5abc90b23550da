# SPDX-License-Identifier: Apache-2.0
"""The few functions of the CUDA runtime that torch has no name for, each of which says what went wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_pointer, _size, _unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
SIGNATURES: dict[str, list[Any]] = {
    "cudaHostRegister": [_pointer, _size, _unsigned],
    "cudaHostUnregister": [_pointer],
    "cudaHostAlloc": [ctypes.POINTER(_pointer), _size, _unsigned],
    "cudaFreeHost": [_pointer],
    "cudaHostGetDevicePointer": [ctypes.POINTER(_pointer), _pointer, _unsigned],
    "cudaMemcpyAsync": [_pointer, _pointer, _size, ctypes.c_int, _pointer],
}


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed; the text names the call and the error."""


class Runtime:
    """The functions above of the CUDA runtime, each of which raises CudaError instead of returning a status."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, name, self._checked(name, function))
        for name in ("cudaGetErrorName", "cudaGetErrorString"):
            getattr(library, name).restype = ctypes.c_char_p

    def _checked(self, name: str, function: Callable[..., int]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            if status := function(*arguments):
                # Taken off the runtime, or torch's next check would find it and blame another call.
                self._library.cudaGetLastError()
                error, text = self._library.cudaGetErrorName(status), self._library.cudaGetErrorString(status)
                raise CudaError(f"{name}: {error.decode()} ({status}), {text.decode()}")

        return call
