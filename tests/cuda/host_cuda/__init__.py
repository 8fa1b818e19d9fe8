"""The launchers of csrc/cuda and their kernels on the host: a library whose operators answer for
tensors of the CPU.

`simt.h` and `simt.cpp` are CUDA's execution model, `runtime.cpp` CUDA's runtime and `torch.cpp`
what torch has of a GPU; `host.h` comes before each launcher. The kernels are those that the host's
compiler makes, under AddressSanitizer and UBSan, or under the race detector of races.h; or those
that nvcc makes, under AddressSanitizer: see ptx. A program that uses the library runs in a Python
of its own and imports `host_cuda.loaded` first. The tests in `checks` are such programs.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import ROOT
from support.programs import compiler, sanitizer_runtime
from torch.utils import cpp_extension

from accumext.backends import _build
from host_cuda import mutants

FOLDER = Path(__file__).parent
PLAIN_FLAGS = ["-std=c++20", "-O1", "-g1", "-ffp-contract=off", f"-I{FOLDER}"]
# Accesses by null pointers end the process anyhow.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=null", "-fno-sanitize-recover=all"]
# Its search for leaks needs ptrace, which containers may forbid.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
TIMEOUT_S = 590.0
ARCH = os.environ.get("HOST_CUDA_ARCH")  # such as sm_90: the kernels are nvcc's, see ptx
# Of kernels at their edges, which are nvcc's if there is one; by test_host_ptx those for sm_90 are
# the same.
DEFAULT_ARCH = "sm_80"
LIBRARY = "HOST_CUDA_LIBRARY"  # the variable that tells a program where the library is

ASCENDING, DESCENDING, SHUFFLED = ORDERS = range(3)  # host_cuda::Order

# The sanitizers and the detector know calls of these, but not what the compiler puts in their place
# in code that is not instrumented.
_WRAPPED = ("memcpy", "memset")
_CALLED = [f"-fno-builtin-{function}" for function in _WRAPPED]
_DETECTED = "-DHOST_CUDA_RACES"
_DETECTOR = [
    _DETECTED,
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-threadsafe-statics",  # their guards are atomic, of which the detector is not told
    *_CALLED,
]


def has_sanitizers() -> bool:
    """Tell whether the compiler has the runtime that a program must preload."""
    return sanitizer_runtime("libasan.so") is not None


def has_detector() -> bool:
    """Tell whether the compiler is GCC, whose reports the race detector knows."""
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    return "clang" not in version.stdout


def build_library(folder: Path, *, races: bool = False) -> None:
    """Compile the library into `folder`, with all mutants in it, switched off.

    With `races` under the race detector.
    """
    csrc = folder / "csrc"
    mutants.write_sources(csrc)
    flags = [*PLAIN_FLAGS, f"-I{csrc}", "-fPIC", "-w", *(_DETECTOR if races else SANITIZERS)]
    flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    flags += [flag for flag in _build.nvcc_flags() if flag.startswith("-DUSE")]

    def compiled(source: Path) -> str:
        own = flags
        if source.suffix == ".cu":
            own = [*flags, *(flag for flag in _build.nvcc_flags() if flag.startswith("-DTORCH"))]
            own += ["-include", str(FOLDER / "host.h"), "-x", "c++"]
            if source.parent.name == "cuda" and not races:
                own.append("-O0")  # their tests are over sooner than an optimising compiler
        elif source.name == "races.cpp":
            own = [*PLAIN_FLAGS, "-O2", "-fPIC"]
        elif source.name == "simt.cpp":
            own = [*PLAIN_FLAGS, "-O2", "-fPIC", *_CALLED, *([_DETECTED] if races else [])]
        target = str(folder / f"{source.stem}.o")
        run_compiler(*own, "-c", str(source), "-o", target)
        return target

    sources = [*csrc.glob("cuda/**/*.cu")]
    sources += [FOLDER / f"{name}.cpp" for name in ("simt", "runtime", "torch")]
    if races:
        sources.append(FOLDER / "races.cpp")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    wrapped = [f"-Wl,--wrap={function}" for function in _WRAPPED]
    link(objects, folder, *(["-Wl,-z,defs", *wrapped] if races else SANITIZERS[:1]))


def link(objects: Iterable[str | Path], folder: Path, *flags: str) -> None:
    """The library of these objects: if nvcc's kernels are among them, they run in place of its
    own."""
    linked = ["-shared", "-Wl,-Bsymbolic", *flags]
    linked += [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    run_compiler(*linked, *map(str, objects), *libraries, "-o", str(folder / "launchers.so"))


def build_program(name: str, folder: Path, *objects: Path) -> Path:
    """Compile `name`.cpp of this folder into an executable in `folder`, linked with these."""
    executable = folder / Path(name).name
    source = str(FOLDER / f"{name}.cpp")
    flags = [*PLAIN_FLAGS, f"-I{_build.csrc()}", *SANITIZERS]
    # With the names of all functions, by which kernels are found.
    run_compiler(*flags, "-rdynamic", source, *map(str, objects), "-ldl", "-o", str(executable))
    return executable


def run_compiler(*arguments: str) -> None:
    subprocess.run([*compiler(), *arguments], check=True, timeout=900)


def execute(executable: Path, *arguments: str) -> str:
    """Return the output of an executable; RuntimeError with its words if it found a fault."""
    done = subprocess.run(
        [executable, *arguments], capture_output=True, text=True, errors="replace",
        timeout=TIMEOUT_S, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def run_checks(
    library: Path, *arguments: str, sanitized: bool = True, arch: str | None = ARCH
) -> subprocess.CompletedProcess[str]:
    """pytest with these arguments and the library, whose kernels are nvcc's for `arch`, if any; -s,
    because captured output is lost where a fault ends the process."""
    variables = {} if arch is None else {"HOST_CUDA_ARCH": arch}
    variables |= {
        LIBRARY: str(library),
        "ACCUMEXT_BACKEND": "reference",  # no other kernels
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/cuda"))),
    }
    if sanitized:
        # The sanitizer looks for the C++ library when the process begins, and Python has none.
        preloaded = (sanitizer_runtime(name) for name in ("libasan.so", "libstdc++.so"))
        variables["LD_PRELOAD"] = ":".join(map(str, preloaded))
    options = ["-q", "-n0", "-s", "-p", "host_cuda.loaded", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=ROOT, env=os.environ | ENVIRONMENT | variables, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
