"""`AccumulatingOptimizer.backward`: the ways in which gradients reach the open window."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function

from accumext import _wgrad_fusion
from accumext._scalars import Scalar
from accumext._tensor_kinds import fit_one_call
from accumext.optimizer._accumulator import Accumulator, Transaction
from accumext.optimizer._arguments import OP
from accumext.optimizer._backward_hooks import GradCollector
from accumext.optimizer._distributed import shared_weight
from accumext.optimizer._grad_slots import GradSlots, clear, contents_of, write_contents
from accumext.optimizer._loss_scaling import LossScale
from accumext.optimizer._window import Window
from accumext.optimizer._window_all_reduce import WindowAllReduce

# "micro_batch": the gradients join the open micro-batch. "afterwards": autograd leaves them in
# `.grad`, from where they are added or kept. "hooks": each is added, and freed, as soon as it is
# complete. "in_place": autograd adds to the main gradients themselves.
Way: TypeAlias = Literal["micro_batch", "afterwards", "hooks", "in_place"]


def run_backward(
    accumulator: Accumulator, op: str, loss: Tensor, weight: Scalar, weighted: bool
) -> None:
    """Scale the loss, run its backward pass and add its gradients to the open window.

    Args:
        weighted: whether the user gave the weight.
    """
    parameters = accumulator.parameters()
    if weighted:
        share, weight = shared_weight(weight, parameters)
        loss = scale_loss(loss, share)
    micro_batch = accumulator.open_micro_batch
    if micro_batch is None:
        slots, unused = accumulator.clear_consumed(parameters)
    else:
        micro_batch.check_weight(op, weight)
        slots, unused = GradSlots.of(parameters), []
    loss = accumulator.scaling.scale_loss(loss)
    all_reduce = _overlapping_all_reduce(op, accumulator, parameters, weight)
    if micro_batch is not None and all_reduce is None:
        micro_batch.backward(op, loss)
        return
    scale = accumulator.scaling.current(op)
    if accumulator.window.attached is not None and (
        all_reduce is not None or accumulator.settings.accumulate_in_backward
    ):
        with Transaction(accumulator, slots):
            accumulator.detach()
    way = choose_way(accumulator, weight, scale, not unused, all_reduce is not None)
    if way == "afterwards":
        _backward_then_add(accumulator, op, loss, weight, scale, slots, unused)
    elif way == "hooks":
        _backward_with_hooks(accumulator, op, loss, weight, scale, unused, all_reduce)
    else:
        _backward_in_place(accumulator, loss, weight, scale)
    accumulator.accumulated = True


def choose_way(
    accumulator: Accumulator, weight: Scalar, scale: LossScale, empty: bool, overlapping: bool
) -> Way:
    """The way that a backward pass outside of `micro_batch()` takes.

    Args:
        empty: whether `.grad` holds nothing that autograd would add to.
        overlapping: whether the window is to be sent while the pass runs.
    """
    if overlapping:
        return "hooks"
    if not accumulator.settings.accumulate_in_backward:
        return "afterwards"
    if empty and _can_add_in_place(accumulator.window, weight, scale):
        return "in_place"
    return "afterwards" if accumulator.keeps_in_grad else "hooks"


def _can_add_in_place(window: Window, weight: Scalar, scale: LossScale) -> bool:
    """Whether autograd would add the same to the main gradients: not cast, not multiplied.

    It needs no hooks. But an exception in the middle of it leaves main gradients that hold a part
    of the micro-batch, so only `accumulate_in_backward` asks.
    """
    mains = window.main_grads
    if not mains.tensors or window.unit_weight is None or mains.casts or not mains.dense:
        return False
    factor = window.factor(weight, scale)
    return not isinstance(factor, Tensor) and factor == 1.0


def _backward_then_add(
    accumulator: Accumulator,
    op: str,
    loss: Tensor,
    weight: Scalar,
    scale: LossScale,
    slots: GradSlots,  # what lies in `.grad` before
    unused: list[Tensor],  # those of it that autograd adds to
) -> None:
    parameters = slots.parameters
    with Transaction(accumulator, slots) as transaction:
        accumulator.detach()
        if unused:
            transaction.keep_contents(unused)
        loss.backward()
        if accumulator.keeps_in_grad:
            slots = GradSlots.of(parameters)
            accumulator.attach(op, slots, weight, scale, produced=True)
        else:
            foreign = accumulator.foreign_grads(parameters)
            slots = accumulator.fresh_slots(parameters)
            accumulator.add(op, transaction, slots, weight, scale, foreign)


def _backward_with_hooks(
    accumulator: Accumulator,
    op: str,
    loss: Tensor,
    weight: Scalar,
    scale: LossScale,
    unused: list[Tensor],  # gradients in `.grad` that autograd adds to
    all_reduce: WindowAllReduce | None,  # what sums the window meanwhile
) -> None:
    window = accumulator.window
    accumulator.all_reduce = all_reduce
    with _dropping_the_window(accumulator, unused):
        before = window.main_grads
        factor = window.count_in(weight, scale)

        def take(grads: dict[Tensor, Tensor], foreign: Container[int]) -> None:
            with record_function("accumext::accumulate"), torch.no_grad():
                window.add_partial(grads, factor, foreign)
                if all_reduce is not None:
                    all_reduce.send_complete(op, window, grads)

        parameters = accumulator.parameters()
        watched = set(parameters)
        collector = GradCollector(op, take)
        with _offering_main_grads(accumulator, parameters, factor), collector.watching(watched):
            loss.backward()
        foreign = accumulator.foreign_grads(parameters)
        slots = accumulator.fresh_slots(parameters)
        take(slots.present(), foreign)
        clear(parameters)
        window.in_order = window.in_order and window.main_grads is before


def _backward_in_place(
    accumulator: Accumulator, loss: Tensor, weight: Scalar, scale: LossScale
) -> None:
    window, parameters = accumulator.window, accumulator.parameters()
    with _dropping_the_window(accumulator, []):
        window.main_grads.lend()
        with _offering_main_grads(accumulator, parameters, 1.0):
            loss.backward()
        with record_function("accumext::accumulate"), torch.no_grad():
            window.count_in(weight, scale)
            window.adopt(GradSlots.of(parameters))
            clear(parameters)


@contextmanager
def _offering_main_grads(
    accumulator: Accumulator, parameters: list[Tensor], factor: Scalar
) -> Iterator[None]:
    """A context for a backward pass whose operators may add to main gradients themselves."""
    if not accumulator.settings.accumulate_in_backward:
        yield
        return
    window = accumulator.window
    accumulator.main_grad_attributes.declare(parameters)
    deferred = [p for p in parameters if _wgrad_fusion.is_deferred(p)]
    new = [p for p in deferred if p not in window.by_parameter]
    offered = {p: main for p in deferred if fit_one_call([main := window.zeros_for(p)])}
    with _wgrad_fusion.offering(offered, factor):
        yield
    window.drop([p for p in new if not _wgrad_fusion.was_added(p)])


def _overlapping_all_reduce(
    op: str, accumulator: Accumulator, parameters: list[Tensor], weight: Scalar
) -> WindowAllReduce | None:
    """What sums the window while its last backward pass runs; None if it is not to, or not yet.

    All processes are told the numbers of the window before anything is done.
    """
    settings, window, group = accumulator.settings, accumulator.window, accumulator.group
    count = window.micro_batches + 1
    if not settings.reduce_in_backward or group is None or count < settings.window:
        return None
    all_reduce = WindowAllReduce(parameters, window, group)
    all_reduce.agree(op, window, window.weight + weight, count, flushing=False)
    return all_reduce


@contextmanager
def _dropping_the_window(accumulator: Accumulator, unused: list[Tensor]) -> Iterator[None]:
    """An exception inside drops the window, and says so: gradients were added to it.

    What a backward pass of the user's own had put into `.grad` comes back.
    """
    held, enabled = accumulator.window.micro_batches > 0, torch.is_grad_enabled()
    slots = GradSlots.of(accumulator.parameters())
    if not unused:
        slots = GradSlots(slots.parameters, [None] * len(slots.parameters))
    contents = contents_of(unused)
    try:
        yield
    except BaseException as error:
        torch.set_grad_enabled(enabled)
        accumulator.drop_window()
        slots.restore()
        write_contents(contents)
        if held:
            _explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
        raise


def scale_loss(loss: Tensor, factor: Scalar) -> Tensor:
    """`loss * factor` in the loss's dtype; the host number 1.0 costs nothing."""
    if isinstance(factor, Tensor):
        return loss * factor.to(loss)
    return loss if factor == 1.0 else loss * factor


def _explain(error: BaseException, note: str) -> None:
    """Add a sentence to an exception on its way out."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        raise RuntimeError(note) from error
