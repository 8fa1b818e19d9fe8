"""What AccumulatingOptimizer does with a window: it steps on it, and reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler, OptState

from accumext import _checks
from accumext._scalars import Scalar, as_tensor, known, larger
from accumext._tensor_kinds import global_norm, nonfinite, zero_flag
from accumext.optimizer import _distributed
from accumext.optimizer._arguments import OP
from accumext.optimizer._backward_pass import BackwardPasses
from accumext.optimizer._grad_slots import Slots, param_grads, put
from accumext.optimizer._step_window import (
    Measure,
    Moved,
    forget_scale,
    measure,
    run_step,
    step_gradient,
)
from accumext.optimizer._trainers import refuse_second_accumulation, tell_of_a_skipped_step
from accumext.optimizer._window import Window
from accumext.optimizer._window_all_reduce import Reduction
from accumext.optimizer._window_report import WindowReport


class Stepping(BackwardPasses):
    """The part of `AccumulatingOptimizer` that empties the window."""

    def _step(self, op: str, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Take in what is pending, and close the window if it is full."""
        try:
            self._refuse_inside_micro_batch(op)
            progress = self._progress
            progress.stepped = False
            refuse_second_accumulation(op, self.window)
            self._refuse_second_unscale(op)
            if self._hands_closure_through(closure):
                return self._closure_step(op, closure, kwargs)
            scale, found_inf = self._outer_scale(op)
            value = None
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
            elif self._is_priming():
                return self.optimizer.step(**kwargs)
            stays = progress.window.attached or self._attaches()
            foreign = () if stays else self._foreign()
            slots = self._slots()
            with self._atomic(slots):
                slots = self._take_pending(op, slots, scale, found_inf, foreign)
                if progress.window.micro_batches >= self.window:
                    result = self._close(op, slots, kwargs)
                elif self._attaches() and all(grad is None for grad in slots.grads):
                    # Without a gradient the optimizer runs its hooks, as it would alone.
                    result = self.optimizer.step(**kwargs)
                else:
                    result = None
            if "found_inf" in self.__dict__ and not self._took_a_step():
                tell_of_a_skipped_step(self)
            progress.accumulated = False
            return value if result is None else result
        except BaseException:
            # GradScaler deletes these only when step returns, and multiplies what is left into the
            # next scale.
            forget_scale(self)
            raise

    def _took_a_step(self) -> bool:
        """Whether the last `step` has stepped, as far as the host knows."""
        last = self._progress.last
        return self._progress.stepped and last is not None and not last.known_to_be_skipped

    def _flush(self, op: str) -> None:
        """Take in what is pending, and close the window if any process has something in it."""
        # Lightning's clone of this class has the wrapper itself for its optimizer.
        if isinstance(self.optimizer, Stepping):
            self.optimizer._flush(op)
            return
        progress = self._progress
        progress.stepped = progress.accumulated = False
        if self._needs_closure:
            return
        self._refuse_second_unscale(op)
        foreign = self._foreign()
        slots = self._slots()
        with self._atomic(slots):
            slots = self._take_pending(op, slots, None, None, foreign, new=True)
            self._close(op, slots, {}, flushing=True)

    def _close(self, op: str, slots: Slots, kwargs: dict[str, Any], flushing: bool = False) -> Any:
        """Step on the open window, if there is anything in it, and start the next.

        Args:
            slots: what lies in `.grad`.
        """
        window, parameters = self._progress.window, slots.parameters
        if self.scaler is not None and window.micro_batches:
            self._refuse_to_forget_others(op, self.scaler)
        with _span("accumext::step"):
            group = self._group()
            if not self._sum_over_processes(op, group, flushing):
                return None
            if group is not None:  # a window that lay in `.grad` was taken out
                slots = self._slots()
            with self._atomic(slots) as atomic:
                window.arrange(parameters)
                optimizer = self.optimizer
                memory = self._progress.product_memory
                measured = measure(
                    optimizer, window, self.max_norm, self.norm_type, self.reduction, memory
                )
                gradient = step_gradient(optimizer, window, measured, memory)
                lent = gradient.of(parameters)
                has_moved = Moved(parameters)
                close, has_updated = self._closing(window, parameters, measured, gradient.skip)

                def finish() -> None:
                    slots.take_back(lent)
                    close()

                def has_happened() -> bool:
                    return has_moved() or has_updated()

                atomic.after(finish, has_happened, lambda: forget_scale(optimizer))
                result = None
                if isinstance(gradient.skip, Tensor) or not gradient.skip:
                    slots.replace(lent)
                    result = run_step(optimizer, gradient, measured.device, has_moved, kwargs)
                forget_scale(optimizer)
                finish()
        self._warn_of_skip(window)
        return result

    def _closing(
        self, window: Window, parameters: list[Tensor], measured: Measure, skip: Scalar
    ) -> tuple[Callable[[], None], Callable[[], bool]]:
        """What is left to do after the step, and whether the part of it that cannot be undone is.

        It may be done twice.
        """
        progress, scaler = self._progress, self.scaler
        if scaler is not None and scaler._get_scale_async() is None:
            scaler.scale(zero_flag(measured.device))  # a copy has none to update
        report, successor = self._report(window, measured, skip), Window()
        attachment = window.attachment
        found_inf = larger(skip, measured.found_inf)
        records = None if scaler is None else scaler._per_optimizer_states  # which update() drops

        def updated() -> bool:
            return scaler is not None and scaler._per_optimizer_states is not records

        def close() -> None:
            consumed = progress.consumed
            if attachment is not None:
                progress.watch.end()
                consumed = consumed.after(
                    param_grads(parameters), attachment.grads if attachment.brought else None
                )
            vars(progress).update(
                last=report, window=successor, stepped=True, consumed=consumed, accumulated=False
            )
            if scaler is not None and not updated():
                self._update_scaler(found_inf, measured.device)

        return close, updated

    def _sum_over_processes(
        self, op: str, group: _distributed.Group | None, flushing: bool
    ) -> bool:
        """Make the open window that of all processes; False if there is nothing in it."""
        progress, window = self._progress, self._progress.window
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
        except BaseException as error:
            progress.window = Window()
            if not isinstance(error, RuntimeError):
                raise
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
        counted, weight = window.counted(), window.weight
        if window.unchecked:  # a micro-batch that would have been dropped
            counted, weight = counted * (1.0 - skipped), weight * (1.0 - skipped)
        report = WindowReport(
            skipped=skipped,
            total_norm=measured.norm,
            clip_coef=measured.clip_coef,
            loss_scale=window.loss_scale,
            weight=weight,
            micro_batches=counted,
            dtype=measured.norm_dtype,
            device=measured.device,
        )
        if isinstance(skipped, Tensor):
            report.keep(window.main, self._names)
        elif window.dropped or skipped:
            culprits = {*window.dropped, *(nonfinite(window.main) if skipped else ())}
            report.name([name for p, name in self._names().items() if p in culprits])
        return report

    def _warn_of_skip(self, window: Window) -> None:
        """Say once that a window was skipped where no loss scale is there to be found by trying."""
        report, scale = self._progress.last, window.loss_scale
        if report is None or not report.known_to_be_skipped or "found_inf" in self.__dict__:
            return
        if isinstance(scale, Tensor) or scale > 1.0:
            return
        names = ", ".join(map(str, report.nonfinite))
        where = f"the gradient of {names}" if names else f"its sum, with a loss scale of {scale:g}"
        self._warn_once(
            "skip",
            f"{OP}: a window was skipped, for inf or NaN in {where}. This is said once; "
            "opt.last.skipped and opt.last.nonfinite tell of every window, and "
            "on_nonfinite='raise' stops at the first",
        )

    def _hands_closure_through(self, closure: Callable[[], Any] | None) -> bool:
        """Whether the wrapped optimizer may call the closure itself, when and as often as it likes.

        That is where nothing is left to do with the gradient but to look whether it is finite.
        """
        if self._needs_closure:
            return True
        return (
            closure is not None
            and self.window == 1
            and self.max_norm is None
            and self.scaler is None
            and "found_inf" not in self.__dict__
            and self._progress.window.micro_batches == 0
            and self._group() is None
            and not getattr(self.optimizer, "_step_supports_amp_scaling", False)
        )

    def _closure_step(
        self, op: str, closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        """Hand the closure through; the report tells of its first evaluation.

        If that gives an inf or NaN, and no parameter has changed yet, there is no step.
        """
        if closure is None:
            _checks.fail_type(op, "closure", "be callable for this optimizer", "None")
        progress, parameters = self._progress, self._parameters()
        has_moved = Moved(parameters)
        seen: list[Tensor] = []

        def evaluate() -> Any:
            with torch.enable_grad():
                value = closure()
            if seen:
                return value
            window, found_inf = progress.window, zero_flag(device)
            if window.micro_batches and not (window.attached and self._is_the_gradient(window)):
                raise _Left(value, None)
            if window.attachment is None:  # as a step without a closure: used gradients are left
                put(parameters, progress.consumed.fresh(param_grads(parameters)))
            grads = {p: p.grad for p in parameters if p.grad is not None}
            seen.append(
                global_norm(list(grads.values()), norm_type=self.norm_type, found_inf=found_inf)
            )
            if bool(found_inf) and not has_moved():
                self._raise_nonfinite(op, grads, 1.0)
                raise _Left(value, nonfinite(grads))
            return value

        def conclude(culprits: list[Tensor]) -> None:
            norm = seen[0] if seen else zero_flag(device)
            counted = int(not culprits or self.on_nonfinite != "skip_micro_batch")
            report = WindowReport(
                skipped=float(bool(culprits)),
                total_norm=known(norm),
                clip_coef=1.0,
                loss_scale=1.0,
                weight=float(counted),
                micro_batches=counted,
                dtype=norm.dtype,
                device=norm.device,
            )
            report.name([name for p, name in self._names().items() if p in set(culprits)])
            attachment = progress.window.attachment
            progress.watch.end()
            brought = attachment.grads if attachment is not None else None
            consumed = progress.consumed.after(param_grads(parameters), brought)
            vars(progress).update(
                last=report, window=Window(), stepped=True, consumed=consumed, accumulated=False
            )

        device = parameters[0].device
        try:
            value = self.optimizer.step(evaluate, **kwargs)
            conclude([])
        except _Left as left:
            value = left.value
            if left.culprits is None:
                result = self._close(op, self._slots(), kwargs)
                return value if result is None else result
            conclude(left.culprits)
        except BaseException:
            if has_moved():
                conclude([])
            raise
        return value

    def _is_the_gradient(self, window: Window) -> bool:
        """Whether the main gradients are what the optimizer is to step on, as they are."""
        normaliser = window.normaliser(self.reduction)
        return not isinstance(normaliser, Tensor) and normaliser == 1.0


def _span(name: str) -> AbstractContextManager[Any]:
    """A range in a profile; none under torch.compile, which cannot trace the class."""
    return nullcontext() if torch.compiler.is_compiling() else record_function(name)


class _Left(Exception):
    """Out of a step in which the closure gave a gradient that the optimizer may not use as it is:
    one that is not finite, or, without culprits, one that the closure has taken in itself."""

    def __init__(self, value: Any, culprits: list[Tensor] | None) -> None:
        super().__init__()
        self.value, self.culprits = value, culprits
