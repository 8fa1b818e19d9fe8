"""Rules about which micro-batches are in a window's gradient, and with which factors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import torch

from accumext.auditing._events import Finding, Pass, View, calls, is_call, only
from accumext.auditing._fit import Fit, Part, fits
from accumext.auditing._sums import (
    Sum,
    alike,
    constants_by_place,
    dividing_places,
    main_losses,
    nodes_of,
    own_clips,
    same,
    still_scaled,
    strangers,
    sums_of,
    usual_size,
)
from accumext.auditing._words import Found, finding, numbered, several, some

_STEPS = 16  # losses of one pass that are of steps in time; terms of a loss are fewer
_ROUNDING_HALF = 0.05  # relative, of a factor, if gradients are of half precision

# --- factors over the mean ------------------------------------------------------------------------


def factors(view: View) -> Found:
    """Report windows whose gradient is a multiple of the mean over their micro-batches."""
    every = _whole(view)
    full = usual_size(every) if every else 1
    if view.optimizer.sums and not all(one.is_mean() for one in every if one.size == full):
        return  # the wrapper was told to sum, and the loop does not divide by its window
    said = {kind: list[Finding]() for kind in dict.fromkeys(one.kind for one in every)}
    for kind, found in said.items():
        sums = [one for one in every if one.kind == kind]
        judged, unknown = ([one for one in sums if one.judged is known] for known in (True, False))
        found += _of_known(view, judged) if judged else ()
        found += _unlike(unknown, _by_size(unknown)) if unknown and _has_divisor(unknown) else ()
    for one in [one for found in said.values() for one in found]:
        if all(said.values()) or not one.id.startswith("accumulation.divided_by"):
            yield one  # if another loss is right, a constant factor is a weight
    if len(said) == 1 and not any(said.values()):  # with several losses it may be a weight
        yield from _of_many_losses(every)


def _of_many_losses(sums: list[Sum]) -> Found:
    """Ask about passes that sum the losses of their steps, and about one division too many, by the
    number of losses, of passes or of both: other factors, and halves, may be weights."""
    counts = {len(main_losses(part.of)) for one in sums for part in one.parts}
    losses = [loss for one in sums for part in one.parts for loss in part.of.losses]
    means = all(loss.reduction == "mean" for loss in losses)
    if not means or len(counts) > 1 or not all(one.certain for one in sums):
        return
    factors, steps, full = [sum(one.weights()) for one in sums], counts.pop(), usual_size(sums)
    many = {part.of.graph.calls >= steps for one in sums for part in one.parts} == {True}
    summed = steps >= _STEPS and many and same(factors[0], steps)
    numbers = {n for n in (steps, full, steps * full) if n > 2}
    twice = next((n for n in sorted(numbers) if same(factors[0] * n, 1.0)), 0)
    equal = all(
        alike(abs(loss.coefficient) for loss in part.of.losses)
        for one in sums for part in one.parts
    )  # fmt: skip
    if not (alike(factors) and equal and (summed or twice)):
        return
    first, passes = sums[0].parts[0].of, several(full, "pass")
    by = abs(factors[0] * first.scale / (first.coefficient or 1.0))
    of = f"the mean over the losses of {numbered(one.window for one in sums)}"
    yield finding(
        f"accumulation.divided_by_{'less' if summed else 'more'}", factors[0], sums[0].kind,
        f"the gradient is {factors[0]:.4g} times {of}: "
        + (f"a pass sums {steps}; divided by {by:.4g} each ({passes} of {steps} losses in a "
           "window), they give the mean" if summed else
           f"a window has {passes} of {several(steps, 'loss')}, and a division by {twice} is one "
           "too many for their mean"),
    )  # fmt: skip


def _whole(view: View) -> list[Sum]:
    """Return the sums of windows whose gradient is unscaled, and has not lost a micro-batch."""
    cleared = {fit.window.index for fit in fits(view) if list(_gone(fit, fit.parts))}
    cleared |= {one.window.index for one in still_scaled(view)}  # of which `scalers` speaks
    return [one for one in sums_of(view) if one.window.index not in cleared]


def _has_divisor(sums: Sequence[Sum]) -> bool:
    """Tell whether all losses were divided by the usual number of micro-batches in a window."""
    divisor = 1 / usual_size(sums)
    columns = constants_by_place(part for one in sums for part in one.parts)
    return any(all(same(value, divisor) for value in column) for column in columns)


def _by_size(sums: Sequence[Sum]) -> dict[int, float]:
    """Return, for each window of an unusual size, its size divided by the usual one."""
    full = usual_size(sums)
    return {i: one.size / full for i, one in enumerate(sums) if one.size != full}


def _of_known(view: View, sums: list[Sum]) -> Found:
    rounding = _ROUNDING_HALF if view.record.half else 0.0
    sizes = [one.size for one in sums]
    scaled = [1.0] * len(sums) if view.optimizer.wrapped else own_clips(sums)
    divisors = dividing_places(sums) if max(sizes) > 1 else []
    as_used = [one.readings(divisors) for one in sums]
    readings = [
        {name: c / clip for name, c in each.items()}
        for each, clip in zip(as_used, scaled, strict=True)
    ]
    off = [
        i for i, pair in enumerate(zip(readings, as_used, strict=True))
        if not any(same(c, 1.0, rounding) for each in pair for c in each.values())
    ]  # fmt: skip
    columns = _in_all(readings)
    undivided = any(all(map(same, column, sizes)) for column in columns.values())
    if max(sizes) == 1:
        yield from _alone(sums, as_used)
    elif undivided and off == [i for i, n in enumerate(sizes) if n > 1]:
        full = usual_size(sums[i] for i in off)
        windows = [one for one in sums if one.size == full]
        several_heads = any(len({part.of.reached for part in one.parts}) > 1 for one in sums)
        asks = len({*sizes}) == 1 or several_heads or not all(one.certain for one in sums)
        signs = {part.of.coefficient * part.factor > 0 for s in sums for part in s.parts}
        if not asks or (alike(scaled) and len(signs) == 1):  # not a difference of means
            yield _said("divisor_missing", [float(full)], windows, asks)
    elif off and len(off) < len(sums):
        hits = Counter(name for each in readings for name, c in each.items() if same(c, 1.0))
        of_off = _in_all([readings[i] for i in off])
        likeliest = of_off[max(of_off, key=lambda name: hits[name])]
        yield from _unlike(sums, dict(zip(off, likeliest, strict=True)))
    elif off and all(one.is_uniform() for one in sums):
        yield from _all_off(sums, columns)


def _in_all(readings: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the factors, by the name of the reading, of readings that all windows have."""
    return {
        name: [each[name] for each in readings]
        for name in readings[0] if all(name in each for each in readings)
    }  # fmt: skip


def _alone(sums: list[Sum], readings: list[dict[str, float]]) -> Found:
    """Report windows of one micro-batch each whose loss was divided all the same."""
    factors = [next(iter(each.values())) for each in readings]
    first = sums[0].parts[0]
    by = 1 / factors[0] if factors[0] else 0.0
    whole = by > 1.5 and same(round(by), by) and round(by) != len(main_losses(first.of))
    alone = all([part.of.where for part in s.fit.parts].count(s.kind) < 2 for s in sums)
    divided = all(
        any(c.divided and same(c.value, factors[0]) for c in one.parts[0].of.constants)
        for one in sums
    )
    if whole and alike(factors) and alone and (divided or same(first.after, factors[0])):
        yield _said("window_of_one", factors[:1], sums)


def _unlike(sums: list[Sum], factor: dict[int, float]) -> Found:
    """Report windows whose factors differ from those of the usual windows."""
    usual = [one for i, one in enumerate(sums) if i not in factor]
    full = usual_size(usual)
    given = next(one.given for one in usual if one.size == full)
    cases: dict[str, list[int]] = {}
    for i, c in factor.items():
        one = sums[i]
        as_usual = alike([*given, *one.given]) or same(c, one.size / full)
        larger = "leftover" if one.size > full else "partial"
        cases.setdefault(larger if as_usual and one.size != full else "varying", []).append(i)
    for id, which in cases.items():
        windows, of_id = [sums[i] for i in which], [factor[i] for i in which]
        weighted = all(one.size == full and not one.sums for one in windows)  # loss weights
        along = which == list(range(which[0], which[-1] + 1))
        phase = along and len(which) > 1 and (which[0] == 0 or which[-1] == len(sums) - 1)
        weighted |= phase and alike(of_id)
        asks = weighted or not all(one.certain for one in sums)
        yield _said(id, of_id, windows, asks, full=0 if id == "varying" else full)


def _all_off(sums: list[Sum], columns: dict[str, list[float]]) -> Found:
    """Report that all windows are wrong: by one factor, one divisor, or varying factors."""
    one_factor = [name for name, column in columns.items() if alike(column)]
    if one_factor:
        factor = columns[one_factor[0]][0]
        id = "divided_by_more" if factor < 1 else "divided_by_less"
        yield _said("sum" if one_factor == ["targets"] else id, [factor], sums)
    elif alike(g for one in sums for g in one.given):
        yield from _unlike(sums, _by_size(sums))
    else:
        asks = not all(one.certain for one in sums)
        yield _said("varying", next(iter(columns.values())), sums, asks)


def _said(
    id: str, factors: list[float], sums: Sequence[Sum], asks: bool = True, full: int = 0
) -> Finding:
    """Describe wrong factors; the one furthest from 1 is the value. `full`: the usual size."""
    worst = max(factors, key=lambda c: abs(math.log(abs(c) or 1e-9)))
    usual = usual_size(sums)
    rest = [s for s in sums if s.size != usual]
    odd = some(f"{s.size} in window {s.window.index + 1}" for s in rest)
    given = {f"{part.of.coefficient / part.of.scale:.4g}" for s in sums for part in s.parts}
    means = any(same(c, worst) for one in sums for c in one.readings().values())
    shown = some(dict.fromkeys(f"{c:.4g}" for c in factors), 4)
    known = "" if not sums[0].judged or sums[0].certain else "if each loss is a mean, "
    of = "the mean over" if sums[0].judged and means else "what a window of its size should have of"
    one = sums[0].judged and means and len(factors) == len(given) == 1 and not full
    first = sums[0].parts[0].of
    divisor = abs(worst * first.scale / (first.coefficient or 1.0))
    steps = len(main_losses(first))
    many = same(sum(sums[0].weights()), worst * steps) and steps > 1
    how = f" ({several(sums[0].size, 'pass')} of {steps} losses)" if many else ""
    divisor *= steps if many else 1
    right = f"; divided by {divisor:.4g} each{how}, they give the mean" if one else ""
    right += " over all" if one and many else ""
    return finding(
        f"accumulation.{id}", worst, sums[0].kind,
        f"{known}the gradient is {shown} times {of} "
        f"the {several(usual, 'micro-batch')} of {numbered(one.window for one in sums)}"
        f"{f' ({odd})' if odd else ''}; their losses were multiplied by "
        f"{some(sorted(given))}" + (f", as in a window of {full}" if full else "") + right,
        asks,
        cure=f"divide the loss of a pass by its {steps} losses; AccumulatingOptimizer(optimizer, "
        f"window={sums[0].size}) divides by the passes" if one and many else "",
    )  # fmt: skip


# --- weights within a window ----------------------------------------------------------------------


def weights(view: View) -> Found:
    """Report micro-batches of unequal token counts and equal weights, or the reverse."""
    worst: dict[str, tuple[float, Sum]] = {}
    for one in sums_of(view):
        masses, counts = one.weights(), one.counts()
        whole = all(counts) and all(masses) and all(float(n).is_integer() for n in counts)
        equal = alike(abs(part.after) for part in one.parts)
        if not (len(masses) == len(counts) > 1 and whole and equal):
            continue
        id, weighed = "accumulation.unequal_weights", masses
        if alike(masses):
            ranks = len({part.rank for part in one.parts})
            id = f"{'processes' if ranks > 1 else 'accumulation'}.unequal_counts"
            weighed = [mass / n for mass, n in zip(masses, counts, strict=True)]
        ratio = max(weighed) / min(weighed)
        if alike(masses) != alike(counts) and ratio > worst.get(id, (0.0,))[0]:
            worst[id] = ratio, one
    for id, (ratio, one) in worst.items():
        yield finding(
            id, ratio, one.kind,
            f"micro-batches of {some([f'{n:g}' for n in one.counts()], 6)} targets: one target "
            f"weighs up to {ratio:.4g} times another; the gradient is {_distance(one):.2g} "
            "from the mean over all targets, relative to it",
        )  # fmt: skip


def _distance(one: Sum) -> float:
    """Return how far a window's gradient is from the one that weights all targets equally."""
    used = torch.stack([part.factor * part.of.gradient for part in one.parts])
    pairs = zip(one.counts(), one.weights(), strict=True)
    per_target = torch.tensor([n / weight for n, weight in pairs], dtype=used.dtype)
    right = (used * per_target[:, None, None]).sum(0) / sum(one.counts())
    return float((used.sum(0) - right).norm() / right.norm())


def scaled_between(view: View) -> Found:
    """Report a sum that was scaled down between passes, as by a clip of the loop's own."""
    cases: list[tuple[list[float], Sum]] = []
    for one in () if view.optimizer.wrapped else sums_of(view):  # a wrapper weights passes
        own = [part.factor for part in one.parts if part.rank == view.record.rank]
        steps = [a / b for a, b in pairwise(own)]
        falls = [ratio for ratio in steps if ratio < 1 and not same(ratio, 1.0)]
        rising = all(ratio > 0 and (ratio < 1 or same(ratio, 1.0)) for ratio in steps)
        scaled = not one.fit.equal and not alike(one.given)  # else the losses compensate
        if falls and rising and scaled and not calls(one.window.events, "unscale_"):
            cases.append((falls, one))
    if cases:
        falls, one = max(cases, key=lambda case: len(case[0]))
        ratios = [ratio for falls, _ in cases for ratio in falls]
        shown = [f"{part.factor:.3g}" for part in one.parts]
        yield finding(
            "accumulation.scaled_between", len(falls), one.kind,
            f"the micro-batches of {numbered([one.window])} are in its gradient with factors "
            f"{some(shown, 6)}: the sum was scaled {several(len(falls), 'time')} before others "
            "were added",
            asks=alike(ratios) and len(ratios) > 1,
        )  # fmt: skip


# --- which passes are in the gradient -------------------------------------------------------------


def lost(view: View) -> Found:
    """Report micro-batches whose gradients the step did not see."""
    cases: list[tuple[str, int, int, str, str]] = []
    usual_sizes = {one.size for one in _whole(view)}
    for fit in fits(view):
        own = [part for part in fit.parts if part.rank == view.record.rank]
        for gone, kept in _gone(fit, own):
            as_kept = [Part(part.of, part.rank, kept[0].factor) for part in (*gone, *kept)]
            counted = not Sum(fit, "", tuple(kept)).is_mean()
            counted &= Sum(fit, "", tuple(as_kept)).is_mean()  # the divisor counts them
            id = "lost" if counted and len(kept) not in usual_sizes else "dropped"
            cases.append((id, len(gone), len(as_kept), gone[0].of.where, "the gradient"))
    for window in view.windows:
        passes, used = window.passes, window.step.used
        nothing = used is not None and not used.any() and any(e.gradient.any() for e in passes)
        if passes and (nothing or not (window.step.present or window.step.skipped)):
            cases.append(("lost", len(passes), len(passes), passes[0].where, "any gradient"))
    if cases:  # prefer "lost" to "dropped", then the greatest number
        id, number, n, where, what = max(cases, key=lambda case: (case[0] == "lost", case[1]))
        yield finding(
            f"accumulation.{id}", number, where,
            f"{number} of the {n} micro-batches of a window are not in {what} that the "
            "step used: .grad was cleared, or replaced, between them",
        )  # fmt: skip


def _gone(fit: Fit, parts: Sequence[Part]) -> Iterator[tuple[list[Part], list[Part]]]:
    """Yield the passes missing from the gradient and those in it, for each line that has both. A
    pass is not missing if a later one has its loss, or if the parameters moved, as SAM does."""
    there = {id(part) for part in fit.there}
    for place in dict.fromkeys(part.of.where for part in parts):
        of_line = [part for part in parts if part.of.where == place]
        kept = [part for part in of_line if id(part) in there]
        later = set[tuple[int, int]]().union(*map(nodes_of, kept))
        gone = [part for part in of_line if id(part) not in there and not nodes_of(part) & later]
        if gone and kept and gone[-1].of.weights == kept[0].of.weights:
            yield gone, kept


def counted_again(view: View) -> Found:
    """Report micro-batches that count several times: graphs kept, or gradients not cleared."""
    known = [fit for fit in fits(view) if not fit.by_hand]
    parts = [part for fit in known for part in fit.there]
    reached = Counter((n, p) for part in parts for n in nodes_of(part) for p in part.of.reached)
    times = max(reached.values(), default=1)
    kept = [fit.window for fit in known if same(fit.earlier, 1.0)]
    runs = [list(run) for _, run in groupby(enumerate(kept), lambda pair: pair[1].index - pair[0])]
    steps = max(map(len, runs), default=0) + 1
    if times > 1:
        yield finding(
            "accumulation.counted_again", times, parts[0].of.where,
            f"the loss of one micro-batch is in {times} backward passes, whose gradients add up",
        )  # fmt: skip
    elif kept:
        yield finding(
            "accumulation.counted_again", steps, kept[0].step.where,
            f"{numbered(kept)} began with the gradients of the step before: micro-batches are in "
            f"up to {steps} steps",
        )  # fmt: skip


def another_loss(view: View) -> Found:
    """Report gradients of another optimizer's loss, such as a GAN generator's in the discriminator.
    A question, unless that optimizer stepped between them and passes without its parameters."""
    cases = []
    for fit in fits(view):
        events, apart = fit.window.events, {} if fit.by_hand else strangers(view, fit)
        others = apart or _stepped_on(view, fit)
        own = {id(part.of) for part in fit.there} - others.keys()
        theirs = [i for i, event in enumerate(events) if id(event) in others]
        last = max((i for i, event in enumerate(events) if id(event) in own), default=0)
        if theirs:
            between = bool(calls(events[theirs[0] : last], "step"))
            cases.append((bool(apart), between, len(others), events[theirs[0]], fit.window))
    if cases:
        alone, between, number, one, window = max(cases, key=lambda case: case[:3])
        yield finding(
            "accumulation.another_loss", number, one.where,
            f"{several(number, 'backward pass')} in the gradient of {numbered([window])} also "
            "reached parameters of another optimizer"
            + (", and the others did not" if alone else "")
            + (", which had stepped before they came" if between else ""),
            asks=not (alone and between),
        )  # fmt: skip


def _stepped_on(view: View, fit: Fit) -> dict[int, Pass]:
    """Return the passes in a gradient, by id, that another optimizer has used for a step before
    passes of other lines came."""
    there, events = {id(part.of): part.of for part in fit.there}, fit.window.events
    for i, event in enumerate(events):
        if is_call(event, "step"):
            theirs = event.parameters - view.optimizer.parameters
            before = {k: there[k] for k in map(id, events[:i]) if k in there}
            before = {k: one for k, one in before.items() if one.reached & theirs}
            later = {one.where for one in only(events[i:], Pass) if id(one) in there}
            if before and later and later.isdisjoint(one.where for one in before.values()):
                return before
    return {}


def unused(view: View) -> Found:
    """Report micro-batches at the end of the loop that no step used."""
    places = {part.of.where for one in sums_of(view) for part in one.parts}
    since: list[Pass] = []
    for event in view.rest:
        stepped = is_call(event, "step") and event.parameters & view.optimizer.parameters
        if stepped or is_call(event, "zero_grad"):
            since = []
        elif isinstance(event, Pass) and event.where in places:
            since.append(event)
    if since and view.record.ended:
        yield finding(
            "accumulation.unused", len(since), since[-1].where,
            f"the last {several(len(since), 'pass')} came after the last step, whose "
            f"windows hold {usual_size(sums_of(view))}",
        )  # fmt: skip


RULES = (
    factors, weights, scaled_between, lost, counted_again, another_loss, unused,
)  # fmt: skip
