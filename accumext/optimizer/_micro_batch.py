"""`micro_batch()`: any number of backward passes that enter the window as one micro-batch."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accumext import _checks
from accumext._scalars import Scalar
from accumext._tensor_kinds import HALF_DTYPES
from accumext.optimizer._accumulator import Accumulator, Transaction, explain
from accumext.optimizer._backward_hooks import GradCollector
from accumext.optimizer._distributed import hold_back
from accumext.optimizer._grad_slots import GradSlots, clear
from accumext.optimizer._loss_scaling import LossScale
from accumext.optimizer._window import Window


class OpenMicroBatch:
    """The micro-batch between entry and exit of `micro_batch()`.

    Gradients of half-precision parameters are summed in float32 here; the others in `.grad`.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._halves = Window()
        self._weight: Scalar | None = None  # of all backward calls
        self._weight_unit: Scalar | None = None  # over which their losses were multiplied with it
        self._failed = False  # whether a backward pass did not come to its end

    def check_weight(self, op: str, weight: Scalar, scale: LossScale) -> None:
        """Raise unless all calls have one weight, as far as the host can see."""
        first = weight if self._weight is None else self._weight
        self._weight, self._weight_unit = first, scale.weight_unit
        if isinstance(first, Tensor) or isinstance(weight, Tensor) or first == weight:
            return
        _checks.fail_value(op, "weight", f"be that of the whole micro-batch, {first:g}", weight)

    def backward(self, op: str, loss: Tensor) -> None:
        """Run one of the backward passes."""
        accumulator = self._accumulator
        halves = [p for p in accumulator.parameters() if p.dtype in HALF_DTYPES]
        frees = accumulator.settings.accumulate_in_backward or accumulator.sends_to_host
        watched = halves if frees else []
        try:
            with GradCollector(op, self._add_halves).watching(watched):
                loss.backward()
            self._collect_halves()
        except BaseException:
            self._failed = True
            raise

    def close(self, op: str, transaction: Transaction, held_back: bool) -> None:
        """Add what the backward passes brought to the open window."""
        accumulator = self._accumulator
        if self._failed:
            got = "one that ended in an exception, and the micro-batch is dropped"
            advice = "Let the exception leave micro_batch()"
            contract = "come to its end"
            raise RuntimeError(_checks.message(op, "a backward pass", contract, got, advice))
        self._collect_halves()
        slots, foreign = accumulator.slots_and_foreign()
        grads = accumulator.fresh(slots).present() | self._halves.by_parameter
        if grads:
            accumulator.refuse_while_reducing(op)
        accumulator.window.held_back |= held_back and accumulator.group is not None
        if grads or (self._weight is not None and accumulator.all_reduce is None):
            slots = GradSlots(list(grads), list(grads.values()))
            weight = 1.0 if self._weight is None else self._weight
            scale = accumulator.scaling.current(op)._replace(weight_unit=self._weight_unit)
            accumulator.add(op, transaction, slots, weight, scale, foreign)
            accumulator.accumulated = True

    def _add_halves(self, halves: dict[Tensor, Tensor], foreign: Container[int]) -> None:
        masters = self._accumulator.masters
        with torch.no_grad():
            there = halves if masters is None else masters.bring(halves)
            self._halves.add_partial(there, 1.0, foreign)

    def _collect_halves(self) -> None:
        """Sum the half-precision gradients in `.grad`, and empty it of them."""
        slots = self._accumulator.fresh(GradSlots.of(self._accumulator.parameters()))
        halves = {p: grad for p, grad in slots.present().items() if p.dtype in HALF_DTYPES}
        self._add_halves(halves, ())  # they are cast: none is kept
        clear(halves)


@contextmanager
def open_micro_batch(op: str, accumulator: Accumulator, model: nn.Module | None) -> Iterator[None]:
    """Open a micro-batch; an exception drops what it brought, and nothing else."""
    held, group = hold_back(op, model, accumulator.settings.process_group)
    accumulator.model_group = group or accumulator.model_group
    with _holding_shards(op, accumulator, model):
        slots, unused = accumulator.begin_backward(op)
        with Transaction(accumulator, slots) as transaction:
            accumulator.detach()
            transaction.keep_contents(unused)
            micro_batch = OpenMicroBatch(accumulator)
            try:
                accumulator.open_micro_batch = micro_batch
                with held:
                    yield
                micro_batch.close(op, transaction, held_back=model is not None)
            finally:
                accumulator.open_micro_batch = None


@contextmanager
def _holding_shards(op: str, accumulator: Accumulator, model: nn.Module | None) -> Iterator[None]:
    """With synchronize="window": `fully_shard` modules keep their gradients to themselves.

    An exception drops the window, of which FSDP holds all gradients in one sum.
    """
    sharded, settings = accumulator.sharded, accumulator.settings
    if settings.synchronize == "backward" or sharded is None or model is None:
        yield
        return
    roots = sharded.roots_to_hold(op, model, settings.reduction)
    window = accumulator.window
    before = window.micro_batches
    try:
        with sharded.holding(roots, model, last=before + 1 >= settings.window):
            yield
        if accumulator.window.micro_batches == before:
            contract = "have an opt.backward where synchronize='window'"
            raise RuntimeError(_checks.message(op, "the micro-batch", contract, "none"))
    except BaseException as error:
        accumulator.drop_window()
        if before:
            explain(error, f"{op}: the open window was dropped: FSDP holds it in one sum")
        raise
