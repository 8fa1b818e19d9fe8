"""The kernels of csrc/cuda, compiled for the host and called like the operators they implement.

`simt.h` is CUDA's execution model, `driver.cpp` what stands between a call and its kernels; both
are built with AddressSanitizer and UBSan, or by races.py. Every call runs in a process of its own,
several times, and must leave the same bits whatever the grid and the order of the threads. The
kernels can also be those that nvcc makes of the same source: see ptx.
"""

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

from accumext.backends import _build
from accumext.ops import reference

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


class Driver:
    """A program that runs operators on the kernels.

    `runs`: pairs of an order and a grid to run a call with.
    """

    def __init__(self, executable: Path) -> None:
        self._executable = executable

    def call(self, op: str, runs: Sequence[tuple[int, int]], *arguments: object) -> None:
        """With tensors or None, numbers, dtypes, and lists of these; what is written there must be
        the same of all runs."""
        request = _Request()
        request.put(*arguments)
        request.take_back(execute(self._executable, op, request=request.bytes(runs)), runs)


class HostCuda(Driver):
    """The operators, by driver.cpp. Arguments and results as in accumext.ops.reference."""

    def total_norm(
        self, grads, *, norm_type=2.0, inv_scale=1.0, found_inf=None, runs=RUNS
    ) -> Tensor:
        norm = _unwritten_norm(grads)
        self.call("total_norm", runs, *_scalar(inv_scale), norm, found_inf, norm_type, grads)
        return norm

    def accumulate_(
        self, main_grads, grads, *, inv_scale=1.0, found_inf=None, overwrite=False, runs=RUNS
    ) -> Tensor:
        norm = _unwritten_norm(main_grads)
        options = (*_scalar(inv_scale), norm, found_inf, overwrite)
        self.call("accumulate_", runs, *options, main_grads, grads)
        return norm

    def unscale_check_clip_accumulate_(
        self, main_grads, grads, *, inv_scale=1.0, norm_type=2.0, max_norm, found_inf=None,
        if_finite=False, overwrite=False, runs=RUNS,
    ) -> Tensor:  # fmt: skip
        norm = _unwritten_norm(grads)
        options = (*_scalar(inv_scale), norm, found_inf, norm_type, max_norm, if_finite, overwrite)
        self.call("unscale_check_clip_accumulate_", runs, *options, main_grads, grads)
        return norm

    def scale_(self, grads, factor, *, runs=RUNS) -> None:
        self.call("scale_", runs, *_scalar(factor), grads)

    def copy_rounded_(self, targets, sources, *, seed=None, found_inf=None, runs=RUNS) -> None:
        self.call("copy_rounded_", runs, seed, found_inf, targets, sources)

    def window_factors(
        self, numbers, flags, main_grads, norm, *, unit, device_unit, weight, scale, max_norm,
        normalised, checks_norm, overflow, found_inf, finite, runs=RUNS,
    ) -> None:  # fmt: skip
        scalars = (norm, 0.0, device_unit, unit, weight, 1.0, scale, 1.0, overflow, 0.0)
        given = (number is not None for number in (max_norm, weight, finite))
        rules = (max_norm or 0.0, *given, normalised, checks_norm)
        norm_dtype = _unwritten_norm(main_grads).dtype
        self.call(
            "window_factors", runs, *scalars, found_inf, 0.0, finite, 1.0, *rules, numbers, flags,
            norm_dtype, main_grads,
        )  # fmt: skip


class _Request:
    """Words and memory, in the order in which a driver reads them."""

    def __init__(self) -> None:
        self._words = bytearray()
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address, numbered

    def put(self, *arguments: object) -> None:
        for argument in arguments:
            if isinstance(argument, int):
                self._words += struct.pack("<q", argument)
            elif isinstance(argument, float):
                self._words += struct.pack("<d", argument)
            elif isinstance(argument, torch.dtype):
                self.put(_DTYPES.index(argument) if argument.is_floating_point else 0)
            elif isinstance(argument, Tensor):
                storage = argument.untyped_storage()
                new = len(self._storages), storage
                index, _ = self._storages.setdefault(storage.data_ptr(), new)
                offset = argument.storage_offset() * argument.element_size()
                self.put(index, offset, argument.dtype, argument.shape, argument.stride())
            elif argument is None:
                self.put(-1, 0, 0, (), ())  # a tensor that is not given
            else:
                self.put(len(argument), *argument)

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


def _scalar(number: float | Tensor) -> tuple[Tensor | None, float]:
    return (number, 1.0) if isinstance(number, Tensor) else (None, number)


def _unwritten_norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.full((), float("nan"), dtype=reference.accumulation_dtype(*tensors))
