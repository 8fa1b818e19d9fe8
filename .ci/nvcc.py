"""Compiles every CUDA source for each architecture; prints registers; a spill is an error, and so
is a declaration that nvcc is known to miscompile.

    python .ci/nvcc.py PTX [FOLDER]

One PTX is compiled for all architectures, that of the oldest: what nvcc makes for a newer one says
the same, by tests/cuda/test_host_ptx.py, which runs nightly. It is left in the folder PTX, for
tests/cuda/host_cuda/ptx. FOLDER is where oldest.py has unpacked the headers of the oldest torch, of
which no newer symbol may be needed; those of the torch that is installed the tests of launchers
meet. Kernels include no header of torch.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import oldest
import torch

from accumext.backends import _build

ARCHS = ("80", "90")  # the oldest first

_CLASS = re.compile(r"\b(?:struct|class)\s+(\w+)[^;{}()]*\{")
# Of a class T, not a reference to one nor in shared memory, where initialisers are not allowed.
_ARRAY_OF_ARRAYS = re.compile(
    r"^(?!.*__shared__)\W*(?:const\s+)?(\w+)(?:<.*>)?\s+\w+(?:\[[^\]]*\]){2}", re.M
)


def miscompiled(text: str) -> list[str]:
    """Arrays of arrays of a class with default member initialisers, or with such a member: nvcc 13
    initialises their first row and leaves zeroes in the others. The host's compiler does not."""
    text = re.sub(r"//.*", "", text)
    bodies = {match[1]: _body(text, match.end()) for match in _CLASS.finditer(text)}
    initialised: set[str] = set()
    while True:
        words = "|".join(initialised) or "(?!)"
        member = re.compile(
            rf"^\s*(?!static|using|constexpr|return)[^()]*=|^\s*(?:{words})\s+\w", re.M
        )
        found = {name for name, body in bodies.items() if any(map(member.match, body.split(";")))}
        if found <= initialised:
            break
        initialised |= found
    arrays = _ARRAY_OF_ARRAYS.finditer(text)
    return [match[0].strip() for match in arrays if match[1] in initialised]


def _body(text: str, begin: int) -> str:
    """Of a class whose first brace is before `begin`, without what is in inner braces."""
    depth, body = 1, []
    for char in text[begin:]:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            break
        if depth == 1:
            body.append(";" if char == "}" else char)
    return "".join(body)


class Kernel(NamedTuple):
    """One kernel as ptxas compiled it."""

    name: str  # mangled
    arch: str
    spilled: int  # bytes stored and loaded
    registers: int


def compile_source(nvcc: str, source: str, include: Path, target: Path) -> list[Kernel]:
    """The kernels of one file, whose PTX stays beside the target; an error stops the run."""
    command = [nvcc, *_build.nvcc_flags(), f"-I{_build.csrc()}", f"-I{include}", "-Xptxas=-v"]
    command += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC"]  # as torch's own builds have it
    command.append("-Xcompiler=-O0")  # launchers only have to compile and to be linked
    cubins = ",".join(f"sm_{arch}" for arch in ARCHS)
    command.append(f"-gencode=arch=compute_{ARCHS[0]},code=[{cubins}]")
    with tempfile.TemporaryDirectory() as kept:
        command += ["-keep", f"-keep-dir={kept}", "-c", source, "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{source} does not compile with {include}:\n{done.stdout}{done.stderr}")
        ptx = Path(kept, f"{target.stem}.ptx")
        shutil.move(ptx, target.with_name(f"{target.stem}_sm_{ARCHS[0]}.ptx"))
    pattern = r"Compiling entry function '(\S+)' for 'sm_(\d+)'(.*?)Used (\d+) registers"
    found = re.findall(pattern, done.stdout + done.stderr, flags=re.DOTALL)
    spills = re.compile(r"(\d+) bytes spill (?:stores|loads)")  # also of functions that it calls
    return [
        Kernel(name, arch, sum(map(int, spills.findall(properties))), int(registers))
        for name, arch, properties, registers in found
    ]


def main() -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc was not found")
    csrc = _build.csrc()
    files = [path for room in ("common", "cuda", "math") for path in (csrc / room).rglob("*.*")]
    if found := miscompiled("\n".join(path.read_text() for path in sorted(files))):
        sys.exit("nvcc initialises only the first row of these arrays:\n" + "\n".join(found))
    objects, *folders = map(Path, sys.argv[1:])
    objects.mkdir(exist_ok=True)
    folder = folders[0] if folders else None
    include = oldest.include(folder) if folder else Path(torch.__file__).parent / "include"
    print(f"headers: {include}")

    sources = _build.sources("cuda")
    targets = [objects / f"{Path(source).stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: str, target: Path) -> list[Kernel]:
            return compile_source(nvcc, source, include, target)

        results = list(pool.map(compiled, sources, targets))
        if folder is not None and (missing := oldest.undeclared(targets, folder)):
            sys.exit(f"the objects need what {folder} lacks: {', '.join(missing)}")
    spilling = 0
    for (source, kernels), arch in itertools.product(zip(sources, results), ARCHS):
        chosen = [kernel for kernel in kernels if kernel.arch == arch]
        used = [kernel.registers for kernel in chosen]
        registers = f"{min(used)} to {max(used)} registers" if used else "none of its own"
        spilled = sum(kernel.spilled for kernel in chosen)
        name = Path(source).name
        print(f"{name} sm_{arch}: {len(used)} kernels, {registers}, {spilled} bytes spilled")
        for kernel in chosen:
            if kernel.spilled:
                spilling += 1
                print(f"  sm_{arch} spills {kernel.spilled} bytes: {kernel.name}")
    if not any(results):
        sys.exit("ptxas reported no kernel at all")
    if spilling:
        sys.exit(f"{spilling} kernels spill registers to memory, whose bandwidth they live on")


if __name__ == "__main__":
    main()
