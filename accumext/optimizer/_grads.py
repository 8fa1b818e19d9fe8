"""The gradients in `.grad` of an optimizer's parameters, and which of them a step has used.

Gradient tensors are not marked, so users may write them through `.data`, assign one twice, share
one among parameters, or fill one by replaying a captured graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from accumext.tensors.kinds import versions
from accumext.tensors.torch_private import is_view

grad_of = attrgetter("grad")
is_none = partial(is_, None)


def grads_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return `.grad` of each parameter."""
    return list(map(grad_of, parameters))


def present(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [grad for grad in grads if grad is not None]


def set_grads(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set `.grad` of each parameter."""
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad


def clear_grads(parameters: Iterable[Tensor]) -> None:
    """Set `.grad` of each parameter to None."""
    for parameter in parameters:
        parameter.grad = None


def clear_these(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set `.grad` to None for parameters whose entry in `grads` is not None."""
    for parameter, grad in zip(parameters, grads):
        if grad is not None:
            parameter.grad = None


class ConsumedGrads(NamedTuple):
    """The gradients that were in `.grad` at the last step or `zero_grad`, as they were then.

    Those that the wrapper's own `backward` computed (`ours`) are used up: the next `backward`
    clears them, and `step` ignores them. Any other gradient is used by every `step`, as by a bare
    optimizer; only `flush`, which a bare one does not have, asks whether it is new.
    """

    seen: Sequence[ReferenceType[Tensor] | None] = ()  # weakly: the memory is the user's to free
    versions: Sequence[int | None] = ()  # a gradient that was written since counts as new
    ours: Sequence[bool] = ()  # empty: all False
    # Gradients of `ours` that may be views of buckets of DistributedDataParallel. Its forward pass
    # may copy them into other buckets and set `.grad` to those: then only values identify them.
    in_buckets: Sequence[Tensor | None] = ()

    @staticmethod
    def after(
        grads: Sequence[Tensor | None],  # in `.grad` now
        ours: Sequence[bool] = (),  # whether the wrapper's backward computed the step's gradient
    ) -> ConsumedGrads:
        """Return a record of these gradients as used, in place of any earlier record."""
        there: Any = grads
        if any(map(is_none, grads)):
            seen = [None if grad is None else ref(grad) for grad in grads]
        else:
            seen = list(map(ref, there))
        known: list[Tensor | None] = []
        if dist.is_available() and dist.is_initialized():
            known = [grad if mine else None for grad, mine in zip(grads, ours)]
            if not any(map(is_view, present(known))):
                known = []
        return ConsumedGrads(seen, versions(grads), ours, known)

    def after_writes(
        self, grads: Sequence[Tensor | None], between: Sequence[int | None]
    ) -> ConsumedGrads:
        """Return the record after two writes that restored the gradients' values, so that these
        still count as used. `between` are their versions between the two writes."""
        rows = zip(self.versions, between, versions(grads), strict=False)
        known = [
            now if now is not None and mid is not None and old == 2 * mid - now else old
            for old, mid, now in rows
        ]
        return self._replace(versions=known)

    def holds(self, grads: Sequence[Tensor | None]) -> bool:
        """Tell whether all of these gradients are in the record, and none was written since."""
        now = [None if seen is None else seen() for seen in self.seen]
        same = len(now) == len(grads) and all(map(is_, now, grads))
        return same and versions(grads) == self.versions

    def unchanged(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Tell which of these gradients are in the record, and were not written since."""
        if not self.seen:
            return [False] * len(grads)
        rows = zip(self.seen, self.versions, grads, versions(grads))
        flags = [
            grad is not None and seen is not None and seen() is grad and before == now
            for seen, before, grad, now in rows
        ]
        if self.in_buckets and not all(flags):
            flags = list(map(_unchanged_or_moved, flags, self.in_buckets, grads))
        return flags + [False] * (len(grads) - len(flags))

    def used_up(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Tell which of these gradients no step uses again."""
        if not any(self.ours):
            return [False] * len(grads)
        ours = [*self.ours, *[False] * (len(grads) - len(self.ours))]
        return [mine and same for mine, same in zip(ours, self.unchanged(grads))]

    def __reduce__(self) -> tuple[Any, ...]:
        return ConsumedGrads, ()  # copies come without `.grad`


def _unchanged_or_moved(unchanged: bool, known: Tensor | None, grad: Tensor | None) -> bool:
    """Tell whether a gradient is unchanged, or has its old values in other memory."""
    if unchanged or known is None or grad is None or known is grad:
        return unchanged
    if (known.shape, known.dtype, known.device) != (grad.shape, grad.dtype, grad.device):
        return False
    with torch.no_grad():
        return torch.allclose(known, grad, 0.0, 0.0, equal_nan=True)


# Gradients that deleted optimizers had used up and left in `.grad`: by the id of a parameter, while
# it exists, the parameter, the gradient and its version.
GONE = dict[int, tuple[ReferenceType[Tensor], ReferenceType[Tensor], int | None]]()


def note_gone(used: ConsumedGrads, parameters: Sequence[Tensor]) -> None:
    """Record in GONE the used-up gradients of an optimizer that is being deleted."""
    for parameter, seen, version, mine in zip(parameters, used.seen, used.versions, used.ours):
        if mine and seen is not None and seen() is not None:
            key = id(parameter)
            GONE[key] = ref(parameter, partial(_forget, key)), seen, version


def _forget(key: int, _: object) -> None:
    GONE.pop(key, None)


def used_up_by(
    several: Iterable[tuple[ConsumedGrads, Sequence[Tensor]]],  # with the parameters of each
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],  # of these
) -> list[bool]:
    """Tell which of these gradients one of several wrappers, or a deleted one, has used up: its own
    `backward` computed them, and its step used them."""
    known = {(key, id(seen())): version for key, (_, seen, version) in GONE.items()}
    for used, held in several:
        for p, seen, version, mine in zip(held, used.seen, used.versions, used.ours):
            if mine and seen is not None:
                known[id(p), id(seen())] = version
    rows = zip(zip(map(id, parameters), map(id, grads)), grads, versions(grads), strict=True)
    return [g is not None and key in known and known[key] == now for key, g, now in rows]


def fresh(
    parameters: Sequence[Tensor], used: ConsumedGrads, *, new: bool = False
) -> list[Tensor | None]:
    """Return the gradients in `.grad` that no step has used up, and None in place of the others.

    Args:
        new: leave out every gradient that a step has used, also those of the user's own passes.
    """
    grads = grads_of(parameters)
    if not used.seen or all(map(is_none, grads)):
        return grads
    gone = used.unchanged(grads) if new else used.used_up(grads)
    return [None if old else grad for old, grad in zip(gone, grads, strict=True)]
