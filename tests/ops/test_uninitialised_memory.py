"""No result depends on memory that nobody has written.

In processes of their own the whole heap is filled with a byte: with what makes NaN, and with zeros.
A library may read what it should not on some processors alone, so the operands of products are
looked at, too.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, poisoned_heap
from support.decode_oracle import make_decoder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import accumext
from accumext.decoder import _operators_reference

# Relative distance of gradients from float64 on the same tokens. Two orders of summation of a few
# hundred terms; the same in float32; operands, or gradients, rounded to 8 or 11 bits.
DISTANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.03, "float16": 0.004, "autocast": 0.03}

# Blocks that glibc keeps per thread, takes from its heap, and maps from the system; torch's
# tensors, and what C++ and Python allocate.
ALIVE = """
import ctypes, torch
sizes = (1, 24, 1000, 10**5, 10**7, 10**8)
allocate = ctypes.CDLL(None).malloc
allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
for size in sizes:
    for again in range(3):  # the second time it is a block that was freed
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert torch.empty(size // dtype.itemsize + 1, dtype=dtype).isnan().all()
        assert ctypes.string_at(allocate(size), size) == b"\\xff" * size
grown = ctypes.CDLL(None).realloc
grown.restype, grown.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
assert ctypes.string_at(grown(allocate(10), 10**6), 10**6) == b"\\xff" * 10**6
gone = torch.zeros(100)
address = gone.data_ptr()
del gone
assert ctypes.string_at(address, 400)[64:] == b"\\xff" * 336  # glibc writes its lists to the front
"""


@pytest.fixture(scope="module")
def heap(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Byte, script and arguments -> a process with a heap filled with that byte."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc")
    if shutil.which(poisoned_heap.compiler()[0]) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("heap")

    def start(byte: int, *arguments: str) -> subprocess.Popen[str]:
        library = str(poisoned_heap.build(folder, byte))
        search = f"{Path(accumext.__file__).parents[1]}{os.pathsep}{ROOT / 'tests'}"
        environment = os.environ | {"LD_PRELOAD": library, "PYTHONPATH": search}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.process
def test_the_heap_is_poisoned(heap: Any) -> None:
    process = heap(poisoned_heap.NAN, "-c", ALIVE)
    process.communicate(timeout=300)
    assert process.returncode == 0


@pytest.mark.process
def test_results_do_not_depend_on_what_the_heap_holds(heap: Any) -> None:
    script = str(ROOT / "tests" / "support" / "heap_cases.py")
    processes = heap(poisoned_heap.NAN, script), heap(0, script, "--digests")
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    of_nan, of_zeros = map(json.loads, outputs)
    assert len(of_nan) > 100
    far = {
        name: distance
        for name, (_, distance) in of_nan.items()
        if not distance <= DISTANCE[name.split()[0]]  # NaN is far, too
    }
    assert not far
    differing = [name for name, (digest, _) in of_nan.items() if digest != of_zeros[name][0]]
    assert not differing


FACTORS = {  # of products: which arguments
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "linear": (0, 1),
    "addmm": (1, 2), "addmm_": (1, 2), "addmv": (1, 2), "baddbmm": (1, 2),
}  # fmt: skip


class WrittenOperands(TorchDispatchMode):
    """Fails where a matrix product is handed NaN, or has some between the elements of an operand.

    What lies there a library may read, and multiply by zero: products of bfloat16 on processors
    with AMX take 32 columns at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spaced = 0  # operands with memory of others between their elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        reference = getattr(_operators_reference, name, None)
        if func.namespace == "accumext" and reference and accumext.backend() == "reference":
            with self:  # its products are looked at, too
                return reference(*args)
        for index in FACTORS.get(name, ()):
            self._check(name, args[index])
        return func(*args, **(kwargs or {}))

    def _check(self, name: str, operand: Tensor) -> None:
        if operand.numel() == 0:
            return
        pairs = zip(operand.shape, operand.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in pairs)
        self.spaced += extent > operand.numel()
        span = operand.as_strided((extent,), (1,), operand.storage_offset())
        shape, strides = list(operand.shape), list(operand.stride())
        assert not span.isnan().any(), f"{name} of {shape} with strides {strides} can see NaN"


@pytest.fixture
def nan_in_new_tensors() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty fills what it makes then
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", ["mm", "addmm"])
def test_a_product_that_can_see_nan_is_found(name: str, nan_in_new_tensors: None) -> None:
    rows = torch.empty(4, 8)
    rows[:, :5] = 1.0
    factors = rows[:, :5], torch.ones(5, 3)
    arguments = factors if name == "mm" else (torch.ones(4, 3), *factors)
    getattr(torch, name)(*arguments)
    with WrittenOperands(), pytest.raises(AssertionError, match=r"of \[4, 5\] with strides \[8, 1"):
        getattr(torch, name)(*arguments)


@pytest.mark.parametrize("mode", DISTANCE)
@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "callable"])
@pytest.mark.parametrize("ends", ["lengths", "eos"])
def test_products_see_written_memory_alone(
    kind: str, mode: str, ends: str, nan_in_new_tensors: None
) -> None:
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    shape = {"vocabulary": 50, "size": 24, "batch": 5}
    decoder = make_decoder("gru_cell" if kind == "callable" else kind, dtype=dtype, **shape)
    cell = decoder.step if kind == "callable" else decoder.cell
    operands = (decoder.embedding, cell, decoder.head, torch.randint(50, (9, 5)), decoder.state)
    calls: list[dict[str, Any]] = [
        {"lengths": torch.tensor([9, 3, 7, 1, 5]), "feedback": feedback, "reduction": reduction}
        for feedback in ("teacher", "greedy")
        for reduction in ("mean", "none")
    ]
    with torch.autocast("cpu", enabled=mode == "autocast"):
        if ends == "eos":
            greedy = accumext.decode_loss(*operands, feedback="greedy")
            calls = [{"eos": int(greedy.tokens[2, 0]), "feedback": "greedy"}]
        for call in calls:
            with WrittenOperands() as products:
                out = accumext.decode_loss(*operands, **call)
                gradients = decoder.gradients(out.loss.sum())
            assert int(out.lengths.sum()) < out.tokens.numel()
            assert products.spaced  # rows that ended leave room in the workspace
            assert all(gradient.isfinite().all() for gradient in gradients)
