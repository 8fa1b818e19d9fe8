"""What a record shows to be wrong. Every rule is a function of the record, and says one thing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from accumext.audit._events import (
    Clipped,
    Finding,
    Loss,
    Pass,
    Record,
    Scheduled,
    Sketch,
    Stepped,
    Truncated,
    Unscaled,
    Updated,
    Window,
    windows_of,
)
from accumext.audit._fit import Fit, Share, finite, fits

_SAME = 1e-2  # relative difference of what counts as equal
_MANY_CALLS = 16  # of one parameter in a graph; layers that share one call it less often
_SAME_BITS = 1e-13  # of sketches, whose own rounding is smaller
_LOST_BITS = 1.0  # of a sum in half precision, beyond those that its last rounding costs


def findings(record: Record) -> tuple[Finding, ...]:
    """All that is wrong, the worst first."""
    return tuple(finding for rule in RULES for finding in rule(record))


# --- what a loss weighs ---------------------------------------------------------------------------


def main_losses(one: Pass) -> tuple[Loss, ...]:
    """The losses that a pass is about: torch's own, else means, else what there is."""
    for chosen in (
        [loss for loss in one.losses if loss.known],
        [loss for loss in one.losses if loss.reduction == "mean"],
    ):
        if chosen:
            return tuple(chosen)
    return one.losses


def mass(share: Share) -> float | None:
    """The weight of a pass's losses in the gradient, as means; None where it is not known."""
    total = 0.0
    for loss in main_losses(share.of):
        if loss.reduction == "sum" and loss.count is None:
            return None
        total += loss.coefficient * (loss.count or 1.0 if loss.reduction == "sum" else 1.0)
    return total * share.factor


def count(one: Pass) -> float | None:
    """The targets that a pass counts; None where a loss does not say."""
    counts = [loss.count for loss in main_losses(one)]
    return None if None in counts else sum(n for n in counts if n is not None)


def micro_batches(fit: Fit) -> list[tuple[Share, ...]]:
    """The shares that are micro-batches of one kind: passes from the same line."""
    shares = sorted(fit.shares, key=lambda share: share.of.where)
    return [tuple(some) for _, some in groupby(shares, key=lambda share: share.of.where)]


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME)


def some(names: Iterable[str], most: int = 3) -> str:
    """A few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def places(windows: Sequence[Window]) -> str:
    numbers = ", ".join(str(window.index + 1) for window in windows)
    return f"window{'s' if len(windows) > 1 else ''} {numbers}"


# --- 1 to 3: divisors, weights, micro-batches -----------------------------------------------------


def divisor(record: Record) -> Iterator[Finding]:
    """The gradient is c times the mean over the micro-batches."""
    if record.sums:
        return
    seen: dict[str, list[tuple[Fit, float, Sequence[Share]]]] = {}
    every = fits(record)
    full = max((len(group) for fit in every for group in micro_batches(fit)), default=0)
    for fit in every:
        for group in micro_batches(fit):
            if not _regular(fit, group):
                continue
            name, factor = _named_factor(group, full)
            if name:
                seen.setdefault(name, []).append((fit, factor, group))
    for name, cases in seen.items():
        fit, factor, group = cases[0]
        n, where = len(group), group[0].of.where
        given = sorted({f"{share.of.coefficient / share.of.scale:.4g}" for share in group})
        ours = "or accumext.AccumulatingOptimizer(optimizer, window=...), which divides by itself"
        cure = {
            "divisor missing": f"divide each micro-batch's loss by {n}: (loss / {n}).backward(), {ours}",
            "divided twice": "divide by the number of micro-batches once: the loss, or the gradient",
            "divisor of a full window": (
                f"divide by the {n} micro-batches that the window holds, not by {full}, or "
                "opt.flush() of accumext.AccumulatingOptimizer, which does"
            ),
        }[name]
        if record.wrapped and name == "divided twice":
            cure = "pass the loss itself: AccumulatingOptimizer divides the window by what it holds"
        yield Finding(
            name,
            f"the gradient is {factor:.4g} times the mean over the {n} micro-batches of "
            f"{places([case[0].window for case in cases])}; factor of the losses: {', '.join(given)}",
            cure,
            factor,
            where,
        )


def _regular(fit: Fit, group: Sequence[Share]) -> bool:
    """Each micro-batch is there once: nothing is lost, or counted again."""
    nodes = Counter(loss.node for share in group for loss in main_losses(share.of))
    there = all(abs(share.factor) > 0 for share in group)
    return there and not fit.earlier and max(nodes.values(), default=1) == 1


def _named_factor(group: Sequence[Share], full: int) -> tuple[str, float]:
    """The name of a wrong factor, and how large it is; no name where it is right, or not known."""
    masses = [mass(share) for share in group]
    counts = [count(share.of) for share in group]
    n, steps = len(group), max(len(main_losses(share.of)) for share in group)
    factors = [sum(share.of.coefficient * share.factor for share in group)]
    known = [m for m in masses if m is not None]
    if len(known) == n:
        factors += [sum(known), sum(known) / max(steps, 1)]
        total = sum(c for c in counts if c is not None)
        sums = all(loss.reduction == "sum" for s in group for loss in main_losses(s.of))
        if sums and total and same(sum(known), total):
            return "", 1.0  # sums by choice
    if all(
        s.of.scale != 1.0 for s in group
    ):  # scaled gradients that were not unscaled: a rule's own
        scale = group[0].of.scale
        if any(same(f, scale * k) for f in factors for k in (1, n)) and scale not in (1, n):
            return "", 1.0
    if n < 2 and full < 2 or any(same(factor, 1.0) for factor in factors):
        return "", 1.0
    for name, expected in (
        ("divisor missing", float(n)),
        ("divided twice", 1 / n),
        ("divisor of a full window", n / full),
    ):
        for factor in factors:
            if same(factor, expected) and expected != 1.0:
                return name, factor
    return "", 1.0


def weights(record: Record) -> Iterator[Finding]:
    """Micro-batches of unequal token counts weigh the same, or the reverse."""
    cases: dict[tuple[str, bool], list[tuple[float, Fit, Sequence[Share]]]] = {}
    for fit in fits(record):
        for group in micro_batches(fit):
            pairs = [(mass(share), count(share.of)) for share in group]
            known = [(m, c) for m, c in pairs if m and c]
            if len(known) < max(len(group), 2) or not _regular(fit, group):
                continue
            masses, counts = [abs(m) for m, _ in known], [c for _, c in known]
            per_target = [m / c for m, c in zip(masses, counts, strict=True)]
            equal_masses = same(min(masses), max(masses))
            if same(min(counts), max(counts)):
                name, ratio = "micro-batches weighted unequally", max(masses) / min(masses)
            else:
                name, ratio = "micro-batches weighted equally", max(per_target) / min(per_target)
            across = len({share.rank for share in group}) > 1 and equal_masses
            wrong = not equal_masses if "unequally" in name else equal_masses
            if wrong and ratio > 1 + _SAME:
                cases.setdefault((name, across), []).append((ratio, fit, group))
    for (name, across), found in cases.items():
        ratio, fit, group = max(found, key=lambda case: case[0])
        counted = ", ".join(f"{count(share.of):g}" for share in group[:6])
        size = _distance(group) if "unequally" not in name else 0.0
        yield Finding(
            "ranks weighted equally" if across and "unequally" not in name else name,
            f"micro-batches of {counted} targets: one target weighs up to {ratio:.4g} times another"
            + (f"; the gradient is {size:.2g} from the mean over all targets" if size else ""),
            "sum the losses (reduction='sum') and divide by all targets of the window"
            + (", on all ranks" if across else "")
            + ", or opt.backward(loss, weight=targets) of accumext.AccumulatingOptimizer",
            ratio,
            group[0].of.where,
        )


def _distance(group: Sequence[Share]) -> float:
    """From the gradient that counts every target alike, relative to it."""
    total = sum(count(share.of) or 0.0 for share in group)
    used = sum(share.factor * share.of.gradient for share in group)
    right = sum(
        share.factor * share.of.gradient * ((count(share.of) or 0.0) / total) / (mass(share) or 1.0)
        for share in group
    )
    return float((used - right).norm() / right.norm())  # type: ignore[union-attr]


def lost(record: Record) -> Iterator[Finding]:
    """Micro-batches whose gradients the step did not see."""
    worst: tuple[int, int, str] | None = None
    for fit in fits(record):
        top = max(abs(share.factor) for share in fit.shares)
        for group in micro_batches(fit):
            gone = [share for share in group if abs(share.factor) < _SAME * top]
            if gone and len(gone) < len(group) and (worst is None or len(gone) > worst[0]):
                worst = len(gone), len(group), gone[0].of.where
    for window in windows_of(record):
        passes = [one for one in window.passes if one.reached & record.audited]
        if not window.step.present and not window.step.skipped and passes:
            worst = len(passes), len(passes), passes[0].where
    if worst is not None:
        gone_count, n, where = worst
        yield Finding(
            "micro-batches lost",
            f"{gone_count} of the {n} micro-batches of a window are not in the gradient that "
            "the step used: .grad was cleared, or replaced, between them",
            "call optimizer.zero_grad() after optimizer.step(), and nowhere else",
            gone_count,
            where,
        )


def again(record: Record) -> Iterator[Finding]:
    """Micro-batches that count several times: graphs kept, or gradients not cleared."""
    nodes: Counter[int] = Counter()
    where = ""
    for fit in fits(record):
        for share in fit.shares:
            nodes.update({loss.node for loss in main_losses(share.of)})
            where = where or share.of.where
    times = max(nodes.values(), default=1)
    if times > 1:
        yield Finding(
            "micro-batches counted again",
            f"the loss of one micro-batch is in {times} backward passes, whose gradients add up",
            "call backward on each micro-batch's own loss, without retain_graph; keep "
            "loss.detach() for the log",
            times,
            where,
        )
    kept = [fit for fit in fits(record) if fit.earlier and same(fit.earlier, 1.0)]
    if kept:
        yield Finding(
            "micro-batches counted again",
            f"{places([fit.window for fit in kept])} began with the gradients of the step before: "
            f"micro-batches are in up to {len(kept) + 1} steps",
            "call optimizer.zero_grad() after every optimizer.step()",
            len(kept) + 1,
            kept[0].window.step.where,
        )


# --- 4 to 6: clips, scalers, schedules ------------------------------------------------------------


def clips(record: Record) -> Iterator[Finding]:
    """Clipped too early, too often, or in vain."""
    early: list[tuple[Clipped, float]] = []
    often: list[tuple[int, Clipped]] = []
    for window in windows_of(record):
        scale, inside = 1.0, 0
        last = None
        for event in window.events:
            if isinstance(event, Pass):
                scale = event.scale
                inside += last is not None
            elif isinstance(event, Unscaled):
                scale = 1.0
            elif isinstance(event, Clipped) and event.parameters & record.audited:
                last = event
                if scale != 1.0 and not record.wrapped:
                    early.append((event, scale))
        if inside and last is not None:
            number = sum(isinstance(event, Clipped) for event in window.events)
            often.append((number, last))
    if early:
        clip, scale = early[0]
        yield Finding(
            "clip before unscale",
            f"the norm {clip.norm:.4g} that was clipped to {clip.max_norm:g} is that of gradients "
            f"times the loss scale {scale:g}; the gradient's own is {clip.norm / scale:.4g}",
            "scaler.unscale_(optimizer) before clip_grad_norm_, once per window, or max_norm= and "
            "scaler= of accumext.AccumulatingOptimizer",
            scale,
            clip.where,
        )
    if often:
        number, clip = max(often, key=lambda case: case[0])
        yield Finding(
            "clip of each micro-batch",
            f"clipped {number} times in a window, to {clip.max_norm:g}: each pass adds to what was "
            "clipped, and the sum of all is not within the limit",
            "clip once, after the window's last backward pass and before optimizer.step()",
            number,
            clip.where,
        )
    vain = [e for e in record.events if isinstance(e, Clipped) and e.others]
    if vain:
        yield Finding(
            "clip of other parameters",
            f"{vain[0].others} of the clipped parameters belong to no optimizer that steps",
            "pass the parameters that the optimizer has: clip_grad_norm_(model.parameters(), ...)",
            vain[0].others,
            vain[0].where,
        )


def scalers(record: Record) -> Iterator[Finding]:
    """A GradScaler used out of order."""
    if record.wrapped:
        return
    updates: list[list[Updated]] = []
    mixed: list[tuple[float, str]] = []
    missing: list[tuple[float, str]] = []
    for window in windows_of(record):
        places_of = [i for i, event in enumerate(window.events) if isinstance(event, Pass)]
        inside = window.events[places_of[0] : places_of[-1]] if places_of else ()
        updates.append([event for event in inside if isinstance(event, Updated)])
        scales = [one.scale for one in window.passes]
        if scales and not same(min(scales), max(scales)):
            mixed.append((max(scales) / min(scales), window.passes[-1].where))
    for fit in fits(record):
        scale = fit.shares[0].of.scale
        unscaled = any(isinstance(event, Unscaled) for event in fit.window.events)
        if fit.equal and scale != 1.0 and not (unscaled or fit.window.step.through_scaler):
            if same(fit.shares[0].factor, 1.0):
                missing.append((scale, fit.window.step.where))
    if most := max(updates, key=len, default=[]):
        yield Finding(
            "scaler updated inside a window",
            f"scaler.update() ran {len(most)} times between micro-batches whose gradients add up",
            "scaler.update() once, after scaler.step(optimizer)",
            len(most),
            most[0].where,
        )
    for found, name, evidence, cure in (
        (
            mixed,
            "scales mixed in one sum",
            "losses of one window were scaled by factors of ratio {:.4g}, and the sum was divided "
            "by the last",
            "keep the loss scale until the window's step, or accumext.AccumulatingOptimizer, which "
            "unscales every micro-batch with its own",
        ),
        (
            missing,
            "unscale missing",
            "the step used gradients times the loss scale, {:.4g}",
            "scaler.step(optimizer) instead of optimizer.step(), or scaler.unscale_(optimizer)",
        ),
    ):
        if found:
            value, where = found[0]
            yield Finding(name, evidence.format(value), cure, value, where)


def nonfinite(record: Record) -> Iterator[Finding]:
    """Steps on inf or NaN, and steps skipped for another reason than an overflow of the scale."""
    windows = windows_of(record)
    stepped = [w for w in windows if w.step.used is not None and not finite(w.step.used)]
    if stepped:
        first = stepped[0]
        names = [record.names[n] for n in _culprits(first, record)]
        yield Finding(
            "step on inf or nan",
            f"{places(stepped)}: the step used an inf or NaN in the gradient of {some(names)}"
            + _bad_losses(first),
            "skip such steps: scaler.step(optimizer), or accumext.AccumulatingOptimizer, whose "
            "on_nonfinite= skips the window or the micro-batch, or raises",
            len(stepped),
            first.step.where,
        )
    skipped = [window for window in windows if window.step.skipped]
    of_data = [w for w in skipped if any(not math.isfinite(p.value) for p in w.passes)]
    if of_data or (skipped and len(skipped) == len(windows) > 1):
        shown = of_data or skipped
        names = sorted(
            {
                record.names[n]
                for one in shown[0].passes
                for n in one.reached
                if not finite(one.gradient[n])
            }
        )
        yield Finding(
            "steps skipped",
            f"{places(shown)} of {len(windows)} stepped nothing: inf or NaN in the gradient of "
            f"{some(names)}" + _bad_losses(shown[0]),
            "find the micro-batch that has it: the scale is not the cause where the loss is not "
            "finite; opt.last.nonfinite of accumext.AccumulatingOptimizer names parameters",
            len(shown),
            shown[0].step.where,
        )


def _culprits(window: Window, record: Record) -> list[int]:
    used = window.step.used
    return [] if used is None else [n for n in sorted(record.audited) if not finite(used[n])]


def _bad_losses(window: Window) -> str:
    bad = [i + 1 for i, one in enumerate(window.passes) if not math.isfinite(one.value)]
    return f"; the loss of micro-batch {bad[0]} is not finite" if bad else ""


def schedules(record: Record) -> Iterator[Finding]:
    """A schedule that counts micro-batches, or steps too early."""
    first = next((i for i, e in enumerate(record.events) if isinstance(e, Stepped)), None)
    early = [e for e in record.events[:first] if isinstance(e, Scheduled)]
    inside: list[list[Scheduled]] = []
    for window in windows_of(record):
        after: list[Scheduled] = []
        fresh = False
        for event in window.events:
            if isinstance(event, Pass):
                fresh = True
            elif isinstance(event, Scheduled) and fresh:
                after.append(event)
                fresh = False
        inside.append(after)
    most = max(inside, key=len, default=[])
    if len(most) > 1:
        yield Finding(
            "scheduler steps per micro-batch",
            f"the schedule went {len(most)} steps on before one step of the optimizer",
            "scheduler.step() after optimizer.step() alone; with accumext.AccumulatingOptimizer: "
            "if opt.stepped: scheduler.step()",
            len(most),
            most[0].where,
        )
    elif early and first is not None:
        yield Finding(
            "scheduler before the first step",
            f"the schedule went {len(early)} steps on before the optimizer's first: its first "
            "learning rate is never used",
            "call scheduler.step() after optimizer.step()",
            len(early),
            early[0].where,
        )


# --- 7 to 9: memory, truncation, precision --------------------------------------------------------


def graphs(record: Record) -> Iterator[Finding]:
    """One graph over many steps."""
    passes = [e for e in record.events if isinstance(e, Pass) and e.graph.calls >= _MANY_CALLS]
    if not passes:
        return
    worst = max(passes, key=lambda one: one.graph.bytes)
    graph = worst.graph
    step = graph.bytes / graph.calls
    flat = graph.bytes - graph.class_bytes * (1 - 1 / graph.calls)
    if graph.bytes - step < record.bytes:
        return
    classes = f", {mib(graph.class_bytes)} of them with an element per class" * bool(
        graph.class_bytes
    )
    yield Finding(
        "one graph over many steps",
        f"a pass keeps {mib(graph.bytes)} for {graph.calls} steps "
        f"({record.names[graph.parameter]} is used {graph.calls} times), and "
        f"{mib(graph.bytes_per_call)} more for each step{classes}",
        f"accumext.decode_loss keeps no logits, with the same gradient: about {mib(flat)}; "
        f"accumext.tbptt(k1=1, k2=1) keeps one step, about {mib(step)}, and truncates the gradient",
        graph.bytes,
        worst.where,
    )


def mib(number: float) -> str:
    """Bytes for people."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(number, 1.0), 1024)), len(units) - 1)
    return f"{number / 1024**power:.4g} {units[power]}"


def truncation(record: Record) -> Iterator[Finding]:
    """What detaching the state costs."""
    measured = [event for event in record.events if isinstance(event, Truncated)]
    for event in measured[:1]:
        if event.distance > _SAME:
            yield Finding(
                "truncated gradient",
                f"k1={event.k1}, k2={event.k2} of {event.steps} steps: {event.distance:.3g} from the "
                f"exact gradient, relative to it (cosine {event.cosine:.3g})",
                "accumext.decode_loss(..., k2=None) has the exact gradient in memory that does not "
                "grow with the logits; or a longer k2",
                event.distance,
                event.where,
            )


def half_sums(record: Record) -> Iterator[Finding]:
    """Sums of half-precision gradients that have lost bits."""
    cases = [
        (fit.window.step, len(fit.shares))
        for fit in fits(record)
        if fit.equal and not fit.earlier and fit.window.step.half_rounding > 0
    ]
    worst = max(cases, key=lambda case: case[0].half_error, default=None)
    if worst is None:
        return
    step, n = worst
    bits = math.log2(step.half_error / step.half_rounding) if step.half_error else 0.0
    if bits >= _LOST_BITS:
        yield Finding(
            "sum in half precision",
            f"the sum of {n} gradients in {len(record.half)} half-precision parameters is "
            f"{step.half_error:.3g} from their sum in float32, relative to it: {bits:.1f} bits more "
            "than one rounding loses",
            "accumulate in float32: accumext.AccumulatingOptimizer does, and accumext.masters "
            "keeps the sum unrounded for the step",
            step.half_error,
            step.where,
        )


# --- 10 to 13: processes, parameters, determinism -------------------------------------------------


def processes(record: Record) -> Iterator[Finding]:
    """DistributedDataParallel that reduces too often, or too little."""
    wasted = [(sum(one.sent for one in w.passes[:-1]), w) for w in windows_of(record)]
    worst, window = max(wasted, key=lambda case: case[0], default=(0, None))
    if worst and window is not None:
        n = len(window.passes)
        yield Finding(
            "reduced every micro-batch",
            f"all {n} passes of a window reduced their gradients: {mib(worst)} per rank for nothing",
            "with model.no_sync(): around all micro-batches but the last, or "
            "opt.micro_batch(model) of accumext.AccumulatingOptimizer",
            worst,
            window.passes[0].where,
        )
    steps = [[w.step.used for w in windows_of(rank)] for rank in record.ranks]
    differing: set[int] = set()
    for of_ranks in zip(*steps, strict=False):
        known = [used for used in of_ranks if used is not None and finite(used)]
        for a, b in pairwise(known):
            apart = (a - b).norm(dim=1) > _SAME_BITS * (a.norm(dim=1) + b.norm(dim=1))
            differing |= set(apart.nonzero()[:, 0].tolist())
    if differing:
        yield Finding(
            "parameters not reduced",
            f"the ranks stepped on different gradients of {some(record.names[n] for n in differing)}",
            "let the window's last backward pass run outside of model.no_sync()",
            len(differing),
            windows_of(record)[0].step.where,
        )


def parameters(record: Record) -> Iterator[Finding]:
    """Parameters that are not trained, or by two."""
    windows = [window for window in windows_of(record) if window.step.present]
    reached = frozenset[int]().union(*(one.reached for w in windows for one in w.passes))
    used = frozenset[int]().union(*(window.step.present for window in windows))
    where = windows[0].step.where if windows else ""
    for name, numbers, evidence, cure in (
        (
            "parameters without gradient",
            record.audited - used - reached if windows else frozenset[int](),
            "no backward pass reached",
            "use them in the loss, or leave them out of the optimizer",
        ),
        (
            "parameters in two groups",
            record.twice,
            "two optimizers, or two groups, step on",
            "give every parameter to one group of one optimizer",
        ),
        (
            "parameters in no optimizer",
            reached - record.trained if windows else frozenset[int](),
            "backward passes reached, and no optimizer stepped on,",
            "make the optimizer after the last of the model's parameters, or set "
            "requires_grad_(False)",
        ),
    ):
        if numbers:
            names = some(record.names[n] for n in sorted(numbers))
            yield Finding(name, f"{evidence} {names}", cure, len(numbers), where)


def determinism(record: Record) -> Iterator[Finding]:
    """Two runs of the same windows that differ."""
    if record.before is None:
        return
    runs = zip(_gradients(record.before), _gradients(record), strict=False)
    for number, ((_, a), (where, b)) in enumerate(runs, 1):
        if a.shape != b.shape or not (finite(a) and finite(b)):
            continue
        distance = float((a - b).norm() / a.norm()) if float(a.norm()) else 0.0
        if distance > _SAME_BITS:
            yield Finding(
                "runs differ",
                f"the gradient of backward pass {number} is {distance:.3g} from that of the first "
                "run, relative to it",
                "seed every generator and the loader's workers; torch.use_deterministic_algorithms("
                "True) names operations that are not deterministic",
                distance,
                where,
            )
            return


def _gradients(record: Record) -> Iterator[tuple[str, Sketch]]:
    for event in record.events:
        if isinstance(event, Pass):
            yield event.where, event.gradient


RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (
    nonfinite, divisor, lost, again, scalers, clips, processes, weights, schedules, parameters,
    half_sums, truncation, determinism, graphs,
)  # fmt: skip
