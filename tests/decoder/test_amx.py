"""The products for AMX on processors without it: their tiles are emulated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.programs import compiler

from accumext._torch_private import cpu_multiplies_bfloat16
from accumext.backend import _build

SOURCES = ("tests/decoder/amx_emulated.cpp", "csrc/cpu/simd/kernels_avx512_bf16.cpp")
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.build
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="no C++ compiler")
@pytest.mark.skipif(not cpu_multiplies_bfloat16(), reason="rows that fill no tile need AVX512-BF16")
def test_products_with_emulated_tiles_are_exact(tmp_path: Path) -> None:
    """Blocks, skinny products and transposed operands of dyadic numbers, around every edge."""
    program = tmp_path / "amx_emulated"
    folders = (_build.csrc(), Path(torch.__file__).parent / "include")
    command = [*compiler(), *_build.cxx_flags("cpu"), *FLAGS, *(f"-I{f}" for f in folders)]
    sources = [str(ROOT / source) for source in SOURCES]
    subprocess.run([*command, *sources, "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
