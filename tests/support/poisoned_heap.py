"""A heap that is filled with one byte, under any command.

    python tests/support/poisoned_heap.py [--byte BYTE] command...

0xFF, the default, is NaN in every floating-point type.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
NAN = 0xFF


def compiler() -> list[str]:
    return (os.environ.get("CXX") or "c++").split()


def build(folder: Path, byte: int = NAN) -> Path:
    """The library to preload."""
    library = folder / f"poisoned_heap_{byte:02x}.so"
    # -fno-builtin: the compiler knows that nobody reads what is written before free().
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fno-builtin", f"-DFILL={byte:#x}"]
    subprocess.run([*compiler(), *flags, str(SOURCE), "-o", str(library)], check=True, timeout=120)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--byte", type=lambda text: int(text, 0), default=NAN)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LD_PRELOAD": str(build(Path(folder), chosen.byte))}
        return subprocess.run(chosen.command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
