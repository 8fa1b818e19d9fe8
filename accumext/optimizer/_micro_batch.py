"""`AccumulatingOptimizer.micro_batch`: several backward passes that count as one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from accumext.distributed import no_sync
from accumext.optimizer._engine import Engine, explain
from accumext.optimizer._grads import clear_grads, clear_these, fresh, is_none
from accumext.optimizer._other_passes import forget_parts, part_from_others, scale_of_pending
from accumext.optimizer._pending import clear_consumed
from accumext.optimizer._sums import add_micro_batch, adding, move_out_of_grad
from accumext.optimizer._window import OpenMicroBatch
from accumext.tensors.checks import message
from accumext.tensors.scalars import Scalar, divide


@contextmanager
def open_micro_batch(op: str, engine: Engine, model: nn.Module | None) -> Iterator[None]:
    """Open a micro-batch. An exception drops its gradients. If they were added to the window
    already, it drops the window, and says so."""
    unsynced, group = no_sync(op, model, engine.settings.process_group)
    engine.reducer.share(group)
    with engine.reducer.holding(op, engine, model):
        parameters = engine.tensors.parameters()
        if not engine.state.in_grad:
            part_from_others(op, engine, parameters)
            clear_consumed(op, engine, parameters, inside=False)
        move_out_of_grad(engine, parameters)
        before = engine.state.micro_batches
        opened = OpenMicroBatch(before=before, key=object())
        try:
            engine.update(micro_batch=opened)
            with unsynced:
                yield
            _close(op, engine, unreduced=model is not None and engine.reducer.group is not None)
        except BaseException as error:
            clear_grads(parameters)
            forget_parts(opened.key)
            state, mine = engine.state, engine.state.micro_batch
            added = mine is not None and state.micro_batches != mine.before
            if added and state.sending is None:
                engine.drop()
                if before:
                    explain(error, op, "it had been added to")
            engine.update(micro_batch=None)
            raise


@torch.no_grad()
def _close(op: str, engine: Engine, unreduced: bool) -> None:
    """Add the gradients of the micro-batch that are in its `part` or in `.grad` to the window."""
    micro_batch, parameters = engine.state.micro_batch, engine.tensors.parameters()
    if micro_batch is None or micro_batch.failed:
        got = "one that ended in an exception, and the micro-batch is dropped"
        advice = "Let the exception leave micro_batch()"
        raise RuntimeError(message(op, "a backward pass", "come to its end", got, advice))
    if unreduced:
        engine.update(window=engine.state.window._replace(unreduced=True))
    part_from_others(op, engine, parameters)
    weight, part = micro_batch.weight, micro_batch.part
    grads = fresh(parameters, engine.state.consumed)  # of passes that were not the wrapper's
    left = not all(map(is_none, grads))
    scale: Scalar = 1.0  # of `grads`
    if left or part is not None:
        engine.refuse(op, "take")
    if left:
        scale = scale_of_pending(op, engine)
    window = engine.state.window if part is None else part.of(parameters)
    if left and weight is not None:
        factor = micro_batch.ratio * divide(window.ledger.base_scale, scale)
        window = adding(window, engine.tensors.send(grads)(), factor).run([])
        clear_these(parameters, grads)
    if part is not None:
        grads, scale = list(window.sums), window.ledger.base_scale
    elif weight is not None or not left:
        engine.update(window=window, micro_batch=None)
        return
    base = None if weight is None else engine.reducer.base_weight
    count = 1.0 if weight is None else weight
    add_micro_batch(engine, op, parameters, grads, count, scale, accumulated=True, base=base)
