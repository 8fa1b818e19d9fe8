"""The kernels of csrc/cuda, compiled for the host and called like the operators they implement.

`simt.h` is CUDA's execution model, `driver.cpp` what stands between a call and its kernels; both
are built with AddressSanitizer and UBSan, or by races.py. Every call runs in a process of its own,
several times, and must leave the same bits whatever the grid and the order of the threads. The
kernels can also be those that nvcc makes of the same source: see ptx.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from support.programs import compiler
from torch import Tensor

from accumext import reference
from accumext.backend import _build

FOLDER = Path(__file__).parent
PLAIN_FLAGS = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off"]
PLAIN_FLAGS += [f"-I{FOLDER}", f"-I{FOLDER / 'launchers'}"]
FLAGS = [
    *PLAIN_FLAGS,
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    f"-I{_build.csrc()}",
]
# Its search for leaks needs ptrace, which containers may forbid.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
TIMEOUT_S = 120.0  # tens of times the longest call
ARCH = os.environ.get("HOST_CUDA_ARCH")  # such as sm_90: the kernels are nvcc's, see ptx

ASCENDING, DESCENDING, SHUFFLED = ORDERS = range(3)  # host_cuda::Order
_Run = TypeVar("_Run")


def usual(*runs: _Run) -> tuple[_Run, ...]:
    """The runs of a call, in tests that are not of the order: of nvcc's kernels the last alone."""
    return runs if ARCH is None else runs[-1:]


# (order of the threads, blocks of the grid): of warps fewer, as many and more than most calls have
# chunks for.
RUNS = usual((ASCENDING, 1), (DESCENDING, 2), (SHUFFLED, 7), (DESCENDING, 20))

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # accumext::Dtype
_OPS = (
    "total_norm", "accumulate_", "unscale_check_clip_accumulate_", "scale_", "window_factors",
    "copy_rounded_",
)  # fmt: skip


def build(name: str, folder: Path, *flags: str) -> Path:
    """Compile `name`.cpp of this folder into an executable in `folder`."""
    executable = folder / Path(name).name
    unit = executable.with_suffix(".o")
    command = [*compiler(), *FLAGS, *flags, "-c", str(FOLDER / f"{name}.cpp"), "-o", str(unit)]
    subprocess.run(command, check=True, timeout=600)
    link(unit, executable=executable)
    return executable


def link(*objects: Path, executable: Path) -> None:
    """With the names of all functions, by which kernels are found."""
    command = [*compiler(), "-fsanitize=address,undefined", "-rdynamic", *map(str, objects)]
    subprocess.run([*command, "-ldl", "-o", str(executable)], check=True, timeout=600)


def execute(executable: Path, *arguments: str, request: bytes = b"") -> bytes:
    """Return the output of an executable; RuntimeError with its words if it found a fault."""
    done = subprocess.run(
        [executable, *arguments],
        input=request,
        capture_output=True,
        timeout=TIMEOUT_S,
        env=os.environ | ENVIRONMENT,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    return done.stdout


class HostCuda:
    """The operators, by the kernels of csrc/cuda. Arguments and results as in accumext.reference.

    `runs`: pairs of an order and a grid to run the call with.
    """

    def __init__(self, driver: Path) -> None:
        self._driver = driver

    def total_norm(
        self, grads, *, norm_type=2.0, inv_scale=1.0, found_inf=None, runs=RUNS
    ) -> Tensor:
        norm = _unwritten_norm(grads)
        self._call(
            "total_norm", [grads], norm, inv_scale, found_inf, norm_type=norm_type, runs=runs
        )
        return norm

    def accumulate_(
        self, main_grads, grads, *, inv_scale=1.0, found_inf=None, overwrite=False, runs=RUNS
    ) -> Tensor:
        norm = _unwritten_norm(main_grads)
        operands = [main_grads, grads]
        self._call(
            "accumulate_", operands, norm, inv_scale, found_inf, overwrite=overwrite, runs=runs
        )
        return norm

    def unscale_check_clip_accumulate_(
        self, main_grads, grads, *, inv_scale=1.0, found_inf=None, runs=RUNS, **options
    ) -> Tensor:
        norm = _unwritten_norm(grads)
        op, operands = "unscale_check_clip_accumulate_", [main_grads, grads]
        self._call(op, operands, norm, inv_scale, found_inf, runs=runs, **options)
        return norm

    def scale_(self, grads, factor, *, runs=RUNS) -> None:
        self._call("scale_", [grads], None, factor, None, runs=runs)

    def copy_rounded_(self, targets, sources, *, seed=None, found_inf=None, runs=RUNS) -> None:
        request = Request()
        request.put_integers(_OPS.index("copy_rounded_"))
        request.put_place(seed)
        request.put_place(found_inf)
        request.put_integers(len(targets))
        for pair in zip(targets, sources, strict=True):
            request.put_operands(pair)
        request.take_back(execute(self._driver, request=request.bytes(runs)), runs)

    def window_factors(
        self, numbers, flags, main_grads, norm, *, unit, device_unit, weight, scale, max_norm,
        normalised, checks_norm, overflow, found_inf, finite, runs=RUNS,
    ) -> None:  # fmt: skip
        request = Request()
        request.put_integers(_OPS.index("window_factors"))
        places = [norm, device_unit, weight, scale, overflow, found_inf, finite]
        for tensor, otherwise in zip(places, (0.0, unit, 1.0, 1.0, 0.0, 0.0, 1.0), strict=True):
            request.put_tensor(tensor)
            request.put_numbers(otherwise)
        request.put_numbers(max_norm or 0.0)
        given = [number is not None for number in (max_norm, weight, finite)]
        request.put_integers(*given, normalised, checks_norm)
        request.put_place(numbers)
        request.put_place(flags)
        if norm is None:
            request.put_dtype(_unwritten_norm(main_grads))
            request.put_integers(len(main_grads))
            for tensor in main_grads:
                request.put_operands([tensor])
        request.take_back(execute(self._driver, request=request.bytes(runs)), runs)

    def _call(
        self,
        op: str,
        operands: Sequence[Sequence[Tensor]],
        norm: Tensor | None,
        scale: float | Tensor,
        found_inf: Tensor | None,
        *,
        norm_type: float = 2.0,
        max_norm: float = 0.0,
        overwrite: bool = False,
        if_finite: bool = False,
        runs: Sequence[tuple[int, int]],
    ) -> None:
        request = Request()
        request.put_integers(_OPS.index(op))
        request.put_tensor(scale if isinstance(scale, Tensor) else None)
        request.put_numbers(1.0 if isinstance(scale, Tensor) else scale)
        request.put_tensor(norm)
        request.put_place(found_inf)
        request.put_numbers(max_norm)
        request.put_integers(if_finite, overwrite)
        request.put_numbers(norm_type)
        request.put_integers(len(operands[0]))
        for tensors in zip(*operands, strict=True):
            request.put_operands(tensors)
        results = execute(self._driver, request=request.bytes(runs))
        request.take_back(results, runs)


class Request:
    """Words and memory, in the order in which a driver reads them."""

    def __init__(self) -> None:
        self._words = bytearray()
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address, numbered

    def put_integers(self, *values: int) -> None:
        self._words += struct.pack(f"<{len(values)}q", *values)

    def put_numbers(self, *values: float) -> None:
        self._words += struct.pack(f"<{len(values)}d", *values)

    def put_place(self, tensor: Tensor | None) -> None:
        """Where a tensor begins: which memory, and the offset in it in bytes."""
        if tensor is None:
            self.put_integers(-1, 0)
            return
        storage = tensor.untyped_storage()
        index, _ = self._storages.setdefault(storage.data_ptr(), (len(self._storages), storage))
        self.put_integers(index, tensor.storage_offset() * tensor.element_size())

    def put_tensor(self, tensor: Tensor | None) -> None:
        self.put_place(tensor)
        self.put_dtype(tensor)

    def put_dtype(self, tensor: Tensor | None) -> None:
        self.put_integers(0 if tensor is None else _DTYPES.index(tensor.dtype))

    def put_operands(self, tensors: Sequence[Tensor]) -> None:
        """A Span or a Pair; no dimensions if all are contiguous, as in csrc/common/arguments.h."""
        for tensor in tensors:
            self.put_tensor(tensor)
        first = tensors[0]
        dense = first.numel() == 0 or all(tensor.is_contiguous() for tensor in tensors)
        self.put_integers(first.numel(), 0 if dense else first.dim())
        for dim in range(0 if dense else first.dim()):
            self.put_integers(first.size(dim), *(tensor.stride(dim) for tensor in tensors))

    def bytes(self, runs: Sequence[tuple[int, int]]) -> bytes:
        parts = [struct.pack("<q", len(runs))]
        parts += [struct.pack("<2q", order, grid) for order, grid in runs]
        parts.append(struct.pack("<q", len(self._storages)))
        for _, storage in self._storages.values():
            parts.append(struct.pack("<q", storage.nbytes()))
            parts.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
        return b"".join([*parts, self._words])

    def take_back(self, results: bytes, runs: Sequence[tuple[int, int]]) -> None:
        """Write what the runs left, which must be the same of all, into the tensors."""
        size = sum(storage.nbytes() for _, storage in self._storages.values())
        assert len(results) == len(runs) * size
        first = results[:size]
        for i, run in enumerate(runs):
            same = results[i * size : (i + 1) * size] == first
            assert same, f"(order, grid) {run} and {runs[0]} leave different bits"
        for _, storage in self._storages.values():
            ctypes.memmove(storage.data_ptr(), first, storage.nbytes())
            first = first[storage.nbytes() :]


def _unwritten_norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.full((), float("nan"), dtype=reference.accumulation_dtype(*tensors))
