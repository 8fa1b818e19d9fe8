"""Importing this puts the launchers behind the decoder's operators on the CPU; it is a plugin of
pytest, too, whose run fails if it launched nothing."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

import accumext  # noqa: F401  (defines the operators)
from host_cuda.launchers import BLOCKS_TOGETHER, LIBRARY

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
_library = ctypes.CDLL(_PATH)


def launches() -> int:
    """Kernels since the process began."""
    return int(_library.host_cuda_launches())


def set_order(order: int) -> None:
    """In which the blocks, and the threads of one, run from now on: host_cuda.ORDERS."""
    _library.host_cuda_set_order(ctypes.c_int64(order))


def set_blocks_together(blocks: int) -> None:
    """How many blocks can run at the same time from now on: with some, the persistent kernel takes
    the windows that it can."""
    _library.host_cuda_set_blocks_together(ctypes.c_int64(blocks))


set_blocks_together(int(os.environ.get(BLOCKS_TOGETHER, "0")))


def pytest_sessionfinish(session) -> None:
    if launches() == 0:
        session.exitstatus = 1
        print("\nnothing was launched")
