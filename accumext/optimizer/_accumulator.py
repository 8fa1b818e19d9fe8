"""The state of an optimizer's accumulation, and how a micro-batch enters the open window."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext._checks import message, users_level
from accumext._scalars import Scalar
from accumext._tensor_kinds import Group, global_norm, nonfinite, zero_flag
from accumext._torch_private import not_compiled, record_function
from accumext._wgrad_fusion import MainGradAttributes
from accumext.optimizer._arguments import OP, Settings
from accumext.optimizer._backward_hooks import BackwardWatch
from accumext.optimizer._grad_ownership import held_elsewhere
from accumext.optimizer._grad_slots import (
    ConsumedGrads,
    GradSlots,
    clear,
    contents_of,
    grad_of,
    is_none,
    versions,
    write_contents,
    zero_grads,
)
from accumext.optimizer._loss_scaling import UNSCALED, LossScale, LossScaling, OuterScale
from accumext.optimizer._masters import MasterWeights
from accumext.optimizer._product_memory import ProductMemory
from accumext.optimizer._sharded_window import ShardedWindow
from accumext.optimizer._window import Window
from accumext.optimizer._window_report import WindowReport, named

if TYPE_CHECKING:
    from accumext.optimizer._micro_batch import OpenMicroBatch
    from accumext.optimizer._window_all_reduce import WindowAllReduce

_params_of = itemgetter("params")
_alive: WeakSet[Accumulator] = WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for accumulator in list(_alive):
        accumulator.warn_of_loss()


class Accumulator:
    """Everything about the open window that changes, in one object that is never replaced.

    So trainers may copy the attributes of the optimizer into an object of their own.
    """

    def __init__(
        self, optimizer: Optimizer, settings: Settings, masters: MasterWeights | None = None
    ) -> None:
        self.optimizer = optimizer  # the wrapped one
        self.settings = settings
        self.masters = masters  # what it steps on in place of half-precision parameters
        self.sharded = ShardedWindow.of(self.parameters())
        self.scaling = LossScaling(settings)
        self.window = Window()
        self.consumed = ConsumedGrads()  # what the last step left in `.grad`
        self.watch = BackwardWatch()  # for backward passes that are not the wrapper's
        # Kept memory is what `accumulate_in_backward` is there to do without.
        self.product_memory = ProductMemory(keeps=not settings.accumulate_in_backward)
        self.main_grad_attributes = MainGradAttributes()
        if settings.accumulate_in_backward:
            self.main_grad_attributes.declare(self.parameters())
        self.open_micro_batch: OpenMicroBatch | None = None  # inside micro_batch()
        self.model_group: Group | None = None  # of the model given to micro_batch()
        self.all_reduce: WindowAllReduce | None = None  # of the window, once it has begun
        self.last: WindowReport | None = None
        self.stepped = False
        self.accumulated = False  # since the last step: too late for an outer GradScaler
        self.warned: frozenset[str] = frozenset()  # of what: each once
        self.saved = 0  # micro-batches of the window that are in a checkpoint, or another's
        _alive.add(self)

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_while_reducing(f"{OP}.__getstate__")
        if self.sharded is not None:
            self.sharded.refuse_while_held(f"{OP}.__getstate__")
        saved = self.window.micro_batches  # the original is there to step on them
        # No copy can share the group of a model.
        return {**self.__dict__, "model_group": None, "saved": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _alive.add(self)

    def warn_of_loss(self) -> None:
        """At the end of the optimizer or of the program: gradients that no step has used."""
        lost = self.window.micro_batches
        if lost > self.saved and not hasattr(sys, "last_type"):
            self.saved = lost
            text = (
                f"{OP} ended with micro-batches in its window that no step has used, {lost}. "
                "Call opt.flush() after the last batch, or opt.discard()"
            )
            warnings.warn(text, stacklevel=2)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.warn_of_loss()

    # The wrapped optimizer

    def parameters(self) -> list[Tensor]:
        """The parameters that gradients are formed for, of all groups, in order."""
        held = list(chain.from_iterable(map(_params_of, self.optimizer.param_groups)))
        return held if self.masters is None else self.masters.parameters_of(held)

    def stepped_on(self) -> list[Tensor]:
        """What the optimizer holds: the same, but masters in place of their parameters."""
        parameters = self.parameters()
        return parameters if self.masters is None else list(map(self.masters.master_of, parameters))

    def names(self) -> dict[Tensor, str | int]:
        """Names of parameters and masters where the optimizer was given any, else indices."""
        names: list[str | int] = []
        for group in self.optimizer.param_groups:
            names += group.get("param_names", range(len(names), len(names) + len(group["params"])))
        by_parameter = dict(zip(self.parameters(), names, strict=True))
        if self.masters is None:
            return by_parameter
        return by_parameter | dict(zip(self.stepped_on(), names, strict=True))

    def know_parameters(self) -> None:
        """Look at the parameters again: the optimizer has been given more."""
        if self.masters is not None:
            self.masters.add(self.stepped_on())
        if self.sharded is None:
            self.sharded = ShardedWindow.of(self.parameters())

    @property
    def sends_to_host(self) -> bool:
        """Whether gradients leave their device for masters in the host's memory."""
        return self.masters is not None and self.masters.any_on_host()

    # Gradients in `.grad`

    def slots_and_foreign(
        self, parameters: list[Tensor] | None = None
    ) -> tuple[GradSlots, Container[int]]:
        """The gradients in `.grad`, and ids of those that somebody else holds too.

        The latter is asked before anything here holds them, and only where the next micro-batch
        can bring main gradients: gradients themselves become those if nobody else holds them.
        """
        if parameters is None:
            parameters = self.parameters()
        foreign: Container[int] = ()
        if self.window.attached is None and not all(map(is_none, map(grad_of, parameters))):
            holders = self.window.main_grads.parameters
            if len(holders) != len(parameters) or not all(map(is_, holders, parameters)):
                foreign = held_elsewhere(parameters)
        return GradSlots(parameters, list(map(grad_of, parameters))), foreign

    def fresh(self, slots: GradSlots) -> GradSlots:
        """The gradients in `.grad` without the window's own and without consumed ones."""
        if self.window.attached is not None:
            return GradSlots(slots.parameters, [None] * len(slots.parameters))
        return self.consumed.fresh(slots) if self.consumed.any_produced else slots

    def begin_backward(self, op: str) -> tuple[GradSlots, list[Tensor]]:
        """Let go of what the last step left in `.grad`, but inside `micro_batch()`.

        Returns:
            What `.grad` holds then, and the gradients in it that count as part of the micro-batch
            to come, since autograd adds to them.
        """
        if (
            self.settings.needs_closure
            or self.all_reduce is not None
            or self.window.world_micro_batches is not None
        ):
            self.refuse_backward(op)
        parameters = self.parameters()
        slots = GradSlots(parameters, list(map(grad_of, parameters)))
        if self.open_micro_batch is not None:
            return slots, []
        if self.last is not None:
            self.last.evidence = None
        if self.window.attached is not None or all(map(is_none, slots.grads)):
            return slots, []
        fresh = self.consumed.fresh(slots, new=True)
        slots.lend(fresh.grads)
        return fresh, [grad for grad in fresh.grads if grad is not None]

    def detach(self) -> None:
        """Take the window's gradients out of `.grad`, where another micro-batch is to come."""
        self.window.detach()
        self.watch.callback = None

    # The window

    @property
    def group(self) -> Group | None:
        """The processes to sum the window over; None for this one alone."""
        group = self.settings.process_group or self.model_group
        return None if group is None or group.size() == 1 else group

    @property
    def steps_at_once(self) -> bool:
        """Whether the next micro-batch is all that the window will hold."""
        return self.settings.window == 1 and self.window.micro_batches == 0 and self.group is None

    @property
    def keeps_in_grad(self) -> bool:
        """Whether the next micro-batch may stay in `.grad`, for the optimizer to find it there."""
        return self.masters is None and self.steps_at_once

    def drop_window(self, successor: Window | None = None) -> None:
        """Start another window. An all-reduce of the old one ends first, as other ranks expect."""
        window, all_reduce = self.window, self.all_reduce
        if all_reduce is not None:
            self.all_reduce = None
            all_reduce.abandon(window)
        if self.sharded is not None:
            self.sharded.drop()
        with Transaction(self, GradSlots.of(self.parameters())):
            if window.attached is not None:
                self.watch.callback = None
                clear(window.attached.parameters)
            self.accumulated = False
            self.window = Window() if successor is None else successor

    def close(self, report: WindowReport, successor: Window, consumed: ConsumedGrads) -> None:
        """Remember the window that has been stepped on, and start the next."""
        if self.sharded is not None:
            self.sharded.idle = True
        vars(self).update(
            last=report, window=successor, stepped=True, consumed=consumed, accumulated=False
        )

    def add(
        self,
        op: str,
        transaction: Transaction,
        slots: GradSlots,  # gradients of the micro-batch
        weight: Scalar,
        scale: LossScale,
        foreign: Container[int] | None,
        found_inf: Tensor | None = None,  # what somebody else found in them
    ) -> None:
        """Add one micro-batch to the window, and empty `.grad` of its parameters."""
        policy, window = self.settings.on_nonfinite, self.window
        if policy == "raise":
            self.raise_nonfinite(op, slots.present(), weight, scale)
        transaction.rest = slots.clear
        with record_function("accumext::accumulate"), torch.no_grad():
            if window.attached is not None:
                self.detach()
            added = slots
            if self.masters is not None and self.sends_to_host:
                grads = self.masters.bring(slots.present())
                added = GradSlots(list(grads), list(grads.values()))
            if policy == "skip_micro_batch":
                window.add_if_finite(added.present(), weight, scale)
            else:
                if found_inf is not None:
                    window.note_found_inf(found_inf)
                window.add(added, weight, scale, foreign)
            slots.clear()

    def attach(
        self, op: str, slots: GradSlots, weight: Scalar, scale: LossScale, *, produced: bool
    ) -> None:
        """Add one micro-batch and leave it in `.grad`, as the window's main gradients."""
        policy = self.settings.on_nonfinite
        if policy == "raise":
            self.raise_nonfinite(op, slots.present(), weight, scale)
        unchecked = policy == "skip_micro_batch"
        with record_function("accumext::accumulate"), torch.no_grad():
            self.window.attach(slots, weight, scale, unchecked=unchecked, produced=produced)
            if produced:
                self.watch.begin(slots.parameters, self._leave_grad)

    def _leave_grad(self) -> None:
        """A backward pass of the user's is about to add to the window's gradients in `.grad`."""
        with Transaction(self, GradSlots.of(self.parameters())), torch.no_grad():
            self.detach()

    @not_compiled  # torch.compile cannot trace it, and is after the wrapped step alone
    def add_pending(
        self,
        op: str,
        transaction: Transaction,
        slots: GradSlots,  # what `.grad` holds
        outer: OuterScale | None,
        foreign: Container[int],
        new: bool = False,
    ) -> GradSlots:
        """Add what a backward pass of the user left in `.grad`, if anything, as one micro-batch.

        Args:
            new: only what no step has used.

        Returns:
            What `.grad` holds afterwards.
        """
        window = self.window
        if window.attached is not None:
            if not window.attached.are_in(slots):
                window.refresh()
            return slots
        pending = self.consumed.fresh(slots, new)
        if all(map(is_none, pending.grads)):
            return slots
        if self.last is not None:
            self.last.evidence = None
        self.refuse_while_reducing(op)
        if self.settings.synchronize == "window" and self.sharded is not None:
            self.sharded.refuse_synchronised(op)
        if outer is None:
            self._warn_of_sums(op, pending.grads)
        scale = self.scaling.current(op) if outer is None else outer.scale
        found_inf = None if outer is None else outer.found_inf
        if self.keeps_in_grad:
            self.attach(op, pending, 1.0, scale, produced=False)
            if found_inf is not None and window.finite_micro_batches is None:
                window.note_found_inf(found_inf)
            return slots
        self.add(op, transaction, pending, 1.0, scale, foreign, found_inf)
        slots = GradSlots.of(slots.parameters)
        transaction.savepoint(slots)
        return slots

    def add_from_grad(self, op: str, weight: Scalar) -> None:
        """Add the gradients in `.grad` as one micro-batch."""
        slots, foreign = self.slots_and_foreign()
        fresh = self.fresh(slots)
        if all(map(is_none, fresh.grads)):
            advice = "Run a backward pass first; backward() has accumulated already"
            raise RuntimeError(message(op, ".grad", "hold new gradients", "none", advice))
        scale = self.scaling.current(op)
        with Transaction(self, slots) as transaction:
            if self.last is not None:
                self.last.evidence = None
            self.add(op, transaction, fresh, weight, scale, foreign)
        self.accumulated = True

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear `.grad`, but for an open window's gradients, which leave it first."""
        slots = GradSlots.of(self.parameters())
        with Transaction(self, slots):
            self.detach()
            if self.last is not None:
                self.last.evidence = None
            self.optimizer.zero_grad(set_to_none)
            if self.masters is not None:  # it has cleared only that of the masters
                zero_grads(slots.parameters, set_to_none)
            self.consumed = ConsumedGrads(GradSlots.of(slots.parameters).grads)

    def collect_held(self, op: str) -> None:
        """Add the gradients that FSDP holds of the open window to it, reduced.

        An exception while they are reduced drops the window, and says so.
        """
        if self.sharded is None:
            return
        self.sharded.refuse_to_collect(op)
        if not self.sharded.holds:
            self.sharded.collect()
            return
        before = GradSlots.of(self.parameters())
        try:
            self.sharded.collect()
            slots, foreign = self.slots_and_foreign()
            with torch.no_grad():
                self.window.add_partial(slots.present(), 1.0, foreign)
            slots.clear()
        except BaseException as error:
            self.drop_window()
            before.restore()
            explain(error, f"{op}: the open window was dropped: it was being reduced")
            raise

    def load_window(self, op: str, window: Window) -> None:
        """Replace the open window by a loaded one."""
        if self.settings.scaler is not None and window.main_grads.tensors:
            self.scaling.create_scale(window.main_grads.tensors[0].device)
            window.unit_scale = self.scaling.same_as(op, window.unit_scale)
        if self.masters is not None and self.sends_to_host:
            norm = window.norm
            window.replace(self.masters.bring(window.by_parameter))
            window.norm = norm
        self.drop_window(window)
        self.saved = window.micro_batches

    # Errors and warnings

    def raise_nonfinite(
        self, op: str, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale = UNSCALED
    ) -> None:
        """Refuse a micro-batch that counts and is not finite, naming the parameters.

        What is averaged over shards counts on all processes, which look at it together, also where
        the weight of this one is zero.
        """
        counts = isinstance(weight, Tensor) or weight > 0.0 or scale.weight_unit is not None
        if not counts or not grads:
            return
        found_inf = zero_flag(next(iter(grads.values())).device)
        global_norm(list(grads.values()), norm_type=2.0, found_inf=found_inf)
        if bool(found_inf):
            names = self.names()
            mine = named([names[p] for p in nonfinite(grads)])
            got = f"inf or NaN in {mine or 'shards of other processes'}"
            raise RuntimeError(message(op, "gradients", "be finite", got))

    def refuse_inside_micro_batch(self, op: str) -> None:
        """Raise for what does not go inside `micro_batch()`."""
        if self.open_micro_batch is not None:
            raise RuntimeError(message(op, "the call", "be outside micro_batch()", "one inside"))

    def refuse_while_reducing(self, op: str) -> None:
        """Raise for what cannot enter a window that is summed over processes already."""
        if self.all_reduce is not None or self.window.world_micro_batches is not None:
            contract = "come after step or discard"
            got = "one for a window that is summed over processes already"
            advice = "With reduce_in_backward=True a micro-batch has one backward pass"
            raise RuntimeError(message(op, "the call", contract, got, advice))

    def refuse_backward(self, op: str) -> None:
        """Raise where no gradients may come from outside: they come in a closure, or too late."""
        self.refuse_while_reducing(op)
        if self.settings.needs_closure:
            kind = type(self.optimizer).__name__
            advice = "Call loss.backward() in the closure, and opt.step(closure)"
            contract = "step without a closure"
            raise RuntimeError(message(op, "the optimizer", contract, kind, advice))

    def warn_once(self, topic: str, text: str) -> None:
        """A warning that points at the user's line, the first time."""
        if topic not in self.warned:
            self.warned |= {topic}
            warnings.warn(text, stacklevel=users_level())

    def _warn_of_sums(self, op: str, grads: Sequence[Tensor | None]) -> None:
        """Say once that a window counts calls of `step`, where each may be meant to end one."""
        if "sums" in self.warned or self.settings.window == 1:
            return
        if all(version is None or version > 0 for version in versions(grads)):
            self.warn_once(
                "sums",
                f"{op}: every gradient was added to, or changed, since autograd made it, and "
                f"window={self.settings.window} counts this call of step as one micro-batch. Call "
                "step after every backward pass, not after every window; put several passes that "
                "are one micro-batch into `with opt.micro_batch():`; and leave the clip to "
                "max_norm",
            )


def _nothing() -> None:
    """The rest where none is left to do."""


class Transaction:
    """A context: an exception leaves the window and `.grad` as before it, or as after it.

    Inside, memory is allocated first and everything is prepared on drafts; nothing that can be seen
    is written in place. What cannot be undone is one call: a kernel that adds to main gradients, of
    which `Window.writes` tells, or the wrapped optimizer's step, of which `has_happened` does.
    If an exception comes before it, everything is put back; if after, the rest is done.
    """

    rest: Callable[[], None]  # to do after the irrevocable call; perhaps twice
    always: Callable[[], None] | None  # to do first, wherever the exception came from
    has_happened: Callable[[], bool] | None  # whether an irrevocable step was made
    _window: Window
    _fields: dict[str, Any]  # of the accumulator
    _window_fields: dict[str, Any]
    _slots: GradSlots
    _callback: Callable[[], None] | None  # of the watch
    _accumulator: Accumulator
    _grad_enabled: bool
    _contents: list[tuple[Tensor, Tensor]]

    def __init__(self, accumulator: Accumulator, slots: GradSlots) -> None:
        vars(self).update(  # at once, since an exception may come between any two lines
            _accumulator=accumulator,
            _grad_enabled=torch.is_grad_enabled(),
            _window=accumulator.window,
            _fields=vars(accumulator).copy(),
            _window_fields=vars(accumulator.window).copy(),
            _slots=slots,
            _callback=accumulator.watch.callback,
            _contents=(),
            rest=_nothing,
            has_happened=None,
            always=None,
        )

    def savepoint(self, slots: GradSlots) -> None:
        """Roll back to here from now on; `slots` is what `.grad` holds."""
        Transaction.__init__(self, self._accumulator, slots)

    def keep_contents(self, grads: Iterable[Tensor]) -> None:
        """Copy gradients that somebody may write in place, to put their values back too."""
        self._contents = contents_of(grads)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            return
        torch.set_grad_enabled(self._grad_enabled)
        if self.always is not None:
            self.always()
        self._window.complete()
        if self._is_done():
            self.rest()
            self._accumulator.open_micro_batch = self._fields["open_micro_batch"]
        else:
            vars(self._accumulator).update(self._fields)
            vars(self._window).update(self._window_fields)
            self._accumulator.watch.callback = self._callback
            self._slots.restore()
            write_contents(self._contents)

    def _is_done(self) -> bool:
        """Whether the irrevocable call was made."""
        if self._accumulator.window is not self._window:
            return True
        if self._window.writes != self._window_fields["writes"]:
            return True
        return self.has_happened is not None and self.has_happened()


def explain(error: BaseException, note: str) -> None:
    """Add a sentence to an exception on its way out."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        raise RuntimeError(note) from error
