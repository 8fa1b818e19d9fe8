"""Importing this puts the launchers behind the operators on the CPU; it is a plugin of pytest, too,
whose run fails if it launched nothing."""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import c_bool, c_char_p, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

import accumext  # noqa: F401  (defines the operators)
from accumext.decoder import _plan
from host_cuda import LIBRARY

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
_plan.PRE_ACTIVATION_DEVICES = ()  # launchers hand out no pre-activations
_library = ctypes.CDLL(_PATH)


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(_library, f"host_cuda_{name}")
    function.restype, function.argtypes = result, arguments
    return function


launches = _function("launches", c_int64)  # kernels since the process began
allocations = _function("allocations", c_int64)  # of tables: calls of cudaMalloc
set_order = _function("set_order", None, c_int64)  # of blocks and threads: host_cuda.ORDERS
blocks = _function("blocks", c_int64)  # of the last launch
argument_bytes = _function("argument_bytes", c_int64)  # of its kernel
shared_bytes = _function("shared_bytes", c_int64)  # dynamic ones of its blocks
use_device = _function("use_device", None, c_int)  # on which all tensors are from now on
use_mutant = _function("use_mutant", None, c_int)  # the number of a fault in mutants.ALL; -1: none
_races = _function("races", c_char_p)
_kernels = _function("kernels", c_char_p)
_new_device = _function("new_device", c_int, c_int, c_int, c_int, c_bool, c_int)
set_driver_version = _function("set_driver_version", None, c_int)
set_free_memory = _function("set_free_memory", None, c_int64)  # bytes cudaMalloc can still give
# Whether the work of an operator is done when it returns, or when somebody waits for it.
wait_for_operators = _function("wait_for_operators", None, c_bool)
synchronize = _function("synchronize", None, c_bool)  # all; True: the last stream's work first
_new_stream = _function("new_stream", c_void_p)
_use_stream = _function("use_stream", None, c_void_p)
_destroy_stream = _function("destroy_stream", None, c_void_p)
_begin_capture = _function("begin_capture", None)
_end_capture = _function("end_capture", c_int)
_replay = _function("replay", None, c_int)


DRIVER = 13000  # the version of CUDA that it is for, unless set_driver_version says another


@functools.cache
def device(
    multiprocessors: int, *, shared_bytes: int = 232448, capability: int = 90,
    cooperative: bool = True, registers: int = 65536,
) -> int:  # fmt: skip
    """The number of a device like an H100 but for these."""
    return int(_new_device(multiprocessors, shared_bytes, capability, cooperative, registers))


H100 = device(132)
SMALLER = device(108, shared_bytes=101376, capability=86)
SLICE = device(3)  # of an H100
STEP_BY_STEP = device(2, cooperative=False)  # blocks do not wait for one another
CROWDED = device(2, registers=32768)  # too few for 255 in each of 256 threads


def kernels() -> str:
    """The mangled names of those that have been launched."""
    return _kernels().decode()


def races() -> str:
    """What the race detector has said since it was asked last."""
    return _races().decode()


def words_with_mutant(number: int, call: Callable[[], object]) -> str:
    """What is printed of a call with a mutant, in a process of its own, which it may end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            use_mutant(number)
            call()
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, errors="replace") as words:
        text = words.read()
    os.waitpid(child, 0)
    return text


class Stream:
    """One of the device's, current within `with`."""

    def __init__(self) -> None:
        self._handle = _new_stream()

    def __enter__(self) -> None:
        _use_stream(self._handle)

    def __exit__(self, *_: object) -> None:
        _use_stream(None)

    def destroy(self) -> int:
        """Leave its work to the device, and its handle, which is returned, to another stream."""
        _destroy_stream(self._handle)
        return int(self._handle)


class Graph:
    """The calls within `with`, on a stream of its own, to be done by `replay`."""

    def __init__(self) -> None:
        self.stream = Stream()

    def __enter__(self) -> None:
        self.stream.__enter__()
        _begin_capture()

    def __exit__(self, *_: object) -> None:
        self._graph = _end_capture()
        self.stream.__exit__()

    def replay(self) -> None:
        """Do it on the current stream."""
        assert self._graph >= 0, "the capture was invalidated"
        _replay(self._graph)


use_device(STEP_BY_STEP)


def pytest_sessionfinish(session) -> None:
    if launches() == 0:
        session.exitstatus = 1
        print("\nnothing was launched")
