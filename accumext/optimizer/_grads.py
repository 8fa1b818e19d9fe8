"""The gradients in `.grad` of an optimizer's parameters, and those of them that a step has used.

Nothing is marked: a gradient that a user writes through `.data`, assigns a second time, shares with
another parameter or fills by replaying a captured graph is a gradient like any other.
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
    """Return the present `.grad` of each."""
    return list(map(grad_of, parameters))


def present(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """Those that are there."""
    return [grad for grad in grads if grad is not None]


def set_grads(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set `.grad` of each."""
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad


def clear_grads(parameters: Iterable[Tensor]) -> None:
    """Empty `.grad`."""
    for parameter in parameters:
        parameter.grad = None


def clear_these(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Empty `.grad` of the parameters that had one of these gradients."""
    for parameter, grad in zip(parameters, grads):
        if grad is not None:
            parameter.grad = None


class ConsumedGrads(NamedTuple):
    """The gradients that the last step found, or `zero_grad` left, in `.grad`, as they were then.

    Those that the wrapper's own `backward` made (`ours`) are used up: the next `backward` clears
    them, and `step` passes them over. Any other gradient is used by every `step` that finds it, as
    by a bare optimizer; only `flush`, which a bare one does not have, asks whether it is new.
    """

    seen: Sequence[ReferenceType[Tensor] | None] = ()  # weakly: the memory is the user's to free
    versions: Sequence[int | None] = ()  # a gradient that was written since counts as new
    ours: Sequence[bool] = ()  # empty: all False
    # Those of ours that may lie in buckets of DistributedDataParallel. Its forward pass may copy
    # them into other buckets, to which it sets `.grad`: only the values tell them then.
    in_buckets: Sequence[Tensor | None] = ()

    def after(
        self,
        grads: Sequence[Tensor | None],  # in `.grad` now
        ours: Sequence[bool] = (),  # where the step was given what the wrapper's backward had made
    ) -> ConsumedGrads:
        """Record the present gradients as used. None was used up before: steps clear those."""
        weakly = [None if grad is None else ref(grad) for grad in grads]
        known = [grad if mine else None for grad, mine in zip(grads, ours)]
        buckets = (
            dist.is_available() and dist.is_initialized() and any(map(is_view, present(known)))
        )
        return ConsumedGrads(weakly, versions(grads), ours, known if buckets else ())

    def after_writes(
        self, grads: Sequence[Tensor | None], between: Sequence[int | None]
    ) -> ConsumedGrads:
        """The same where these were written twice since, alike, and hold what they did: their
        versions between the writes tell how many one counts."""
        rows = zip(self.versions, between, versions(grads), strict=False)
        known = [
            now if now is not None and mid is not None and old == 2 * mid - now else old
            for old, mid, now in rows
        ]
        return self._replace(versions=known)

    def unchanged(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Tell which of these were there, and were not seen to be written since."""
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
        """Tell which of these no step takes again."""
        if not any(self.ours):
            return [False] * len(grads)
        ours = [*self.ours, *[False] * (len(grads) - len(self.ours))]
        return [mine and same for mine, same in zip(ours, self.unchanged(grads))]

    def __reduce__(self) -> tuple[Any, ...]:
        return ConsumedGrads, ()  # copies come without `.grad`


def _unchanged_or_moved(unchanged: bool, known: Tensor | None, grad: Tensor | None) -> bool:
    """Tell whether a gradient is what it was, if need be in other memory."""
    if unchanged or known is None or grad is None or known is grad:
        return unchanged
    if (known.shape, known.dtype, known.device) != (grad.shape, grad.dtype, grad.device):
        return False
    with torch.no_grad():
        return torch.allclose(known, grad, 0.0, 0.0, equal_nan=True)


# Of optimizers that have ended: what they had used up and left in `.grad` of a parameter, by the id
# of that, while it exists.
GONE = dict[int, tuple[ReferenceType[Tensor], ReferenceType[Tensor], int | None]]()


def note_gone(used: ConsumedGrads, parameters: Sequence[Tensor]) -> None:
    """Remember what an optimizer of these parameters leaves that ends."""
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
    """Tell which of these the wrapper's own `backward` made, and a step of any, or of one that has
    ended, has used."""
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
    """The gradients in `.grad` that no step has used up.

    Args:
        new: nor used at all.
    """
    grads = grads_of(parameters)
    if not used.seen or all(map(is_none, grads)):
        return grads
    gone = used.unchanged(grads) if new else used.used_up(grads)
    return [None if old else grad for old, grad in zip(gone, grads, strict=True)]
