"""The oldest torch that is supported: every source fits its headers, every library its symbols.

    python .ci/oldest.py FOLDER

Unpacks its headers into FOLDER, from a wheel without dependencies. CPU sources must be correct with
them, and they must declare every symbol of torch that the installed CPU library needs. Exit status
77 if the wheel cannot be had; the last line says why.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from accumext.backends import _build

NOT_RUN = 77
VERSION = "{}.{}.0".format(*_build.TORCH_MINIMUM)
# The smallest wheel for Linux: the headers that the sources include are the same in all of them.
WHEEL = ("--platform", "manylinux_2_28_aarch64", "--python-version", "3.12")
OF_TORCH = re.compile(r"aoti_torch_|torch_|_ZN?K?(?:3c10|2at|5torch)")  # how its symbols begin


def include(folder: Path) -> Path:
    """Where the headers lie."""
    return folder / "torch" / "include"


def fetch(folder: Path) -> None:
    """Unpack the headers; leaves with NOT_RUN if there is no wheel to be had."""
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download]
        command += ["--only-binary=:all:", *WHEEL, f"torch=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(download).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            print(f"no wheel of torch {VERSION}: {words[-1] if words else 'pip gives no reason'}")
            sys.exit(NOT_RUN)
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [n for n in wheel.namelist() if n.startswith("torch/include/torch/")]
            wheel.extractall(folder, names)


def undeclared(binaries: Iterable[Path], folder: Path) -> list[str]:
    """Symbols of torch that libraries or objects need and the headers do not declare."""
    headers = [*include(folder).rglob("*shim*.h"), *include(folder).rglob("stable/**/*.h")]
    declared = set(re.findall(r"\w+", "".join(path.read_text("utf-8") for path in headers)))
    of_torch: set[str] = set()
    for binary in binaries:
        command = ["nm", "-Du" if binary.suffix == ".so" else "-u", binary]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        needed = (line.split()[-1] for line in listed.splitlines())
        of_torch.update(name for name in needed if OF_TORCH.match(name))
    if not of_torch:
        sys.exit("nm lists no symbol of torch")
    return sorted(of_torch - declared)


def parse(folder: Path) -> None:
    """Check the CPU sources with the headers; an error of the compiler stops the run."""
    compiler = (os.environ.get("CXX") or "c++").split()
    flags = [*_build.cxx_flags("cpu"), "-fsyntax-only"]
    flags += [f"-I{_build.csrc()}", f"-isystem{include(folder)}"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = ([*compiler, *flags, source] for source in _build.sources("cpu"))
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))


def main() -> None:
    folder = Path(sys.argv[1])
    fetch(folder)
    parse(folder)
    print(f"the CPU sources fit the headers of torch {VERSION}")
    installed = _build.installation() / "_C_cpu.abi3.so"
    if missing := undeclared([installed], folder):
        sys.exit(f"{installed} needs what torch {VERSION} does not have: {', '.join(missing)}")
    print(f"the CPU library compiled for torch {torch.__version__} needs no symbol newer than that")


if __name__ == "__main__":
    main()
