"""Compiles every CUDA source for each architecture; prints registers; a spill is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from accumext import _build

ARCHS = ("80", "90")


class Kernel(NamedTuple):
    """One kernel as ptxas compiled it."""

    name: str  # mangled
    arch: str
    spilled: int  # bytes stored and loaded
    registers: int


def compile_source(nvcc: str, source: str) -> list[Kernel]:
    """The kernels of one file; an error stops the run."""
    includes = [f"-I{_build.csrc()}", f"-I{Path(torch.__file__).parent / 'include'}"]
    command = [nvcc, *_build.nvcc_flags(), *includes, "-Xptxas=-v", f"--threads={len(ARCHS)}"]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    command += ["-Xcompiler=-fPIC", "-c", source, "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{source} does not compile:\n{done.stdout}{done.stderr}")
    pattern = (
        r"Compiling entry function '(\S+)' for 'sm_(\d+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    found = re.findall(pattern, done.stdout + done.stderr, flags=re.DOTALL)
    return [
        Kernel(name, arch, int(stores) + int(loads), int(registers))
        for name, arch, stores, loads, registers in found
    ]


def main() -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc was not found")
    total = 0
    spilling = 0
    for source in _build.sources("cuda"):
        kernels = compile_source(nvcc, source)
        total += len(kernels)
        for arch in ARCHS:
            used = [kernel.registers for kernel in kernels if kernel.arch == arch]
            spilled = sum(kernel.spilled for kernel in kernels if kernel.arch == arch)
            registers = f"{min(used)} to {max(used)} registers" if used else "none of its own"
            name = Path(source).name
            print(f"{name} sm_{arch}: {len(used)} kernels, {registers}, {spilled} bytes spilled")
        for kernel in kernels:
            if kernel.spilled:
                spilling += 1
                print(f"  sm_{kernel.arch} spills {kernel.spilled} bytes: {kernel.name}")
    if total == 0:
        sys.exit("ptxas reported no kernel at all")
    if spilling:
        sys.exit(f"{spilling} kernels spill registers to memory, whose bandwidth they live on")


if __name__ == "__main__":
    main()
