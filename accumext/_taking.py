"""What AccumulatingOptimizer does until a window closes: it takes micro-batches in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function
from torch.amp import GradScaler

from accumext import _checks, distributed
from accumext import _straight as straight
from accumext._arguments import OP
from accumext._gradients import HALF_DTYPES, nonfinite, zero_flag
from accumext._intake import Intake
from accumext._numbers import Scalar, known
from accumext._report import WindowReport
from accumext._window import UNSCALED, LossScale, Window
from accumext._wrapper import OptimizerWrapper

_USED = "_accumext_used"  # attribute of a gradient that a step has used: its version at that time

_grad_of = attrgetter("grad")


class Progress:
    """Everything that changes, in one object never rebound: Lightning clones what is around it."""

    def __init__(self) -> None:
        self.window = Window()
        self.last: WindowReport | None = None
        self.stepped = False
        self.accumulated = False  # since the last step: too late for an outer GradScaler
        self.part: Window | None = None  # inside micro_batch: its half-precision gradients so far
        self.part_weight: Scalar | None = None
        self.group: distributed.Group | None = None  # of the model given to micro_batch


class Taking(OptimizerWrapper):
    """The half of `AccumulatingOptimizer` that fills the window."""

    window: int
    max_norm: float | None
    norm_type: float
    scaler: GradScaler | None  # None also where it is disabled
    on_nonfinite: str
    reduction: str
    process_group: distributed.Group | None
    accumulate_in_backward: bool
    _needs_closure: bool
    _progress: Progress

    # Gradients in `.grad`

    def _lying(self) -> list[Tensor | None]:
        """`.grad` of every parameter."""
        return list(map(_grad_of, self._parameters()))

    def _grads(self) -> dict[Tensor, Tensor]:
        """Every gradient in `.grad`, but for the window's own."""
        parameters, window = self._parameters(), self._progress.window
        if window.attached:
            parameters = [p for p in parameters if p not in window.main]
        return {p: grad for p in parameters if (grad := p.grad) is not None}

    def _new_grads(self) -> dict[Tensor, Tensor]:
        """Those of them that no step has used."""
        return {p: grad for p, grad in self._grads().items() if not _is_used(grad)}

    def _clear_grads(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _forget(self) -> None:
        """Let go of the gradients that the last report may still be asked about."""
        if self._progress.last is not None:
            self._progress.last.forget()

    def _make_room(self) -> bool:
        """Before a backward pass, let go of what the last step left; is `.grad` empty then?"""
        self._forget()
        self._progress.window.detach()
        empty = True
        for parameter, grad in zip(self._parameters(), self._lying(), strict=True):
            if grad is None:
                continue
            if _is_used(grad):
                parameter.grad = None
            else:
                empty = False
        return empty

    def _mark_used(self, grads: Iterable[Tensor]) -> None:
        """Whatever lies there is nothing new, until somebody writes it."""
        for grad in grads:
            setattr(grad, _USED, grad._version)

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

    def _recognise_scale(self, window: Window) -> None:
        """Give a loaded window the key of the scale in force, if that is the one of its unit."""
        if self.scaler is not None and window.mains.tensors:
            device = window.mains.tensors[0].device
            self.scaler.scale(torch.zeros((), device=device))  # creates the scale if need be
            scale = self._own_scale(f"{OP}.load_accumulation_state_dict")
            if bool(scale.value == window.unit_scale.value):
                window.unit_scale = scale

    # Taking in

    def _take(self, op: str, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take in one micro-batch and empty `.grad`."""
        window = self._progress.window
        self._forget()
        self._raise_nonfinite(op, grads, weight)
        with record_function("accumext::accumulate"), torch.no_grad():
            window.detach()
            if self.on_nonfinite == "skip_micro_batch":
                window.take_if_finite(grads, weight, scale)
            else:
                window.take(grads, window.count(weight, scale))
            for parameter in grads:
                parameter.grad = None

    def _attaches(self) -> bool:
        """Whether the next micro-batch may stay in `.grad`: it is all that the window will hold."""
        return self.window == 1 and self._progress.window.micro_batches == 0

    def _attach(self, op: str, weight: Scalar, scale: LossScale) -> None:
        """Take in one micro-batch and leave it in `.grad`, as the window's main gradients."""
        self._forget()
        self._raise_nonfinite(op, self._grads(), weight)
        with record_function("accumext::accumulate"), torch.no_grad():
            self._progress.window.attach(self._parameters(), self._lying(), weight, scale)

    def _take_pending(self, op: str, scale: LossScale | None, found_inf: Tensor | None) -> None:
        """Take in what a backward pass of the user left in `.grad`, if anything."""
        window = self._progress.window
        if window.attached:
            if window.is_where_it_was(self._lying()):
                return
            window.refresh()
        grads = self._new_grads()
        if not grads:
            return
        scale = self._own_scale(op) if scale is None else scale
        if self._attaches():  # with what an earlier step used and nobody cleared: it adds up
            self._attach(op, 1.0, scale)
        else:
            self._take(op, grads, 1.0, scale)
        if found_inf is not None and window.survivors is None:
            window.note(found_inf)

    def _raise_nonfinite(self, op: str, grads: dict[Tensor, Tensor], weight: Scalar) -> None:
        """With `on_nonfinite="raise"`, refuse a micro-batch that counts and is not finite."""
        counts = isinstance(weight, Tensor) or weight > 0.0
        if self.on_nonfinite != "raise" or not counts or not grads:
            return
        found_inf = zero_flag(next(iter(grads.values())).device)
        distributed.total_norm(list(grads.values()), norm_type=2.0, found_inf=found_inf)
        if bool(found_inf):
            names = self._names()
            got = "inf or NaN in " + ", ".join(str(names[p]) for p in nonfinite(grads))
            raise RuntimeError(_checks.message(op, "gradients", "be finite", got))

    # Backward passes

    def _resident_factor(
        self, loss: Tensor, weight: Scalar, scale: LossScale, room: bool
    ) -> Scalar | None:
        """What to multiply the loss with so that autograd can add to the main gradients in place.

        That needs no memory for a second set of gradients. None where they have to be taken in
        afterwards: where they must be looked at, cast or rescaled, and under a GradScaler with
        another weight, as the ratio could overflow float16.
        """
        window = self._progress.window
        if (
            self.on_nonfinite != "skip_window"
            or not window.mains.tensors
            or window.unit_weight is None
            or (not isinstance(weight, Tensor) and weight == 0.0)
            or not room
            or window.mains.casts
            or not window.mains.dense
        ):
            return None
        factor = window.factor(weight, scale)
        if not isinstance(factor, Tensor) and factor == 1.0:
            return factor
        exact = loss.dtype in (torch.float32, torch.float64)
        return factor if self.scaler is None and exact else None

    def _backward_resident(
        self, loss: Tensor, factor: Scalar, weight: Scalar, scale: LossScale
    ) -> None:
        """Run a backward pass that adds to the main gradients themselves."""
        window = self._progress.window
        with self._dropping_the_window(window):
            window.mains.lend()
            if isinstance(factor, Tensor) or factor != 1.0:
                loss = loss * (factor.to(loss) if isinstance(factor, Tensor) else factor)

            def destination(parameter: Tensor) -> straight.Destination | None:
                main = window.main.get(parameter) if straight.expected(parameter) else None
                return None if main is None else straight.Destination(main, 1.0)

            with straight.offering(destination):
                loss.backward()
            with record_function("accumext::accumulate"), torch.no_grad():
                window.count(weight, scale)
                window.take_back(self._parameters(), self._lying())
                self._clear_grads()

    def _backward_then_take(self, op: str, loss: Tensor, weight: Scalar, scale: LossScale) -> None:
        """Run a backward pass, then take in the gradients that lie in `.grad`."""
        try:
            loss.backward()
            if self._attaches():
                self._attach(op, weight, scale)
            else:
                self._take(op, self._grads(), weight, scale)
        except BaseException:
            self._clear_grads()
            raise

    def _backward_taking(self, op: str, loss: Tensor, weight: Scalar, scale: LossScale) -> None:
        """Run a backward pass that hands every gradient over as soon as it is complete."""
        window = self._progress.window
        with self._dropping_the_window(window):
            before = window.mains
            factor = window.count(weight, scale)

            def take(grads: dict[Tensor, Tensor]) -> None:
                with record_function("accumext::accumulate"), torch.no_grad():
                    window.take(grads, factor)

            mine = set(self._parameters())
            straight.mark(mine)
            offered = {parameter for parameter in mine if straight.expected(parameter)}

            def destination(parameter: Tensor) -> straight.Destination | None:
                main = window.destination(parameter) if parameter in offered else None
                return None if main is None else straight.Destination(main, factor)

            with Intake(op, take).watching(mine), straight.offering(destination):
                loss.backward()
            take(self._grads())
            self._clear_grads()
            window.in_order = window.in_order and window.mains is before

    def _backward_part(self, op: str, loss: Tensor) -> None:
        """Inside micro_batch: run a backward pass, and take out half gradients: see `_gather`."""
        halves = [p for p in self._parameters() if p.dtype in HALF_DTYPES]
        watched = halves if self.accumulate_in_backward else []
        with Intake(op, self._gather).watching(watched):
            loss.backward()
        self._gather_part()

    @contextmanager
    def _dropping_the_window(self, window: Window) -> Iterator[None]:
        """An exception inside drops the window, and says so: gradients were added to it."""
        held = window.micro_batches > 0
        try:
            yield
        except BaseException as error:
            self._clear_grads()
            self._progress.window = Window()
            if held:
                _explain(error, f"{OP}.backward: the open window was dropped: it had been added to")
            raise

    def _gather(self, halves: dict[Tensor, Tensor]) -> None:
        """Inside micro_batch: add half gradients up in float32, as `.grad` could not."""
        part = self._progress.part
        assert part is not None
        with torch.no_grad():
            part.take(halves, 1.0)

    def _gather_part(self) -> None:
        """Inside micro_batch: gather the half gradients that lie in `.grad`."""
        halves = {p: grad for p, grad in self._grads().items() if p.dtype in HALF_DTYPES}
        self._gather(halves)
        for parameter in halves:
            parameter.grad = None

    def _check_part_weight(self, op: str, weight: Scalar) -> None:
        """Inside micro_batch: one weight for all calls, as far as the host can see."""
        progress = self._progress
        first = weight if progress.part_weight is None else progress.part_weight
        progress.part_weight = first
        if isinstance(first, Tensor) or isinstance(weight, Tensor) or first == weight:
            return
        contract = f"be that of the whole micro-batch, {first:g}"
        _checks.fail_value(op, "weight", contract, weight)

    # Refusals

    def _refuse_inside_micro_batch(self, op: str) -> None:
        if self._progress.part is not None:
            raise RuntimeError(
                _checks.message(op, "the call", "be outside micro_batch()", "one inside")
            )

    def _refuse_closure_optimizer(self, op: str) -> None:
        if self._needs_closure:
            kind = type(self.optimizer).__name__
            advice = "Call loss.backward() in the closure, and opt.step(closure)"
            raise RuntimeError(
                _checks.message(op, "the optimizer", "step without a closure", kind, advice)
            )


def _is_used(grad: Tensor) -> bool:
    """Whether a step has used this gradient and nobody has written it since."""
    return getattr(grad, _USED, None) == grad._version


def _explain(error: BaseException, note: str) -> None:
    """Add a sentence to an exception on its way out."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        raise RuntimeError(note) from error
