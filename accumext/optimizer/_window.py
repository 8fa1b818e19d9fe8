"""A window of micro-batches, and all that changes in an optimizer, as values that nobody writes."""

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
    """Where a window is. `Engine.refuse` has the table of what cannot be called then."""

    EMPTY = auto()
    OPEN = auto()  # the sums are its own
    IN_GRAD = auto()  # the sums are what lies in `.grad`, whoever writes there: a window of one
    INSIDE = auto()  # of `micro_batch()`
    SENDING = auto()  # its sums are on their way to other processes
    SUMMED = auto()  # over all processes, and not stepped on


class Window(NamedTuple):
    """Sums of gradients, and the numbers that say what they are the sums of."""

    parameters: Sequence[Tensor] = ()
    sums: Sequence[Tensor | None] = ()  # None: no gradient yet. IN_GRAD: what `backward` has made
    ledger: Ledger = Ledger()
    phase: Phase = Phase.OPEN
    norm: Tensor | None = None  # 2-norm of the sums, if the last pass over all of them found it
    autograd_adds: bool = True  # to the sums themselves: each is of its parameter's dtype
    left_out: tuple[Tensor, ...] = ()  # parameters whose gradient was not finite, if known here
    unreduced: bool = False  # gradients of a model that has not synchronised them

    def of(self, parameters: Sequence[Tensor]) -> Window:
        """Bring the sums into the order of these: the optimizer's parameters may have changed."""
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
        """The same without sums, for those that lie in `.grad`."""
        return self._replace(phase=Phase.OPEN, sums=(), parameters=()).of(parameters)

    def out_of_grad(self, parameters: Sequence[Tensor]) -> Window:
        """As it is without `.grad`: its sums are the gradients that lie there."""
        if self.phase is not Phase.IN_GRAD:
            return self.of(parameters)
        pairs = zip(parameters, grads_of(parameters), strict=True)
        sums = [None if g is None else g.detach().to(main_dtype(p)) for p, g in pairs]
        return self.opened(parameters)._replace(sums=sums)


NO_WINDOW = Window()


class OpenMicroBatch(NamedTuple):
    """The micro-batch between entry and exit of `micro_batch()`."""

    weight: Scalar | None = None  # of all backward calls, once there was one
    ratio: Scalar = 1.0  # weight / base_weight
    part: Window | None = None  # its gradients, if they are looked at before they are added
    failed: bool = False  # a backward pass did not come to its end
    before: int = 0  # micro-batches that the window held before it
    key: object = None  # the same for all parts of one micro-batch


class OtherPass(NamedTuple):
    """The gradients of this optimizer's parameters that a backward pass of another wrapper made.

    They are kept out of `.grad`, since this one would take them for its own: `accumulate` takes
    them, and whatever else brings it a gradient goes on without them.
    """

    parameters: Sequence[Tensor]
    grads: Sequence[Tensor | None]  # of the loss times `factor`
    weight: Scalar  # of the loss
    factor: Scalar  # of the loss: its loss scale, and its weight as far as that was carried
    loss_scale: Scalar
    group: Group | None  # over which the other one sums its window: these are not synchronised
    key: object  # of the micro-batch that the pass is a part of; None if it is all of one
    several: bool  # it followed another one, which was not taken either
    partly: bool  # the other one holds more of these parameters, and took their gradients


class State(NamedTuple):
    """Everything that changes from call to call."""

    window: Window = NO_WINDOW
    consumed: ConsumedGrads = ConsumedGrads()  # what a step has used and left in `.grad`
    micro_batch: OpenMicroBatch | None = None  # inside micro_batch()
    sending: Any = None  # the sum over processes that the window is on its way into
    last: WindowReport | None = None
    stepped: bool = False
    accumulated: bool = False  # since the last step: too late for an outer GradScaler
    through_backward: bool = False  # the latest micro-batch came through `backward`
    saved: int = 0  # micro-batches of the window that are in a checkpoint, or another's
    other_pass: OtherPass | None = None  # that this optimizer has not taken
    earlier_scale: tuple[ConsumedGrads, Scalar] | None = (
        None  # of what lies in `.grad`, see `note_scale`
    )

    @property
    def micro_batches(self) -> int:
        """How many the open window holds."""
        return self.window.ledger.micro_batches

    @property
    def in_grad(self) -> bool:
        """Tell whether the window is what lies in `.grad`."""
        return self.window.phase is Phase.IN_GRAD

    def phases(self) -> list[Phase]:
        """Return what holds of the window: INSIDE may come with another phase."""
        found = [] if self.micro_batch is None else [Phase.INSIDE]
        if self.sending is not None:
            return [*found, Phase.SENDING]
        if self.micro_batches == 0 and self.window.phase is Phase.OPEN:
            return [*found, Phase.EMPTY]
        return [*found, self.window.phase]
