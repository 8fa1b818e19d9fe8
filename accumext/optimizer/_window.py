"""A window of micro-batches, and the whole state of an optimizer, as immutable values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from accumext.optimizer._grads import ConsumedGrads, grads_of
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._report import WindowReport
from accumext.tensors.kinds import Group, any_half, main_dtype
from accumext.tensors.scalars import Scalar


class Phase(Enum):
    """The phase of a window. `_engine._REFUSED` lists the methods that it forbids."""

    OPEN = auto()  # its sums are tensors of its own; it may be empty
    IN_GRAD = auto()  # its sums are the tensors in `.grad`, whoever writes them: a window of one
    INSIDE = auto()  # the call is inside `micro_batch()`
    SENDING = auto()  # its sums are being sent to other processes
    SUMMED = auto()  # its sums are those of all processes, and no step has used them


class Window(NamedTuple):
    """Sums of gradients, and the numbers that say what they are the sums of."""

    parameters: Sequence[Tensor] = ()
    sums: Sequence[Tensor | None] = ()  # None: no gradient yet. IN_GRAD: those `backward` computed
    ledger: Ledger = Ledger()
    phase: Phase = Phase.OPEN
    norm: Tensor | None = None  # 2-norm of the sums, if the last pass over all of them computed it
    autograd_adds: bool = True  # autograd can add to the sums: each has its parameter's dtype
    left_out: tuple[Tensor, ...] = ()  # parameters whose gradient was not finite, if known here
    unreduced: bool = False  # the sums are of gradients that their model has not synchronised

    def of(self, parameters: Sequence[Tensor]) -> Window:
        """Return the window with its sums in the order of these parameters, since those of the
        optimizer may have changed."""
        before = self.parameters
        if self.phase is Phase.IN_GRAD or (
            len(before) == len(parameters) and all(map(is_, before, parameters))
        ):
            return self
        known = {id(p): main for p, main in zip(before, self.sums, strict=True)}
        return self._replace(
            parameters=parameters,
            sums=[known.get(id(p)) for p in parameters],
            autograd_adds=not any_half(parameters),
            norm=None,
        )

    def opened(self, parameters: Sequence[Tensor]) -> Window:
        """Return an open window with these numbers, and without sums, which are in `.grad`."""
        return self._replace(phase=Phase.OPEN, sums=(), parameters=()).of(parameters)

    def out_of_grad(self, parameters: Sequence[Tensor]) -> Window:
        """Return the window with its sums in `sums`. Those of phase IN_GRAD share memory with the
        gradients in `.grad`, if they have the dtype of a sum."""
        if self.phase is not Phase.IN_GRAD:
            return self.of(parameters)
        pairs = zip(parameters, grads_of(parameters), strict=True)
        sums = [None if g is None else g.detach().to(main_dtype(p)) for p, g in pairs]
        return self.opened(parameters)._replace(sums=sums)


NO_WINDOW = Window()


class OpenMicroBatch(NamedTuple):
    """The micro-batch between entry and exit of `micro_batch()`."""

    weight: Scalar | None = None  # of all its `backward` calls, once there was one
    ratio: Scalar = 1.0  # weight / base_weight
    part: Window | None = None  # its gradients, if they are checked before they are added
    failed: bool = False  # a backward pass did not come to its end
    before: int = 0  # micro-batches that the window held before it
    key: object = None  # identifies it to other wrappers, which its passes may reach


class OtherPass(NamedTuple):
    """Gradients of this optimizer's parameters that a backward pass of another wrapper computed.

    They are kept out of `.grad`, since this one would take them for its own. `accumulate` adds
    them; any other call that adds gradients drops them.
    """

    parameters: Sequence[Tensor]
    grads: Sequence[Tensor | None]  # of the loss times `factor`
    weight: Scalar  # of the loss
    factor: Scalar  # of the loss: its loss scale, times its weight if the loss was multiplied by it
    loss_scale: Scalar
    group: Group | None  # over which the other one sums its window: these are not synchronised
    key: object  # of the micro-batch that the pass is a part of; None if it is all of one
    several: bool  # it followed another such pass, which was not added either
    partly: bool  # some of these parameters are also the other one's, which has their gradients


class State(NamedTuple):
    """The gradients, and the report of the last window, which calls replace. Warnings that were
    given, and what the reducer knows of other processes, are not in it."""

    window: Window = NO_WINDOW
    consumed: ConsumedGrads = ConsumedGrads()  # gradients a step has used and left in `.grad`
    micro_batch: OpenMicroBatch | None = None  # inside micro_batch()
    sending: Any = None  # the `Sending` of a window that is being summed over processes
    last: WindowReport | None = None
    stepped: bool = False  # the latest `step` or `flush` has closed a window
    accumulated: bool = False  # since the last step, before an outer GradScaler could see
    through_backward: bool = False  # the latest micro-batch came through `backward`
    saved: int = 0  # micro-batches of the window that a checkpoint, or the copied optimizer, holds
    other_pass: OtherPass | None = None  # that this optimizer has not added
    # Gradients that wait in `.grad`, and their loss scale if it is not the present one.
    earlier_scale: tuple[ConsumedGrads, Scalar] | None = None

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in the open window."""
        return self.window.ledger.micro_batches

    @property
    def in_grad(self) -> bool:
        """Tell whether the window's sums are the tensors in `.grad`."""
        return self.window.phase is Phase.IN_GRAD

    def phases(self) -> list[Phase]:
        """Return the phases of the window: one, and INSIDE before it inside `micro_batch()`."""
        found = [] if self.micro_batch is None else [Phase.INSIDE]
        return [*found, self.window.phase if self.sending is None else Phase.SENDING]
