"""The progress of a phase: a bar on a terminal, where tqdm is there; plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

_NARROW = 60  # columns; below, there is no room for percentage and time
_SHORTEST_BAR = 8


class Progress:
    """The pieces of one phase, on stderr, as they come."""

    def __init__(self, phase: str, total: int) -> None:
        self._phase, self._total, self._done = phase, total, 0
        self._named = False
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=phase, bar_format="{desc}", dynamic_ncols=True)
            self._draw("")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, piece: str) -> None:
        """The next piece, of this name, is under way."""
        self._named = True
        if self._bar is None:
            self._print(self._done + 1, piece)
        else:
            self._draw(piece)

    def end(self, *figures: str) -> None:
        """The piece is done; what was found, the most important figure first."""
        self._done += 1
        if self._bar is not None and (figures or self._visible()):
            self._draw(*(", ".join(figures[:n]) for n in range(len(figures), 0, -1)))
        elif self._bar is None and figures:
            self._print(self._done, ", ".join(figures))

    def _visible(self) -> bool:
        """Tell whether this piece shows, and the next one does not draw the bar anyway."""
        if self._named:
            return self._done == self._total
        return 100 * (self._done - 1) // self._total < 100 * self._done // self._total

    def _print(self, piece: int, text: str) -> None:
        print(f"{self._phase} {piece}/{self._total}: {text}", file=sys.stderr, flush=True)

    def _draw(self, *texts: str) -> None:
        """The bar with the first text that leaves room for it, or what fits of the last one."""
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        before = f"{self._phase} |"
        after = f"| {self._done}/{self._total}"
        if columns >= _NARROW:
            before, after = (
                f"{self._phase} {{percentage:3.0f}}%|",
                after + " [{elapsed}<{remaining}]",
            )
        taken = len(before.format(percentage=0)) + len(
            after.format(elapsed="00:00", remaining="00:00")
        )
        room = max(0, columns - taken - _SHORTEST_BAR - len(", "))
        text = next(
            (text for text in texts if len(text) <= room), texts[-1][:room] if texts else ""
        )
        self._bar.bar_format = before + "{bar}" + after + (f", {text}" if text else "")
        self._bar.n = self._done
        self._bar.refresh()
