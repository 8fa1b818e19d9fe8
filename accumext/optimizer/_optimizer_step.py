"""`AccumulatingOptimizer.step` and `flush`: add what is pending, and close a full window."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext import _checks
from accumext._scalars import to_host_if_free
from accumext._tensor_kinds import global_norm, nonfinite, zero_flag
from accumext._torch_private import takes_scale
from accumext.optimizer._accumulator import Accumulator, Transaction
from accumext.optimizer._grad_slots import GradSlots, is_none
from accumext.optimizer._loss_scaling import (
    OuterScale,
    forget_scale,
    outer_scale,
    refuse_outer_scale,
)
from accumext.optimizer._step_window import StepWatch, step_window
from accumext.optimizer._trainers import refuse_second_accumulation, tell_of_a_skipped_step
from accumext.optimizer._window import Window
from accumext.optimizer._window_report import WindowReport


def run_step(
    accumulator: Accumulator,
    proxy: Optimizer,  # the AccumulatingOptimizer, on which a GradScaler sets its attributes
    op: str,
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Add what is pending in `.grad`, and step on the window if it is full."""
    try:
        settings, optimizer = accumulator.settings, accumulator.optimizer
        if accumulator.open_micro_batch is not None:
            accumulator.refuse_inside_micro_batch(op)
        accumulator.stepped = False
        refuse_second_accumulation(op, settings.window)
        if settings.scaler is not None:
            accumulator.scaling.refuse_unscaled(op, (proxy, optimizer))
        if settings.needs_closure or (
            closure is not None and _may_hand_through(accumulator, proxy)
        ):
            return _step_with_closure(accumulator, proxy, op, closure, kwargs)
        outer = value = None
        if "found_inf" in vars(proxy):  # a GradScaler is calling
            if accumulator.masters is not None:
                refuse_outer_scale(op, "masters, whose gradients it cannot see")
            outer = outer_scale(op, proxy, settings, accumulator.accumulated)
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        elif not optimizer.state and _is_priming(optimizer):
            return optimizer.step(**kwargs)
        result = _add_and_step(accumulator, proxy, op, outer, kwargs)
        if outer is not None and not _took_a_step(accumulator):
            tell_of_a_skipped_step(proxy)
        accumulator.accumulated = False
        return value if result is None else result
    except BaseException:
        # GradScaler deletes these only when step returns, and multiplies what is left into the
        # next scale.
        forget_scale(vars(proxy))
        raise


def _add_and_step(
    accumulator: Accumulator,
    proxy: Optimizer,
    op: str,
    outer: OuterScale | None,
    kwargs: dict[str, Any],
) -> Any:
    """Add what is pending in `.grad`, and step on the window if it is full."""
    at_once = accumulator.settings.window == 1 and accumulator.steps_at_once
    foreign: Container[int] = ()
    if at_once and accumulator.masters is None:  # whatever is pending stays in `.grad`
        slots = GradSlots.of(accumulator.parameters())
    else:
        slots, foreign = accumulator.slots_and_foreign()
    with Transaction(accumulator, slots) as transaction:
        empty = all(map(is_none, slots.grads))
        if not empty or accumulator.window.attached is not None:
            slots = accumulator.add_pending(op, transaction, slots, outer, foreign)
        if accumulator.window.micro_batches >= accumulator.settings.window:
            return step_window(accumulator, proxy, op, transaction, slots, kwargs)
        if at_once and empty:  # the optimizer runs its hooks, as it would alone
            step = accumulator.optimizer.step
            if accumulator.masters is not None:  # some move parameters without gradients, too
                step = accumulator.masters.followed(step)
            return step(**kwargs)
    return None


def flush(accumulator: Accumulator, proxy: Optimizer, op: str) -> None:
    """Add what is pending, and step on the window if any process has something in it."""
    accumulator.refuse_inside_micro_batch(op)
    accumulator.stepped = accumulator.accumulated = False
    if accumulator.settings.needs_closure:
        return
    accumulator.scaling.refuse_unscaled(op, (proxy, accumulator.optimizer))
    slots, foreign = accumulator.slots_and_foreign()
    with Transaction(accumulator, slots) as transaction:
        slots = accumulator.add_pending(op, transaction, slots, None, foreign, new=True)
        step_window(accumulator, proxy, op, transaction, slots, {}, flushing=True)


def _took_a_step(accumulator: Accumulator) -> bool:
    """Whether the last `step` has stepped, as far as the host knows."""
    last = accumulator.last
    return accumulator.stepped and last is not None and not last.known_to_be_skipped


def _is_priming(optimizer: Optimizer) -> bool:
    """Whether a distributed checkpoint steps only to make the optimizer create its state.

    There is no state yet, and every learning rate and gradient is zero. Gradients are read only
    where the rest holds.
    """
    grads = []
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        if (isinstance(rate, Tensor) and rate.device.type != "cpu") or rate != 0:
            return False
        grads += [p.grad for p in group["params"] if p.grad is not None]
    return bool(grads) and not any(bool(torch.any(grad != 0)) for grad in grads)


def _may_hand_through(accumulator: Accumulator, proxy: Optimizer) -> bool:
    """Whether the wrapped optimizer may call the closure itself, when and as often as it likes.

    That is where nothing is left to do with the gradient but to look whether it is finite.
    """
    settings = accumulator.settings
    return (
        accumulator.keeps_in_grad
        and settings.max_norm is None
        and settings.scaler is None
        and "found_inf" not in vars(proxy)
        and not takes_scale(accumulator.optimizer)
    )


class _Left(Exception):
    """Out of a step in which the closure gave a gradient that the optimizer may not use as it is:
    one that is not finite, or, without culprits, one that the closure has accumulated itself."""

    def __init__(self, value: Any, culprits: list[Tensor] | None) -> None:
        super().__init__()
        self.value, self.culprits = value, culprits


def _step_with_closure(
    accumulator: Accumulator,
    proxy: Optimizer,
    op: str,
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Hand the closure through; the report tells of its first evaluation.

    If that gives an inf or NaN, and no parameter has changed yet, there is no step.
    """
    if closure is None:
        _checks.fail_type(op, "closure", "be callable for this optimizer", "None")
    settings, parameters = accumulator.settings, accumulator.parameters()
    masters, stepped_on = accumulator.masters, accumulator.stepped_on()
    if masters is not None:
        masters.take_over()  # a write that the watch is not to see
    watch, device = StepWatch(stepped_on), parameters[0].device
    seen: list[Tensor] = []  # norm of the first gradient

    def evaluate() -> Any:
        if masters is None:
            return look_at(closure)
        if seen or watch.has_moved():  # not all writes of an optimizer can be seen
            if watch.rounding is not None:
                watch.rounding.write()
            watch.rounding = masters.rounding(stepped_on)
        value = look_at(closure)
        masters.lend_grads()
        return value

    def look_at(closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            value = closure()
        if seen:
            return value
        window, found_inf = accumulator.window, zero_flag(device)
        slots = GradSlots.of(parameters)
        if window.attached is None:
            if window.micro_batches:
                raise _Left(value, None)
            # As a step without a closure: used gradients are left.
            fresh = accumulator.consumed.fresh(slots)
            slots.lend(fresh.grads)
            slots = fresh
        elif isinstance(n := window.normaliser(settings.reduction).value(), Tensor) or n != 1.0:
            raise _Left(value, None)
        grads = slots.present()
        norms = list(grads.values())
        seen.append(global_norm(norms, norm_type=settings.norm_type, found_inf=found_inf))
        if bool(found_inf) and not watch.has_moved():
            if settings.on_nonfinite == "raise":
                accumulator.raise_nonfinite(op, grads, 1.0)
            raise _Left(value, nonfinite(grads))
        return value

    def conclude(culprits: list[Tensor]) -> None:
        if masters is not None:
            masters.take_grads_back()
            if watch.rounding is not None and watch.has_moved():
                watch.rounding.write()
        norm = seen[0] if seen else zero_flag(device)
        counted = int(not culprits or settings.on_nonfinite != "skip_micro_batch")
        report = WindowReport(
            skipped=float(bool(culprits)),
            total_norm=to_host_if_free(norm),
            clip_coef=1.0,
            loss_scale=1.0,
            weight=float(counted),
            micro_batches=counted,
            dtype=norm.dtype,
            device=norm.device,
        )
        report.name([name for p, name in accumulator.names().items() if p in set(culprits)])
        attached = accumulator.window.attached
        accumulator.watch.callback = None
        produced = attached.grads if attached is not None else None
        consumed = accumulator.consumed.after(GradSlots.of(parameters).grads, produced)
        accumulator.close(report, Window(), consumed)

    hook = None
    if masters is not None:
        watch.rounding = masters.rounding(stepped_on)
        hook = watch.begin(accumulator.optimizer)
    try:
        value = accumulator.optimizer.step(evaluate, **kwargs)
        conclude([])
    except _Left as left:
        value = left.value
        if left.culprits is None:
            slots = GradSlots.of(parameters)
            with Transaction(accumulator, slots) as transaction:
                result = step_window(accumulator, proxy, op, transaction, slots, kwargs)
            return value if result is None else result
        conclude(left.culprits)
    except BaseException:
        if watch.has_moved():
            conclude([])
        elif masters is not None:
            masters.take_grads_back()
        raise
    finally:
        if hook is not None:
            hook.remove()
    return value
