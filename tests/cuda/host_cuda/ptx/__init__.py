"""The kernels of csrc/cuda as nvcc makes them, on the host.

nvcc compiles what runs on a GPU by itself: what the host's compiler makes of the same source shows
none of its faults. So its PTX is translated into C++, linked into the library of host_cuda, and
takes the place of the library's own kernels there. Two things are not covered: ptxas, which turns
PTX into instructions of a GPU, and how a GPU orders accesses to memory.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import host_cuda
from accumext.backends import _build
from host_cuda.ptx.translate import translate

FOLDER = Path(__file__).parent
# Sources of csrc/cuda with kernels.
SOURCES = sorted(
    str(path.relative_to(_build.csrc() / "cuda").with_suffix(""))
    for path in _build.csrc().glob("cuda/**/*.cu")
    if path.stem not in ("clip", "upload_cache")  # which launch kernels of others
)
FLAGS = [
    *host_cuda.PLAIN_FLAGS,
    "-g0",
    "-O0",  # their tests are over sooner than an optimising compiler would be
    "-w",
    "-fPIC",
    f"-I{_build.csrc()}",
]
COMPILED = "HOST_CUDA_PTX"  # the variable that names the folder where nvcc's PTX is already


def available() -> bool:
    return COMPILED in os.environ or shutil.which("nvcc") is not None


def build(arch: str, cache: Path) -> list[Path]:
    """Objects with nvcc's kernels for `arch`, such as "sm_90".

    Files that are compiled on the way are kept in `cache`, by the content of their sources."""

    def compiled(source: str) -> Path:
        code = translate(assembly(source, arch, cache))
        headers = [path.read_text() for path in sorted(host_cuda.FOLDER.rglob("*.h"))]
        facts = [code, *headers, *FLAGS]
        return _kept(cache, facts, lambda to: compile_translated(code, to))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compiled, SOURCES))


def assembly(source: str, arch: str, cache: Path) -> str:
    """The PTX of a source."""
    if folder := os.environ.get(COMPILED):
        ptx = Path(folder, f"{Path(source).name}_{arch}.ptx")
    else:
        ptx = _kept(cache, [*_facts(), source, arch], lambda to: _run_nvcc(source, arch, to))
    return ptx.read_text()


def _run_nvcc(source: str, arch: str, to: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    command = ["nvcc", *_build.nvcc_flags(), f"-I{_build.csrc()}", f"-I{include}", "-ptx"]
    command += [f"-arch={arch}", str(_build.csrc() / "cuda" / f"{source}.cu"), "-o", str(to)]
    subprocess.run(command, check=True, timeout=600)


def compile_translated(code: str, to: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
        file.write(code)
        file.flush()
        host_cuda.run_compiler(*FLAGS, "-c", file.name, "-o", str(to))


@functools.cache
def _facts() -> tuple[str, ...]:
    """Return all that PTX depends on besides its source and architecture."""
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(
        path for path in _build.csrc().rglob("*") if path.suffix in (".h", ".cuh", ".cu")
    )
    return nvcc, torch.__version__, *_build.nvcc_flags(), *(path.read_text() for path in sources)


def _kept(cache: Path, facts: list[str], make: Callable[[Path], None]) -> Path:
    """The file of the cache that `make` makes of these facts."""
    path = cache / hashlib.sha256("\0".join(facts).encode()).hexdigest()
    if not path.exists():
        unfinished = Path(tempfile.mkdtemp(dir=cache)) / "file"
        make(unfinished)
        unfinished.rename(path)
        unfinished.parent.rmdir()
    return path
