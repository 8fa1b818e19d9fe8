"""All launchers of csrc/cuda and their kernels, compiled for the host: a library whose operators
answer for tensors of the CPU.

`runtime.cpp` is CUDA's runtime there and `torch.cpp` what torch has of a GPU; `host.h` comes
before each launcher. A program that uses the library runs in a Python of its own under
AddressSanitizer and UBSan, and imports `host_cuda.launchers.loaded` first.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import ROOT
from support.programs import compiler, sanitizer_runtime
from torch.utils import cpp_extension

import host_cuda
from accumext.backends import _build
from host_cuda import mutants
from host_cuda.launchers.table_mutants import MUTANTS

FOLDER = Path(__file__).parent
LIBRARY = "HOST_CUDA_LIBRARY"  # the variable that tells such a program where the library is
TIMEOUT_S = 590.0

# Devices of runtime.cpp: an H100; 108 multiprocessors with 99 KB of shared memory; three of an
# H100's; two, whose blocks do not wait for one another; two that have too few registers for the
# persistent kernel.
H100, SMALLER, SLICE, NOT_COOPERATIVE, CROWDED = range(5)


def available() -> bool:
    """Tell whether the compiler has the runtime that such a program must preload."""
    return sanitizer_runtime("libasan.so") is not None


def build(folder: Path) -> None:
    """Compile the library into `folder`, with MUTANTS in it that are switched off."""
    csrc = folder / "csrc"
    mutants.write_sources(csrc, MUTANTS)

    def compiled(source: Path) -> str:
        flags = [f"-I{csrc}", *host_cuda.FLAGS, "-fPIC", "-fvisibility=hidden", "-w"]
        if source.parent.name == "cuda":  # for their few tests, operators of lists compile too long
            flags.append("-O0")
        flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        flags += [flag for flag in _build.nvcc_flags() if flag.startswith("-DUSE")]
        if source.suffix == ".cu":
            flags += [flag for flag in _build.nvcc_flags() if flag.startswith("-DTORCH")]
            flags += ["-include", str(FOLDER / "host.h"), "-x", "c++"]
        target = str(folder / f"{source.stem}.o")
        command = [*compiler(), *flags, "-c", str(source), "-o", target]
        subprocess.run(command, check=True, timeout=600)
        return target

    sources = [*csrc.glob("cuda/**/*.cu"), *FOLDER.glob("*.cpp")]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    command = [*compiler(), "-shared", "-fsanitize=address,undefined", *objects]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch", "-ltorch_cpu", "-o", str(folder / "launchers.so")]
    subprocess.run(command, check=True, timeout=600)


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in which `loaded` can be imported."""
    # The sanitizer looks for the C++ library when the process begins, and Python has none.
    preloaded = [sanitizer_runtime(name) for name in ("libasan.so", "libstdc++.so")]
    search = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/cuda")]
    variables = {
        LIBRARY: str(library),
        "ACCUMEXT_BACKEND": "reference",  # no other kernels
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(search),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | host_cuda.ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
