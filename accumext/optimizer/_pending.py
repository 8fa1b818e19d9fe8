"""Gradients in `.grad` that backward passes of the user's own computed: added, or cleared."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

from torch import Tensor
from torch.optim import Optimizer

from accumext.optimizer._accelerate import refuse_second_accumulation
from accumext.optimizer._engine import LEAVING, Engine, others_of
from accumext.optimizer._grads import (
    ConsumedGrads,
    clear_grads,
    fresh,
    grad_of,
    grads_of,
    is_none,
)
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._other_passes import (
    ONE_FOR_EACH,
    move_others_out_of_grad,
    part_from_others,
    scale_of_pending,
    take_other_pass,
)
from accumext.optimizer._proxy import takes
from accumext.optimizer._scaler import OuterScale, refuse_unscaled
from accumext.optimizer._sums import add_micro_batch, move_out_of_grad
from accumext.optimizer._warnings import warn_of_a_full_window, warn_of_unscaled
from accumext.optimizer._window import NO_WINDOW, Phase
from accumext.tensors.checks import message
from accumext.tensors.scalars import Scalar
from accumext.tensors.torch_private import not_compiled


def clear_consumed(
    op: str, engine: Engine, parameters: Sequence[Tensor], inside: bool
) -> Sequence[Tensor | None]:
    """Remove from `.grad` the gradients that steps have used, except inside a micro-batch. Return
    the remaining ones: autograd adds to them, so they become part of the next micro-batch."""
    grads, used = grads_of(parameters), engine.state.consumed
    pending: Sequence[Tensor | None] = ()
    if not inside and used.holds(grads):
        clear_grads(parameters)
    else:
        pending = fresh(parameters, used, new=not inside)
    if pending and not inside:
        for parameter, grad, mine in zip(parameters, grads, pending, strict=True):
            if mine is not grad:
                parameter.grad = None
    if engine.state.earlier_scale is not None:
        scale_of_pending(op, engine)
    return () if all(map(is_none, pending)) else pending


@not_compiled  # torch.compile cannot trace it, and is to compile only the wrapped step
def take_pending(
    engine: Engine, op: str, parameters: list[Tensor], outer: OuterScale | None, new: bool = False
) -> None:
    """Add the gradients that a backward pass of the user left in `.grad` as one micro-batch.

    Args:
        new: only gradients that no step has used.
    """
    settings, engine.thread = engine.settings, get_ident()
    pending = fresh(parameters, engine.state.consumed, new=new)
    if all(map(is_none, pending)):
        return
    engine.forget_evidence()
    if engine.state.sending is not None or engine.state.window.phase is Phase.SUMMED:
        engine.refuse(op, "take")
    if engine.state.through_backward:
        engine.update(through_backward=False)
        if settings.scaler is not None:
            warn_of_unscaled(engine)
    engine.reducer.begin(op, engine)
    if settings.window > 1 and engine.state.micro_batches == 0:
        refuse_second_accumulation(op, settings.window)
    scale, found_inf = (scale_of_pending(op, engine), None) if outer is None else outer
    if not engine.keeps_in_grad:
        add_micro_batch(engine, op, parameters, pending, 1.0, scale, found_inf=found_inf)
        return
    if engine.policy.check is not None:
        engine.policy.check(engine, op, pending, 1.0)
    for parameter, grad in zip(parameters, pending, strict=True):  # clear used-up gradients
        if grad is None:
            parameter.grad = None
    if engine.policy.leaves_out:  # the step itself checks the gradient
        found_inf = None
    ledger, _ = Ledger().with_micro_batch(1.0, scale, found_inf=found_inf)
    engine.update(window=NO_WINDOW._replace(ledger=ledger, phase=Phase.IN_GRAD))


def accumulate(engine: Engine, proxy: Optimizer, op: str, weight: Scalar | None) -> None:
    """Add the gradients in `.grad` as one micro-batch, or else those of another wrapper's pass."""
    engine.thread = get_ident()
    refuse_unscaled(op, engine.settings.scaler, proxy, engine.optimizer)
    parameters = engine.tensors.parameters()
    grads: list[Tensor | None] = []
    if not engine.state.in_grad:
        part_from_others(op, engine, parameters)
        grads = fresh(parameters, engine.state.consumed)
    made, nothing = engine.state.other_pass, all(map(is_none, grads))
    if made is None and nothing:
        advice = "Run a backward pass first; backward() has accumulated already"
        if others_of(engine):
            advice += f". {ONE_FOR_EACH}"
        raise RuntimeError(message(op, ".grad", "hold new gradients", "none", advice))
    engine.reducer.begin(op, engine)
    if engine.state.micro_batches >= engine.settings.window:
        warn_of_a_full_window(engine)
    if engine.watch is not None:
        engine.watch.see_earlier(engine, passes=1)
    engine.forget_evidence()
    if made is not None and nothing:
        take_other_pass(op, engine, made, weight)
        return
    scale, weight = scale_of_pending(op, engine), 1.0 if weight is None else weight
    add_micro_batch(engine, op, parameters, grads, weight, scale, accumulated=True)


def zero_grad(engine: Engine, set_to_none: bool) -> None:
    """Clear `.grad`, by the wrapped `zero_grad` if it is overridden and no window is open."""
    parameters, clear = engine.tensors.parameters(), engine.optimizer.zero_grad
    if engine.state.in_grad:
        move_out_of_grad(engine, parameters)
    if len(LEAVING) > engine.leaves:
        move_others_out_of_grad(engine, parameters)
    engine.forget_evidence()
    if engine.state.other_pass is not None:
        engine.update(other_pass=None)
    # Those that the wrapped one does not clear: with masters it has only these.
    ours = [] if engine.tensors.is_parameters else parameters
    may_leave = not set_to_none
    if getattr(clear, "__func__", None) is Optimizer.zero_grad:
        if not (set_to_none and all(map(is_none, map(grad_of, parameters)))):
            clear(set_to_none)
    elif engine.state.micro_batches:  # the wrapped one may clear more than `.grad`
        ours = parameters
    else:
        clear(**takes(clear, set_to_none=set_to_none))
        may_leave = True
    if not set_to_none:
        for parameter in ours:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()
    if engine.state.consumed.seen or ours or may_leave:
        left = [] if ours and set_to_none else grads_of(parameters)
        used = ConsumedGrads() if all(map(is_none, left)) else ConsumedGrads().after(left)
        engine.commit(engine.state._replace(consumed=used), ours if set_to_none else ())
