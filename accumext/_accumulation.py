"""What AccumulatingOptimizer does: takes micro-batches in, and closes windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.profiler import record_function

from accumext import _checks, distributed
from accumext._arguments import OP
from accumext._boundary import Measure, apply, measure
from accumext._gradients import HALF_DTYPES, Scalar, nonfinite, on_host, zero_flag
from accumext._report import WindowReport
from accumext._window import UNSCALED, LossScale, Window
from accumext._wrapper import OptimizerWrapper

_USED = "_accumext_used"  # attribute of a gradient that a step has used: its version at that time


class Progress:
    """Everything that changes, in one object never rebound: Lightning clones what is around it."""

    def __init__(self) -> None:
        self.window = Window()
        self.last: WindowReport | None = None
        self.stepped = False
        self.accumulated = False  # since the last step: too late for an outer GradScaler
        self.part: Window | None = None  # inside micro_batch: its half-precision gradients so far
        self.part_weight: Scalar | None = None
        self.group: distributed.Group | None = None  # of the model given to micro_batch


class Accumulation(OptimizerWrapper):
    """The private half of `AccumulatingOptimizer`."""

    window: int
    max_norm: float | None
    norm_type: float
    scaler: GradScaler | None  # None also where it is disabled
    on_nonfinite: str
    reduction: str
    process_group: distributed.Group | None
    _needs_closure: bool
    _progress: Progress

    # Gradients in `.grad`

    def _grads(self) -> dict[Tensor, Tensor]:
        """Every gradient in `.grad` that is not a main gradient already."""
        window = self._progress.window
        mains = window.main if window.attached else {}
        grads = {p: p.grad for p in self._parameters() if p.grad is not None}
        return {p: grad for p, grad in grads.items() if mains.get(p) is not grad}

    def _new_grads(self) -> dict[Tensor, Tensor]:
        """Those of them that no step has used."""
        return {p: grad for p, grad in self._grads().items() if not _is_used(grad)}

    def _clear_grads(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _forget(self) -> None:
        """Let go of the gradients that the last report may still be asked about."""
        if self._progress.last is not None:
            self._progress.last.forget()

    def _clear_used(self) -> None:
        """Make room for a backward pass: let go of what the last step left visible."""
        self._forget()
        for parameter in self._parameters():
            if parameter.grad is not None and _is_used(parameter.grad):
                parameter.grad = None

    def _mark_used(self, grads: dict[Tensor, Tensor]) -> None:
        """Whatever lies there is nothing new, until somebody writes it."""
        for grad in grads.values():
            setattr(grad, _USED, grad._version)

    # Loss scales

    def _own_scale(self, op: str) -> LossScale:
        """The scale in force now."""
        if self.scaler is None:
            return UNSCALED
        scale = self.scaler._get_scale_async()
        if scale is None:
            advice = "Use opt.backward(loss), or scaler.scale(loss).backward() with the same scaler"
            got = "a scaler that has not scaled any"
            raise RuntimeError(_checks.message(op, "the loss", "be scaled first", got, advice))
        return LossScale(scale.double(), (id(scale), scale._version))

    def _outer_scale(self, op: str) -> tuple[LossScale | None, Tensor | None]:
        """What a GradScaler around this step has to say: scale (None: nothing), and found_inf."""
        if "found_inf" not in self.__dict__:
            return None, None
        contract = "be called directly, not through scaler.step"
        if self.scaler is not None:
            advice = "Leave scaler=None where a GradScaler is called around the optimizer"
            got = "an outer GradScaler beside its own"
            raise RuntimeError(_checks.message(op, "step", contract, got, advice))
        if self._progress.accumulated:
            got = "gradients taken in before the GradScaler could see them"
            advice = "Pass the scaler to the constructor: AccumulatingOptimizer(..., scaler=scaler)"
            raise RuntimeError(_checks.message(op, "step", contract, got, advice))
        scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        return (
            UNSCALED if scale is None else LossScale(scale.double()),
            found_inf if isinstance(found_inf, Tensor) else None,  # the int 0 without gradients
        )

    def _recognise_scale(self, window: Window) -> None:
        """Give a loaded window the key of the scale in force, if that is the one of its unit."""
        unit = window.unit_scale.value
        if self.scaler is not None and isinstance(unit, Tensor):
            self.scaler.scale(torch.zeros((), device=unit.device))  # creates the scale if need be
            scale = self._own_scale(f"{OP}.load_accumulation_state_dict")
            if bool(scale.value == unit):
                window.unit_scale = scale

    # Taking in

    def _take(
        self,
        op: str,
        grads: dict[Tensor, Tensor],
        weight: Scalar,
        scale: LossScale,
        attach: bool = False,
    ) -> None:
        """Take in one micro-batch and empty `.grad`, or leave it there as the window's own."""
        window = self._progress.window
        self._forget()
        with record_function("accumext::accumulate"), torch.no_grad():
            counts = isinstance(weight, Tensor) or weight > 0
            if self.on_nonfinite == "raise" and counts:
                self._raise_nonfinite(op, grads)
            if attach:
                window.attach(grads, weight, scale)
                return
            window.detach()
            if self.on_nonfinite == "skip_micro_batch":
                window.add_if_finite(grads, weight, scale)
            else:
                window.add(grads, weight, scale)
            for parameter in grads:
                parameter.grad = None

    def _take_pending(self, op: str, scale: LossScale | None, found_inf: Tensor | None) -> None:
        """Take in what a backward pass of the user left in `.grad`, if anything."""
        grads = self._new_grads()
        if not grads:
            return
        window = self._progress.window
        attach = self.window == 1 and window.micro_batches == 0
        if attach:  # like the bare optimizer, with what an earlier step used and nobody cleared
            grads = self._grads()
        self._take(op, grads, 1.0, self._own_scale(op) if scale is None else scale, attach)
        if found_inf is not None and window.survivors is None:
            window.note(found_inf)

    def _raise_nonfinite(self, op: str, grads: dict[Tensor, Tensor]) -> None:
        if not grads:
            return
        found_inf = zero_flag(next(iter(grads.values())).device)
        distributed.total_norm(list(grads.values()), 2.0, found_inf)
        if bool(found_inf):
            names = self._names()
            got = "inf or NaN in " + ", ".join(str(names[p]) for p in nonfinite(grads))
            raise RuntimeError(_checks.message(op, "gradients", "be finite", got))

    def _resident_factor(self, loss: Tensor, weight: Scalar, scale: LossScale) -> Scalar | None:
        """What to multiply the loss with so that autograd can add to the main gradients in place.

        That needs no memory for a second set of gradients. None where they have to be taken in
        afterwards: where they must be looked at, cast or rescaled, and under a GradScaler with
        another weight, as the ratio could overflow float16.
        """
        window = self._progress.window
        parameters = self._parameters()
        if (
            self.on_nonfinite != "skip_window"
            or not window.main
            or window.unit_weight is None
            or (not isinstance(weight, Tensor) and weight == 0.0)
            or any(p.dtype in HALF_DTYPES or p.grad is not None for p in parameters)
            or any(main.is_sparse for main in window.main.values())
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
        window.lend()
        try:
            if isinstance(factor, Tensor) or factor != 1.0:
                loss = loss * (factor.to(loss) if isinstance(factor, Tensor) else factor)
            loss.backward()
        except BaseException as error:
            self._clear_grads()
            self._progress.window = Window()
            _explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
            raise
        with record_function("accumext::accumulate"), torch.no_grad():
            window.take_back(self._grads(), weight, scale)
            self._clear_grads()

    def _gather_part(self) -> None:
        """Inside micro_batch: take out half gradients, which must not add up in `.grad`."""
        part = self._progress.part
        assert part is not None
        halves = {p: grad for p, grad in self._grads().items() if p.dtype in HALF_DTYPES}
        with torch.no_grad():
            part.add(halves, 1.0, UNSCALED)
        for parameter in halves:
            parameter.grad = None

    def _check_part_weight(self, op: str, weight: Scalar) -> None:
        """Inside micro_batch: one weight for all calls, as far as the host can see."""
        progress = self._progress
        first = weight if progress.part_weight is None else progress.part_weight
        progress.part_weight = first
        known = all(not isinstance(w, Tensor) or on_host(w) for w in (first, weight))
        if known and float(first) != float(weight):
            contract = f"be that of the whole micro-batch, {float(first):g}"
            _checks.fail_value(op, "weight", contract, float(weight))

    # Refusals

    def _refuse_inside_micro_batch(self, op: str) -> None:
        if self._progress.part is not None:
            raise RuntimeError(
                _checks.message(op, "the call", "be outside micro_batch()", "one inside")
            )

    def _refuse_closure_optimizer(self, op: str) -> None:
        if self._needs_closure:
            kind = type(self.optimizer).__name__
            advice = "Call loss.backward() in the closure, and opt.step(closure)"
            raise RuntimeError(
                _checks.message(op, "the optimizer", "step without a closure", kind, advice)
            )

    # Stepping

    def _step(self, op: str, closure: Callable[[], Any] | None) -> Any:
        """Take in what is pending, and close the window if it is full."""
        progress = self._progress
        progress.stepped = False
        try:
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
                self._close()
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
        self._progress.stepped = self._progress.accumulated = False
        if not self._needs_closure:
            self._take_pending(op, None, None)
            if self._progress.window.micro_batches or self._group() is not None:
                self._close()

    def _close(self) -> None:
        """Step on the open window and start the next."""
        progress, window = self._progress, self._progress.window
        group = self._group()
        with record_function("accumext::step"):
            window.refresh()
            if group is not None:
                if self.on_nonfinite == "skip_micro_batch" and window.survivors is None:
                    window.survivors = torch.tensor(float(window.micro_batches))
                distributed.reduce_window(window, self._parameters(), group)
                if window.is_empty():
                    return
            measured = measure(window, self.max_norm, self.norm_type, self.reduction)
            skipped = apply(self.optimizer, window, measured)
            if self.scaler is not None:
                self._update_scaler(torch.maximum(skipped, measured.found_inf))
        progress.last = self._report(window, measured, skipped)
        if window.attached:
            self._mark_used(window.main)
        else:
            for parameter in window.main:
                parameter.grad = None
        progress.window, progress.stepped = Window(), True

    def _group(self) -> distributed.Group | None:
        """Over which the window is summed."""
        return self.process_group or self._progress.group

    def _update_scaler(self, found_inf: Tensor) -> None:
        """Tell the scaler what this window found, as `scaler.step` would have recorded it."""
        assert self.scaler is not None
        record = self.scaler._per_optimizer_states[id(self)]
        record["found_inf_per_device"] = {found_inf.device: found_inf}
        record["stage"] = OptState.STEPPED
        self.scaler.update()

    def _report(self, window: Window, measured: Measure, skipped: Tensor) -> WindowReport:
        names = self._names()
        known = on_host(skipped)
        culprits = set(window.dropped)
        if known and bool(skipped):
            culprits |= set(nonfinite(window.main))

        report = WindowReport(
            skipped=skipped,
            total_norm=measured.norm,
            clip_coef=measured.clip_coef,
            loss_scale=window.loss_scale,
            weight=window.weight,
            micro_batches=window.counted(),
            nonfinite=[name for p, name in names.items() if p in culprits],
        )
        if not known:
            report.keep({names[p]: main for p, main in window.main.items()})
        return report

    def _closure_step(self, op: str, closure: Callable[[], Any] | None) -> Any:
        """Hand the closure through; the report tells of its first evaluation."""
        if closure is None:
            _checks.fail_type(op, "closure", "be callable for this optimizer", "None")
        norms: list[Tensor] = []
        found_inf = zero_flag(self._parameters()[0].device)

        def evaluate() -> Any:
            value = closure()
            if not norms:
                norms.append(
                    distributed.total_norm(list(self._grads().values()), self.norm_type, found_inf)
                )
            return value

        value = self.optimizer.step(evaluate)
        self._progress.stepped = True
        self._progress.last = WindowReport(
            skipped=torch.zeros_like(found_inf),
            total_norm=norms[0] if norms else torch.zeros_like(found_inf),
            clip_coef=1.0,
            loss_scale=1.0,
            weight=1.0,
            micro_batches=1,
            nonfinite=[],
        )
        return value


def _is_used(grad: Tensor) -> bool:
    """Whether a step has used this gradient and nobody has written it since."""
    return getattr(grad, _USED, None) == grad._version


def _explain(error: BaseException, note: str) -> None:
    """Add a sentence to an exception on its way out."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        raise RuntimeError(note) from error
