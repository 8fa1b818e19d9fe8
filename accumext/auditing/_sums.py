"""The weights of a window's micro-batches in its gradient, in all possible readings.

A loss is a mean, a sum over a known number of targets, or of an unknown kind. It was multiplied
with constants on its way to the root of its pass. So "the gradient is c times the mean" has several
readings. A loop is right if one of them gives 1 in all its windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

from accumext.auditing._events import Loss, Pass, View, Window, calls
from accumext.auditing._fit import Fit, Part, fits

_SAME = 1e-2  # relative difference up to which numbers count as equal


def same(a: float, b: float, within: float = 0.0) -> bool:
    return math.isclose(a, b, rel_tol=_SAME, abs_tol=within)


def alike(values: Iterable[float]) -> bool:
    """Tell whether all values are the same."""
    listed = list(values)
    return all(same(listed[0], value) for value in listed)


def main_losses(one: Pass) -> tuple[Loss, ...]:
    """Return the losses that a pass is about: torch's own, else means, else all of them."""
    known = tuple(loss for loss in one.losses if loss.known)
    means = tuple(loss for loss in one.losses if loss.reduction == "mean")
    return known or means or one.losses


def count(one: Pass) -> float | None:
    """Return the number of targets that a pass counts; None if a loss does not say."""
    counts = [loss.count for loss in main_losses(one)]
    return None if None in counts else sum(n for n in counts if n is not None)


def _weight(part: Part) -> float | None:
    """Return the weight of a pass's losses in the gradient, as means; None if it is not known.
    Signs do not count: a loss may be negative."""
    losses, weight = main_losses(part.of), 0.0
    for loss in losses:
        if loss.reduction == "sum" and loss.count is None:
            return None
        # A loop divides the sum over no target by 1, not by 0.
        n = max(loss.count or 0.0, 1.0) if loss.reduction == "sum" else 1.0
        weight += abs(loss.coefficient) * n
    return abs(part.factor) * weight if part.of.scalar and losses else None


def _all_known(values: Iterable[float | None]) -> list[float]:
    """Return the values, or no value if one is not known."""
    listed = list(values)
    return [] if None in listed else [value for value in listed if value is not None]


def nodes_of(part: Part) -> set[tuple[int, int]]:
    return {(part.rank, loss.node) for loss in main_losses(part.of)}


def constants_by_place(parts: Iterable[Part]) -> list[tuple[float, ...]]:
    """Return the first constants of all passes, their second ones, and so on; nothing if passes
    have different numbers of constants."""
    chains = [[constant.value for constant in part.of.constants] for part in parts]
    return list(zip(*chains, strict=True)) if len(set(map(len, chains))) == 1 else []


def dividing_places(sums: Sequence[Sum]) -> list[int]:
    """Return the places of constants that add up to 1 in each window, as 1 / size does."""
    columns = [constants_by_place(one.parts) for one in sums]
    return [
        place for place in range(min(map(len, columns)))
        if all(
            same(sum(its[place]) / len(its[place]) * max(one.size, one.most), 1.0)
            for one, its in zip(sums, columns, strict=True)
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Sum:
    """The passes of one kind in a window's gradient."""

    fit: Fit
    kind: str  # the line of their backward passes
    parts: tuple[Part, ...]
    most: int = 0  # size of the window's largest sum

    @property
    def window(self) -> Window:
        return self.fit.window

    @property
    def size(self) -> int:
        """Micro-batches per process, counted at the parameter that gets most gradients."""
        reached = Counter(number for part in self.parts for number in part.of.reached)
        most = max(reached.values(), default=len(self.parts))
        return most // len({part.rank for part in self.parts})

    @property
    def given(self) -> list[float]:
        """The factors of the losses, of before and after the pass together."""
        return [abs(part.of.coefficient * part.factor) for part in self.parts]

    def weights(self) -> list[float]:
        """Return the weights of the losses, if all are known."""
        return _all_known(map(_weight, self.parts))

    def counts(self) -> list[float]:
        """Return the number of targets of each micro-batch, if all are known."""
        return _all_known(count(part.of) for part in self.parts)

    def _losses(self) -> list[Loss]:
        return [loss for part in self.parts for loss in main_losses(part.of)]

    @property
    def sums(self) -> bool:
        """Whether all losses are sums."""
        return all(loss.reduction == "sum" for loss in self._losses())

    @property
    def has_given(self) -> bool:
        """Whether a pass began at a gradient that the loop gave it."""
        return not all(part.of.scalar for part in self.parts)

    @property
    def judged(self) -> bool:
        """Whether the weights of the losses are known."""
        return bool(self.weights())

    @property
    def certain(self) -> bool:
        """Whether the kinds of the losses are known: a user's own function may divide inside."""
        return self.judged and all(loss.known or loss.reduction for loss in self._losses())

    def is_uniform(self) -> bool:
        """Tell whether all micro-batches, or all targets, have one weight."""
        weights, counts = self.weights(), self.counts()
        known = all(weights) and all(counts)
        per_target = [w / n for w, n in zip(weights, counts, strict=False)] if known else []
        return any(alike(each) for each in (self.given, weights, per_target) if each)

    def is_mean(self) -> bool:
        """Tell whether the gradient is the mean in one of its readings."""
        return any(same(c, 1.0) for c in self.readings().values())

    def readings(self, divisors: Sequence[int] = ()) -> dict[str, float]:
        """Return the factors over the mean of the losses, the likeliest reading first; for a right
        loop at least one of them is 1. `divisors`: the places of constants that add up to 1 in
        each window."""
        found = self._of_known_losses() if self.judged else {}
        scalar = all(part.of.scalar for part in self.parts)
        # The loss may have a constant of its own beside the divisor, but no second divisor.
        columns = constants_by_place(self.parts) if scalar and len(divisors) < 2 else []
        for place, column in enumerate(columns if len(columns) > 1 or not self.judged else ()):
            if place in divisors or not all(same(constant, 1.0) for constant in column):
                each = [c * part.after for c, part in zip(column, self.parts, strict=True)]
                found[f"constant {place}"] = abs(sum(each))
                if self.sums and (counts := self.counts()):
                    of_targets = sum(c * n for c, n in zip(each, counts, strict=True))
                    found[f"constant {place} of targets"] = abs(of_targets)
        if self.most > self.size:  # a loss that not every micro-batch has
            found |= {f"{name}, of a part": c * self.most / self.size for name, c in found.items()}
        return found

    def _of_known_losses(self) -> dict[str, float]:
        weights, counts, given = self.weights(), self.counts(), {"given": sum(self.given)}
        number, losses = len(self.parts), len(self._losses())
        steps = losses / number  # a pass has their mean as its loss, or their sum
        constants = [c.value for part in self.parts for c in part.of.constants]
        of_steps = steps > 1 and any(same(c, 1 / steps) for c in constants)
        targets = {"targets": sum(weights) / sum(counts)} if self.sums and any(counts) else {}
        pairs = zip(weights, self.parts, strict=True)
        return {
            **({} if self.sums or of_steps else given),
            "losses": sum(weights),
            "a loss of many": sum(weights) / steps,
            **targets,
            **given,
            "losses that count": sum(weight for weight, part in pairs if count(part.of) != 0),
        }


def usual_size(sums: Iterable[Sum]) -> int:
    """Return the number of micro-batches that most windows have."""
    return Counter(one.size for one in sums).most_common(1)[0][0]


def own_clips(sums: Sequence[Sum]) -> list[float]:
    """Return the factors of whole windows, if they differ, as they do after a clip of the loop's
    own; otherwise ones."""
    each = [[abs(part.after) for part in one.parts] for one in sums]
    world = max(len({part.rank for part in one.parts}) for one in sums)
    if all(map(alike, each)) and not alike(factors[0] for factors in each):
        return [factors[0] * world for factors in each]
    return [1.0] * len(sums)


@lru_cache(maxsize=8)
def sums_of(view: View) -> tuple[Sum, ...]:
    """Return the sums of all windows that can be compared: one for each line with backward passes.
    It is one for all lines together if that is a mean in more windows: with `no_sync`, the last
    pass may have a line of its own."""
    kinds, each, joined = _kinds(view), list[list[Sum]](), list[Sum]()
    others = {one.where for fit in fits(view) for one in strangers(view, fit).values()}
    for fit in fits(view):
        if runs_elsewhere(view, fit) or fit.by_hand or fit.earlier:
            continue
        there = tuple(part for part in fit.there if part.of.where not in others)
        of_kinds = {
            kind: tuple(part for part in there if kinds[part.of.where] == kind)
            for kind in dict.fromkeys(kinds[part.of.where] for part in there)
        }
        sums = [Sum(fit, k, parts) for k, parts in of_kinds.items() if _adds_up(view, parts)]
        each.append([replace(one, most=max(s.size for s in sums)) for one in sums])
        if there and _adds_up(view, there):
            joined.append(Sum(fit, next(iter(kinds.values())), there))
    right = sum(all(one.is_mean() for one in sums) for sums in each)
    if len(joined) == len(each) and sum(one.is_mean() for one in joined) > right:
        return tuple(joined)
    return tuple(one for sums in each for one in sums)


def _adds_up(view: View, parts: Sequence[Part]) -> bool:
    """Tell whether these passes have different losses, and are unscaled."""
    nodes = Counter(node for part in parts for node in nodes_of(part))
    scale, *more = {part.of.scale for part in parts}
    unscaled = not more and not keeps_scale(scale, parts[0].factor, len(parts))
    # The wrapper unscales every pass with a scale of its own.
    return (view.optimizer.wrapped or unscaled) and max(nodes.values(), default=1) == 1


def keeps_scale(scale: float, factor: float, passes: int) -> bool:
    """Tell whether a step used scaled gradients, or their mean, without unscaling them."""
    return scale != 1.0 and any(same(factor, share) for share in (1.0, 1 / passes))


def still_scaled(view: View) -> list[Sum]:
    """Return the sums of a wrapper that are means times the loss scale, which it does not know."""
    scaled = [one for one in sums_of(view) if one.parts[0].of.scale != 1.0]
    return [
        one for one in scaled if view.optimizer.wrapped
        and any(same(c, one.parts[0].of.scale) for c in one.readings().values())
    ]  # fmt: skip


def runs_elsewhere(view: View, fit: Fit) -> bool:
    """Tell whether a pass of another process ran at a line at which none of this one did."""
    return not {part.of.where for part in fit.there} <= {one.where for one in view.passes}


def strangers(view: View, fit: Fit) -> dict[int, Pass]:
    """Return the passes in a gradient, by id, that reach parameters of another optimizer although
    others do not: they are of its loss, such as a generator's in the discriminator."""
    passes = {id(part.of): part.of for part in fit.there}
    found = dict[int, Pass]()
    for step in calls(view.events, "step"):
        theirs = step.parameters - view.optimizer.parameters
        reaching = {id: one for id, one in passes.items() if one.reached & theirs}
        found |= reaching if len(reaching) < len(passes) else {}
    return found


def _kinds(view: View) -> dict[str, str]:
    """Return the kind of each line with a backward pass. Two lines are of one kind if the second
    continues the loop of the first, as a second call of `fit` does: each has windows of its own,
    and in a window with both, all passes of one come before those of the other."""
    lines = [[one.where for one in window.passes] for window in view.windows]
    order = [one.where for one in view.passes]
    alone = {places[0] for places in lines if len(set(places)) == 1}
    kinds = {place: place for place in order}
    for places in lines:
        blocks = [place for place, _ in groupby(places)]
        for a, b in pairwise(blocks if len(set(blocks)) == len(blocks) else []):
            if a in alone and (b in alone or a not in order[order.index(b) :]):
                kinds[b] = kinds[a]
    return kinds
