"""What is said on stderr of a compile, which takes long, and of its errors.

setup.py loads this file by path, as it does _build.py, so only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def announce(words: str) -> None:
    """Tell a terminal, a notebook or a log, such as that of `pip install -v`."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(f"accumext: {words}", file=sys.stderr, flush=True)


_REMINDER_S = 10.0


def _after(seconds: float) -> str:
    return f", after {seconds:.0f} s"


@contextlib.contextmanager
def announced(
    words: str, more: str = "", how_far: Callable[[float], str] = _after
) -> Iterator[None]:
    """Tell what is being done, again every ten seconds until it is done, and if it fails.

    Args:
        words: what is being done.
        more: what is said of it at the beginning alone.
        how_far: returns what is said of it after some seconds, such as by `files_done`.
    """
    begin, over = time.monotonic(), threading.Event()

    def remind() -> None:
        while not over.wait(_REMINDER_S):
            announce(f"still {words}{how_far(time.monotonic() - begin)}")

    announce(words + more)
    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    except Exception as error:
        announce(f"{words} failed: {error_line(error)}")
        raise
    finally:
        over.set()
        reminder.join()


def files_done(folder: Path, efforts: Mapping[str, float]) -> Callable[[float], str]:
    """Return the `how_far` of a compile: files that are done, and how long the others will take.

    The compile may leave objects of earlier ones as they are. Nothing is said then of the others,
    since only the compile knows how many they are.

    Args:
        folder: the folder in which the compile writes its objects.
        efforts: the time that each source takes, by its name without suffix, in any unit.
    """

    def objects() -> dict[Path, int]:
        found = {}
        for path in folder.rglob("*.o"):
            with contextlib.suppress(FileNotFoundError):  # it is replaced just now
                found[path] = path.stat().st_mtime_ns
        return found

    before = objects()
    counted, since = 0, 0.0  # files, and after how many seconds they were first seen to be so many

    def how_far(seconds: float) -> str:
        nonlocal counted, since
        new = objects().items() - before.items()
        if before:
            return f": {len(new)} file{'s' * (len(new) != 1)} after {seconds:.0f} s"
        if len(new) != counted:
            counted, since = len(new), seconds
        total = sum(efforts.values())
        done = sum(efforts.get(path.name.partition(".")[0], 0) for path, _ in new)
        left = since * total / done - seconds if 0 < done < total else 0.0
        estimate = f", about {left:.0f} s more" if left >= 1 else ""
        return f": {counted} of {len(efforts)} files after {seconds:.0f} s{estimate}"

    return how_far


def error_line(error: Exception) -> str:
    """Return the line of a compiler's output that has the error, or else the command."""
    lines = str(error).splitlines() or [type(error).__name__]
    for line in lines:
        if " error: " in line:
            return line.strip()
    failed = [number for number, line in enumerate(lines) if line.startswith("FAILED: ")]
    if not failed:
        return lines[0].strip()
    command, *said = lines[failed[0] + 1 :]  # ninja prints the command first
    said = [line for line in said if line.strip() and not line.startswith(("[", "ninja: "))]
    return said[0].strip() if said else f"a command failed and said nothing: {command}"
