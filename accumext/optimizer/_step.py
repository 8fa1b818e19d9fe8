"""`AccumulatingOptimizer.step` and `flush`: add pending gradients, and step on a full window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext.master_weights import params_of
from accumext.optimizer._accelerate import tell_of_a_skipped_step
from accumext.optimizer._closures import (
    may_hand_through,
    refuse_closure,
    step_with_closure,
)  # fmt: skip
from accumext.optimizer._engine import ALIVE, LEAVING, Engine
from accumext.optimizer._grads import GONE, grad_of, grads_of, is_none
from accumext.optimizer._other_passes import (
    note_scale,
    own_is_pending,
    part_from_others,
    pass_over,
)  # fmt: skip
from accumext.optimizer._pending import take_pending
from accumext.optimizer._scaler import (
    OuterScale,
    begin_update,
    forget_scale,
    outer_scale,
    refuse_outer_scale,
    refuse_unscaled,
)  # fmt: skip
from accumext.optimizer._warnings import warn_of_another_step, warn_of_skip
from accumext.optimizer._window import NO_WINDOW, Phase
from accumext.optimizer._window_step import step_on_window
from accumext.tensors.kinds import versions
from accumext.tensors.scalars import known_number
from accumext.tensors.torch_private import record_function, set_grad_enabled


def run_step(
    engine: Engine,
    proxy: Optimizer,  # the AccumulatingOptimizer, on which a GradScaler sets its attributes
    op: str,
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Add the gradients pending in `.grad`, and step on the window if it is full."""
    enabled = torch.is_grad_enabled()
    try:
        set_grad_enabled(False)
        settings, optimizer = engine.settings, engine.optimizer
        if engine.state.micro_batch is not None:
            engine.refuse(op)
        if engine.state.stepped:
            engine.update(stepped=False)
        if closure is not None and not callable(closure):
            refuse_closure(op, closure)
        if settings.needs_closure or (closure is not None and may_hand_through(engine, proxy)):
            refuse_unscaled(op, settings.scaler, proxy, optimizer)
            parameters = engine.tensors.parameters()
            go_on = partial(close_window, engine, proxy, op, parameters, kwargs)
            return step_with_closure(engine, op, closure, kwargs, go_on)
        value = result = None
        outer = _outer_scale(engine, proxy, op) if "found_inf" in vars(proxy) else None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        parameters = list(chain.from_iterable(map(params_of, optimizer.param_groups)))
        if not engine.tensors.is_parameters:
            parameters = engine.tensors.parameters()
        in_grad = engine.state.window.phase is Phase.IN_GRAD
        pending = not (in_grad or all(map(is_none, map(grad_of, parameters))))
        if pending and (GONE or len(LEAVING) > engine.leaves):
            pending = own_is_pending(op, engine, parameters)
        if engine.state.other_pass is not None:
            pass_over(op, engine, own=pending)
        if pending and closure is None and not optimizer.state and _is_priming(optimizer):
            return optimizer.step(**kwargs)
        if engine.watch is not None:
            engine.watch.see_step(engine, parameters, pending, scaled=outer is not None)
        if pending:
            refuse_unscaled(op, settings.scaler, proxy, optimizer)
            take_pending(engine, op, parameters, outer)
        if engine.state.window.ledger.micro_batches >= settings.window:
            result = close_window(engine, proxy, op, parameters, kwargs, enabled, closure)
        elif settings.window == 1 and not pending and engine.next_is_all:
            # The optimizer runs its hooks, as it would without the wrapper.
            result = engine.tensors.followed(optimizer.step)(**kwargs)
        if outer is not None and not _took_a_step(engine):
            tell_of_a_skipped_step(proxy)
        if engine.state.accumulated:
            engine.update(accumulated=False)
        return value if result is None else result
    except BaseException:
        # GradScaler deletes these attributes only if step returns, and would multiply a
        # `grad_scale` that is left into the next one.
        forget_scale(vars(proxy))
        raise
    finally:
        set_grad_enabled(enabled)


def _outer_scale(engine: Engine, proxy: Optimizer, op: str) -> OuterScale:
    """Return the scale and flag that the calling GradScaler has set on the optimizer."""
    if not engine.tensors.is_parameters:
        refuse_outer_scale(op, "masters, whose gradients it cannot see")
    return outer_scale(op, proxy, engine.settings.scaler, engine.state.accumulated)


def flush(engine: Engine, proxy: Optimizer, op: str) -> None:
    """Add pending gradients, and step on the window if any process has something in it."""
    engine.refuse(op)
    engine.update(stepped=False, accumulated=False, other_pass=None)
    if engine.settings.needs_closure:
        return
    refuse_unscaled(op, engine.settings.scaler, proxy, engine.optimizer)
    parameters, enabled = engine.tensors.parameters(), torch.is_grad_enabled()
    with torch.no_grad():
        if not engine.state.in_grad:
            part_from_others(op, engine, parameters)
            take_pending(engine, op, parameters, None, new=True)
        if engine.watch is not None:
            engine.watch.see_flush(engine)
        close_window(engine, proxy, op, parameters, {}, enabled, flushing=True)


def _took_a_step(engine: Engine) -> bool:
    """Tell whether the last `step` has stepped, as far as the host knows."""
    last = engine.state.last
    return engine.state.stepped and last is not None and not last.known_to_be_skipped


def _is_priming(optimizer: Optimizer) -> bool:
    """Tell whether a distributed checkpoint steps only to make the optimizer create its state.

    Then there is no state yet, and every learning rate and gradient is zero. Gradients, which may
    be on a device, are read last.
    """
    grads = []
    for group in optimizer.param_groups:
        if known_number(group.get("lr", 0.0)) != 0.0:
            return False
        grads += [p.grad for p in group["params"] if p.grad is not None]
    return bool(grads) and not any(bool(torch.any(grad != 0)) for grad in grads)


def close_window(
    engine: Engine,
    proxy: Optimizer,
    op: str,
    parameters: list[Tensor],  # those of the window's gradients
    kwargs: dict[str, Any],  # of the wrapped step
    enabled: bool = False,  # whether gradients are enabled for the wrapped step, as for its caller
    closure: object = None,  # evaluated before; the wrapped step does not get it
    flushing: bool = False,
) -> Any:
    """Step on the open window, if there is anything in it, and start the next."""
    settings = engine.settings
    compiling = torch.compiler.is_compiling()  # torch.compile cannot trace `record_function`
    with nullcontext() if compiling else record_function("accumext::step"):
        if not engine.reducer.close(op, engine, flushing):
            return None
        device = parameters[0].device if parameters else torch.device("cpu")
        begun = begin_update(op, settings.scaler, proxy, engine.optimizer, device)
        if settings.scaler is not None and len(ALIVE) > 1:
            note_scale(op, engine)
        result, skipped = step_on_window(
            engine, proxy, op, parameters, kwargs, enabled, begun, closure
        )
    if skipped:
        warn_of_skip(engine, proxy)
    return result


def stepping_at_once(engine: Engine, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of a method such as `first_step` of SAM, after whose step the gradients that
    `backward` left in `.grad` count as used."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        warn_of_another_step(engine, name)
        parameters = engine.tensors.parameters()
        before, grads = versions(parameters), grads_of(parameters)
        value = method(*args, **kwargs)
        state = engine.state
        if state.in_grad and versions(parameters) != before:  # it has stepped
            made = list(map(is_, grads, state.window.sums))
            used = state.consumed.after(grads_of(parameters), made)
            engine.update(window=NO_WINDOW, consumed=used, accumulated=False)
        return value

    return call
