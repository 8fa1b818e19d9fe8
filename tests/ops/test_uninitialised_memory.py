"""No result depends on memory that nobody has written.

In processes of their own the whole heap is filled with a word: with NaN, with zeros, and with a
number too small to be normal, which slows a product down even where its result is thrown away.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, poisoned_heap

import accumext

# Relative distance of gradients from float64 on the same tokens. Two orders of summation of a few
# hundred terms; the same in float32; operands, or gradients, rounded to 8 or 11 bits.
DISTANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.03, "float16": 0.004, "autocast": 0.03}

# That the heap is poisoned: blocks that glibc keeps per thread, takes from its heap, and maps from
# the system; torch's tensors, and what C++ and Python allocate.
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
    """Word, script and arguments -> a process with a heap filled with that word."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc")
    if shutil.which(poisoned_heap.compiler()[0]) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("heap")

    def start(word: int, *arguments: str) -> subprocess.Popen[str]:
        library = str(poisoned_heap.build(folder, word))
        search = f"{Path(accumext.__file__).parents[1]}{os.pathsep}{ROOT / 'tests'}"
        environment = os.environ | {"LD_PRELOAD": library, "PYTHONPATH": search}
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.process
def test_results_do_not_depend_on_what_the_heap_holds(heap: Any) -> None:
    script = str(ROOT / "tests" / "support" / "heap_cases.py")
    run = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    processes = heap(poisoned_heap.NAN, "-c", ALIVE + run), heap(0, script, "--digests")
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


# Every operator of the decoder that multiplies, for each number of rows, in float and bfloat16.
# The flag is that of one thread.
MULTIPLY = """
import ctypes, torch, accumext
ops = torch.ops.accumext
torch.set_num_threads(1)
subnormal_operands = ctypes.CDLL(None).subnormal_operands
subnormal_operands.restype = ctypes.c_bool
found = []
def call(operator, *arguments):
    subnormal_operands()
    operator(*arguments)
    if subnormal_operands():
        found.append((str(operator), batch, dtype))
units, words, steps = 33, 491, 2
for dtype in (torch.float32, torch.bfloat16):
    for batch in range(1, 34):
        def weight(*shape):
            return (torch.rand(shape) + 0.5).to(dtype)
        head, cell = weight(words, units), [weight(3 * units, units), weight(3 * units, units)]
        biases = [torch.ones(3 * units)] * 2
        targets = torch.zeros(steps, batch).long()
        exps = torch.ones(words, steps * batch).to(dtype)
        tokens, stats = torch.zeros(batch).long(), torch.ones(3, steps * batch)
        call(ops.head_forward, torch.rand(batch, units), head, None, targets[0], None, 1.0,
             exps.t()[:batch], 32, tokens, torch.ones(3, batch))
        uniforms = torch.rand(batch, dtype=torch.float64)
        for top_k, top_p in ((words, 0.5), (3, 0.5)):
            call(ops.head_sample, torch.rand(batch, units), head, None, uniforms, 0.5, top_k,
                 top_p, 32, tokens, torch.ones(3, batch))
        call(ops.head_top, torch.rand(batch, units), head, None, 32, torch.ones(batch, 3),
             torch.zeros(batch, 3).long(), torch.ones(2, batch))
        states = [torch.ones(steps + 1, batch, units)]
        call(ops.decode_steps, weight(words, units), cell + biases, states, 0, None, 1.0,
             None, 1.0, None, 1.0, targets.clone(), None, None, None, -1, 0, None, 1.0, head, None,
             targets, targets.clone(), exps.t(), stats, torch.zeros(steps * batch).long(), 32, 0,
             steps)
        gates = torch.ones(steps, batch, 3 * units)
        call(ops.rnn_backward, 0, torch.ones(steps, batch, units),
             torch.ones(steps, batch, 4 * units), states[0], None, None, None, None,
             weight(units, 3 * units), torch.ones(batch, units), None, gates, gates.clone())
        call(ops.add_matmul, torch.ones(words, units), exps[:, :batch], weight(batch, units), False)
        call(ops.add_matmul, torch.ones(batch, units), exps[:, :batch].t(), head, False)
print(found)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is that of x86")
@pytest.mark.skipif(accumext.backend() == "reference", reason="the library's products may")
def test_nothing_is_multiplied_with_what_the_heap_holds(heap: Any) -> None:
    process = heap(poisoned_heap.SUBNORMAL, "-c", MULTIPLY)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output.strip() == "[]"
