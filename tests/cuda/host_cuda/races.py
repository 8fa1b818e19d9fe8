"""The kernels of csrc/cuda under a race detector, races.h, in place of the sanitizers. In
them are the mutants of race_mutants.py, which are switched off unless a test asks for one."""

import subprocess
from pathlib import Path

from support.programs import compiler

from host_cuda import FOLDER, PLAIN_FLAGS, mutants
from host_cuda.race_mutants import MUTANTS

# The detector is told of calls of these, but not of what the compiler puts in their place.
_FUNCTIONS = ("memcpy", "memset")
_FLAGS = [
    *PLAIN_FLAGS,
    "-DHOST_CUDA_RACES",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-threadsafe-statics",  # their guards are atomic, of which the detector is not told
    *(f"-fno-builtin-{function}" for function in _FUNCTIONS),
    "-fno-pie",  # addresses are those in the file, of which reports give the lines
]


def build_detector(folder: Path) -> None:
    """Compile races.cpp in `folder`."""
    command = [*compiler(), *PLAIN_FLAGS, "-O2", "-fno-pie", "-c", str(FOLDER / "races.cpp")]
    subprocess.run([*command, "-o", str(folder / "races.o")], check=True, timeout=600)


def build(name: str, folder: Path, detector: Path) -> None:
    """Compile `name`.cpp of this folder into an executable in `folder` that fails where threads
    race. `detector`: the folder of build_detector()."""
    csrc, compiled = folder / "csrc", folder / f"{name}.o"
    mutants.write_sources(csrc, MUTANTS)
    command = [*compiler(), *_FLAGS, f"-I{csrc}", "-c", str(FOLDER / f"{name}.cpp")]
    subprocess.run([*command, "-o", str(compiled)], check=True, timeout=600)
    command = [*compiler(), "-no-pie", str(compiled), str(detector / "races.o")]
    command += [f"-Wl,--wrap={function}" for function in _FUNCTIONS]
    subprocess.run([*command, "-o", str(folder / name)], check=True, timeout=600)
