"""The limit of the machine: the fastest of several plain reads, updates and, on a CPU, writes."""

from __future__ import annotations

import ctypes
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _timing import Contender, Job, Result, Shape, Traffic, Yardstick

READ, UPDATE = Traffic(4, 0), Traffic(0, 8)
WRITE = Traffic(0, 4)
ELEMENTS = {"cpu": 32 * 10**6, "cuda": 256 * 10**6}  # float32; several times what any cache holds


class Memory:
    """Ways to move float32 elements: torch's, and on the CPU, with a compiler, those of C++."""

    def __init__(self, device: torch.device) -> None:
        self.shape = Shape(ELEMENTS[device.type], 1)
        self.tensors = [torch.ones(self.shape.elements, device=device) for _ in range(2)]
        x, y = self.tensors
        self.reads: dict[str, Callable[[], Any]] = {"torch.sum": lambda: torch.sum(x)}
        self.updates: dict[str, Callable[[], Any]] = {
            "torch.add_": lambda: x.add_(1.0),
            "torch.copy_": lambda: y.copy_(x),
        }
        self.writes: dict[str, Callable[[], Any]] = {}
        if device.type == "cuda":
            self.reads["torch.amax"] = lambda: torch.amax(x)
            return
        self.writes = {"torch.zero_": y.zero_, "torch.fill_": lambda: y.fill_(1.0)}
        self.reads["torch.dot"] = lambda: torch.dot(x, x)
        library = _compiled()
        if library is not None:
            to, source = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (y, x))
            size = ctypes.c_int64(x.numel()), torch.get_num_threads()
            self.reads["C++ read"] = functools.partial(library.read_floats, source, *size)
            self.updates["C++ update"] = functools.partial(library.update_floats, source, *size)
            self.writes["C++ write"] = functools.partial(library.write_floats, to, *size)
            self.updates["C++ copy"] = functools.partial(library.copy_floats, to, source, *size)

    def jobs(self) -> Iterator[Job]:
        """Yield the contests: which read, which update and which write is the fastest."""
        reads = {name: Contender(run, READ, None) for name, run in self.reads.items()}
        updates = {name: Contender(run, UPDATE, None) for name, run in self.updates.items()}
        writes = {name: Contender(run, WRITE, None) for name, run in self.writes.items()}
        yield Job("read", self.shape, reads)
        yield Job("update", self.shape, updates)
        if writes:
            yield Job("write", self.shape, writes)

    def yardstick(self, *results: Result) -> Yardstick:
        """Return the winners of the contests, by their medians."""
        reader, updater, *writer = (max(result.seconds, key=result.rate) for result in results)
        runs = self.reads[reader], updater, self.updates[updater], self.updates["torch.copy_"]
        write = (writer[0], self.writes[writer[0]]) if writer else ()
        return Yardstick(reader, *runs, self.shape.elements, *write)


def _compiled() -> ctypes.CDLL | None:
    from torch.utils import cpp_extension

    source = Path(__file__).with_name("memory.cpp")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = cpp_extension.load(
                "accumext_bench_memory",
                [str(source)],
                extra_cflags=["-O3", "-march=native", "-fopenmp"],
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                is_python_module=False,
            )
        except (OSError, RuntimeError) as error:
            print(f"no C++ loops to measure the memory with: {error}", file=sys.stderr)
            return None
        return ctypes.CDLL(path)
