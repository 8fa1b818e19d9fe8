"""A progress bar where tqdm and a terminal are there, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from accumext.demo.record import Step, megabytes


class Progress:
    """The figures of each optimizer step on stderr, as they come."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._shown = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=steps, unit="step", desc="training")

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

    def show(self, step: Step) -> None:
        """One more step is done."""
        self._shown += 1
        text = (
            f"loss {step.loss:.3f}, gradient norm {step.gradient_norm:.3f}, "
            f"{step.words_per_second:,.0f} tokens/s, peak memory {megabytes(step.peak_memory)}"
        )
        if self._bar is None:
            print(f"step {self._shown}/{self._steps}: {text}", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
