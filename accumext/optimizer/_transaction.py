"""Calls that happen as a whole or not at all, whatever exception ends them, and wherever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accumext.optimizer._grad_slots import Slots, contents_of, write

if TYPE_CHECKING:
    from accumext.optimizer._taking import Progress


def _nothing() -> None:
    """What is left to do where nothing is."""


class Atomic:
    """A context: an exception leaves the window and `.grad` as before it, or as after it.

    Inside, memory is allocated first and everything is prepared on drafts; nothing that can be seen
    is written in place. What cannot be undone is one call: a kernel that adds to main gradients, of
    which `Window.writes` tells, or the wrapped optimizer's step, of which `evidence` does. After an
    exception before it, everything is put back; after one behind it, what was left to do is done.
    """

    def __init__(self, progress: Progress, slots: Slots) -> None:
        self._progress, self._window = progress, progress.window
        self._fields, self._window_fields = vars(progress).copy(), vars(progress.window).copy()
        self._slots, self._leave = slots, progress.watch.leave
        self._contents: list[tuple[Tensor, Tensor]] = []
        self._grad_enabled = torch.is_grad_enabled()
        self._evidence: Callable[[], bool] | None = None
        self._always: Callable[[], None] = _nothing
        self._rest: Callable[[], None] = _nothing

    def keep_contents(self, grads: Iterable[Tensor]) -> None:
        """Copy gradients that somebody may write in place, to put their values back too."""
        self._contents = contents_of(grads)

    def after(
        self,
        rest: Callable[[], None],
        evidence: Callable[[], bool] | None = None,
        always: Callable[[], None] = _nothing,
    ) -> None:
        """What is left to do once the irrevocable call was made, or always; perhaps twice."""
        self._rest, self._evidence, self._always = rest, evidence, always

    def __enter__(self) -> Atomic:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            return
        torch.set_grad_enabled(self._grad_enabled)
        self._always()
        self._window.complete()
        if self._is_done():
            self._rest()
            self._progress.part = self._fields["part"]
        else:
            self._restore()

    def _is_done(self) -> bool:
        """Whether the irrevocable call was made."""
        if self._progress.window is not self._window:
            return True
        if self._window.writes != self._window_fields["writes"]:
            return True
        return self._evidence is not None and self._evidence()

    def _restore(self) -> None:
        vars(self._progress).update(self._fields)
        vars(self._window).update(self._window_fields)
        self._progress.watch.resume(self._leave)
        self._slots.restore()
        write(self._contents)
