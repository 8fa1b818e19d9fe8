"""The CPU kernels of every instruction set: same bits, and nothing that the linker could mix up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import oracle
import pytest
import torch

import accumext
from accumext import _build

if accumext.backend() != "cpu":
    pytest.skip("no compiled CPU kernels are in use", allow_module_level=True)

# Prints a digest of all that the kernels compute, for every pair of dtypes and layouts that walk
# over memory in all three ways: densely, in runs, and element by element.
DIGEST = """
import hashlib, itertools, torch, accumext
torch.manual_seed(0)
dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
sizes = [1, 15, 16, 17, 31, 32, 33, 100, 2047, 2048, 2049, 70000]
digest = hashlib.sha256()
def add(*tensors):
    for tensor in tensors:
        digest.update(torch.cat([tensor.reshape(-1)]).view(torch.uint8).numpy().tobytes())
def random(n, dtype, layout="dense"):  # randn itself depends on the capability
    x = (torch.randint(-1000, 1001, (n,)).double() / 37).to(dtype)
    if layout == "runs":
        return x.new_zeros(2, n + 5)[:, 2:-3].copy_(x)
    return x.new_zeros(n, 3)[:, 1].copy_(x) if layout == "strided" else x
for layout in ("dense", "runs", "strided"):
    for main, grad in itertools.product(dtypes, dtypes):
        mains = [random(n, main, layout) for n in sizes]
        grads = [random(n, grad, layout) for n in sizes]
        for overwrite in (False, True):
            add(accumext.accumulate_(mains, grads, inv_scale=0.37, overwrite=overwrite), *mains)
    for dtype in dtypes:
        grads = [random(n, dtype, layout) for n in sizes]
        for p in (1.0, 2.0, 3.0, float("inf"), -float("inf")):
            add(accumext.total_norm(grads, norm_type=p, inv_scale=0.37))
        accumext.scale_(grads, 0.37)
        add(*grads)
large = [torch.zeros(5_000_000)]  # written past the caches
add(accumext.accumulate_(large, [random(5_000_000, torch.bfloat16)], overwrite=True), *large)
print(accumext.backend(), digest.hexdigest())
"""


def digest(capability: str) -> str:
    """What the script prints where torch is told to use no more than this instruction set."""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DIGEST]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_every_instruction_set_gives_the_same_bits() -> None:
    portable = digest("default")
    assert portable.startswith("cpu ")
    assert digest("avx2") == portable
    assert digest("avx512") == portable


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("offset", range(4))
def test_large_main_gradients_at_any_alignment(offset: int, overwrite: bool) -> None:
    size = 4_200_000  # large enough to be written past the caches, where aligned
    grad = oracle.dyadic([size], torch.bfloat16)
    memory = oracle.dyadic([size + 8], torch.float32)
    expected = memory.clone()
    part = slice(offset, offset + size)
    expected[part] = oracle.accumulated(memory[part], grad, 0.5, overwrite)
    accumext.accumulate_([memory[part]], [grad], inv_scale=0.5, overwrite=overwrite)
    assert torch.equal(memory, expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_other_objects_can_take_no_code_of_an_instruction_set(name: str, tmp_path: Path) -> None:
    """An inline function that two objects define is kept once, in whichever instruction set."""
    source, target = _build.csrc() / "cpu" / f"kernels_{name}.cpp", tmp_path / "kernels.o"
    includes = [f"-I{_build.csrc()}", f"-I{Path(torch.__file__).parent / 'include'}"]
    compiler = sysconfig.get_config_var("CXX").split()[0]
    command = [os.environ.get("CXX", compiler), *_build.cxx_flags("cpu"), *includes]
    subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
    listed = ["nm", "-C", "--defined-only", "--extern-only", str(target)]
    symbols = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    defined = [symbol.split(maxsplit=2)[2] for symbol in symbols]
    assert defined == [f"accumext::cpu::k{name.capitalize()}Kernels"]
