"""Rules about what is in a window's gradient, and how much of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from accumext.auditing._events import Call, Pass, View, is_call
from accumext.auditing._fit import Fit, Part, fits
from accumext.auditing._sums import (
    Sum,
    alike,
    count,
    loss_weight,
    main_losses,
    nodes_of,
    own_clips,
    same,
    strangers,
    sums_of,
)
from accumext.auditing._words import Found, Said, numbered, several, some

_ROUNDING_HALF = 0.05  # of a factor, where gradients are of half precision

# --- factors over the mean ------------------------------------------------------------------------


def factors(view: View) -> Found:
    """The gradient is c times the mean over the micro-batches."""
    gone = {fit.window.index for fit in fits(view) for _ in _gone(fit, list(fit.parts))}
    every = [one for one in sums_of(view) if one.window.index not in gone]
    for kind in dict.fromkeys(one.kind for one in every):
        sums = [one for one in every if one.kind == kind]
        judged, unknown = ([one for one in sums if one.judged is known] for known in (True, False))
        if judged:
            yield from _of_known(view, judged)
        if unknown and _has_divisor(unknown):
            yield from _unlike(unknown, _by_size([one.size for one in unknown]))


def _has_divisor(sums: Sequence[Sum]) -> bool:
    """Whether all losses were divided by the number of micro-batches that most windows hold."""
    full = Counter(one.size for one in sums).most_common(1)[0][0]
    chains = [[c.value for c in part.of.constants] for one in sums for part in one.parts]
    one_form = len(set(map(len, chains))) == 1
    return one_form and any(
        all(same(value, 1 / full) for value in column) for column in zip(*chains, strict=True)
    )


def _by_size(sizes: list[int]) -> dict[int, float]:
    """Of windows that do not hold as much as most: what they hold, in theirs."""
    full = Counter(sizes).most_common(1)[0][0]
    return {i: n / full for i, n in enumerate(sizes) if n != full}


def _of_known(view: View, sums: list[Sum]) -> Found:
    rounding = _ROUNDING_HALF if view.record.half else 0.0
    sizes = [one.size for one in sums]
    scaled = [1.0] * len(sums) if view.optimizer.wrapped else own_clips(sums)
    readings = [one.readings(clip) for one, clip in zip(sums, scaled, strict=True)]
    as_used = [one.readings() for one in sums]
    each = [{*a.values(), *b.values()} for a, b in zip(readings, as_used, strict=True)]
    off = [i for i, cs in enumerate(each) if not any(_is_one(c, rounding) for c in cs)]
    if max(sizes) == 1:
        yield from _alone(sums, as_used)
    elif off and off == [i for i, n in enumerate(sizes) if n > 1] and _is_size(readings, sizes):
        full = Counter(sizes[i] for i in off).most_common(1)[0][0]
        windows = [one for one in sums if one.size == full]
        several_heads = any(len({part.of.reached for part in one.parts}) > 1 for one in sums)
        asks = len({*sizes}) == 1 or several_heads or not all(one.certain for one in sums)
        if not asks or alike(scaled):
            yield _said("divisor_missing", {i: float(full) for i in off}, windows, asks)
    elif off and len(off) < len(sums):
        right = [i for i in range(len(sums)) if i not in off]
        names = [name for name in readings[off[0]] if all(name in readings[i] for i in off)]
        hits = Counter(n for i in right for n, c in readings[i].items() if same(c, 1.0))
        name = max(names, key=lambda n: hits[n])
        yield from _unlike(sums, {i: readings[i][name] for i in off})
    elif off and all(one.is_uniform() for one in sums):
        yield from _all_off(sums, readings)


def _is_one(c: float, rounding: float) -> bool:
    return same(c, 1.0) or abs(c - 1) < rounding


def _is_size(readings: list[dict[str, float]], sizes: list[int]) -> bool:
    """Whether a reading gives the number of micro-batches in all windows."""
    return any(
        all(name in r and same(r[name], n) for r, n in zip(readings, sizes, strict=True))
        for name in readings[0]
    )


def _alone(sums: list[Sum], readings: list[dict[str, float]]) -> Found:
    """Windows of one micro-batch each, whose loss was divided all the same."""
    factors = [next(iter(r.values())) for r in readings]
    outside = sums[0].parts[0].factor * sums[0].parts[0].of.scale
    losses = len(main_losses(sums[0].parts[0].of))
    lines = [[part.of.where for part in one.fit.parts] for one in sums]
    alone = all(places.count(one.kind) < 2 for places, one in zip(lines, sums, strict=True))
    by = 1 / factors[0] if factors[0] else 0.0
    whole = by > 1.5 and same(round(by), by) and round(by) != losses and alike(factors)
    divided = all(
        any(c.divided and same(c.value, factors[0]) for c in one.parts[0].of.constants)
        for one in sums
    )
    if whole and alone and (divided or same(outside, factors[0])):
        yield _said("window_of_one", {0: factors[0]}, sums, asks=True)


def _unlike(sums: list[Sum], factor: dict[int, float]) -> Found:
    """Windows whose factors are not those of the usual ones."""
    usual = [i for i in range(len(sums)) if i not in factor]
    full = Counter(sums[i].size for i in usual).most_common(1)[0][0]
    given = next(sums[i] for i in usual if sums[i].size == full).given
    cases: dict[str, dict[int, float]] = {}
    for i, c in factor.items():
        as_usual = (
            not sums[i].judged or alike([*given, *sums[i].given]) or same(c, sums[i].size / full)
        )
        larger = "leftover" if sums[i].size > full else "partial"
        id = larger if as_usual and sums[i].size != full else "varying"
        cases.setdefault(id, {})[i] = c
    for id, of_id in cases.items():
        windows = [sums[i] for i in of_id]
        weighted = all(one.size == full and not one.sums for one in windows)  # by the loss itself
        weighted |= _is_phase(list(of_id), len(sums)) and alike(of_id.values())
        asks = id == "varying" and (weighted or not all(one.certain for one in sums))
        yield _said(id, of_id, windows, asks, full=0 if id == "varying" else full)


def _is_phase(which: list[int], number: int) -> bool:
    """Whether these windows are the first or the last ones."""
    along = which == list(range(which[0], which[-1] + 1))
    return along and len(which) > 1 and (which[0] == 0 or which[-1] == number - 1)


def _all_off(sums: list[Sum], readings: list[dict[str, float]]) -> Found:
    """No window is right: by one factor, by one divisor for windows of any size, or by others."""
    names = [name for name in readings[0] if all(name in r for r in readings)]
    one_factor = [name for name in names if alike(r[name] for r in readings)]
    if one_factor:
        factor = readings[0][one_factor[0]]
        id = "divided_by_more" if factor < 1 else "divided_by_less"
        yield _said("sum" if one_factor == ["targets"] else id, {0: factor}, sums, asks=True)
    elif alike(g for one in sums for g in one.given):
        yield from _unlike(sums, _by_size([one.size for one in sums]))
    else:
        asks = not all(one.certain for one in sums)
        of_window = {i: r[names[0]] for i, r in enumerate(readings)}
        yield _said("varying", of_window, sums, asks)


def _said(
    id: str, factor: dict[int, float], sums: Sequence[Sum], asks: bool = False, full: int = 0
) -> Said:
    """The factor furthest from 1 is the value; `full`: the usual number of micro-batches."""
    worst = max(factor.values(), key=lambda c: abs(math.log(abs(c) or 1e-9)))
    sizes = some(dict.fromkeys(str(one.size) for one in sums))
    given = {f"{part.of.coefficient / part.of.scale:.4g}" for s in sums for part in s.parts}
    means = any(same(c, worst) for one in sums for c in one.readings().values())
    shown = some(dict.fromkeys(f"{c:.4g}" for c in factor.values()), 4)
    known = "" if not sums[0].judged or sums[0].certain else "if each loss is a mean, "
    of = "the mean over" if sums[0].judged and means else "what a window of its size should have of"
    return Said(
        f"accumulation.{id}", worst, sums[0].kind,
        f"{known}the gradient is {shown} times {of} "
        f"the {sizes} {'micro-batch' if sizes == '1' else 'micro-batches'} of "
        f"{numbered(one.window for one in sums)}; their losses were multiplied by "
        f"{some(sorted(given))}" + (f", as in a window of {full}" if full else ""),
        asks,
    )  # fmt: skip


# --- weights within a window ----------------------------------------------------------------------


def weights(view: View) -> Found:
    """Micro-batches of unequal token counts weigh the same, or the reverse."""
    cases: dict[str, list[tuple[float, Sum]]] = {}
    for one in sums_of(view):
        masses, counts = list(map(abs, one.weights())), one.counts()
        there = [abs(part.factor * part.of.scale) for part in one.parts]
        whole = all(counts) and all(masses) and all(float(n).is_integer() for n in counts)
        if not (len(masses) == len(counts) == len(there) > 1 and whole and alike(there)):
            continue
        per_target = [mass / n for mass, n in zip(masses, counts, strict=True)]
        if alike(masses) and not alike(counts):
            ranks = {part.rank for part in one.parts}
            id = "processes" if len(ranks) > 1 else "accumulation"
            ratio = max(per_target) / min(per_target)
            cases.setdefault(f"{id}.unequal_counts", []).append((ratio, one))
        elif alike(counts) and not alike(masses):
            ratio = max(masses) / min(masses)
            cases.setdefault("accumulation.unequal_weights", []).append((ratio, one))
    for id, of_id in cases.items():
        ratio, one = max(of_id, key=lambda case: case[0])
        yield Said(
            id, ratio, one.kind,
            f"micro-batches of {some([f'{n:g}' for n in one.counts()], 6)} targets: one target "
            f"weighs up to {ratio:.4g} times another; the gradient is {distance(one.parts):.2g} "
            "from the mean over all targets, relative to it",
            asks=True,
        )  # fmt: skip


def distance(parts: Sequence[Part]) -> float:
    """Of a window's gradient from the one that counts every target alike."""
    total = sum(count(part.of) or 0.0 for part in parts)
    each = [
        (p.factor * p.of.gradient, (count(p.of) or 0.0) / (loss_weight(p) or 1.0)) for p in parts
    ]
    used = sum((part for part, _ in each[1:]), each[0][0])
    right = sum((part * c / total for part, c in each[1:]), each[0][0] * each[0][1] / total)
    return float((used - right).norm() / right.norm())


def scaled_between(view: View) -> Found:
    """The sum was scaled down between passes, as by a clip of the loop's own."""
    cases: list[tuple[int, Sum]] = []
    ratios: list[float] = []
    for one in () if view.optimizer.wrapped else sums_of(view):  # which weights each pass
        unscaled = any(is_call(event, "unscale_") for event in one.window.events)
        own = [part.factor for part in one.parts if part.rank == view.record.rank]
        steps = [a / b for a, b in pairwise(own)]
        smaller = [ratio for ratio in steps if ratio < 1 and not same(ratio, 1.0)]
        rising = all(ratio > 0 and (ratio < 1 or same(ratio, 1.0)) for ratio in steps)
        scaled = not one.fit.equal and not alike(one.given)  # else the losses make up for it
        if smaller and rising and scaled and not unscaled:
            cases.append((len(smaller), one))
            ratios += smaller
    if cases:
        times, one = max(cases, key=lambda case: case[0])
        shown = [f"{part.factor:.3g}" for part in one.parts]
        yield Said(
            "accumulation.scaled_between", times, one.kind,
            f"the micro-batches of {numbered([one.window])} are in its gradient with factors "
            f"{some(shown, 6)}: the sum was scaled {several(times, 'time')} before others were "
            "added",
            asks=alike(ratios) and len(ratios) > 1,
        )  # fmt: skip


# --- which passes are in the gradient -------------------------------------------------------------


def lost(view: View) -> Found:
    """Micro-batches whose gradients the step did not see."""
    cases: list[tuple[bool, int, int, str, str]] = []
    whole = [fit for fit in fits(view) if not list(_gone(fit, list(fit.parts)))]
    usual_sizes = {one.size for one in sums_of(view) if one.fit in whole}
    for fit in fits(view):
        own = [part for part in fit.parts if part.rank == view.record.rank]
        for gone, kept in _gone(fit, own):
            usual = any(same(c, 1.0) for c in Sum(fit, "", tuple(kept)).readings().values())
            as_kept = [Part(part.of, part.rank, kept[0].factor) for part in (*gone, *kept)]
            of_all = Sum(fit, "", tuple(as_kept)).readings().values()
            counted = not usual and any(same(c, 1.0) for c in of_all)  # by the divisor
            meant = not counted or len(kept) in usual_sizes
            number, where = len(gone) + len(kept), gone[0].of.where
            cases.append((meant, len(gone), number, where, "the gradient"))
    for window in view.windows:
        passes = window.passes
        used = window.step.used
        nothing = used is not None and not used.any() and any(e.gradient.any() for e in passes)
        if passes and (nothing or not (window.step.present or window.step.skipped)):
            number = len(passes)
            cases.append((False, number, number, passes[0].where, "any gradient"))
    if cases:  # what is lost, else what is dropped: the most of a window
        meant, gone_count, n, where, what = max(cases, key=lambda case: (not case[0], case[1]))
        yield Said(
            "accumulation.dropped" if meant else "accumulation.lost", gone_count, where,
            f"{gone_count} of the {n} micro-batches of a window are not in {what} that the "
            "step used: .grad was cleared, or replaced, between them",
            asks=meant,
        )  # fmt: skip


def _gone(fit: Fit, parts: list[Part]) -> Iterator[tuple[list[Part], list[Part]]]:
    """The parts that are not in the gradient though others of their line are; not those of a loss
    that another pass has as well, nor those after which the parameters moved, as SAM does."""
    there = {id(part) for part in fit.there}
    for place in dict.fromkeys(part.of.where for part in parts):
        of_line = [part for part in parts if part.of.where == place]
        kept = [part for part in of_line if id(part) in there]
        gone = [part for part in of_line if id(part) not in there]
        later = set[tuple[int, int]]().union(*map(nodes_of, kept)) if kept else set()
        gone = [part for part in gone if not nodes_of(part) & later]
        if gone and kept and gone[-1].of.weights == kept[0].of.weights:
            yield gone, kept


def counted_again(view: View) -> Found:
    """Micro-batches that count several times: graphs kept, or gradients not cleared."""
    known = [fit for fit in fits(view) if not fit.by_hand]
    parts = [part for fit in known for part in fit.there]
    reached = Counter((n, p) for part in parts for n in nodes_of(part) for p in part.of.reached)
    times = max(reached.values(), default=1)
    kept = [fit.window for fit in known if same(fit.earlier, 1.0)]
    if times > 1:
        yield Said(
            "accumulation.counted_again", times, parts[0].of.where,
            f"the loss of one micro-batch is in {times} backward passes, whose gradients add up",
        )  # fmt: skip
    elif kept:
        yield Said(
            "accumulation.counted_again", len(kept) + 1, kept[0].step.where,
            f"{numbered(kept)} began with the gradients of the step before: micro-batches are in "
            f"up to {len(kept) + 1} steps",
        )  # fmt: skip


def another_loss(view: View) -> Found:
    """Gradients of another optimizer's loss, as a GAN's generator leaves them in the discriminator:
    a question, unless that optimizer has stepped between them and others."""
    cases = []
    for fit in fits(view):
        others = strangers(view, fit) if not fit.by_hand else frozenset()
        events = [
            e for e in fit.window.events
            if is_call(e, "step") or any(part.of is e for part in fit.there)
        ]  # fmt: skip
        steps = [i for i, e in enumerate(events) if is_call(e, "step")]
        between = any(
            any(id(e) in others for e in events[:i])
            and any(isinstance(e, Pass) and id(e) not in others for e in events[i:])
            for i in steps
        )
        first = [e for e in events if id(e) in others]
        cases += [(between, len(others), first[0], fit)] if first else []
    if cases:
        between, number, one, fit = max(cases, key=lambda case: case[:2])
        yield Said(
            "accumulation.another_loss", number, one.where,
            f"{several(number, 'backward pass')} in the gradient of {numbered([fit.window])} also "
            "reached parameters of another optimizer, and the others did not"
            + (", which had stepped before they came" if between else ""),
            asks=not between,
        )  # fmt: skip


def unused(view: View) -> Found:
    """Micro-batches at the end that no step used."""
    places = {part.of.where for one in sums_of(view) for part in one.parts}
    since: list[Pass] = []
    for event in view.rest:
        theirs = isinstance(event, Call) and event.name == "step" and event.parameters
        if is_call(event, "zero_grad") or (theirs and theirs & view.optimizer.parameters):
            since = []
        elif isinstance(event, Pass) and event.where in places:
            since.append(event)
    if since and view.record.ended:
        full = Counter(one.size for one in sums_of(view)).most_common(1)[0][0]
        yield Said(
            "accumulation.unused", len(since), since[-1].where,
            f"the last {several(len(since), 'micro-batch')} came after the last step, whose "
            f"windows hold {full}",
            asks=True,
        )  # fmt: skip


RULES = (
    factors, weights, scaled_between, lost, counted_again, another_loss, unused,
)  # fmt: skip
