"""Closures that the wrapped optimizer evaluates, and errors for wrong closures."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext.ops.any_tensors import global_norm
from accumext.optimizer._engine import Engine
from accumext.optimizer._grads import fresh, grads_of, present, set_grads
from accumext.optimizer._other_passes import pass_over
from accumext.optimizer._report import WindowReport
from accumext.optimizer._step_watch import StepWatch
from accumext.tensors import checks
from accumext.tensors.kinds import nonfinite, zero_flag
from accumext.tensors.scalars import equals, to_host_if_free
from accumext.tensors.torch_private import takes_scale


def refuse_closure(op: str, closure: object) -> NoReturn:
    """Raise TypeError for a closure that cannot be called."""
    advice = "For a loss: opt.backward(loss), then opt.step()"
    checks.fail_type(op, "closure", "be a function or None", checks.type_name(closure), advice)


def may_hand_through(engine: Engine, proxy: Optimizer) -> bool:
    """Tell whether the wrapped optimizer may call the closure itself, whenever it likes.

    It may if the wrapper only checks that the gradient is finite, and changes nothing.
    """
    settings = engine.settings
    return (
        engine.next_is_all
        and engine.tensors.is_parameters
        and settings.max_norm is None
        and settings.scaler is None
        and "found_inf" not in vars(proxy)
        and not takes_scale(engine.optimizer)
    )


class _AbortStep(Exception):
    """Leaves the wrapped step before it has changed any parameter; `go_on` is called instead."""

    def __init__(self, value: Any, go_on: Callable[[], Any]) -> None:
        super().__init__()
        self.value, self.go_on = value, go_on


def step_with_closure(
    engine: Engine,
    op: str,
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
    step_without: Callable[[], Any],  # steps on the window, if the closure has filled it
) -> Any:
    """Let the wrapped optimizer call the closure; the report is of the first evaluation.

    If that gives an inf or NaN, and no parameter has changed yet, no step is taken.
    """
    if closure is None:
        checks.fail_type(op, "closure", "be callable for this optimizer", "None")
    engine.tensors.follow_parameters()
    evaluation = _Evaluation(engine, op, closure, step_without)
    watch = evaluation.watch
    try:
        watch.begin(engine.optimizer)
        try:
            if engine.settings.names_closure:
                value = engine.optimizer.step(closure=evaluation.run, **kwargs)
            else:
                value = engine.optimizer.step(evaluation.run, **kwargs)
        finally:
            watch.end(engine.optimizer)
        evaluation.conclude()
    except _AbortStep as abort:
        result = abort.go_on()
        return abort.value if result is None else result
    except BaseException:
        if watch.has_moved():
            evaluation.conclude()
        else:
            engine.tensors.clear_master_grads()
        raise
    return value


class _Evaluation:
    """The closure of one step, which the wrapped optimizer evaluates."""

    def __init__(
        self, engine: Engine, op: str, closure: Callable[[], Any], step_without: Callable[[], Any]
    ) -> None:
        self._engine, self._op, self._closure = engine, op, closure
        self._step_without = step_without
        self._parameters = engine.tensors.parameters()
        self._seen: list[Tensor] = []  # norm of the first gradient
        self.watch = StepWatch(engine.tensors.stepped_on(), engine.tensors.rounding(every=True))

    def run(self) -> Any:
        """Evaluate the closure; the wrapped optimizer is given this method in place of it."""
        target, watch = self._engine.tensors, self.watch
        if target.is_parameters:
            return self._look_at()
        if self._seen or watch.has_moved():  # `has_moved` may miss writes after an evaluation
            watch.write()
            watch.rounding = target.rounding(every=True)
        value = self._look_at()
        target.set_master_grads()
        return value

    def _look_at(self) -> Any:
        with torch.enable_grad():
            value = self._closure()
        if self._seen:
            return value
        engine, parameters = self._engine, self._parameters
        state, settings = engine.state, engine.settings
        if state.in_grad:
            if not equals(state.window.ledger.quotient(settings.reduction).value(), 1.0):
                raise _AbortStep(value, self._step_without)
        elif state.micro_batches:
            raise _AbortStep(value, self._step_without)
        else:  # leave out gradients that a step has used up, as a step without a closure does
            set_grads(parameters, fresh(parameters, state.consumed))
        grads = grads_of(parameters)
        there = [i for i, grad in enumerate(grads) if grad is not None]
        if state.other_pass is not None:
            pass_over(self._op, engine, own=bool(there))
        found_inf = zero_flag(parameters[0].device)
        if not engine.policy.looks:
            self._seen.append(torch.full_like(found_inf, torch.nan))
            return value
        norm = global_norm(present(grads), norm_type=settings.norm_type, found_inf=found_inf)
        self._seen.append(norm)
        if bool(found_inf) and not self.watch.has_moved():
            if engine.policy.check is not None:
                engine.policy.check(engine, self._op, grads, 1.0)
            culprits = [there[i] for i in nonfinite(present(grads))]
            raise _AbortStep(value, lambda: self.conclude(culprits))
        return value

    def conclude(self, culprits: list[int] | None = None) -> None:
        """Close the window whose gradient the closure has computed."""
        engine, parameters, window = self._engine, self._parameters, self._engine.state.window
        engine.tensors.clear_master_grads()
        if self.watch.has_moved():
            self.watch.write()
        norm = self._seen[0] if self._seen else zero_flag(parameters[0].device)
        counted = int(culprits is None or not engine.policy.leaves_out)
        report = WindowReport(
            skipped=float(culprits is not None),
            total_norm=to_host_if_free(norm),
            clip_coef=1.0,
            loss_scale=1.0,
            weight=float(counted),
            micro_batches=counted,
            dtype=norm.dtype,
            device=norm.device,
        )
        names = engine.names()
        report.name([names[parameters[i]] for i in culprits or ()])
        grads = grads_of(parameters)
        ours = list(map(is_, grads, window.sums)) if engine.state.in_grad else ()
        used = engine.state.consumed.after(grads, ours)
        engine.begin_next(used, report)
