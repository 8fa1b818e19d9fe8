"""What a first call says on stderr of a compile, which takes long, and of its errors."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator


def announce(words: str) -> None:
    """Tell a terminal, a notebook or a log why the first call takes so long."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(f"accumext: {words}", file=sys.stderr, flush=True)


_REMINDER_S = 10.0


@contextlib.contextmanager
def announced(words: str, more: str = "") -> Iterator[None]:
    """Tell what is being done, again every ten seconds until it is done, and if it fails."""
    begin, over = time.monotonic(), threading.Event()

    def remind() -> None:
        while not over.wait(_REMINDER_S):
            announce(f"still {words}, after {time.monotonic() - begin:.0f} s")

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
