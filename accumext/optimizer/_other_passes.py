"""Backward passes of one wrapper that reach parameters of another.

In a GAN, the generator's loss reaches the discriminator, whose optimizer must not step on it. But
one loss may also belong to two optimizers, which both step on it. Autograd runs the same pass in
both cases. So gradients of another wrapper's parameters are kept out of `.grad`, and that wrapper
is told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, starmap
from operator import is_
from threading import get_ident

import torch
from torch import Tensor

from accumext.ops.any_tensors import (
    scale_,
)
from accumext.optimizer._engine import LEAVING, Engine, engines_alive
from accumext.optimizer._grads import (
    GONE,
    ConsumedGrads,
    fresh,
    grads_of,
    is_none,
    set_grads,
    used_up_by,
)
from accumext.optimizer._scaler import current_scale
from accumext.optimizer._settings import OP
from accumext.optimizer._sums import add_micro_batch, move_out_of_grad, own_their_memory
from accumext.optimizer._window import OtherPass
from accumext.tensors.checks import message
from accumext.tensors.scalars import Scalar, divide, on_device
from accumext.tensors.torch_private import leaves_since, not_compiled


def run_beside_others(
    engine: Engine, loss: Tensor, weight: Scalar, factor: Scalar, run: Callable[[], None]
) -> None:
    """Run a backward pass of `loss * factor`, and hand other wrappers their gradients of it."""
    known, theirs = set(map(id, engine.tensors.parameters())), list[tuple[Engine, list[Tensor]]]()
    parted = set[int]()
    for other in _others(engine, loss):
        parameters = other.tensors.parameters()
        if not known.isdisjoint(map(id, parameters)):
            parameters = [p for p in parameters if id(p) not in known]
            parted.add(id(other))
        _out_of_buckets(other, parameters)
        known.update(map(id, parameters))
        theirs.append((other, parameters))
    parameters = list(chain.from_iterable(several for _, several in theirs))
    before = grads_of(parameters)
    begin = list(chain.from_iterable(starmap(partial(_earlier_parts, engine), theirs)))

    def put_back() -> None:
        if not all(map(is_, grads_of(parameters), before)):
            set_grads(parameters, before)

    try:
        if not all(map(is_, before, begin)):
            set_grads(parameters, begin)
        run()
        for other, several in theirs:
            if not all(map(is_none, grads := grads_of(several))):
                _tell(engine, other, several, grads, weight, factor, id(other) in parted)
        put_back()
    except BaseException:
        put_back()
        raise


def _others(engine: Engine, loss: Tensor) -> list[Engine]:
    """Return the other wrappers that are used in this thread: gradients of another thread are not
    of this pass. One that may have moved here from another thread counts if the loss reaches it."""
    thread, found = get_ident(), list[Engine]()
    came, engine.thread = engine.thread != thread, thread
    for other in reversed(engines_alive()):  # of several that hold a parameter, the latest is used
        unused = other.state.last is None and not other.state.micro_batches
        if other is not engine and other.thread != thread and (came or unused):
            reached = set(map(id, leaves_since(0, [loss])))
            if not reached.isdisjoint(map(id, other.tensors.parameters())):
                other.thread = thread
        if other is not engine and other.thread == thread:
            found.append(other)
    return found


# Parameters that several wrappers hold


@not_compiled
def part_from_others(op: str, engine: Engine, parameters: Sequence[Tensor]) -> bool:
    """Remove from `.grad` the gradients that `backward` of other wrappers left there for parameters
    that both hold. Returns whether there were any.

    Raises:
        RuntimeError: there are also gradients of the user's own pass, which may be meant for both.
    """
    sharing = _sharing(engine, parameters)
    gone = not GONE.keys().isdisjoint(map(id, parameters))
    if not (sharing or gone):
        return False
    holders = [other for other in sharing if other.state.in_grad]
    grads = fresh(parameters, engine.state.consumed, new=True)
    several = [(other.state.consumed, other.tensors.parameters()) for other in sharing]
    old = used_up_by(several, parameters, grads)
    theirs = {id(p) for holder in holders for p in holder.tensors.parameters()}
    rows = zip(parameters, grads, old, strict=True)
    if holders and any(not (g is None or used or id(p) in theirs) for p, g, used in rows):
        got = "also one of a backward pass of your own"
        raise RuntimeError(message(op, ".grad", _OWN, got, ONE_FOR_EACH))
    move_others_out_of_grad(engine, parameters)
    for parameter, used in zip(parameters, old):
        if used:
            parameter.grad = None
        if gone:
            GONE.pop(id(parameter), None)
    return bool(holders) or any(old)


def move_others_out_of_grad(engine: Engine, parameters: Sequence[Tensor]) -> None:
    """Take the windows of other wrappers out of `.grad` of parameters that both hold."""
    for other in _sharing(engine, parameters):
        if other.state.in_grad:
            move_out_of_grad(other, other.tensors.parameters())


def _sharing(engine: Engine, parameters: Sequence[Tensor]) -> list[Engine]:
    """Return the other wrappers of some of these parameters that left gradients in `.grad`."""
    mine = set(map(id, parameters))
    return [
        other
        for other in engines_alive(LEAVING)
        if other is not engine and not mine.isdisjoint(map(id, other.tensors.parameters()))
    ]


def own_is_pending(op: str, engine: Engine, parameters: Sequence[Tensor]) -> bool:
    """Tell whether `.grad` holds a gradient that no other wrapper computed.

    Raises:
        RuntimeError: it holds gradients of other wrappers alone, and the window is empty.
    """
    parted = part_from_others(op, engine, parameters)
    pending = not all(map(is_none, grads_of(parameters)))
    if parted and not (pending or engine.state.micro_batches or engine.state.accumulated):
        got = "only that of another one that holds the parameters, too"
        raise RuntimeError(message(op, ".grad", _OWN, got, ONE_FOR_EACH))
    return pending


_OWN = "hold a gradient of this AccumulatingOptimizer's own backward pass"
ONE_FOR_EACH = (
    "Call backward of each optimizer that holds the parameters, with retain_graph=True in all but "
    "the last if it is one loss"
)


def _out_of_buckets(other: Engine, parameters: Sequence[Tensor]) -> None:
    """Remove from `.grad` gradients whose memory a pass would overwrite. DistributedDataParallel
    does so if `.grad` is empty and gradients are views of its buckets."""
    grads = grads_of(parameters)
    dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
    if own_their_memory(dense):
        return
    if other.state.in_grad:
        move_out_of_grad(other, other.tensors.parameters())
        return
    used = used_up_by([(other.state.consumed, other.tensors.parameters())], parameters, grads)
    for parameter, grad, gone in zip(parameters, grads, used):
        parameter.grad = None if gone or grad is None else grad.clone()


def _earlier_parts(
    engine: Engine, other: Engine, parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return gradients of earlier passes of this micro-batch, for autograd to add to."""
    made, micro_batch = other.state.other_pass, engine.state.micro_batch
    if made is None or micro_batch is None or made.key is not micro_batch.key:
        return [None] * len(parameters)
    known = dict(zip(map(id, made.parameters), made.grads))
    return [known.get(id(p)) for p in parameters]


def _tell(
    engine: Engine,
    other: Engine,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weight: Scalar,
    factor: Scalar,
    partly: bool,
) -> None:
    """Hand gradients that a pass of this wrapper computed to the owner of the parameters."""
    if on_device(factor):  # may be 0, by which one cannot divide
        factor = torch.where(factor == 0, 1.0, factor)
    micro_batch, old = engine.state.micro_batch, other.state.other_pass
    key = None if micro_batch is None else micro_batch.key
    several = old is not None and (old.several or key is None or old.key is not key)
    scale = current_scale(OP, engine.settings.scaler)
    made = OtherPass(
        parameters, grads, weight, factor, scale, engine.reducer.group, key, several, partly
    )
    other.update(other_pass=made)


def forget_parts(key: object) -> None:
    """Drop the gradients that a failed micro-batch computed for other wrappers' parameters."""
    for other in engines_alive():
        if other.state.other_pass is not None and other.state.other_pass.key is key:
            other.update(other_pass=None)


def take_other_pass(op: str, engine: Engine, made: OtherPass, weight: Scalar | None) -> None:
    """Add the gradients that another wrapper's pass computed as a micro-batch. In no_grad.

    Args:
        weight: what the micro-batch counts; None: its weight in the other wrapper.
    """
    if made.several or made.partly or engine.reducer.sharded:
        contract, got = "hold new gradients", "those of another AccumulatingOptimizer's backward"
        advice = "Run loss.backward() for both, and accumulate(weight) of each"
        if made.partly:
            advice = ONE_FOR_EACH
        elif made.several:
            got += " calls, more than one"
            advice = "Call accumulate() after each of them, or zero_grad() before one that counts"
        raise RuntimeError(message(op, ".grad", contract, got, advice))
    known = dict(zip(map(id, made.parameters), made.grads))
    parameters = engine.tensors.parameters()
    grads = [known.get(id(p)) for p in parameters]
    if made.group is not None:
        engine.reducer.share(made.group)
        engine.update(window=engine.state.window._replace(unreduced=True))
    count = made.weight if weight is None else weight
    add_micro_batch(engine, op, parameters, grads, count, made.factor, accumulated=True)
    window = engine.state.window
    ledger = window.ledger._replace(loss_scale=made.loss_scale)
    engine.update(window=window._replace(ledger=ledger), other_pass=None)


def pass_over(op: str, engine: Engine, own: bool) -> None:
    """Drop gradients of another wrapper's pass, at a step that has gradients of its own, in `.grad`
    or in the window. Raise if it has none, since it is unknown whether to step on the others."""
    full = engine.state.micro_batches >= engine.settings.window
    if own or full or engine.state.accumulated:
        engine.update(other_pass=None)
        return
    contract = "hold a gradient of this optimizer's own backward pass"
    got = "only that of another AccumulatingOptimizer's backward"
    advice = (
        "Call accumulate() after that backward if it counts here, too, as one loss of two "
        "optimizers does, or zero_grad() if not"
    )
    raise RuntimeError(message(op, ".grad", contract, got, advice))


# One scaler in several wrappers


@not_compiled
def note_scale(op: str, engine: Engine) -> None:
    """Let other wrappers with this scaler know, before a step updates it, the loss scale of the
    gradients that wait in `.grad` of their parameters."""
    scaler = engine.settings.scaler
    for other in engines_alive():
        if other is engine or other.settings.scaler is not scaler or other.state.in_grad:
            continue
        grads, noted = fresh(other.tensors.parameters(), other.state.consumed, new=True), [False]
        if other.state.earlier_scale is not None:  # a step before this one has told them
            noted = other.state.earlier_scale[0].unchanged(grads)
        if not all(map(is_none, grads)) and not any(noted):
            earlier = ConsumedGrads().after(grads), current_scale(op, scaler)
            other.update(earlier_scale=earlier)


def scale_of_pending(op: str, engine: Engine) -> Scalar:
    """Return the loss scale of the gradients that a backward pass of the user left in `.grad`: the
    present one. Gradients from before another wrapper updated the scaler are rescaled to it."""
    scale, earlier = current_scale(op, engine.settings.scaler), engine.state.earlier_scale
    if earlier is not None:
        grads = grads_of(engine.tensors.parameters())
        same = [g for g, same in zip(grads, earlier[0].unchanged(grads)) if g is not None and same]
        engine.update(earlier_scale=None)
        with torch.no_grad():
            scale_(same, divide(scale, earlier[1]))
    return scale
