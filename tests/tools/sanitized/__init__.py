"""The CPU library under AddressSanitizer and UBSan, and under ThreadSanitizer.

The whole library, as the dispatcher calls it, in a Python that preloads the sanitizer's run time.
ThreadSanitizer follows the library's own loops, on the threads of `threads.cpp`; what torch does
inside its own libraries none of them sees, but for memory that torch frees and we still read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.programs import compiler, sanitizer_runtime
from torch.utils import cpp_extension

from accumext.backend import _build

FOLDER = Path(__file__).parent
TIMEOUT_S = 300.0  # tens of times the longest run

# Its search for leaks needs ptrace, which containers may forbid.
KINDS = {
    "address": ("-fsanitize=address,undefined", "libasan.so"),
    "thread": ("-fsanitize=thread", "libtsan.so"),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66",
    "OMP_NUM_THREADS": "1",
    "ACCUMEXT_BACKEND": "reference",  # the driver loads the library itself
}


def runtime(kind: str) -> Path | None:
    """Return the library that a program not built for the sanitizer has to preload; None if it is
    missing."""
    return sanitizer_runtime(KINDS[kind][1])


def build(kind: str, folder: Path, csrc: Path | None = None) -> Path:
    """Compile the library, `threads` and `faults` into `folder`; returns the library."""
    sanitize = KINDS[kind][0]
    csrc = csrc or _build.csrc()
    includes = [f"-I{path}" for path in (csrc, *cpp_extension.include_paths())]
    # Not optimised: half the time to compile, and nothing that could be seen is optimised away.
    dropped = ("-O", "-g", "-fvisibility")  # threads.cpp is to be found by others
    kept = [flag for flag in _build.cxx_flags("cpu") if not flag.startswith(dropped)]
    flags = [*kept, "-O0", "-g1", "-w", "-fPIC", sanitize, "-fno-sanitize-recover=all", *includes]
    sources = sorted(csrc.glob("cpu/**/*.cpp"), key=lambda path: -path.stem.startswith("kernels"))

    def compiled(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        _run([*compiler(), *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, [*sources, *FOLDER.glob("*.cpp")]))
    link = [*compiler(), "-shared", sanitize]
    own = [path for path in objects if Path(path).stem not in ("threads", "faults")]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    _run([*link, *own, "-o", str(folder / "library.so"), *libraries, "-ltorch", "-ltorch_cpu"])
    for name in ("threads", "faults"):
        _run([*link, str(folder / f"{name}.o"), "-o", str(folder / f"{name}.so")])
    return folder / "library.so"


def run(kind: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """The driver with these arguments, in a Python with the sanitizer."""
    preloaded = [str(runtime(kind))]
    if (folder / "threads.so").exists():
        preloaded.append(str(folder / "threads.so"))
    environment = os.environ | OPTIONS | variables | {"LD_PRELOAD": ":".join(preloaded)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(FOLDER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return subprocess.run(
        [sys.executable, str(FOLDER / "driver.py"), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
