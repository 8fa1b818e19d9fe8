"""The wrapped optimizer's step on a window: what precedes and follows it, undone if it fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext.optimizer._engine import Engine
from accumext.optimizer._gradient import UNDIVIDED, InPlace, Operands, form, measure, to_host
from accumext.optimizer._grads import grad_of, grads_of, present, set_grads
from accumext.optimizer._ledger import Ledger, Quotient, StepFactors, step_factors
from accumext.optimizer._report import Name, WindowReport, named
from accumext.optimizer._scaler import update
from accumext.optimizer._settings import Settings
from accumext.optimizer._step_watch import StepWatch
from accumext.optimizer._window import NO_WINDOW, Phase, State, Window
from accumext.tensors.checks import message
from accumext.tensors.kinds import any_dtensor, nonfinite, versions
from accumext.tensors.scalars import Scalar, as_tensor, equals
from accumext.tensors.torch_private import TAKES_SCALE, not_compiled, set_grad_enabled


class StepPlan(NamedTuple):
    """What a step on a window will do. When it is made, only gradients may have changed."""

    window: Window
    sums: Operands
    factors: StepFactors
    dtype: torch.dtype  # of the norm
    grads: Sequence[Tensor | None]  # as the optimizer is to see them
    divisor: Scalar  # by which it is to divide them
    device_skip: Scalar | None  # a device's flag, not 0 if no step may be taken; None: see `skips`
    skips: bool  # the host knows that there is no step
    found_inf: Scalar  # for the scaler
    fused: bool  # the optimizer divides, and may be told by a device not to step


def _plan(
    engine: Engine,
    op: str,
    parameters: list[Tensor],
    stepped_on: Sequence[Tensor],
    before: Sequence[Tensor | None],  # their `.grad`
    in_place: InPlace,
) -> StepPlan:
    """Measure and form the gradient of the open window."""
    settings, window = engine.settings, engine.state.window.of(parameters)
    looks = engine.policy.looks or settings.scaler is not None  # for inf and NaN
    if not looks and window.phase is Phase.IN_GRAD and _is_bare(window, settings):
        factors, sums = StepFactors(math.nan, 1.0, 1.0, 0.0, 0.0), Operands.untouched(before)
        return StepPlan(
            window, sums, factors, sums.dtype, before, UNDIVIDED, None, False, 0.0, False
        )
    sums = Operands.in_window(window, before)
    divides = getattr(engine.optimizer, TAKES_SCALE, False)
    fused = divides and not any_dtensor(sums.tensors)
    factors, dtype = measure(sums, window, settings, looks, in_place, stepped_on, fused, divides)
    grads, divisor, skip, found_inf = sums.grads, UNDIVIDED, factors.skip, factors.found_inf
    known = not isinstance(skip, Tensor)  # to the host
    if not known or not skip:
        grads, divisor, rounded = form(sums, factors, dtype, in_place, stepped_on, fused)
        for norm in rounded if looks else ():  # not finite: rounding has overflowed
            skip, found_inf = _or_nonfinite(norm, skip), _or_nonfinite(norm, found_inf)
        if rounded and not fused:
            skip = to_host(skip)
    unknown, skips = (None, bool(skip)) if known else (skip, False)
    if skips and engine.policy.check is not None:
        names = named(_names_of(engine, parameters, sums, nonfinite(present(grads))))
        got = f"inf or NaN in {names}" if names else "a norm that is not"
        advice = "Call opt.discard() to drop the window"
        raise RuntimeError(message(op, "the window's sum", "be finite", got, advice))
    return StepPlan(window, sums, factors, dtype, grads, divisor, unknown, skips, found_inf, fused)


def _is_bare(window: Window, settings: Settings) -> bool:
    """Tell whether the window's gradient is that in `.grad`, and no scaler has found an inf."""
    quotient, found_inf = window.ledger.quotient(settings.reduction), window.ledger.found_inf
    return settings.max_norm is None and equals(found_inf, 0.0) and equals(quotient.value(), 1.0)


def _or_nonfinite(norm: Tensor, flag: Scalar) -> Scalar:
    """Return 1 if the flag is not 0 or the norm is not finite, else 0."""
    ledger = Ledger() if equals(flag, 0.0) else Ledger(found_inf=flag)
    return step_factors(
        ledger, Quotient(), None, device=norm.device, sums=[], norm=norm,
        overflow=None, normalised=False, checks_norm=True,
    ).found_inf  # fmt: skip


class _GuardedStep:
    """All that precedes and follows the wrapped step on a window. After any exception, all of it is
    done or undone."""

    def __init__(
        self, engine: Engine, proxy: Optimizer, op: str, parameters: list[Tensor], begun: object
    ) -> None:
        self._engine, self._proxy, self._op, self._parameters = engine, proxy, op, parameters
        self._begun = begun  # what `begin_update` returned
        self._stepped_on = parameters
        if not engine.tensors.is_parameters:
            engine.tensors.follow_parameters()
            self._stepped_on = engine.tensors.stepped_on()
        self._before = list(map(grad_of, self._stepped_on))
        self._lent: Sequence[Tensor | None] = self._before
        self._watch, self._in_place = StepWatch(self._stepped_on), InPlace()
        self._closed: State | None = None
        self.plan: StepPlan

    @not_compiled
    def begin(self) -> bool:
        """Put the gradient in `.grad` for the optimizer. Return whether there is a step to take."""
        engine, optimizer, stepped_on = self._engine, self._engine.optimizer, self._stepped_on
        self.plan = plan = _plan(
            engine, self._op, self._parameters, stepped_on, self._before, self._in_place
        )
        if plan.skips:
            return False
        skip, divisor = plan.device_skip, plan.divisor
        if plan.grads is not plan.sums.grads or not plan.sums.in_grad:  # not in `.grad` already
            self._lent = plan.grads
            for parameter, grad in zip(stepped_on, self._lent, strict=True):
                parameter.grad = grad
        if not engine.tensors.is_parameters:
            self._watch.rounding = engine.tensors.rounding(0.0 if skip is None else skip)
        if plan.fused:
            scale = None
            if divisor is not UNDIVIDED:
                scale = as_tensor(divisor, torch.float32, plan.sums.device)
            found = None if skip is None else as_tensor(skip, torch.float32, plan.sums.device)
            vars(optimizer).update(grad_scale=scale, found_inf=found)
        self._watch.begin(optimizer)
        return True

    @not_compiled
    def finish(self) -> None:
        """Close the window. May be called again after an exception in it."""
        engine, plan, used = self._engine, self.plan, self._engine.state.consumed
        self._take_back()
        if self._watch.rounding is not None:
            self._watch.write()
        if plan.sums.in_grad:
            made = list(map(is_, self._before, plan.window.sums))
            used = used.after(grads_of(self._parameters), made)
        engine.begin_next(used, _report(engine, self._parameters, plan))
        self._closed = engine.state
        if engine.reducer.sharded:
            engine.reducer.closed()
        if engine.settings.scaler is not None:
            update(
                engine.settings.scaler, self._begun, self._proxy, plan.found_inf, plan.sums.device
            )

    @not_compiled
    def recover(self) -> bool:
        """Finish, after an exception, if the step was taken, else restore everything. Returns
        whether the step was taken."""
        closed = self._closed is not None and self._engine.state is self._closed
        if closed or self._watch.has_moved():
            self.finish()
            return True
        self._take_back()
        set_grads(self._stepped_on, self._before)  # also gradients that the step has removed
        engine = self._engine
        engine.warned.add("full")  # the window stays full: another micro-batch is no user's error
        if self._in_place.done:
            grads = self._before if engine.state.in_grad else ()
            between = versions(grads)
            self._in_place.undo()
            if engine.state.in_grad:
                engine.update(consumed=engine.state.consumed.after_writes(grads, between))
        if engine.state.in_grad and not engine.state.window.sums:  # the user's own, as before
            engine.update(window=NO_WINDOW)
        return False

    def _take_back(self) -> None:
        """Remove the attributes set on the optimizer, and restore `.grad`."""
        optimizer = self._engine.optimizer
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        self._watch.end(optimizer)
        if self._lent is self._before:
            return
        for parameter, lent, grad in zip(self._stepped_on, self._lent, self._before, strict=True):
            # Restore unless the step has cleared the gradient that was put there.
            if lent is None or parameter.grad is not None:
                parameter.grad = grad


def _report(engine: Engine, parameters: Sequence[Tensor], plan: StepPlan) -> WindowReport:
    """Report a closed window."""
    ledger, factors = plan.window.ledger, plan.factors
    counted = ledger.micro_batches if ledger.counted is None else ledger.counted
    report = WindowReport(
        float(plan.skips) if plan.device_skip is None else plan.device_skip,
        factors.norm,
        factors.clip_coef,
        ledger.loss_scale,
        ledger.weight,
        counted if ledger.of_all is None else ledger.of_all,
        plan.dtype,
        plan.sums.device,
        empty_if_skipped=plan.sums.in_grad and engine.policy.leaves_out,
    )
    if plan.device_skip is not None:  # parameters are looked for when somebody asks for names
        report.evidence = plan.sums.tensors, partial(_names_of, engine, parameters, plan.sums)
    elif plan.skips or plan.window.left_out:
        bad = nonfinite(present(plan.grads)) if plan.skips else []
        found = set(_names_of(engine, parameters, plan.sums, bad))
        names = engine.names()
        found |= {names[parameter] for parameter in plan.window.left_out}
        report.name([names[p] for p in parameters if names[p] in found])
    return report


def _names_of(
    engine: Engine, parameters: Sequence[Tensor], sums: Operands, indices: Sequence[int]
) -> list[Name]:
    """Return the names of parameters by index among those that have a gradient."""
    there = [p for p, grad in zip(parameters, sums.grads, strict=True) if grad is not None]
    known = engine.names() if indices else {}
    return [known[there[i]] for i in indices]


def refuse_what_it_misses(
    engine: Engine, op: str, closure: object, error: BaseException, summed: bool
) -> None:
    """Raise a RuntimeError that explains the error of a wrapped step, if the step asked for the
    closure, which was evaluated before, or for the graph of gradients, which sums do not have.

    Whether an optimizer needs either cannot be known before: only its error tells.
    """
    said, kind = str(error).lower(), type(engine.optimizer).__name__
    if closure is not None and ("closure" in said or "'nonetype' object is not callable" in said):
        contract = "step without the closure, which was evaluated before"
        advice = (
            f"{kind} gets it with window=1, without max_norm, scaler, process_group and masters, "
            "and with loss.backward(), not opt.backward, if there is a backward pass before"
        )
    elif summed and "grad_fn" in said:
        contract = "step without the graph of .grad, which the sums of a window do not have"
        advice = (
            "Pass window=1, without masters, and add gradients up by hand: "
            "(loss / n).backward(create_graph=True) n times, then opt.step()"
        )
    else:
        return
    raise RuntimeError(message(op, "the optimizer", contract, kind, advice)) from error


def step_on_window(
    engine: Engine,
    proxy: Optimizer,  # the AccumulatingOptimizer, under whose id the scaler knows it
    op: str,
    parameters: list[Tensor],  # those of the window's gradients
    kwargs: dict[str, Any],  # of the wrapped step
    enabled: bool,  # whether gradients are enabled for the wrapped step, as they are for its caller
    begun: object,  # what `begin_update` returned
    closure: object,  # evaluated before; the wrapped step does not get it
) -> tuple[Any, bool]:
    """Step on the open window, and start the next. Returns also whether the host knows that there
    was no step."""
    summed = engine.state.window.phase is not Phase.IN_GRAD
    around, result = _GuardedStep(engine, proxy, op, parameters, begun), None
    try:
        if around.begin():
            set_grad_enabled(enabled)
            result = engine.optimizer.step(**kwargs)
            set_grad_enabled(False)
        around.finish()
    except BaseException as error:
        set_grad_enabled(False)
        if not around.recover():
            refuse_what_it_misses(engine, op, closure, error, summed)
        raise
    return result, around.plan.skips
