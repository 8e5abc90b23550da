# SPDX-License-Identifier: Apache-2.0
"""What page-locking needs of the CUDA runtime, called in the library that torch has loaded.

torch's own binding (`torch.cuda.cudart()`) lacks what makes a refusal harmless: cudaGetLastError, without which torch
blames its next kernel for it, and a copy to prove that page-locked memory delivers. Nothing is looked for before the
first call, so a torch without CUDA imports this module too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

# CUDA runtime API, "Memory Management": cudaHostRegisterPortable | cudaHostRegisterMapped, cudaMemcpyKind, cudaError.
_REGISTER_FLAGS = 1 | 2
_TO_DEVICE, _TO_HOST, _BY_ADDRESS = 1, 2, 4
_OUT_OF_MEMORY = 2

_Pointer, _Out, _Size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
# Without these, ctypes would cut addresses and sizes to 32 bits.
_ARGUMENTS: dict[str, list[Any]] = {
    "cudaDeviceSynchronize": [],
    "cudaFree": [_Pointer],
    "cudaGetErrorName": [ctypes.c_int],
    "cudaGetLastError": [],
    "cudaHostGetDevicePointer": [_Out, _Pointer, ctypes.c_uint],
    "cudaHostRegister": [_Pointer, _Size, ctypes.c_uint],
    "cudaHostUnregister": [_Pointer],
    "cudaMalloc": [_Out, _Size],
    "cudaMemcpy": [_Pointer, _Pointer, _Size, ctypes.c_int],
}


class CudaError(RuntimeError):
    """The runtime's function `call` answered with `code`, which it calls `name`."""

    def __init__(self, code: int, name: str, call: str) -> None:
        super().__init__(f"{call} answers {name} ({code})")
        self.code, self.name, self.call = code, name, call


class CudaMissing(CudaError):
    """There is no CUDA runtime in this process."""

    def __init__(self, why: str) -> None:
        super().__init__(-1, "no CUDA runtime", "ctypes")
        self.args = (why,)


@functools.cache
def library() -> Any:
    """The CUDA runtime; raises CudaMissing when there is none.

    By the name of torch's own copy, which the loader then gives again: the last error is kept in each copy by itself,
    so another one could not take back what torch would report.
    """
    version = torch.version.cuda
    if version is None:
        raise CudaMissing(f"torch {torch.__version__} has no CUDA")
    file = f"libcudart.so.{version.split('.')[0]}"
    try:
        loaded = ctypes.CDLL(file)
        for name, arguments in _ARGUMENTS.items():
            getattr(loaded, name).argtypes = arguments
    except (OSError, AttributeError) as error:  # no such file; not one of these functions in it
        raise CudaMissing(f"torch {torch.__version__} has CUDA {version}, but no whole runtime: {error}") from error
    loaded.cudaGetErrorName.restype = ctypes.c_char_p
    return loaded


def _call(name: str, *arguments: Any) -> None:
    runtime = library()
    code = int(getattr(runtime, name)(*arguments))
    if code:
        runtime.cudaGetLastError()  # read is cleared; else torch's next check reports it, after some innocent kernel
        raise CudaError(code, runtime.cudaGetErrorName(code).decode(), name)


def host_register(address: int, nbytes: int) -> None:
    """Page-lock `nbytes` bytes of host memory for every device, readable by kernels; raises CudaError."""
    _call("cudaHostRegister", address, nbytes, _REGISTER_FLAGS)


def host_unregister(address: int) -> None:
    """Undo `host_register`; raises CudaError."""
    _call("cudaHostUnregister", address)


def host_pointer_for_device(address: int) -> int:
    """Where the current device reads the registered host memory at `address`; raises CudaError."""
    found = ctypes.c_void_p()
    _call("cudaHostGetDevicePointer", ctypes.pointer(found), address, 0)
    return found.value or 0


def through_device(spans: Sequence[tuple[int, int]], before: bytes) -> bytes:
    """What arrives in ordinary memory when `spans` are copied to the current device and back; raises CudaError.

    Args:
        spans: (address, bytes) of each, the host's address or the device's.
        before: as many bytes as all spans together, which lie at every place on the way beforehand: a copy that
            delivers nothing gives these.
    """
    ordinary = ctypes.create_string_buffer(before, len(before))
    there = ctypes.addressof(ordinary)
    device = _device_memory(len(before))
    try:
        _call("cudaMemcpy", device, there, len(before), _TO_DEVICE)
        at = device
        for address, nbytes in spans:
            _call("cudaMemcpy", at, address, nbytes, _BY_ADDRESS)
            at += nbytes
        _call("cudaDeviceSynchronize")
        _call("cudaMemcpy", there, device, len(before), _TO_HOST)
    finally:
        # Where even this fails, the device is lost to torch as well, which will say so.
        with contextlib.suppress(CudaError):
            _call("cudaFree", device)
    return ordinary.raw


def _device_memory(nbytes: int) -> int:
    made = ctypes.c_void_p()
    try:
        _call("cudaMalloc", ctypes.pointer(made), nbytes)
    except CudaError as error:
        if error.code != _OUT_OF_MEMORY:
            raise
        torch.cuda.empty_cache()  # torch keeps what it freed, and a full device must not look like a refused page-lock
        _call("cudaMalloc", ctypes.pointer(made), nbytes)
    return made.value or 0
