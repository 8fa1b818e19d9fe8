"""The CPU library as a test compiles it: with flags of its own, or other sources."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from torch.utils import cpp_extension

from accumext.backends import _build
from accumext.tensors.torch_private import cpu_multiplies_bfloat16
from support.programs import compiler

EMULATED = Path(__file__).with_name("avx512_emulated.h")


def sources_of_every_isa(csrc: Path) -> Path:
    """The sources, or a copy of them in the folder `csrc` where this processor would not run the
    kernels for AVX512-BF16."""
    return _build.csrc() if cpu_multiplies_bfloat16() else emulated_avx512(csrc)


def emulated_avx512(csrc: Path) -> Path:
    """Copy the sources to `csrc`, with the kernels for AVX-512 made of instructions of AVX2.

    They are then what the library takes where the processor has AVX2: vectors of 64 bytes in two
    registers each, and functions of the header in the place of the intrinsics.
    """
    shutil.copytree(_build.csrc(), csrc)
    for source in (csrc / "cpu").rglob("*"):
        if source.suffix in (".cpp", ".h"):
            text = source.read_text(encoding="utf-8")
            text = re.sub(r"(#pragma GCC target.*avx512.*)", rf'\1\n#include "{EMULATED}"', text)
            text = re.sub(r'(?<=")(avx512\w+,)*avx512\w+', "avx2", text)
            text = re.sub(r"_mm512_|_mm256_(?=maskz)", "avx512::", text)
            source.write_text(text, encoding="utf-8")
    return csrc


def compiled(
    csrc: Path, folder: Path, flags: Sequence[str], others: Iterable[Path] = (),
    own: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Path]:  # fmt: skip
    """The objects of all CPU sources of `csrc`, and of others that include them, by their stems;
    `own` are further flags of some stems."""
    includes = [f"-I{path}" for path in (csrc, *cpp_extension.include_paths())]
    sources = sorted(csrc.glob("cpu/**/*.cpp"), key=lambda path: -path.stem.startswith("kernels"))

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        also = own.get(source.stem, ())
        run([*compiler(), *flags, *also, "-fPIC", *includes, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        targets = pool.map(compile_one, [*sources, *others])
        return {target.stem: target for target in targets}


def linked(objects: Iterable[Path], library: Path, *flags: str) -> Path:
    """Link objects to a library, which torch loads if it needs torch."""
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    torch = [*folders, "-Wl,--as-needed", "-ltorch", "-ltorch_cpu"]
    run([*compiler(), "-shared", *flags, *map(str, objects), "-o", str(library), *torch])
    return library


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
