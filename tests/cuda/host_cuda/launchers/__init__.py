"""The decoder's launchers of csrc/cuda and their kernels, compiled for the host: a library whose
operators answer for tensors of the CPU.

A program that uses it runs in a Python of its own under AddressSanitizer and UBSan, and imports
`host_cuda.launchers.loaded` first. `host.h` and `cuda/enqueue.h` are what the launchers find in
place of CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import ROOT
from support.programs import compiler, sanitizer_runtime
from torch.utils import cpp_extension

import host_cuda
from accumext.backend import _build

FOLDER = Path(__file__).parent
LIBRARY = "HOST_CUDA_LIBRARY"  # the variable that tells such a program where the library is
BLOCKS_TOGETHER = "HOST_CUDA_BLOCKS_TOGETHER"  # of the stand-in for a GPU; 0, the default: none
TIMEOUT_S = 590.0


def available() -> bool:
    """Whether the compiler has what such a program must preload."""
    return sanitizer_runtime("libasan.so") is not None


def build(folder: Path) -> Path:
    """Compile the library into `folder`."""
    target = [flag for flag in _build.nvcc_flags() if flag.startswith(("-DUSE", "-DTORCH"))]
    flags = [f"-I{FOLDER}", *host_cuda.FLAGS, *target, "-fPIC", "-fvisibility=hidden", "-w"]
    flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    flags += ["-include", str(FOLDER / "host.h"), "-x", "c++"]

    def compiled(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        subprocess.run(
            [*compiler(), *flags, "-c", str(source), "-o", str(target)], check=True, timeout=600
        )
        return str(target)

    sources = [*_build.csrc().glob("cuda/decoder/*.cu"), FOLDER / "library.cpp"]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    library = folder / "launchers.so"
    command = [*compiler(), "-shared", "-fsanitize=address,undefined", *objects]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch", "-ltorch_cpu", "-o", str(library)]
    subprocess.run(command, check=True, timeout=600)
    return library


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
