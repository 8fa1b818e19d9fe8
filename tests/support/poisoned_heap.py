"""A heap that is filled with one word, under any command.

    python tests/support/poisoned_heap.py [--word WORD] command...

0xFFFFFFFF, the default, is NaN in every floating-point type.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
NAN = 0xFFFFFFFF
SUBNORMAL = 0x000116C2  # 1e-40 in float32


def compiler() -> list[str]:
    return (os.environ.get("CXX") or "c++").split()


def build(folder: Path, word: int = NAN) -> Path:
    """Compile the library to preload."""
    library = folder / f"poisoned_heap_{word:08x}.so"
    # -fno-builtin: the compiler knows that nobody reads what is written before free().
    flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-fno-builtin", f"-DFILL={word:#x}"]
    subprocess.run([*compiler(), *flags, str(SOURCE), "-o", str(library)], check=True, timeout=120)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--word", type=lambda text: int(text, 0), default=NAN)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LD_PRELOAD": str(build(Path(folder), chosen.word))}
        return subprocess.run(chosen.command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
