"""The products for AMX, and those for AVX512-BF16: emulated where the processor has neither."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.cpu_library import sources_of_every_isa
from support.programs import compiler

from accumext.backends import _build

PROGRAM = Path(__file__).with_name("amx_emulated.cpp")
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.build
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="no C++ compiler")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no AVX2"
)
def test_products_with_emulated_tiles_are_exact(tmp_path):
    """Blocks, skinny products and transposed operands of dyadic numbers, around every edge."""
    program = tmp_path / "amx_emulated"
    csrc = sources_of_every_isa(tmp_path / "csrc")
    folders = (csrc, Path(torch.__file__).parent / "include")
    command = [*compiler(), *_build.cxx_flags("cpu"), *FLAGS, *(f"-I{f}" for f in folders)]
    sources = [str(PROGRAM), str(csrc / "cpu" / "simd" / "kernels_avx512_bf16.cpp")]
    subprocess.run([*command, *sources, "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
