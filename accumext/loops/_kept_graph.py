"""Whether the graph of all steps of a rollout fits into the memory, by the sizes of few of them."""

from __future__ import annotations

import torch

from accumext.loops._checkpoint_plan import SMALLEST
from accumext.tensors.free_memory import free_memory

ALWAYS_KEPT = 2**24  # bytes of a graph that is kept however little memory is free
SHARE = 4  # a larger one is kept if it takes at most one part in so many of the free memory
AGAIN = 4  # steps are measured again if so many times as many have run


class KeptGraph:
    """The size of a graph to which steps are added, and that of all steps together.

    Only few steps are measured, since hooks take time. The graphs of steps grow if the state does;
    between those that are measured they are taken to grow evenly.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps  # of all windows
        self._ran = self._measured = 0  # steps that ran, in all and up to the last measurement
        self._bytes = self._bytes_per_step = 0  # up to there: of the graph, and of its last step
        self._budget: int | None = None
        self.largest_step = 0  # bytes of the graph of the last of all steps, if it grows as so far

    def ahead(self) -> tuple[int, bool]:
        """Return how many steps run next, and whether they are to be measured."""
        unmeasured = AGAIN * self._measured - self._ran
        if unmeasured > 0:
            return unmeasured, False
        return (2 if self._measured else SMALLEST), True

    def add(self, steps: int) -> None:
        """Count steps that are not measured."""
        self._ran += steps

    def fits(self, steps: int, bytes_of_last: int, device: torch.device) -> bool:
        """Add measured steps, with the bytes that the last of them saved. Tell whether the memory
        of the device holds the graph of all steps."""
        self._ran += steps
        since, before = self._ran - self._measured, self._bytes_per_step
        growth = max(0.0, (bytes_of_last - before) / since) if self._measured else 0.0
        self._bytes += since * (bytes_of_last + (before if self._measured else bytes_of_last)) // 2
        self._measured, self._bytes_per_step = self._ran, bytes_of_last
        ahead = self._steps - self._ran
        self.largest_step = int(bytes_of_last + growth * ahead)
        whole = self._bytes + ahead * (bytes_of_last + growth * ahead / 2)
        if whole > ALWAYS_KEPT and self._budget is None:
            self._budget = ((free_memory(device) or 0) + self._bytes) // SHARE
        return whole <= max(ALWAYS_KEPT, self._budget or 0)
