"""What AccumulatingOptimizer does in a backward pass: ways for gradients to reach the window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function

from accumext import _checks
from accumext import _straight as straight
from accumext._arguments import OP
from accumext._gradients import HALF_DTYPES
from accumext._intake import Intake
from accumext._numbers import Scalar
from accumext._reduction import Reduction
from accumext._taking import Taking
from accumext._window import LossScale, Window


class BackwardPasses(Taking):
    """The part of `AccumulatingOptimizer` that runs backward passes."""

    def _resident_factor(
        self, loss: Tensor, weight: Scalar, scale: LossScale, room: bool
    ) -> Scalar | None:
        """What to multiply the loss with so that autograd can add to the main gradients in place.

        That needs no memory for a second set of gradients. None where they have to be taken in
        afterwards: where they must be looked at, cast or rescaled, and under a GradScaler with
        another weight, as the ratio could overflow float16.
        """
        window = self._progress.window
        if (
            self.on_nonfinite != "skip_window"
            or not window.mains.tensors
            or window.unit_weight is None
            or (not isinstance(weight, Tensor) and weight == 0.0)
            or not room
            or window.mains.casts
            or not window.mains.dense
        ):
            return None
        factor = window.factor(weight, scale)
        if not isinstance(factor, Tensor) and factor == 1.0:
            return factor
        exact = loss.dtype in (torch.float32, torch.float64)
        return factor if self.scaler is None and exact else None

    def _backward_resident(
        self, loss: Tensor, factor: Scalar, weight: Scalar, scale: LossScale
    ) -> None:
        """Run a backward pass that adds to the main gradients themselves."""
        window = self._progress.window
        with self._dropping_the_window(window):
            window.mains.lend()
            loss = times(loss, factor)

            def destination(parameter: Tensor) -> straight.Destination | None:
                main = window.main.get(parameter) if straight.expected(parameter) else None
                return None if main is None else straight.Destination(main, 1.0)

            with straight.offering(destination):
                loss.backward()
            with record_function("accumext::accumulate"), torch.no_grad():
                window.count(weight, scale)
                window.take_back(self._parameters(), self._lying())
                self._clear_grads()

    def _backward_then_take(self, op: str, loss: Tensor, weight: Scalar, scale: LossScale) -> None:
        """Run a backward pass, then take in the gradients that lie in `.grad`."""
        try:
            loss.backward()
            if self._attaches():
                self._attach(op, weight, scale)
            else:
                self._take(op, self._grads(), weight, scale)
        except BaseException:
            self._clear_grads()
            raise

    def _reduction_of_the_last(self, op: str, weight: Scalar) -> Reduction | None:
        """What sums the window while its last backward pass runs; None if it is not to, or not yet.

        All processes are told the numbers of the window before anything is done.
        """
        window, group = self._progress.window, self._group()
        count = window.micro_batches + 1
        if not self.reduce_in_backward or group is None or count < self.window:
            return None
        reduction = Reduction(self._parameters(), window, group)
        reduction.agree(op, window, window.weight + weight, count, flushing=False)
        return reduction

    def _backward_taking(
        self,
        op: str,
        loss: Tensor,
        weight: Scalar,
        scale: LossScale,
        reduction: Reduction | None = None,
    ) -> None:
        """Run a backward pass that hands every gradient over as soon as it is complete."""
        window = self._progress.window
        self._progress.reduction = reduction
        with self._dropping_the_window(window):
            before = window.mains
            factor = window.count(weight, scale)

            def take(grads: dict[Tensor, Tensor]) -> None:
                with record_function("accumext::accumulate"), torch.no_grad():
                    window.take(grads, factor)
                    if reduction is not None:
                        reduction.complete(op, window, grads)

            mine = set(self._parameters())
            if self.accumulate_in_backward:
                straight.mark(mine)
            offered = {parameter for parameter in mine if straight.expected(parameter)}

            def destination(parameter: Tensor) -> straight.Destination | None:
                main = window.destination(parameter) if parameter in offered else None
                return None if main is None else straight.Destination(main, factor)

            with Intake(op, take).watching(mine), straight.offering(destination):
                loss.backward()
            take(self._grads())
            self._clear_grads()
            window.in_order = window.in_order and window.mains is before

    def _backward_part(self, op: str, loss: Tensor) -> None:
        """Inside micro_batch: run a backward pass, and take out half gradients: see `_gather`."""
        halves = [p for p in self._parameters() if p.dtype in HALF_DTYPES]
        watched = halves if self.accumulate_in_backward else []
        with Intake(op, self._gather).watching(watched):
            loss.backward()
        self._gather_part()

    @contextmanager
    def _dropping_the_window(self, window: Window) -> Iterator[None]:
        """An exception inside drops the window, and says so: gradients were added to it."""
        held = window.micro_batches > 0
        try:
            yield
        except BaseException as error:
            self._clear_grads()
            self._drop_window()
            if held:
                _explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
            raise

    def _gather(self, halves: dict[Tensor, Tensor]) -> None:
        """Inside micro_batch: add half gradients up in float32, as `.grad` could not."""
        part = self._progress.part
        assert part is not None
        with torch.no_grad():
            part.take(halves, 1.0)

    def _gather_part(self) -> None:
        """Inside micro_batch: gather the half gradients that lie in `.grad`."""
        halves = {p: grad for p, grad in self._grads().items() if p.dtype in HALF_DTYPES}
        self._gather(halves)
        for parameter in halves:
            parameter.grad = None

    def _check_part_weight(self, op: str, weight: Scalar) -> None:
        """Inside micro_batch: one weight for all calls, as far as the host can see."""
        progress = self._progress
        first = weight if progress.part_weight is None else progress.part_weight
        progress.part_weight = first
        if isinstance(first, Tensor) or isinstance(weight, Tensor) or first == weight:
            return
        contract = f"be that of the whole micro-batch, {first:g}"
        _checks.fail_value(op, "weight", contract, weight)


def times(loss: Tensor, factor: Scalar) -> Tensor:
    """`loss * factor` in the loss's dtype; the host number 1.0 costs nothing."""
    if isinstance(factor, Tensor):
        return loss * factor.to(loss)
    return loss if factor == 1.0 else loss * factor


def _explain(error: BaseException, note: str) -> None:
    """Add a sentence to an exception on its way out."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        raise RuntimeError(note) from error
