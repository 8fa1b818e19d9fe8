"""A heap that is filled with a word: with NaN, and, in which no product may be taken, with a number
too small to be normal, which slows products down even where their results are thrown away."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, poisoned_heap

import accumext

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
def heap(tmp_path_factory):
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
def test_the_whole_heap_is_filled(heap):
    """As it is under `.ci/run heap-native`, which runs the tests of results on such a heap."""
    process = heap(poisoned_heap.NAN, "-c", ALIVE)
    process.communicate(timeout=100)
    assert process.returncode == 0


# Every operator of the decoder that multiplies, for each number of rows, in float and bfloat16.
# The flag is that of one thread.
MULTIPLY = """
import ctypes, torch, accumext
from support.decoder_calls import backward_call, head_call, steps_call
ops = torch.ops.accumext
torch.set_num_threads(1)
subnormal_operands = ctypes.CDLL(None).subnormal_operands
subnormal_operands.restype = ctypes.c_bool
found = []
def check(name, call, *arguments):
    subnormal_operands()
    call(*arguments)
    if subnormal_operands():
        found.append((name, rows, narrow))
for narrow in (False, True):
    for rows in range(1, 34):
        head = head_call(rows=rows, narrow=narrow)
        check("head", head)
        hidden, weight, bias = parts = head.arguments[:3]
        uniforms, tokens = torch.rand(rows, dtype=torch.float64), torch.zeros(rows).long()
        for top_k in (len(weight), 3):
            check("sample", ops.head_sample, *parts, uniforms, 0.5, top_k, 0.5, 32, tokens,
                  torch.ones(3, rows))
        check("top", ops.head_top, *parts, 32, torch.ones(rows, 3), torch.zeros(rows, 3).long(),
              torch.ones(2, rows))
        check("steps", steps_call("gru", batch=rows, narrow=narrow))
        check("backward", backward_call("gru", batch=rows, narrow=narrow))
        exps = head.arguments[6]
        check("matmul", ops.add_matmul, weight.float(), exps.t(), hidden.to(weight.dtype), False)
        check("matmul", ops.add_matmul, hidden, exps, weight, False)
print(found)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is that of x86")
@pytest.mark.skipif(accumext.backend() == "reference", reason="the library's products may")
def test_nothing_is_multiplied_with_what_the_heap_holds(heap):
    process = heap(poisoned_heap.SUBNORMAL, "-c", MULTIPLY)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output.strip() == "[]"
