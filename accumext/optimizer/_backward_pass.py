"""`AccumulatingOptimizer.backward`: the ways in which gradients reach the open window."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext import _wgrad_fusion
from accumext._scalars import Scalar
from accumext._torch_private import record_function
from accumext.optimizer._accumulator import Accumulator, Transaction, explain
from accumext.optimizer._arguments import OP
from accumext.optimizer._backward_hooks import GradCollector
from accumext.optimizer._grad_slots import GradSlots, clear, contents_of, write_contents
from accumext.optimizer._host_transfer import HostTransfer
from accumext.optimizer._loss_scaling import LossScale
from accumext.optimizer._window import Window
from accumext.optimizer._window_all_reduce import WindowAllReduce

# "micro_batch": the gradients join the open micro-batch. "stay_in_grad": autograd leaves them in
# `.grad`, where they are the main gradients. "afterwards": they are added from there when the pass
# has ended. "hooks": each is added, and freed, as soon as it is complete. "in_place": autograd adds
# to the main gradients themselves.
Way: TypeAlias = Literal["micro_batch", "stay_in_grad", "afterwards", "hooks", "in_place"]


def run_backward(
    accumulator: Accumulator,
    proxy: Optimizer,  # the AccumulatingOptimizer, by which the user's scaler may know it
    op: str,
    loss: Tensor,
    weight: Scalar,
) -> None:
    """Scale the loss, run its backward pass and add its gradients to the open window."""
    settings, sharded = accumulator.settings, accumulator.sharded
    optimizers = (proxy, accumulator.optimizer)
    loss, scale = accumulator.scaling.scale_loss(op, loss, optimizers)
    if sharded is not None:
        if settings.synchronize == "window" and not sharded.is_open:
            sharded.refuse_synchronised(op)
        loss, scale = sharded.weigh(op, loss, weight, scale, accumulator.window)
    slots, unused = accumulator.begin_backward(op)
    micro_batch = accumulator.open_micro_batch
    if micro_batch is not None:
        micro_batch.check_weight(op, weight, scale)
    all_reduce = None
    if settings.reduce_in_backward:
        all_reduce = _overlapping_all_reduce(op, accumulator, slots.parameters, weight)
    if accumulator.window.attached is not None and (
        all_reduce is not None or settings.accumulate_in_backward
    ):
        with Transaction(accumulator, slots):
            accumulator.detach()
    way = choose_way(accumulator, weight, scale, bool(unused), all_reduce is not None)
    if way == "micro_batch" and micro_batch is not None:
        micro_batch.backward(op, loss)
        return
    if way == "hooks":
        _backward_with_hooks(accumulator, op, loss, weight, scale, unused, all_reduce)
    elif way == "in_place":
        _backward_in_place(accumulator, loss, weight, scale)
    else:
        with Transaction(accumulator, slots) as transaction:
            if accumulator.window.attached is not None:
                accumulator.detach()
            if unused:
                transaction.keep_contents(unused)
            loss.backward()
            if way == "stay_in_grad":
                slots = GradSlots.of(slots.parameters)
                accumulator.attach(op, slots, weight, scale, produced=True)
            else:
                there, foreign = accumulator.slots_and_foreign(slots.parameters)
                fresh = accumulator.fresh(there)
                accumulator.add(op, transaction, fresh, weight, scale, foreign)
    accumulator.accumulated = True


def choose_way(
    accumulator: Accumulator, weight: Scalar, scale: LossScale, unused: bool, overlapping: bool
) -> Way:
    """The way that the gradients of a backward pass take.

    Args:
        unused: whether `.grad` holds gradients that autograd would add to.
        overlapping: whether the window is sent to other processes while the pass runs.
    """
    if overlapping:
        return "hooks"
    if accumulator.open_micro_batch is not None:
        return "micro_batch"
    settings, window = accumulator.settings, accumulator.window
    in_backward = settings.accumulate_in_backward
    if accumulator.masters is not None:
        sends = settings.on_nonfinite == "skip_window" and accumulator.sends_to_host
        return "hooks" if in_backward or sends else "afterwards"
    if in_backward and not unused and _can_add_in_place(window, weight, scale):
        return "in_place"
    if settings.window == 1 and accumulator.keeps_in_grad:
        return "stay_in_grad"
    return "hooks" if in_backward else "afterwards"


def _can_add_in_place(window: Window, weight: Scalar, scale: LossScale) -> bool:
    """Whether autograd would add the same to the main gradients: not cast, not multiplied.

    It needs no hooks. But an exception in the middle of it leaves main gradients that hold a part
    of the micro-batch, so only `accumulate_in_backward` asks.
    """
    main_grads = window.main_grads
    if (
        not main_grads.tensors
        or window.unit_weight is None
        or main_grads.casts
        or not main_grads.dense
    ):
        return False
    factor = window.factor(weight, scale)
    return not isinstance(factor, Tensor) and factor == 1.0


def _backward_with_hooks(
    accumulator: Accumulator,
    op: str,
    loss: Tensor,
    weight: Scalar,
    scale: LossScale,
    unused: list[Tensor],  # gradients in `.grad` that autograd adds to
    all_reduce: WindowAllReduce | None,  # what sums the window during this pass
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
        if accumulator.settings.accumulate_in_backward:
            accumulator.main_grad_attributes.declare(parameters)
        transfer: HostTransfer | None = None
        offered, give = parameters, take
        masters = accumulator.masters
        if masters is not None and accumulator.sends_to_host:
            transfer = HostTransfer(take, masters.goes_to_host)
            give = transfer.give
            offered = [p for p in parameters if not masters.goes_to_host(p)]
        offering = _wgrad_fusion.offering(offered, window.zeros_for, factor)
        with offering, GradCollector(op, give).watching(watched):
            loss.backward()
        slots, foreign = accumulator.slots_and_foreign(parameters)
        give(accumulator.fresh(slots).present(), foreign)
        if transfer is not None:
            transfer.finish()
        clear(parameters)
        window.in_order = window.in_order and window.main_grads is before


def _backward_in_place(
    accumulator: Accumulator, loss: Tensor, weight: Scalar, scale: LossScale
) -> None:
    window, parameters = accumulator.window, accumulator.parameters()
    with _dropping_the_window(accumulator, []):
        window.main_grads.lend()
        with _wgrad_fusion.offering(parameters, window.by_parameter.get, 1.0):
            loss.backward()
        with record_function("accumext::accumulate"), torch.no_grad():
            window.count_in(weight, scale)
            window.adopt(GradSlots.of(parameters))
            clear(parameters)


def _overlapping_all_reduce(
    op: str, accumulator: Accumulator, parameters: list[Tensor], weight: Scalar
) -> WindowAllReduce | None:
    """What sums the window while its last backward pass runs; None if it is not to, or not yet.

    All processes are told the numbers of the window before anything is done.
    """
    window, group = accumulator.window, accumulator.group
    count = window.micro_batches + 1
    if group is None or count < accumulator.settings.window:
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
            explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
        raise
