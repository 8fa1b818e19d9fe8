"""What the micro-batches of a window weigh in its gradient, in every way in which that can be read.

A loss is a mean, or a sum of so many targets, or neither is known; it was multiplied with constants
on its way to the root of its pass. So "the gradient is c times the mean" has several readings. A
loop is right if one of them gives 1 in all its windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from accumext.auditing._events import Call, Loss, Pass, View, Window
from accumext.auditing._fit import Fit, Part, fits

_SAME = 1e-2  # relative difference of what counts as equal


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME)


def alike(values: Iterable[float]) -> bool:
    """Whether all are the same."""
    listed = list(values)
    return all(same(listed[0], value) for value in listed)


def main_losses(one: Pass) -> tuple[Loss, ...]:
    """The losses that a pass is about: torch's own, else means, else what there is."""
    known = tuple(loss for loss in one.losses if loss.known)
    means = tuple(loss for loss in one.losses if loss.reduction == "mean")
    return known or means or one.losses


def loss_weight(part: Part) -> float | None:
    """The weight of a pass's losses in the gradient, as means; None where it is not known. Signs
    are the losses' own."""
    losses = main_losses(part.of)
    unknown = any(loss.reduction == "sum" and loss.count is None for loss in losses)
    if unknown or not part.of.scalar or not losses:
        return None
    # A sum that counts nothing would still be divided by 1.
    of_sums = [max(loss.count or 0.0, 1.0) if loss.reduction == "sum" else 1.0 for loss in losses]
    weights = [abs(loss.coefficient) * n for loss, n in zip(losses, of_sums, strict=True)]
    return abs(part.factor) * sum(weights)


def count(one: Pass) -> float | None:
    """The targets that a pass counts; None where a loss does not say."""
    counts = [loss.count for loss in main_losses(one)]
    return None if None in counts else sum(n for n in counts if n is not None)


def nodes_of(part: Part) -> set[tuple[int, int]]:
    return {(part.rank, loss.node) for loss in main_losses(part.of)}


@dataclass(frozen=True)
class Sum:
    """The passes of one kind in a window's gradient."""

    fit: Fit
    kind: str  # the line of their backward passes
    parts: tuple[Part, ...]

    @property
    def window(self) -> Window:
        return self.fit.window

    @property
    def size(self) -> int:
        """Micro-batches of a process, as the parameter sees them that gets most."""
        reached = Counter(number for part in self.parts for number in part.of.reached)
        most = max(reached.values(), default=len(self.parts))
        return most // len({part.rank for part in self.parts})

    @property
    def given(self) -> list[float]:
        """What the losses were multiplied with, before and after the pass."""
        return [abs(part.of.coefficient * part.factor) for part in self.parts]

    def weights(self) -> list[float]:
        """Those of the losses, where they are known."""
        known = [loss_weight(part) for part in self.parts]
        return [weight for weight in known if weight is not None]

    def counts(self) -> list[float]:
        """Targets of each micro-batch, where they are known."""
        known = [count(part.of) for part in self.parts]
        return [n for n in known if n is not None]

    def _losses(self) -> list[Loss]:
        return [loss for part in self.parts for loss in main_losses(part.of)]

    @property
    def sums(self) -> bool:
        """Whether all losses are sums."""
        return all(loss.reduction == "sum" for loss in self._losses())

    @property
    def judged(self) -> bool:
        """Whether it is known what the losses are, or that each is one number."""
        return len(self.weights()) == len(self.parts)

    @property
    def certain(self) -> bool:
        """Whether it is known what the losses are: a function of one's own may divide inside."""
        return self.judged and all(loss.known or loss.reduction for loss in self._losses())

    def is_uniform(self) -> bool:
        """Whether all micro-batches, or all targets, have one weight."""
        weights, counts = self.weights(), self.counts()
        if alike(self.given) or not self.judged:
            return alike(self.given)
        per_target = len(counts) == len(weights) and all(counts) and all(weights)
        return alike(weights) or (
            per_target and alike(w / n for w, n in zip(weights, counts, strict=True))
        )

    def readings(self, own_clip: float = 1.0) -> dict[str, float]:
        """The factor over the mean of the losses, the likeliest reading first: 1 for a right loop
        in one of them at least. `own_clip`: what the loop has scaled the sum with."""
        found, number = dict[str, float](), len(self.parts)
        if self.judged:
            total, losses = sum(self.weights()), len(self._losses())
            found = {"losses": total, "a loss of many": total * number / losses}
            if self.sums and len(self.counts()) == number and any(self.counts()):
                found["targets"] = total / sum(self.counts())
            steps = losses / number  # whose mean the loss of a pass is, or their sum
            constants = [c.value for part in self.parts for c in part.of.constants]
            if not self.sums and not (steps > 1 and any(same(c, 1 / steps) for c in constants)):
                found = {"given": sum(self.given), **found}
            found["given"] = sum(self.given)
            pairs = zip(self.weights(), self.parts, strict=True)
            found["losses that count"] = sum(w for w, part in pairs if count(part.of) != 0)
        chains = [part.of.constants for part in self.parts]
        if len(set(map(len, chains))) == 1 and all(part.of.scalar for part in self.parts):
            # A constant of the loss's own may stand beside the division.
            for place, column in enumerate(zip(*chains, strict=True)):
                factors = [part.factor * part.of.scale for part in self.parts]
                value = sum(c.value * f for c, f in zip(column, factors, strict=True))
                ones = all(same(c.value, 1.0) for c in column)
                if not ones and (len(chains[0]) > 1 or not self.judged):
                    found[f"constant {place}"] = abs(value)
        return {name: value / own_clip for name, value in found.items()}


def own_clips(sums: Sequence[Sum]) -> list[float]:
    """What windows were scaled with as a whole, where that differs between them, as by a clip of
    the loop's own; else 1."""
    each = [[abs(part.factor * part.of.scale) for part in one.parts] for one in sums]
    world = max(len({part.rank for part in one.parts}) for one in sums)
    if all(map(alike, each)) and not alike(factors[0] for factors in each):
        return [factors[0] * world for factors in each]
    return [1.0] * len(sums)


@lru_cache(maxsize=8)
def sums_of(view: View) -> tuple[Sum, ...]:
    """Those of all windows that can be compared."""
    kinds, found = _kinds(view), []
    others = {
        part.of.where for fit in fits(view) for ids in [strangers(view, fit)] for part in fit.there
        if id(part.of) in ids
    }  # fmt: skip
    for fit in fits(view):
        if fit.by_hand or fit.earlier or view.optimizer.sums:
            continue
        there = [part for part in fit.there if part.of.where not in others]
        for kind in dict.fromkeys(kinds[part.of.where] for part in there):
            parts = tuple(part for part in there if kinds[part.of.where] == kind)
            nodes = Counter(node for part in parts for node in nodes_of(part))
            wraps = view.optimizer.wrapped  # and unscales every pass with a scale of its own
            one_scale = len({wraps or part.of.scale for part in parts}) == 1
            as_scaled = any(same(parts[0].factor, share) for share in (1.0, 1 / len(parts)))
            scaled = not wraps and parts[0].of.scale != 1.0 and as_scaled
            if one_scale and not scaled and max(nodes.values(), default=1) == 1:
                found.append(Sum(fit, kind, parts))
    return tuple(found)


def strangers(view: View, fit: Fit) -> frozenset[int]:
    """The ids of passes in a gradient that reach parameters of another optimizer, where others in
    it do not: of that one's loss, as a generator's in the discriminator."""
    every = [*(e for window in view.windows for e in window.events), *view.rest]
    passes = [part.of for part in fit.there]
    found = set()
    for event in every:
        if isinstance(event, Call) and event.name == "step":
            theirs = event.parameters - view.optimizer.parameters
            reaching = {id(one) for one in passes if one.reached & theirs}
            found |= reaching if len(reaching) < len({id(one) for one in passes}) else set()
    return frozenset(found)


def _kinds(view: View) -> dict[str, str]:
    """The kind of each line with a backward pass. Two lines are of one kind if the second takes up
    the loop of the first, as a second call of `fit` does: each has windows of its own, and where a
    window has both, one follows the other."""
    lines = [[one.where for one in window.passes] for window in view.windows]
    order = [one.where for one in view.passes]
    alone = {places[0] for places in lines if len(set(places)) == 1}
    kinds = {place: place for place in order}
    for places in lines:
        blocks = [place for place, _ in groupby(places)]
        for a, b in pairwise(blocks if len(set(blocks)) == len(blocks) else []):
            last = len(order) - 1 - order[::-1].index(a)
            if a in alone and (b in alone or last < order.index(b)):
                kinds[b] = kinds[a]
    return kinds
