"""What AccumulatingOptimizer does in a backward pass: ways for gradients to reach the window."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function

from accumext import _checks
from accumext import _wgrad_fusion as straight
from accumext._scalars import Scalar
from accumext._tensor_kinds import HALF_DTYPES
from accumext.optimizer._arguments import OP
from accumext.optimizer._backward_hooks import Intake
from accumext.optimizer._grad_slots import Slots, clear, contents_of, param_grads, put, write
from accumext.optimizer._taking import Taking
from accumext.optimizer._window import LossScale, Window
from accumext.optimizer._window_all_reduce import Reduction


class BackwardPasses(Taking):
    """The part of `AccumulatingOptimizer` that runs backward passes."""

    def _adds_in_place(self, weight: Scalar, scale: LossScale, empty: bool) -> bool:
        """Whether autograd may add to the main gradients themselves, and gives what we would.

        That needs no hooks. Not where gradients have to be cast or multiplied; and not without
        `accumulate_in_backward`, since an exception in the middle of it leaves main gradients that
        hold a part of the micro-batch.
        """
        window = self._progress.window
        return (
            self.accumulate_in_backward
            and empty
            and bool(window.mains.tensors)
            and window.unit_weight is not None
            and not isinstance(factor := window.factor(weight, scale), Tensor)
            and factor == 1.0
            and not window.mains.casts
            and window.mains.dense
        )

    def _backward_in_place(self, loss: Tensor, weight: Scalar, scale: LossScale) -> None:
        """Run a backward pass that adds to the main gradients themselves."""
        window = self._progress.window
        with self._dropping_the_window(window, []):
            window.mains.lend()

            def destination(parameter: Tensor) -> straight.Destination | None:
                main = window.main.get(parameter) if straight.expected(parameter) else None
                return None if main is None else straight.Destination(main, 1.0)

            with straight.offering(destination):
                loss.backward()
            with record_function("accumext::accumulate"), torch.no_grad():
                parameters = self._parameters()
                window.count(weight, scale)
                window.take_back(parameters, param_grads(parameters))
                clear(parameters)

    def _backward_then_take(
        self,
        op: str,
        loss: Tensor,
        weight: Scalar,
        scale: LossScale,
        slots: Slots | None,
        still: list[Tensor],
    ) -> None:
        """Run a backward pass, then take in the gradients that lie in `.grad`.

        Args:
            slots: what lies there before, where that is known.
            still: those of it that autograd is to add to.
        """
        with self._atomic(slots) as atomic:
            self._detach()
            atomic.keep_contents(still)
            loss.backward()
            if self._attaches():
                self._attach(op, self._slots(), weight, scale, brought=True)
            else:
                foreign = self._foreign()
                self._take(op, self._grads(), weight, scale, foreign)

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
        still: list[Tensor],
        reduction: Reduction | None = None,
    ) -> None:
        """Run a backward pass that hands every gradient over as soon as it is complete."""
        window = self._progress.window
        self._progress.reduction = reduction
        with self._dropping_the_window(window, still):
            before = window.mains
            factor = window.count(weight, scale)

            def take(grads: dict[Tensor, Tensor], foreign: Container[int]) -> None:
                with record_function("accumext::accumulate"), torch.no_grad():
                    window.take_part(grads, factor, foreign)
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
            foreign = self._foreign()
            take(self._grads(), foreign)
            clear(self._parameters())
            window.in_order = window.in_order and window.mains is before

    def _backward_part(self, op: str, loss: Tensor) -> None:
        """Inside micro_batch: run a backward pass, and take out half gradients: see `_gather`."""
        halves = [p for p in self._parameters() if p.dtype in HALF_DTYPES]
        watched = halves if self.accumulate_in_backward else []
        try:
            with Intake(op, self._gather).watching(watched):
                loss.backward()
            self._gather_part()
        except BaseException:
            self._progress.part_failed = True
            raise

    @contextmanager
    def _dropping_the_window(self, window: Window, still: list[Tensor]) -> Iterator[None]:
        """An exception inside drops the window, and says so: gradients were added to it.

        What a backward pass of the user's own had put into `.grad` comes back.
        """
        held, enabled = window.micro_batches > 0, torch.is_grad_enabled()
        parameters = self._parameters()
        before = param_grads(parameters) if still else [None] * len(parameters)
        contents = contents_of(still)
        try:
            yield
        except BaseException as error:
            torch.set_grad_enabled(enabled)
            self._drop_window()
            put(parameters, before)
            write(contents)
            if held:
                _explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
            raise

    def _gather(self, halves: dict[Tensor, Tensor], foreign: Container[int]) -> None:
        """Inside micro_batch: add half gradients up in float32, as `.grad` could not."""
        part = self._progress.part
        assert part is not None
        with torch.no_grad():
            part.take_part(halves, 1.0, foreign)

    def _gather_part(self) -> None:
        """Inside micro_batch: gather the half gradients that lie in `.grad`."""
        halves = {p: grad for p, grad in self._grads().items() if p.dtype in HALF_DTYPES}
        self._gather(halves, ())  # they are cast: none is kept
        clear(halves)

    def _take_part(self, op: str, held_back: bool) -> None:
        """At the end of micro_batch: take in what its backward passes brought."""
        progress = self._progress
        if progress.part_failed:
            got = "one that ended in an exception, and the micro-batch is dropped"
            advice = "Let the exception leave micro_batch()"
            contract = "come to its end"
            raise RuntimeError(_checks.message(op, "a backward pass", contract, got, advice))
        self._gather_part()
        part = progress.part
        assert part is not None
        foreign = self._foreign()
        grads = self._grads() | part.main
        if grads:
            self._refuse_while_reducing(op)
        progress.window.held_back |= held_back and self._group() is not None
        if grads or (progress.part_weight is not None and progress.reduction is None):
            weight = 1.0 if progress.part_weight is None else progress.part_weight
            self._take(op, grads, weight, self._own_scale(op), foreign)
            progress.accumulated = True

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
