"""`AccumulatingOptimizer.step` and `flush`: take what is pending, and close a full window. Steps of
the wrapped optimizer's own, such as SAM's `first_step`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import chain
from operator import is_
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext.master_weights import params_of
from accumext.ops.any_tensors import (
    global_norm,
)
from accumext.optimizer._accelerate import refuse_second_accumulation, tell_of_a_skipped_step
from accumext.optimizer._agreement import agree_on_shards
from accumext.optimizer._closing import Closing, StepWatch
from accumext.optimizer._factors import normaliser
from accumext.optimizer._grads import GONE, fresh, grad_of, grads_of, is_none, present, put
from accumext.optimizer._other_passes import (
    note_scale,
    own_is_pending,
    part_from_others,
    pass_over,
    scale_of_pending,
)
from accumext.optimizer._processes import sum_over_processes
from accumext.optimizer._report import WindowReport
from accumext.optimizer._scaler import (
    OuterScale,
    begin_update,
    forget_scale,
    outer_scale,
    refuse_outer_scale,
    refuse_unscaled,
)
from accumext.optimizer._sums import add_micro_batch, count_in, raise_nonfinite
from accumext.optimizer._window import ALIVE, LEAVING, NO_WINDOW, Box
from accumext.optimizer._wrong_loops import (
    warn_of_another_step,
    warn_of_skip,
    warn_of_unscaled,
)
from accumext.tensors import checks
from accumext.tensors.kinds import (
    nonfinite,
    versions,
    zero_flag,
)
from accumext.tensors.scalars import known_number, to_host_if_free
from accumext.tensors.torch_private import (
    not_compiled,
    record_function,
    set_grad_enabled,
    takes_scale,
)


def run_step(
    box: Box,
    proxy: Optimizer,  # the AccumulatingOptimizer, on which a GradScaler sets its attributes
    op: str,
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Take what is pending in `.grad`, and step on the window if it is full."""
    enabled = torch.is_grad_enabled()
    try:
        set_grad_enabled(False)
        state, settings, optimizer = box.state, box.settings, box.optimizer
        if state.micro_batch is not None:
            box.refuse_inside_micro_batch(op)
        if state.stepped:
            box.state = state = state._replace(stepped=False)
        if closure is not None and not callable(closure):
            _refuse_closure(op, closure)
        if settings.needs_closure or (closure is not None and _may_hand_through(box, proxy)):
            refuse_unscaled(op, settings.scaler, proxy, optimizer)
            return _step_with_closure(box, proxy, op, closure, kwargs)
        outer = value = result = None
        if "found_inf" in vars(proxy):  # a GradScaler is calling
            if not box.target.is_parameters:
                refuse_outer_scale(op, "masters, whose gradients it cannot see")
            outer = outer_scale(op, proxy, settings.scaler, state.accumulated)
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        parameters = list(chain.from_iterable(map(params_of, optimizer.param_groups)))
        if not box.target.is_parameters:
            parameters = box.target.parameters()
        pending = not (box.state.window.in_grad or all(map(is_none, map(grad_of, parameters))))
        if pending and (GONE or len(LEAVING) > box.leaves):
            pending = own_is_pending(op, box, parameters)
        if box.state.other_pass is not None:
            pass_over(op, box, own=pending)
        if pending and closure is None and not optimizer.state and _is_priming(optimizer):
            return optimizer.step(**kwargs)
        if box.watch is not None:
            box.watch.see_step(box, parameters, pending, scaled=outer is not None)
        if pending:
            refuse_unscaled(op, settings.scaler, proxy, optimizer)
            take_pending(box, op, parameters, outer)
        if box.state.window.micro_batches >= settings.window:
            result = close_window(box, proxy, op, parameters, kwargs, enabled, closure)
        elif settings.window == 1 and not pending and box.keeps_at_once:
            # The optimizer runs its hooks, as it would without the wrapper.
            result = box.target.followed(optimizer.step)(**kwargs)
        if outer is not None and not _took_a_step(box):
            tell_of_a_skipped_step(proxy)
        if box.state.accumulated:
            box.state = box.state._replace(accumulated=False)
        return value if result is None else result
    except BaseException:
        # GradScaler deletes these only when step returns, and multiplies what is left into the
        # next scale.
        forget_scale(vars(proxy))
        raise
    finally:
        set_grad_enabled(enabled)


def flush(box: Box, proxy: Optimizer, op: str) -> None:
    """Take what is pending, and step on the window if any process has something in it."""
    box.refuse_inside_micro_batch(op)
    box.state = box.state._replace(stepped=False, accumulated=False, other_pass=None)
    if box.settings.needs_closure:
        return
    refuse_unscaled(op, box.settings.scaler, proxy, box.optimizer)
    parameters, enabled = box.target.parameters(), torch.is_grad_enabled()
    with torch.no_grad():
        if not box.state.window.in_grad:
            part_from_others(op, box, parameters)
            take_pending(box, op, parameters, None, new=True)
        close_window(box, proxy, op, parameters, {}, enabled, flushing=True)


@not_compiled  # torch.compile cannot trace it, and is after the wrapped step alone
def take_pending(
    box: Box, op: str, parameters: list[Tensor], outer: OuterScale | None, new: bool = False
) -> None:
    """Take in what a backward pass of the user left in `.grad`, if anything, as one micro-batch.

    Args:
        new: only what no step has used.
    """
    state, settings, box.thread = box.state, box.settings, get_ident()
    pending = fresh(parameters, state.used, new=new)
    if all(map(is_none, pending)):
        return
    if state.last is not None:
        state.last.evidence = None
    if state.all_reduce is not None or state.window.world is not None:
        box.refuse_while_reducing(op)
    if state.through_backward:
        box.state = state = state._replace(through_backward=False)
        if settings.scaler is not None:
            warn_of_unscaled(box)
    if settings.synchronize == "window" and box.sharded is not None:
        box.sharded.refuse_synchronised(op)
    agree_on_shards(op, box)
    if settings.window > 1 and state.window.micro_batches == 0:
        refuse_second_accumulation(op, settings.window)
    scale, found_inf = (scale_of_pending(op, box), 0.0) if outer is None else outer
    if not box.keeps_in_grad:
        add_micro_batch(box, op, parameters, pending, 1.0, scale, found_inf=found_inf)
        return
    policy = settings.on_nonfinite
    if policy == "raise":
        raise_nonfinite(box, op, pending, 1.0)
    for parameter, grad in zip(parameters, pending, strict=True):  # but for what is used up
        if grad is None:
            parameter.grad = None
    unchecked = policy == "skip_micro_batch"
    window, _ = count_in(NO_WINDOW, 1.0, scale, found_inf=0.0 if unchecked else found_inf)
    box.state = state._replace(window=window._replace(in_grad=True, unchecked=unchecked))


def _took_a_step(box: Box) -> bool:
    """Tell whether the last `step` has stepped, as far as the host knows."""
    last = box.state.last
    return box.state.stepped and last is not None and not last.known_to_be_skipped


def _is_priming(optimizer: Optimizer) -> bool:
    """Tell whether a distributed checkpoint steps only to make the optimizer create its state.

    There is no state yet, and every learning rate and gradient is zero. Gradients are read only
    where the rest holds.
    """
    grads = []
    for group in optimizer.param_groups:
        if known_number(group.get("lr", 0.0)) != 0.0:
            return False
        grads += [p.grad for p in group["params"] if p.grad is not None]
    return bool(grads) and not any(bool(torch.any(grad != 0)) for grad in grads)


def close_window(
    box: Box,
    proxy: Optimizer,  # the AccumulatingOptimizer, under whose id the scaler knows it
    op: str,
    parameters: list[Tensor],  # that gradients are formed for
    kwargs: dict[str, Any],  # of the wrapped step
    records: bool = False,  # what the wrapped step does, as its caller does
    closure: object = None,  # that was evaluated, and that the wrapped step does not get
    flushing: bool = False,
) -> Any:
    """Step on the open window, if there is anything in it, and start the next."""
    state, settings = box.state, box.settings
    compiling = torch.compiler.is_compiling()  # which cannot trace the class of the span
    with nullcontext() if compiling else record_function("accumext::step"):
        shared = settings.process_group or state.model_group or box.sharded
        if shared or state.window.held_back:
            del state  # of whose window the all-reduce frees what it has sent
            if not sum_over_processes(box, op, flushing):
                return None
        elif state.window.micro_batches == 0:
            return None
        device = parameters[0].device if parameters else torch.device("cpu")
        begun = begin_update(op, settings.scaler, proxy, box.optimizer, device)
        if settings.scaler is not None and len(ALIVE) > 1:
            note_scale(op, box)
        summed = not box.state.window.in_grad
        closing, result = Closing(box, proxy, op, parameters, begun), None
        try:
            if closing.begin():
                set_grad_enabled(records)
                result = box.optimizer.step(**kwargs)
                set_grad_enabled(False)
            closing.finish()
        except BaseException as error:
            set_grad_enabled(False)
            if not closing.recover():
                _refuse_what_it_misses(box, op, error, closure, summed)
            raise
    if not isinstance(closing.skip, Tensor) and closing.skip:
        warn_of_skip(box, proxy)
    return result


def _refuse_what_it_misses(
    box: Box, op: str, error: BaseException, closure: object, summed: bool
) -> None:
    """RuntimeError in place of that of a step that has moved nothing, where it asked for a closure
    that was given, or for the graph of gradients, which their sums do not have.

    Whether an optimizer needs either is not to be known before: only its error tells.
    """
    said, kind = str(error).lower(), type(box.optimizer).__name__
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
    raise RuntimeError(checks.message(op, "the optimizer", contract, kind, advice)) from error


# Optimizers that evaluate closures


def _refuse_closure(op: str, closure: object) -> NoReturn:
    """TypeError for what cannot be called."""
    advice = "For a loss: opt.backward(loss), then opt.step()"
    checks.fail_type(op, "closure", "be a function or None", checks.type_name(closure), advice)


def _may_hand_through(box: Box, proxy: Optimizer) -> bool:
    """Tell whether the wrapped optimizer may call the closure itself, whenever it likes.

    It may where nothing is left to do with the gradient but to look whether it is finite.
    """
    settings = box.settings
    return (
        box.keeps_at_once
        and box.target.is_parameters
        and settings.max_norm is None
        and settings.scaler is None
        and "found_inf" not in vars(proxy)
        and not takes_scale(box.optimizer)
    )


class _Left(Exception):
    """Out of a step in which the closure gave a gradient that the optimizer may not use as it is:
    one that is not finite, or, without culprits, one that the closure has accumulated itself."""

    def __init__(self, value: Any, culprits: list[int] | None) -> None:
        super().__init__()
        self.value, self.culprits = value, culprits


def _step_with_closure(
    box: Box,
    proxy: Optimizer,
    op: str,
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Hand the closure through; the report tells of its first evaluation.

    If that gives an inf or NaN, and no parameter has changed yet, there is no step.
    """
    if closure is None:
        checks.fail_type(op, "closure", "be callable for this optimizer", "None")
    box.target.take_over()
    evaluation = _Evaluation(box, op, closure)
    watch = evaluation.watch
    try:
        watch.begin(box.optimizer)
        try:
            if box.settings.names_closure:
                value = box.optimizer.step(closure=evaluation.run, **kwargs)
            else:
                value = box.optimizer.step(evaluation.run, **kwargs)
        finally:
            watch.end(box.optimizer)
        evaluation.conclude([])
    except _Left as left:
        value = left.value
        if left.culprits is None:
            result = close_window(box, proxy, op, box.target.parameters(), kwargs)
            return value if result is None else result
        evaluation.conclude(left.culprits)
    except BaseException:
        if watch.has_moved():
            evaluation.conclude([])
        else:
            box.target.take_grads_back()
        raise
    return value


class _Evaluation:
    """A closure, evaluated by the wrapped optimizer."""

    def __init__(self, box: Box, op: str, closure: Callable[[], Any]) -> None:
        self._box, self._op, self._closure = box, op, closure
        self._parameters = box.target.parameters()
        self._seen: list[Tensor] = []  # norm of the first gradient
        self.watch = StepWatch(box.target.stepped_on(), box.target.rounding(every=True))

    def run(self) -> Any:
        """Evaluate the closure for the wrapped optimizer, which calls this in its stead."""
        target, watch = self._box.target, self.watch
        if target.is_parameters:
            return self._look_at()
        if self._seen or watch.has_moved():  # not all writes of an optimizer can be seen
            watch.write()
            watch.rounding = target.rounding(every=True)
        value = self._look_at()
        target.lend_grads()
        return value

    def _look_at(self) -> Any:
        with torch.enable_grad():
            value = self._closure()
        if self._seen:
            return value
        box, parameters = self._box, self._parameters
        window, settings = box.state.window, box.settings
        if window.in_grad:
            quotient = normaliser(window, settings.reduction).value()
            if isinstance(quotient, Tensor) or quotient != 1.0:
                raise _Left(value, None)
        elif window.micro_batches:
            raise _Left(value, None)
        else:  # as a step without a closure: what is used up is left out
            put(parameters, fresh(parameters, box.state.used))
        grads = grads_of(parameters)
        there = [i for i, grad in enumerate(grads) if grad is not None]
        if box.state.other_pass is not None:
            pass_over(self._op, box, own=bool(there))
        found_inf = zero_flag(parameters[0].device)
        norm = global_norm(present(grads), norm_type=settings.norm_type, found_inf=found_inf)
        self._seen.append(norm)
        if bool(found_inf) and not self.watch.has_moved():
            if settings.on_nonfinite == "raise":
                raise_nonfinite(box, self._op, grads, 1.0)
            raise _Left(value, [there[i] for i in nonfinite(present(grads))])
        return value

    def conclude(self, culprits: list[int]) -> None:
        """Close the window of which the closure has formed the gradient."""
        box, parameters, window = self._box, self._parameters, self._box.state.window
        box.target.take_grads_back()
        if self.watch.has_moved():
            self.watch.write()
        norm = self._seen[0] if self._seen else zero_flag(parameters[0].device)
        counted = int(not culprits or box.settings.on_nonfinite != "skip_micro_batch")
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
        names = box.names()
        report.name([names[parameters[i]] for i in culprits])
        grads = grads_of(parameters)
        ours = list(map(is_, grads, window.sums)) if window.in_grad else ()
        used = box.state.used.after(grads, ours)
        box.state = box.state._replace(
            window=NO_WINDOW, used=used, last=report, stepped=True, accumulated=False
        )


def stepping_at_once(box: Box, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A step of another name, which uses up the gradient that `backward` has left in `.grad`."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        warn_of_another_step(box, name)
        parameters = box.target.parameters()
        before, grads = versions(parameters), grads_of(parameters)
        value = method(*args, **kwargs)
        state = box.state
        if state.window.in_grad and versions(parameters) != before:  # it has stepped
            made = list(map(is_, grads, state.window.sums))
            used = state.used.after(grads_of(parameters), made)
            box.state = state._replace(window=NO_WINDOW, used=used, accumulated=False)
        return value

    return call
