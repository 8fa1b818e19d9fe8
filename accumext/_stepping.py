"""What AccumulatingOptimizer does with a window: it steps on it, and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler, OptState

from accumext import _checks, distributed
from accumext._backward import BackwardPasses
from accumext._boundary import Measure, apply, measure
from accumext._gradients import nonfinite, zero_flag
from accumext._numbers import Scalar, as_tensor, known, larger
from accumext._reduction import Reduction
from accumext._report import WindowReport
from accumext._trainers import refuse_second_accumulation
from accumext._window import Window


class Stepping(BackwardPasses):
    """The part of `AccumulatingOptimizer` that empties the window."""

    def _step(self, op: str, closure: Callable[[], Any] | None) -> Any:
        """Take in what is pending, and close the window if it is full."""
        progress = self._progress
        progress.stepped = False
        try:
            refuse_second_accumulation(op, self.window)
            if self._needs_closure:
                return self._closure_step(op, closure)
            scale, found_inf = self._outer_scale(op)
            value = None
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
            elif self._is_priming():
                self.optimizer.step()
                return None
            self._take_pending(op, scale, found_inf)
            if progress.window.micro_batches >= self.window:
                self._close(op)
            return value
        except BaseException:
            # GradScaler deletes these only when step returns, and multiplies what is left into the
            # next scale.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise
        finally:
            progress.accumulated = False

    def _flush(self, op: str) -> None:
        """Take in what is pending, and close the window if any process has something in it."""
        # Lightning's clone of this class has the wrapper itself for its optimizer.
        if isinstance(self.optimizer, Stepping):
            self.optimizer._flush(op)
            return
        self._progress.stepped = self._progress.accumulated = False
        if not self._needs_closure:
            self._take_pending(op, None, None)
            self._close(op, flushing=True)

    def _close(self, op: str, flushing: bool = False) -> None:
        """Step on the open window, if there is anything in it, and start the next."""
        progress, window = self._progress, self._progress.window
        if self.scaler is not None and window.micro_batches:
            self._refuse_to_forget_others(op, self.scaler)
        with record_function("accumext::step"):
            if not self._sum_over_processes(op, flushing):
                return
            window.arrange(self._parameters())
            optimizer = self.optimizer
            measured = measure(optimizer, window, self.max_norm, self.norm_type, self.reduction)
            skipped = apply(optimizer, window, measured)
            if self.scaler is not None:
                self._update_scaler(larger(skipped, measured.found_inf), measured.device)
        progress.last = self._report(window, measured, skipped)
        if window.attached:
            self._mark_used(window.mains.tensors)
        else:
            window.mains.withdraw()
        progress.window, progress.stepped = Window(), True

    def _sum_over_processes(self, op: str, flushing: bool) -> bool:
        """Make the open window that of all processes; False if there is nothing in it."""
        progress, window, group = self._progress, self._progress.window, self._group()
        if group is None:
            if window.held_back:
                contract = "be known for gradients that micro_batch(model) has held back"
                advice = "Run a micro_batch(model) first, or pass process_group to the constructor"
                got = "a window that was loaded"
                raise RuntimeError(_checks.message(op, "the group", contract, got, advice))
            return window.micro_batches > 0
        if window.gathered is not None:  # an earlier step ended in an error after that
            return True
        reduction = progress.reduction
        if reduction is None:
            window.detach()
            if self.on_nonfinite == "skip_micro_batch" and window.survivors is None:
                window.survivors = float(window.micro_batches)
            reduction = Reduction(self._parameters(), window, group)
            if not reduction.agree(op, window, window.weight, window.micro_batches, flushing):
                return False
        progress.reduction = None
        try:
            reduction.finish(window)
        except RuntimeError as error:
            progress.window = Window()
            contract = "be summed over all processes"
            got = f"an error ({str(error).splitlines()[0]}), and it was dropped"
            raise RuntimeError(_checks.message(op, "the window", contract, got)) from error
        return True

    def _refuse_to_forget_others(self, op: str, scaler: GradScaler) -> None:
        """`update` would let the scaler forget that it has unscaled another optimizer already."""
        others = [r for key, r in scaler._per_optimizer_states.items() if key != id(self)]
        if any(record["stage"] is OptState.UNSCALED for record in others):
            contract = "have no optimizer that is unscaled and has not stepped"
            advice = "Call scaler.step for that one first"
            raise RuntimeError(_checks.message(op, "the scaler", contract, "one", advice))

    @_disable_dynamo  # torch.compile loses the record
    def _update_scaler(self, found_inf: Scalar, device: torch.device) -> None:
        """Tell the scaler what this window found, as `scaler.step` would have recorded it."""
        assert self.scaler is not None
        record = self.scaler._per_optimizer_states[id(self)]
        record["found_inf_per_device"] = {device: as_tensor(found_inf, torch.float32, device)}
        record["stage"] = OptState.STEPPED
        self.scaler.update()

    def _report(self, window: Window, measured: Measure, skipped: Scalar) -> WindowReport:
        report = WindowReport(
            skipped=skipped,
            total_norm=measured.norm,
            clip_coef=measured.clip_coef,
            loss_scale=window.loss_scale,
            weight=window.weight,
            micro_batches=window.counted(),
            dtype=measured.norm_dtype,
            device=measured.device,
        )
        if isinstance(skipped, Tensor):
            report.keep(window.main, self._names)
        elif window.dropped or skipped:
            culprits = {*window.dropped, *(nonfinite(window.main) if skipped else ())}
            report.name([name for p, name in self._names().items() if p in culprits])
        return report

    def _closure_step(self, op: str, closure: Callable[[], Any] | None) -> Any:
        """Hand the closure through; the report tells of its first evaluation."""
        if closure is None:
            _checks.fail_type(op, "closure", "be callable for this optimizer", "None")
        norms: list[Tensor] = []

        def evaluate() -> Any:
            value = closure()
            if not norms:
                grads = list(self._grads().values())
                found_inf = zero_flag(device)
                norms.append(
                    distributed.total_norm(grads, norm_type=self.norm_type, found_inf=found_inf)
                )
            return value

        device = self._parameters()[0].device
        value = self.optimizer.step(evaluate)
        norm = norms[0] if norms else zero_flag(device)
        self._progress.stepped = True
        self._progress.last = WindowReport(
            skipped=0.0,
            total_norm=known(norm),
            clip_coef=1.0,
            loss_scale=1.0,
            weight=1.0,
            micro_batches=1,
            dtype=norm.dtype,
            device=norm.device,
        )
        return value
