"""Importing this puts the launchers behind the operators on the CPU; it is a plugin of pytest, too,
whose run fails if it launched nothing."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

import accumext  # noqa: F401  (defines the operators)
from accumext.decoder import _plan
from host_cuda.launchers import LIBRARY, NOT_COOPERATIVE

_PATH = os.environ[LIBRARY]
_ATEN = torch.library.Library("aten", "IMPL")


def _mm_dtype_out(self: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """The product that torch has on a GPU alone, under the same conditions."""
    assert self.dtype == mat2.dtype
    assert self.dtype in (torch.float16, torch.bfloat16)
    assert out.dtype == out_dtype == torch.float32
    return torch.mm(self.to(out_dtype), mat2.to(out_dtype), out=out)


_ATEN.impl("mm.dtype_out", _mm_dtype_out, "CPU")
torch.ops.load_library(_PATH)
_plan.HANDED_OUT = ()  # launchers hand out no pre-activations
_library = ctypes.CDLL(_PATH)


_library.host_cuda_launches.restype = ctypes.c_int64
_library.host_cuda_allocations.restype = ctypes.c_int64
_library.host_cuda_new_stream.restype = ctypes.c_void_p


def launches() -> int:
    """Kernels since the process began."""
    return int(_library.host_cuda_launches())


def allocations() -> int:
    """Of tables: calls of cudaMalloc since the process began."""
    return int(_library.host_cuda_allocations())


def set_order(order: int) -> None:
    """In which the blocks, and the threads of one, run from now on: host_cuda.ORDERS."""
    _library.host_cuda_set_order(ctypes.c_int64(order))


def use_device(device: int) -> None:
    """On which all tensors are from now on."""
    _library.host_cuda_use_device(device)


def set_free_memory(size: int) -> None:
    """Set the number of bytes that cudaMalloc can still give."""
    _library.host_cuda_set_free_memory(ctypes.c_int64(size))


def wait_for_operators(wait: bool) -> None:
    """Set whether the work of an operator is done when it returns, or when somebody waits for
    it."""
    _library.host_cuda_wait_for_operators(wait)


def synchronize(*, last_first: bool = False) -> None:
    """Do all work, of the stream that was made last first if so asked."""
    _library.host_cuda_synchronize(last_first)


class Stream:
    """One of the device's, current within `with`."""

    def __init__(self) -> None:
        self._handle = _library.host_cuda_new_stream()

    def __enter__(self) -> None:
        _library.host_cuda_use_stream(ctypes.c_void_p(self._handle))

    def __exit__(self, *_: object) -> None:
        _library.host_cuda_use_stream(None)

    def destroy(self) -> int:
        """Leave its work to the device, and its handle, which is returned, to another stream."""
        _library.host_cuda_destroy_stream(ctypes.c_void_p(self._handle))
        return int(self._handle)


class Graph:
    """The calls within `with`, on a stream of its own, to be done by `replay`."""

    def __init__(self) -> None:
        self.stream = Stream()

    def __enter__(self) -> None:
        self.stream.__enter__()
        _library.host_cuda_begin_capture()

    def __exit__(self, *_: object) -> None:
        self._graph = _library.host_cuda_end_capture()
        self.stream.__exit__()

    def replay(self) -> None:
        """Do it on the current stream."""
        assert self._graph >= 0, "the capture was invalidated"
        _library.host_cuda_replay(self._graph)


use_device(NOT_COOPERATIVE)


def pytest_sessionfinish(session) -> None:
    if launches() == 0:
        session.exitstatus = 1
        print("\nnothing was launched")
