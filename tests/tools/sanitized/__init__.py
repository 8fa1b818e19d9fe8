"""The CPU library under AddressSanitizer and UBSan, and under ThreadSanitizer.

The whole library, as the dispatcher calls it, in a Python that preloads the sanitizer's run time.
ThreadSanitizer follows the library's own loops, on the threads of `threads.cpp`; what torch does
inside its own libraries none of them sees, but for memory that torch frees and we still read.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from support import cpu_library
from support.programs import sanitizer_runtime

from accumext.backends import _build

FOLDER = Path(__file__).parent
TIMEOUT_S = 300.0  # tens of times the longest run

# Its search for leaks needs ptrace, which containers may forbid. Accesses by null pointers end the
# process anyhow.
KINDS = {
    "address": ("-fsanitize=address,undefined -fno-sanitize=null", "libasan.so"),
    "thread": ("-fsanitize=thread", "libtsan.so"),
}
# Kernels that no run takes: where threads race does not depend on the width of vectors.
LEFT_OUT = {"address": [], "thread": ["avx2", "portable"]}
# What UBSan looks at is in all three the same source, but for intrinsics, and it sees the portable
# kernels; a vector that is not aligned ends the process where it is wide. Half the time to compile.
WITHOUT_UBSAN = {f"kernels_{isa}": ["-fno-sanitize=undefined"] for isa in ("avx2", "avx512")}
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


def without_kernels(csrc: Path, isa: str) -> None:
    """Leave the tables of an instruction set's kernels empty, which takes no time to compile."""
    source = csrc / "cpu" / "simd" / f"kernels_{isa}.cpp"
    text = re.sub(r'#include "cpu/(copy_rounded_body|bodies).h"', "", source.read_text())
    text = text.replace(
        '"cpu/decoder/bodies.h"', '"cpu/decoder/kernels.h"\n#include "cpu/kernels.h"'
    )
    source.write_text(re.sub(r"(accumext::cpu::k\w+)\s*=[^;]*;", r"\1 = {};", text))


def not_optimised(csrc: Path) -> None:
    """Remove the pragma by which the portable kernels are optimised whatever the flags."""
    source = csrc / "cpu" / "simd" / "kernels_portable.cpp"
    text, found = re.subn(r"#pragma GCC optimize.*", "", source.read_text())
    assert found == 1, "the portable kernels have no such pragma any more"
    source.write_text(text)


def build(kind: str, folder: Path) -> Path:
    """Compile the library, `threads` and `faults` into `folder`; returns the library."""
    sanitize = KINDS[kind][0].split()
    csrc = cpu_library.sources_of_every_isa(folder / "csrc")
    if csrc != folder / "csrc":
        csrc = Path(shutil.copytree(csrc, folder / "csrc"))
    not_optimised(csrc)
    if torch.cpu._is_avx2_supported():  # then AVX-512 runs, or is emulated
        for isa in LEFT_OUT[kind]:
            without_kernels(csrc, isa)
    # Not optimised: half the time to compile, and nothing that could be seen is optimised away.
    dropped = ("-O", "-g", "-fvisibility")  # threads.cpp is to be found by others
    kept = [flag for flag in _build.cxx_flags("cpu") if not flag.startswith(dropped)]
    flags = [*kept, "-O0", "-g1", "-w", *sanitize, "-fno-sanitize-recover=all"]
    own = WITHOUT_UBSAN if kind == "address" else {}
    objects = cpu_library.compiled(csrc, folder, flags, FOLDER.glob("*.cpp"), own)
    for name in ("threads", "faults"):
        cpu_library.linked([objects.pop(name)], folder / f"{name}.so", *sanitize)
    return cpu_library.linked(objects.values(), folder / "library.so", *sanitize)


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
