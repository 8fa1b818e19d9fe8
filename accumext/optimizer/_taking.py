"""What AccumulatingOptimizer does until a window closes: it takes micro-batches in."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Container, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function
from torch._compile import _disable_dynamo
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from accumext import _checks
from accumext._scalars import Scalar, known
from accumext._tensor_kinds import global_norm, nonfinite, zero_flag
from accumext.optimizer import _distributed
from accumext.optimizer._arguments import OP
from accumext.optimizer._grad_slots import Consumed, Slots, Watch, clear, versions
from accumext.optimizer._main_grads import foreign_grads
from accumext.optimizer._optimizer_proxy import OptimizerWrapper
from accumext.optimizer._product_memory import ProductMemory
from accumext.optimizer._transaction import Atomic
from accumext.optimizer._window import UNSCALED, LossScale, Window
from accumext.optimizer._window_all_reduce import Reduction
from accumext.optimizer._window_report import WindowReport

_alive: WeakSet[Progress] = WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for progress in list(_alive):
        progress.warn_of_loss()


class Progress:
    """Everything that changes, in one object never rebound: Lightning clones what is around it."""

    def __init__(self, product_memory: ProductMemory) -> None:
        self.window = Window()
        self.last: WindowReport | None = None
        self.stepped = False
        self.accumulated = False  # since the last step: too late for an outer GradScaler
        self.consumed = Consumed()  # what the last step left in `.grad`
        self.product_memory = product_memory
        self.watch = Watch()  # for backward passes that are not the wrapper's
        self.part: Window | None = None  # inside micro_batch: its half-precision gradients so far
        self.part_weight: Scalar | None = None
        self.part_failed = False  # a backward pass inside micro_batch did not come to its end
        self.group: _distributed.Group | None = None  # of the model given to micro_batch
        self.reduction: Reduction | None = None  # of the window, if it is on its way already
        self.warned: frozenset[str] = frozenset()  # of what: each once
        self.saved = 0  # micro-batches of the window that are in a checkpoint, or another's
        _alive.add(self)

    def __getstate__(self) -> dict[str, Any]:
        saved = self.window.micro_batches  # the original is there to step on them
        return {**self.__dict__, "group": None, "saved": saved}  # no copy can share a group

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _alive.add(self)

    def warn_of_loss(self) -> None:
        """At the end of the optimizer or of the program: gradients that nobody has stepped on."""
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


class Taking(OptimizerWrapper):
    """The part of `AccumulatingOptimizer` that fills the window."""

    window: int
    max_norm: float | None
    norm_type: float
    scaler: GradScaler | None  # None also where it is disabled
    on_nonfinite: str
    reduction: str
    process_group: _distributed.Group | None
    accumulate_in_backward: bool
    reduce_in_backward: bool
    _needs_closure: bool
    _progress: Progress

    def _atomic(self, slots: Slots | None = None) -> Atomic:
        """A context that leaves things, and what lies in `.grad`, as before it or as after it."""
        return Atomic(self._progress, self._slots() if slots is None else slots)

    # Gradients in `.grad`

    def _slots(self) -> Slots:
        """What lies in `.grad` now."""
        return Slots.of(self._parameters())

    def _grads(self) -> dict[Tensor, Tensor]:
        """Every gradient in `.grad`, but for the window's own, and for what is used up."""
        if self._progress.window.attached:
            return {}
        parameters, grads = self._slots()
        return _present(parameters, self._progress.consumed.fresh(grads))

    def _foreign(self) -> set[int]:
        """Gradients that somebody else holds too; asked before anything here holds them.

        Only those that may become main gradients are looked at.
        """
        parameters = self._parameters()
        return set() if self._progress.window.holds(parameters) else foreign_grads(parameters)

    def _forget(self) -> None:
        """Let go of the gradients that the last report may still be asked about."""
        if self._progress.last is not None:
            self._progress.last.forget()

    def _clear_consumed(self) -> tuple[Slots, list[Tensor]]:
        """Before a backward pass, let go of what the last step left.

        Returns:
            What lies in `.grad` yet, and those of it that belong to the micro-batch which is to
            come, as autograd adds to them.
        """
        self._forget()
        slots = self._slots()
        if self._progress.window.attached or all(grad is None for grad in slots.grads):
            return slots, []
        still = self._progress.consumed.fresh(slots.grads, new=True)
        slots.replace(still)
        return Slots(slots.parameters, still), [grad for grad in still if grad is not None]

    def _detach(self) -> None:
        """Take the window's gradients out of `.grad`, where another micro-batch is to come."""
        self._progress.window.detach()
        self._progress.watch.end()

    def _group(self) -> _distributed.Group | None:
        """Over which the window is to be summed."""
        group = self.process_group or self._progress.group
        return None if group is None or group.size() == 1 else group

    def _drop_window(self, successor: Window | None = None) -> None:
        """Start another window. One that is on its way arrives first, as other processes expect."""
        progress, window = self._progress, self._progress.window
        reduction = progress.reduction
        if reduction is not None:
            progress.reduction = None
            reduction.abandon(window)
        with self._atomic():
            if window.attachment is not None:
                progress.watch.end()
                clear(window.attachment.parameters)
            successor = Window() if successor is None else successor
            vars(progress).update(window=successor, accumulated=False)

    def _warn_once(self, about: str, text: str) -> None:
        """A warning that points at the user's line, the first time."""
        progress = self._progress
        if about not in progress.warned:
            progress.warned |= {about}
            warnings.warn(text, stacklevel=_users_level())

    # Loss scales

    def _own_scale(self, op: str) -> LossScale:
        """The scale in force now."""
        if self.scaler is None:
            return UNSCALED
        scale = self.scaler._get_scale_async()
        if scale is None:
            advice = "Use opt.backward(loss), or scaler.scale(loss).backward() with the same scaler"
            got = "a scaler that has not scaled any"
            raise RuntimeError(_checks.message(op, "the loss", "be scaled first", got, advice))
        value = known(scale)
        return LossScale(value, (id(scale), scale._version) if isinstance(value, Tensor) else None)

    def _outer_scale(self, op: str) -> tuple[LossScale | None, Tensor | None]:
        """What a GradScaler around this step has to say: scale (None: nothing), and found_inf."""
        if "found_inf" not in self.__dict__:
            return None, None
        contract = "be called directly, not through scaler.step"
        if self.scaler is not None:
            advice = "Leave scaler=None where a GradScaler is called around the optimizer"
            got = "an outer GradScaler beside its own"
            raise RuntimeError(_checks.message(op, "step", contract, got, advice))
        if self._progress.accumulated:
            got = "gradients taken in before the GradScaler could see them"
            advice = "Pass the scaler to the constructor: AccumulatingOptimizer(..., scaler=scaler)"
            raise RuntimeError(_checks.message(op, "step", contract, got, advice))
        scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        return (
            UNSCALED if scale is None else LossScale(known(scale)),
            found_inf if isinstance(found_inf, Tensor) else None,  # the int 0 without gradients
        )

    def _refuse_second_unscale(self, op: str) -> None:
        """`scaler.unscale_` on an optimizer that unscales with that scaler itself."""
        if self.scaler is None:
            return
        states = self.scaler._per_optimizer_states
        mine = (states[key]["stage"] for key in (id(self), id(self.optimizer)) if key in states)
        if OptState.UNSCALED in mine:
            contract = "be unscaled by the optimizer alone, which was given the scaler"
            advice = "Leave scaler.unscale_ out: clip with max_norm, look at opt.last.total_norm"
            got = "gradients that scaler.unscale_ has unscaled"
            raise RuntimeError(_checks.message(op, ".grad", contract, got, advice))

    def _recognise_scale(self, window: Window) -> None:
        """Give a loaded window the key of the scale in force, if that is the one of its unit."""
        if self.scaler is not None and window.mains.tensors:
            device = window.mains.tensors[0].device
            self.scaler.scale(torch.zeros((), device=device))  # creates the scale if need be
            scale = self._own_scale(f"{OP}.load_accumulation_state_dict")
            if bool(scale.value == window.unit_scale.value):
                window.unit_scale = scale

    # Taking in

    def _take(
        self,
        op: str,
        grads: dict[Tensor, Tensor],
        weight: Scalar,
        scale: LossScale,
        foreign: Container[int] | None,
        found_inf: Tensor | None = None,  # what somebody else found in them
    ) -> None:
        """Take in one micro-batch and empty `.grad`."""
        with self._atomic() as atomic:
            self._forget()
            self._raise_nonfinite(op, grads, weight)
            window = self._progress.window
            atomic.after(lambda: clear(grads))
            with record_function("accumext::accumulate"), torch.no_grad():
                self._detach()
                if found_inf is not None and self.on_nonfinite != "skip_micro_batch":
                    window.note(found_inf)
                if self.on_nonfinite == "skip_micro_batch":
                    window.take_if_finite(grads, weight, scale)
                else:
                    window.take(grads, weight, scale, foreign)
                clear(grads)

    def _attaches(self) -> bool:
        """Whether the next micro-batch may stay in `.grad`: it is all that the window will hold."""
        window = self._progress.window
        return self.window == 1 and window.micro_batches == 0 and self._group() is None

    def _attach(
        self, op: str, slots: Slots, weight: Scalar, scale: LossScale, *, brought: bool
    ) -> None:
        """Take in one micro-batch and leave it in `.grad`, as the window's main gradients."""
        self._forget()
        progress, (parameters, grads) = self._progress, slots
        if self.on_nonfinite == "raise":
            self._raise_nonfinite(op, _present(parameters, grads), weight)
        unchecked = self.on_nonfinite == "skip_micro_batch"
        with record_function("accumext::accumulate"), torch.no_grad():
            progress.window.attach(
                parameters, grads, weight, scale, unchecked=unchecked, brought=brought
            )
            if brought:
                progress.watch.begin(parameters, self._leave_grad)

    def _leave_grad(self) -> None:
        """A backward pass of the user's is about to add to the window's gradients in `.grad`."""
        with self._atomic(), torch.no_grad():
            self._detach()

    @_disable_dynamo  # torch.compile cannot trace it, and is after the wrapped step alone
    def _take_pending(
        self,
        op: str,
        slots: Slots,
        scale: LossScale | None,
        found_inf: Tensor | None,
        foreign: Container[int],
        new: bool = False,
    ) -> Slots:
        """Take in what a backward pass of the user left in `.grad`, if anything.

        Args:
            slots: what lies there.
            new: only what no step has used.

        Returns:
            What lies there afterwards.
        """
        window, (parameters, there) = self._progress.window, slots
        if window.attachment is not None:
            if not window.attachment.is_where_it_was(there):
                window.refresh()
            return slots
        fresh = self._progress.consumed.fresh(there, new)
        if all(grad is None for grad in fresh):
            return slots
        self._refuse_while_reducing(op)
        self._warn_of_sums(op, fresh, scale)
        scale = self._own_scale(op) if scale is None else scale
        if self._attaches():
            self._attach(op, Slots(parameters, fresh), 1.0, scale, brought=False)
            if found_inf is not None and window.survivors is None:
                window.note(found_inf)
            return slots
        self._take(op, _present(parameters, fresh), 1.0, scale, foreign, found_inf)
        return self._slots()

    def _warn_of_sums(
        self, op: str, grads: Sequence[Tensor | None], outer_scale: LossScale | None
    ) -> None:
        """Say once that a window counts calls of `step`, where each may be meant to end one."""
        said = "sums" in self._progress.warned
        if said or self.window == 1 or outer_scale is not None:  # a GradScaler has written them all
            return
        if all(version is None or version > 0 for version in versions(grads)):
            self._warn_once(
                "sums",
                f"{op}: every gradient was added to, or changed, since autograd made it, and "
                f"window={self.window} counts this call of step as one micro-batch. Call step "
                "after every backward pass, not after every window; put several passes that are "
                "one micro-batch into `with opt.micro_batch():`; and leave the clip to max_norm",
            )

    def _raise_nonfinite(self, op: str, grads: dict[Tensor, Tensor], weight: Scalar) -> None:
        """With `on_nonfinite="raise"`, refuse a micro-batch that counts and is not finite."""
        counts = isinstance(weight, Tensor) or weight > 0.0
        if self.on_nonfinite != "raise" or not counts or not grads:
            return
        found_inf = zero_flag(next(iter(grads.values())).device)
        global_norm(list(grads.values()), norm_type=2.0, found_inf=found_inf)
        if bool(found_inf):
            names = self._names()
            mine = ", ".join(str(names[p]) for p in nonfinite(grads))
            got = f"inf or NaN in {mine or 'shards of other processes'}"
            raise RuntimeError(_checks.message(op, "gradients", "be finite", got))

    # Refusals

    def _refuse_inside_micro_batch(self, op: str) -> None:
        if self._progress.part is not None:
            raise RuntimeError(
                _checks.message(op, "the call", "be outside micro_batch()", "one inside")
            )

    def _refuse_while_reducing(self, op: str) -> None:
        progress = self._progress
        if progress.reduction is not None or progress.window.gathered is not None:
            contract = "come after step or discard"
            got = "one for a window that is summed over processes already"
            advice = "With reduce_in_backward=True a micro-batch has one backward pass"
            raise RuntimeError(_checks.message(op, "the call", contract, got, advice))

    def _refuse_closure_optimizer(self, op: str) -> None:
        if self._needs_closure:
            kind = type(self.optimizer).__name__
            advice = "Call loss.backward() in the closure, and opt.step(closure)"
            raise RuntimeError(
                _checks.message(op, "the optimizer", "step without a closure", kind, advice)
            )


def _present(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
    """The gradients of the parameters that have one."""
    pairs = zip(parameters, grads, strict=True)
    return {parameter: grad for parameter, grad in pairs if grad is not None}


def _users_level() -> int:
    """The `stacklevel` of the user's line, for a warning that the caller is to give."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("accumext", "contextlib", "torch")
