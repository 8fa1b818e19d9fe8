"""What `.grad` of an optimizer's parameters holds, and what of it the last step has consumed.

Nothing is marked: a gradient that a user writes through `.data`, assigns a second time, shares with
another parameter or fills by replaying a captured graph is a gradient like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import and_, attrgetter, eq, is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from accumext._torch_private import not_compiled, write_count

grad_of = attrgetter("grad")
is_none = partial(is_, None)


class GradSlots(NamedTuple):
    """An optimizer's parameters, and what `.grad` of each held at one moment."""

    parameters: list[Tensor]
    grads: list[Tensor | None]

    @classmethod
    def of(cls, parameters: list[Tensor]) -> GradSlots:
        """As they are now."""
        return cls(parameters, list(map(grad_of, parameters)))

    def present(self) -> dict[Tensor, Tensor]:
        """The gradients of the parameters that had one."""
        pairs = zip(self.parameters, self.grads, strict=True)
        return {parameter: grad for parameter, grad in pairs if grad is not None}

    def lend(self, grads: Sequence[Tensor | None]) -> None:
        """Put these into `.grad`, where they differ from what it held."""
        for parameter, mine, grad in zip(self.parameters, grads, self.grads, strict=True):
            if mine is not grad:
                parameter.grad = mine

    def take_back(self, lent: Sequence[Tensor | None]) -> None:
        """Undo `lend` wherever `.grad` still holds what was lent."""
        for parameter, mine, grad in zip(self.parameters, lent, self.grads, strict=True):
            if mine is not grad and parameter.grad is mine:
                parameter.grad = grad

    def clear(self) -> None:
        """Empty `.grad` of the parameters that had a gradient."""
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            if grad is not None:
                parameter.grad = None

    def restore(self) -> None:
        """Put back what `.grad` held."""
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad


def clear(parameters: Iterable[Tensor]) -> None:
    """Empty `.grad`."""
    for parameter in parameters:
        parameter.grad = None


def zero_grads(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """What `Optimizer.zero_grad` does, for parameters that are not the optimizer's own."""
    for parameter in parameters:
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad = parameter.grad.detach().zero_()


def contents_of(grads: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Gradients with copies of their values."""
    return [(grad, grad.detach().clone()) for grad in grads]


@torch.no_grad()
def write_contents(contents: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the gradients the values they had."""
    for grad, values in contents:
        grad.copy_(values)


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """How often each tensor has been written, as far as autograd was told; None without a count."""
    try:
        return list(map(write_count, tensors))
    except (AttributeError, RuntimeError):  # a missing tensor, or one made in inference mode
        return [None if t is None or t.is_inference() else write_count(t) for t in tensors]


class ConsumedGrads:
    """The gradients that the last step left in `.grad`, as they were then.

    Gradients that the wrapper's own `backward` produced are consumed by a step: the next `backward`
    clears them, and `step` skips them. Any other gradient is used by every `step` that finds it, as
    by a bare optimizer; only `flush`, which a bare one does not have, asks whether it is new.
    """

    @not_compiled  # it would compile anew for every gradient
    def __init__(
        self,
        grads: Sequence[Tensor | None] = (),  # of the optimizer's parameters, in their order
        produced: Sequence[Tensor | None] = (),  # those of them that the wrapper's backward made
    ) -> None:
        # Weakly: the memory is the user's to free.
        self._seen = [None if grad is None else ref(grad) for grad in grads]
        self._versions = versions(grads)  # a gradient written since counts as new
        self._produced = list(map(is_, grads, produced))  # empty where none was
        self.any_produced = bool(produced)  # whether `fresh` may leave anything out

    def unchanged(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Which of these were there at that step, and were not seen to be written since."""
        if not self._seen:
            return [False] * len(grads)
        same = [r is not None and r() is grad for r, grad in zip(self._seen, grads, strict=False)]
        unwritten = map(eq, self._versions, versions(grads))
        flags = list(map(and_, same, unwritten))
        return flags + [False] * (len(grads) - len(flags))

    def consumed(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Which of these no step takes again."""
        if not self._produced:
            return [False] * len(grads)
        rest = [False] * (len(grads) - len(self._produced))
        return list(map(and_, self.unchanged(grads), self._produced + rest))

    def fresh(self, slots: GradSlots, new: bool = False) -> GradSlots:
        """The same without consumed gradients; if `new`, without any that a step has used."""
        if not (self._seen if new else self._produced):
            return slots
        parameters, grads = slots
        flags = self.unchanged(grads) if new else self.consumed(grads)
        pairs = zip(flags, grads, strict=True)
        return GradSlots(parameters, [None if flag else grad for flag, grad in pairs])

    def after(
        self, grads: Sequence[Tensor | None], produced: Sequence[Tensor | None] | None
    ) -> ConsumedGrads:
        """What is consumed after a step on gradients of the wrapper's backward (None: of others).

        Gradients consumed earlier, and skipped by this step, stay consumed.
        """
        if produced is None and not self._produced:
            return ConsumedGrads(grads)
        if produced is not None and len(produced) == len(grads) and all(map(is_, produced, grads)):
            return ConsumedGrads(grads, grads)
        new = [None] * len(grads) if produced is None else produced
        triples = zip(self.consumed(grads), grads, new, strict=True)
        return ConsumedGrads(grads, [grad if used else mine for used, grad, mine in triples])

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_seen": [],
            "_versions": [],
            "_produced": [],
            "any_produced": False,
        }  # copies come without `.grad`


class AttachedGrads(NamedTuple):
    """A window's main gradients while `.grad` holds them, for the user to see."""

    parameters: Sequence[Tensor]  # all: what a user puts into `.grad` belongs to the window
    grads: Sequence[Tensor | None]
    produced: bool  # by the wrapper's own backward pass

    def are_in(self, slots: GradSlots) -> bool:
        """Whether `.grad` of every parameter is still the same tensor."""
        grads = slots.grads
        return len(grads) == len(self.grads) and all(map(is_, self.grads, grads))
