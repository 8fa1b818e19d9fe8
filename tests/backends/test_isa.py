"""The CPU kernels of every instruction set: same bits, and nothing that the linker could mix up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, forks, oracle
from support.cpu_library import compiled, emulated_avx512, linked
from support.once import once
from support.source_tree import COMPILER, Tree

import accumext
from accumext.backends import _build

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
        for seed in (None, torch.tensor(7)):
            accumext.copy_rounded_(mains, grads, seed=seed)
            add(*mains)
    for dtype in dtypes:
        grads = [random(n, dtype, layout) for n in sizes]
        for p in (1.0, 2.0, 3.0, float("inf"), -float("inf")):
            add(accumext.total_norm(grads, norm_type=p, inv_scale=0.37))
        accumext.scale_(grads, 0.37)
        add(*grads)
large = [torch.zeros(5_000_000)]  # written past the caches
add(accumext.accumulate_(large, [random(5_000_000, torch.bfloat16)], overwrite=True), *large)
for seed in (None, torch.tensor(7)):
    large = [torch.zeros(5_000_000, dtype=torch.bfloat16)]
    accumext.copy_rounded_(large, [random(5_000_000, torch.float32)], seed=seed)
    add(*large)
print(torch.backends.cpu.get_cpu_capability(), accumext.backend(), digest.hexdigest())
"""
WIDEST = torch.backends.cpu.get_cpu_capability().lower()


def digest(capability: str | None = None) -> str:
    """Return the script's output where torch is told to use at most this instruction set.

    None: it is told nothing. With "avx2" emulated kernels for AVX-512 would not be chosen.
    """
    env = dict(os.environ)
    if capability is not None:
        env["ATEN_CPU_CAPABILITY"] = capability  # which an import of torch does not read
    done = forks.run("-c", DIGEST, cwd=Path.cwd(), env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    used, _, found = done.stdout.partition(" ")
    assert used == (capability or WIDEST).upper()
    return found


@pytest.mark.process
def test_every_instruction_set_gives_the_same_bits():
    portable = digest("default")
    assert portable.startswith("cpu ")
    assert digest("avx2") == portable
    assert digest() == portable


OPERATORS = [f"{ROOT}/tests/{name}.py" for name in (
    "decoder/test_add_matmul", "decoder/test_head_forward", "decoder/test_head_objective",
    "decoder/test_decode_steps", "decoder/test_rnn_backward", "generation/test_head_top",
)]  # fmt: skip


def check_tests(*tests: str, folder: Path, **variables: str) -> None:
    """Run tests with the package that is in a folder."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    env = os.environ | variables
    done = forks.run("-m", "pytest", *options, *tests, cwd=folder, env=env, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.process
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_decoders_operators_with_fewer_instructions(capability):
    """Their own tests, where the others run with all that the processor has."""
    if capability == WIDEST or (capability == "avx2" and WIDEST == "default"):
        pytest.skip("these are all that the processor has")
    check_tests(*OPERATORS, folder=ROOT, ATEN_CPU_CAPABILITY=capability)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """Make a folder with the package, its kernels for AVX-512 of instructions of AVX2."""

    def build(folder: Path) -> None:
        tree = Tree(folder)
        shutil.rmtree(folder / "csrc")
        csrc = emulated_avx512(folder / "csrc")
        (folder / "objects").mkdir()
        objects = compiled(csrc, folder / "objects", [*_build.cxx_flags("cpu"), "-O1"])
        tree.install(linked(objects.values(), folder / "library.so"))

    return once(tmp_path_factory, "emulated", build)


@pytest.mark.build
@pytest.mark.skipif(WIDEST != "avx2", reason="the processor has AVX-512, or no AVX2")
@pytest.mark.parametrize(
    "tests",
    [OPERATORS, [f"{__file__}::test_every_instruction_set_gives_the_same_bits"]],
    ids=["operators", "same-bits"],
)
def test_emulated_avx512(tests, emulated):
    """The kernels for AVX-512, and for AVX512-BF16, on a processor without it."""
    check_tests(*tests, folder=emulated, PYTHONPATH=str(emulated))


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("offset", range(4))
def test_large_main_gradients_at_any_alignment(offset, overwrite):
    size = 4_200_000  # large enough to be written past the caches, where aligned
    grad = oracle.dyadic([size], torch.bfloat16)
    memory = oracle.dyadic([size + 8], torch.float32)
    expected = memory.clone()
    part = slice(offset, offset + size)
    expected[part] = oracle.accumulated(memory[part], grad, 0.5, overwrite)
    accumext.accumulate_([memory[part]], [grad], inv_scale=0.5, overwrite=overwrite)
    assert torch.equal(memory, expected)


EXPORTS = {  # what each file defines for others
    "avx2": ["kAvx2Double", "kAvx2Float", "kAvx2Kernels"],
    "avx512": ["kAvx512Double", "kAvx512Float", "kAvx512Kernels"],
    "avx512_bf16": ["kPairedAvx512"],
    "amx": ["amx_granted", "kPairedAmx"],
}


COMPILE = """
from torch.utils.cpp_extension import load
from accumext.backends import _build
load(**_build.load_arguments("cpu"))
"""


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """Compile every source; return the folder of the objects."""

    def build(folder: Path) -> None:
        env = {**os.environ, **COMPILER}
        env |= {"ACCUMEXT_BACKEND": "reference", "TORCH_EXTENSIONS_DIR": str(folder)}
        subprocess.run([sys.executable, "-c", COMPILE], env=env, check=True)

    return once(tmp_path_factory, "objects", build)


@pytest.mark.build
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("name", EXPORTS)
def test_other_objects_can_take_no_code_of_an_instruction_set(name, objects):
    """An inline function that two objects define is kept once, in whichever instruction set."""
    (target,) = objects.rglob(f"kernels_{name}.o")
    listed = ["nm", "-C", "--defined-only", "--extern-only", str(target)]
    symbols = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    defined = [symbol.split(maxsplit=2)[2] for symbol in symbols]
    names = [symbol.removeprefix("accumext::cpu::").split("(")[0] for symbol in defined]
    assert sorted(names) == EXPORTS[name]
