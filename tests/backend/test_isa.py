"""The CPU kernels of every instruction set: same bits, and nothing that the linker could mix up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT, oracle
from support.cpu_library import compiled, emulated_avx512, linked
from support.once import once
from support.source_tree import COMPILER, Tree

import accumext
from accumext.backend import _build

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
print(accumext.backend(), digest.hexdigest())
"""


def digest(capability: str) -> str:
    """Return the script's output where torch is told to use at most this instruction set."""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DIGEST]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.process
def test_every_instruction_set_gives_the_same_bits() -> None:
    portable = digest("default")
    assert portable.startswith("cpu ")
    assert digest("avx2") == portable
    assert digest("avx512") == portable


# Writes what the decoder's operators compute, in float and double, for every kind of cell and dtype
# of weight, with columns and units behind the last whole vector. The first argument is the file.
DECODER = """
import sys, torch, accumext
ops, results = torch.ops.accumext, {}
def numbers(*shape, seed=0):  # randn itself depends on the capability
    count = torch.Size(shape).numel()
    x = (torch.arange(count, dtype=torch.float64) + 1 + seed) * 0.6180339887498949
    return ((x - x.floor()) * 4 - 2).view(shape)
for sums, weight_dtype in ((torch.float64,) * 2, (torch.float32,) * 2,
                           (torch.float32, torch.bfloat16), (torch.float32, torch.float16)):
    for rows, words, depth in ((1, 13, 1), (5, 481, 17), (33, 500, 33), (16, 961, 64)):
        hidden = (numbers(rows, depth) / 4).to(sums)
        weight = numbers(words, depth, seed=3).to(weight_dtype)
        bias, targets = numbers(words, seed=7).to(sums), torch.arange(rows) % words
        uniforms = (numbers(rows, seed=1) + 2) / 4
        exps, tokens, stats = torch.zeros(words, rows), torch.zeros(2, rows).long(), []
        for sampled in (0, 1):
            stats.append(torch.zeros(3, rows, dtype=sums))
            ops.head_forward(hidden, weight, bias, targets, uniforms if sampled else None, 0.7,
                             exps.to(sums).t(), 32, tokens[sampled], stats[sampled])
        name = f"head {weight_dtype} {rows} {words} {depth}"
        results[name] = torch.cat([*stats])
        results[name + " tokens"] = tokens
for dtype in (torch.float64, torch.float32):
    for kind, gates in enumerate((3, 4, 1, 1)):
        steps, batch, units, inputs = 4, 11, 13, 5
        sizes = ((gates * units, inputs), (gates * units, units), (gates * units,))
        cell = [(numbers(*s, seed=i) / 3).to(dtype) for i, s in enumerate(sizes)]
        cell.append(torch.empty(0, dtype=dtype))
        parts = 2 if kind == 1 else 1
        states = [numbers(steps + 1, batch, units, seed=p).to(dtype) for p in range(parts)]
        read = torch.arange(steps * batch).view(steps, batch) % 7
        live = read % 5 != 0
        ops.decode_steps(numbers(7, inputs).to(dtype), cell, states, kind, None, 1.0, None, 1.0,
                         None, 1.0, read, None, None, live, -1, 0, None, 1.0,
                         numbers(9, units).to(dtype), None, read, read.clone(), None, None, None,
                         32, 0, steps)
        results[f"steps {kind} {dtype}"] = torch.stack(states)
        pre = None if gates == 1 else numbers(steps, batch, 4 * units).to(dtype)
        dh = [numbers(batch, units, seed=9 + p).to(dtype) for p in range(parts)]
        d_x = torch.zeros(steps, batch, gates * units, dtype=dtype)
        d_h = torch.zeros_like(d_x) if kind == 0 else None
        ops.rnn_backward(kind, numbers(steps, batch, units).to(dtype), pre, states[0],
                         states[1] if parts == 2 else None, live, None, None,
                         cell[1].t().contiguous(), dh[0], dh[1] if parts == 2 else None, d_x, d_h)
        results[f"backward {kind} {dtype}"] = torch.cat([d_x.flatten(), *(d.flatten() for d in dh)])
torch.save({"backend": accumext.backend(), **results}, sys.argv[1])
"""
# Relative to the largest value. A sum of some dozens of terms is rounded once per term where the
# processor multiplies and adds in one instruction, twice elsewhere, and in pairs of bfloat16 at
# once; states go through four steps.
DECODER_TOLERANCE = {torch.float64: 1e-14, torch.float32: 3e-6}


def decoded(capability: str, folder: Path) -> dict[str, torch.Tensor]:
    file = folder / capability
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", DECODER, str(file)], env=env, check=True)
    found = torch.load(file)
    assert found.pop("backend") == "cpu"
    return found


@pytest.mark.process
def test_every_instruction_set_decodes_alike(tmp_path: Path) -> None:
    """AVX-512 multiplies bfloat16 in pairs where it can, and the others widen it first."""
    portable = decoded("default", tmp_path)
    assert len(portable) > 40
    for capability in ("avx2", "avx512"):
        for name, found in decoded(capability, tmp_path).items():
            expected = portable[name]
            if not expected.is_floating_point():
                assert torch.equal(found, expected), (capability, name)
                continue
            allowed = DECODER_TOLERANCE[expected.dtype] * max(1.0, float(expected.abs().max()))
            error = float((found - expected).abs().max())
            assert error <= allowed, (capability, name, error)


WIDEST = torch.backends.cpu.get_cpu_capability().lower()
OPERATORS = [f"{ROOT}/tests/{name}.py" for name in (
    "decoder/test_add_matmul", "decoder/test_head_forward", "decoder/test_head_objective",
    "decoder/test_decode_steps", "decoder/test_rnn_backward", "generation/test_head_top",
)]  # fmt: skip


def check_tests(*tests: str, folder: Path, **variables: str) -> None:
    """Run tests with the package that is in a folder."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    env = os.environ | variables
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.process
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_decoders_operators_with_fewer_instructions(capability: str) -> None:
    """Their own tests, where the others run with all that the processor has."""
    if capability == WIDEST or (capability == "avx2" and WIDEST == "default"):
        pytest.skip("these are all that the processor has")
    check_tests(*OPERATORS, folder=ROOT, ATEN_CPU_CAPABILITY=capability)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, whose kernels for AVX-512 are made of instructions of AVX2."""

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
    [
        OPERATORS,
        [
            f"{__file__}::test_every_instruction_set_gives_the_same_bits",
            f"{__file__}::test_every_instruction_set_decodes_alike",
        ],
    ],
    ids=["operators", "alike"],
)
def test_emulated_avx512(tests: list[str], emulated: Path) -> None:
    """The kernels for AVX-512, and for AVX512-BF16, on a processor without it."""
    check_tests(*tests, folder=emulated, PYTHONPATH=str(emulated))


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


EXPORTS = {  # what each file defines for others
    "avx2": ["kAvx2Double", "kAvx2Float", "kAvx2Kernels"],
    "avx512": ["kAvx512Double", "kAvx512Float", "kAvx512Kernels"],
    "avx512_bf16": ["kPairedAvx512"],
    "amx": ["amx_granted", "kPairedAmx"],
}


COMPILE = """
from torch.utils.cpp_extension import load
from accumext.backend import _build
load(**_build.load_arguments("cpu"))
"""


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the object of every source."""

    def build(folder: Path) -> None:
        env = {**os.environ, **COMPILER}
        env |= {"ACCUMEXT_BACKEND": "reference", "TORCH_EXTENSIONS_DIR": str(folder)}
        subprocess.run([sys.executable, "-c", COMPILE], env=env, check=True)

    return once(tmp_path_factory, "objects", build)


@pytest.mark.build
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("name", EXPORTS)
def test_other_objects_can_take_no_code_of_an_instruction_set(name: str, objects: Path) -> None:
    """An inline function that two objects define is kept once, in whichever instruction set."""
    (target,) = objects.rglob(f"kernels_{name}.o")
    listed = ["nm", "-C", "--defined-only", "--extern-only", str(target)]
    symbols = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    defined = [symbol.split(maxsplit=2)[2] for symbol in symbols]
    names = [symbol.removeprefix("accumext::cpu::").split("(")[0] for symbol in defined]
    assert sorted(names) == EXPORTS[name]
