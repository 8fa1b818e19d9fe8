"""What a record shows to be wrong. Every rule is a function of the record, and says one thing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

from accumext.audit._events import (
    Call,
    Clipped,
    Event,
    Finding,
    Loss,
    Pass,
    Record,
    Stepped,
    Truncated,
    Window,
    windows_of,
)
from accumext.audit._fit import Fit, Share, finite, fits

Group: TypeAlias = Sequence[Share]  # micro-batches of one kind: passes from the same line
Found: TypeAlias = Iterator[Finding]

_SAME = 1e-2  # relative difference of what counts as equal
_MANY_CALLS = 16  # of one parameter in a graph; layers that share one call it less often
_SAME_BITS = 1e-13  # of sketches, whose own rounding is smaller
_LOST_BITS = 1.0  # of a sum in half precision, beyond those that its last rounding costs

CURES = {  # name of a finding -> what to write instead
    "step on inf or nan": "scaler.step(optimizer), or on_nonfinite= of AccumulatingOptimizer, "
    "which skips the window or the micro-batch, or raises",
    "steps skipped": "find the micro-batch that has it: no loss scale helps where the loss is not "
    "finite; opt.last.nonfinite of AccumulatingOptimizer names parameters",
    "unscale missing": "scaler.step(optimizer) instead of optimizer.step()",
    "divisor missing": "divide every micro-batch's loss by their number, or "
    "AccumulatingOptimizer(optimizer, window=n), which divides by what a window holds",
    "divided twice": "divide once, the loss or the gradient; for AccumulatingOptimizer: neither",
    "divisor of a full window": "divide the last window of an epoch by the micro-batches that it "
    "holds, or opt.flush() of AccumulatingOptimizer, which does",
    "micro-batches lost": "optimizer.zero_grad() after optimizer.step(), and nowhere else",
    "micro-batches counted again": "optimizer.zero_grad() after every optimizer.step(); backward "
    "on each micro-batch's own loss, without retain_graph, and loss.detach() for the log",
    "scales mixed in one sum": "keep the loss scale until the window's step, or "
    "AccumulatingOptimizer, which unscales every micro-batch with its own",
    "scaler updated inside a window": "scaler.update() once, after scaler.step(optimizer)",
    "clip before unscale": "scaler.unscale_(optimizer) before clip_grad_norm_, once per window, or "
    "max_norm= and scaler= of AccumulatingOptimizer",
    "clip of each micro-batch": "clip once, after the window's last backward pass",
    "clip of other parameters": "clip_grad_norm_ of the parameters that the optimizer has",
    "parameters not reduced": "let a window's last backward pass run outside of model.no_sync()",
    "reduced every micro-batch": "with model.no_sync(): around all micro-batches but the last, or "
    "opt.micro_batch(model) of AccumulatingOptimizer",
    "ranks weighted equally": "divide by the targets of all ranks: sum the losses, all-reduce the "
    "counts; or opt.backward(loss, weight=targets) of AccumulatingOptimizer",
    "micro-batches weighted equally": "sum the losses (reduction='sum') and divide by all targets "
    "of the window, or opt.backward(loss, weight=targets) of AccumulatingOptimizer",
    "micro-batches weighted unequally": "give micro-batches of as many targets the same factor",
    "scheduler steps per micro-batch": "scheduler.step() after optimizer.step() alone; with "
    "AccumulatingOptimizer: if opt.stepped: scheduler.step()",
    "scheduler before the first step": "scheduler.step() after optimizer.step()",
    "parameters in two groups": "give every parameter to one group of one optimizer",
    "parameters in no optimizer": "make the optimizer after the last of the model's parameters, or "
    "requires_grad_(False)",
    "parameters without gradient": "use them in the loss, or leave them out of the optimizer",
    "sum in half precision": "sum in float32: AccumulatingOptimizer does, and accumext.masters "
    "keeps the sum unrounded for the step",
    "truncated gradient": "accumext.decode_loss: the exact gradient, in memory that does not grow "
    "with the logits; or a longer k2",
    "runs differ": "seed every generator and the loader's workers; "
    "torch.use_deterministic_algorithms(True) names operations that are not deterministic",
    "one graph over many steps": "accumext.decode_loss keeps no logits, with the same gradient; "
    "accumext.tbptt(k1=1, k2=1) keeps one step, and truncates the gradient",
}  # fmt: skip


def findings(record: Record) -> tuple[Finding, ...]:
    """All that is wrong, the worst first: in the order of `CURES`."""
    order = list(CURES)
    every = [finding for rule in RULES for finding in rule(record)]
    return tuple(sorted(every, key=lambda finding: order.index(finding.name)))


def found(name: str, value: float, where: str, evidence: str) -> Finding:
    return Finding(name, evidence, CURES[name], value, where)


# --- what a loss weighs ---------------------------------------------------------------------------


def main_losses(one: Pass) -> tuple[Loss, ...]:
    """The losses that a pass is about: torch's own, else means, else what there is."""
    known = tuple(loss for loss in one.losses if loss.known)
    means = tuple(loss for loss in one.losses if loss.reduction == "mean")
    return known or means or one.losses


def mass(share: Share) -> float | None:
    """The weight of a pass's losses in the gradient, as means; None where it is not known."""
    losses = main_losses(share.of)
    if any(loss.reduction == "sum" and loss.count is None for loss in losses):
        return None
    of_sums = [loss.count or 0.0 if loss.reduction == "sum" else 1.0 for loss in losses]
    total = sum(loss.coefficient * n for loss, n in zip(losses, of_sums, strict=True))
    return total * share.factor


def count(one: Pass) -> float | None:
    """The targets that a pass counts; None where a loss does not say."""
    counts = [loss.count for loss in main_losses(one)]
    return None if None in counts else sum(n for n in counts if n is not None)


def groups(fit: Fit) -> list[Group]:
    """The kinds of micro-batches of a window."""
    shares = sorted(fit.shares, key=lambda share: share.of.where)
    return [tuple(some) for _, some in groupby(shares, key=lambda share: share.of.where)]


def regular(fit: Fit, group: Group) -> bool:
    """Each micro-batch is there once, and no other scale was on some of them."""
    nodes = Counter(node for share in group for node in nodes_of(share))
    top = max(abs(share.factor) for share in group)
    there = all(abs(share.factor) > _SAME * top for share in group)
    alike = len({(share.of.scale, share.of.reached) for share in group}) == 1
    return there and alike and not fit.earlier and max(nodes.values(), default=1) == 1


def clipped_inside(window: Window) -> list[Clipped]:
    """The clips of gradients to which passes were added later."""
    for events in parts(window):
        last = max((i for i, event in enumerate(events) if isinstance(event, Pass)), default=0)
        if any(isinstance(event, Clipped) for event in events[:last]):
            return [event for event in events if isinstance(event, Clipped)]
    return []


def parts(window: Window) -> Iterator[list[Event]]:
    """The events of a window between calls of `zero_grad`: gradients of one part add up."""
    for clears, events in groupby(window.events, lambda event: is_call(event, "zero_grad")):
        if not clears:
            yield list(events)


def is_call(event: Event, name: str) -> bool:
    return isinstance(event, Call) and event.name == name


def nodes_of(share: Share) -> set[tuple[int, int]]:
    return {(share.rank, loss.node) for loss in main_losses(share.of)}


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME)


def some(names: Iterable[str], most: int = 3) -> str:
    """A few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def numbered(windows: Iterable[Window]) -> str:
    numbers = [str(window.index + 1) for window in windows]
    return f"window{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def mib(number: float) -> str:
    """Bytes for people."""
    power = min(int(math.log(max(number, 1.0), 1024)), 4)
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# --- 1 to 3: divisors, weights, micro-batches -----------------------------------------------------


def divisor(record: Record) -> Found:
    """The gradient is c times the mean over the micro-batches."""
    every = [(fit, group) for fit in fits(record) for group in groups(fit)]
    full = Counter[str]()  # of every line
    for _, group in every:
        full[group[0].of.where] = max(full[group[0].of.where], len(group))
    cases: dict[str, list[tuple[Fit, float, Group]]] = {}
    for fit, group in every:
        if regular(fit, group) and not record.sums:
            name, factor = named_factor(group, full[group[0].of.where])
            cases.setdefault(name, []).append((fit, factor, group))
    for name, of_name in cases.items():
        if name:
            _, factor, group = of_name[0]
            given = {f"{share.of.coefficient / share.of.scale:.4g}" for share in group}
            yield found(
                name, factor, group[0].of.where,
                f"the gradient is {factor:.4g} times the mean over the {len(group)} micro-batches "
                f"of {numbered(fit.window for fit, _, _ in of_name)}; their losses were multiplied "
                f"by {some(sorted(given))}",
            )  # fmt: skip


def named_factor(group: Group, full: int) -> tuple[str, float]:
    """The name of a wrong factor, and how large it is; no name where it is right, or not known."""
    n, masses = len(group), [mass(share) for share in group]
    known = [m for m in masses if m is not None]
    losses = [loss for share in group for loss in main_losses(share.of)]
    factors = [sum(share.of.coefficient * share.factor for share in group)]
    if len(known) == n:
        factors += [sum(known), sum(known) / (len(losses) / n)]  # a mean over steps, or their sum
    summed = [loss.count for loss in losses if loss.reduction == "sum"]
    targets = sum(each or 0.0 for each in summed) if len(summed) == len(losses) else 1.0
    if None in summed or any(same(f, 1.0) or same(f, targets) for f in factors):
        return "", 1.0  # not known; or a mean, or a sum by choice
    partial, whole = ("divisor of a full window", n / full), ("divided twice", 1 / n)
    names = {
        "divisor missing": float(n),
        **dict((partial, whole) if n < full else (whole, partial)),
    }
    for name, expected in names.items():
        for factor in factors:
            if same(factor, expected):
                return name, factor
    return "", 1.0


def weights(record: Record) -> Found:
    """Micro-batches of unequal token counts weigh the same, or the reverse."""
    cases: dict[str, list[tuple[float, Group]]] = {}
    for fit in fits(record):
        for group in groups(fit):
            known = [(abs(m), c) for s in group if (m := mass(s)) and (c := count(s.of))]
            if len(known) < max(len(group), 2) or not regular(fit, group):
                continue
            masses, counts = [m for m, _ in known], [c for _, c in known]
            per_target = [m / c for m, c in known]
            equal = same(min(masses), max(masses))
            if equal and not same(min(counts), max(counts)):
                ranks = {share.rank for share in group}
                name = "ranks" if len(ranks) > 1 else "micro-batches"
                ratio = max(per_target) / min(per_target)
                cases.setdefault(f"{name} weighted equally", []).append((ratio, group))
            elif not equal and same(min(counts), max(counts)):
                ratio = max(masses) / min(masses)
                cases.setdefault("micro-batches weighted unequally", []).append((ratio, group))
    for name, of_name in cases.items():
        ratio, group = max(of_name, key=lambda case: case[0])
        yield found(
            name, ratio, group[0].of.where,
            f"micro-batches of {some([f'{count(s.of):g}' for s in group], 6)} targets: one target "
            f"weighs up to {ratio:.4g} times another; the gradient is {distance(group):.2g} from "
            "the mean over all targets, relative to it",
        )  # fmt: skip


def distance(group: Group) -> float:
    """Of a window's gradient from the one that counts every target alike."""
    total = sum(count(share.of) or 0.0 for share in group)
    parts = [(s.factor * s.of.gradient, (count(s.of) or 0.0) / (mass(s) or 1.0)) for s in group]
    used = sum((part for part, _ in parts[1:]), parts[0][0])
    right = sum((part * c / total for part, c in parts[1:]), parts[0][0] * parts[0][1] / total)
    return float((used - right).norm() / right.norm())


def lost(record: Record) -> Found:
    """Micro-batches whose gradients the step did not see."""
    cases = []
    for fit in fits(record):
        top = max(abs(share.factor) for share in fit.shares)
        for group in groups(fit):
            own = [share for share in group if share.rank == record.rank]
            gone = [share for share in own if abs(share.factor) < _SAME * top]
            cases += [(len(gone), len(own), own[0].of.where)] if len(gone) < len(own) else []
    for window in windows_of(record):
        passes = window.passes
        if passes and not (window.step.present or window.step.skipped):
            cases.append((len(passes), len(passes), passes[0].where))
    gone_count, n, where = max(cases, default=(0, 0, ""))
    if gone_count:
        yield found(
            "micro-batches lost", gone_count, where,
            f"{gone_count} of the {n} micro-batches of a window are not in the gradient that the "
            "step used: .grad was cleared, or replaced, between them",
        )  # fmt: skip


def again(record: Record) -> Found:
    """Micro-batches that count several times: graphs kept, or gradients not cleared."""
    shares = [share for fit in fits(record) for share in fit.shares]
    times = max(Counter(n for s in shares for n in nodes_of(s)).values(), default=1)
    kept = [fit.window for fit in fits(record) if same(fit.earlier, 1.0)]
    if times > 1:
        yield found(
            "micro-batches counted again", times, shares[0].of.where,
            f"the loss of one micro-batch is in {times} backward passes, whose gradients add up",
        )  # fmt: skip
    elif kept:
        yield found(
            "micro-batches counted again", len(kept) + 1, kept[0].step.where,
            f"{numbered(kept)} began with the gradients of the step before: micro-batches are in "
            f"up to {len(kept) + 1} steps",
        )  # fmt: skip


# --- 4 to 6: clips, scalers, schedules ------------------------------------------------------------


def clips(record: Record) -> Found:
    """Clipped too early, too often, or in vain."""
    early: list[tuple[Clipped, float]] = []
    for window in [] if record.wrapped else windows_of(record):
        scale = 1.0
        for event in window.events:
            if isinstance(event, Pass):
                scale = event.scale
            elif is_call(event, "unscale_"):
                scale = 1.0
            elif isinstance(event, Clipped) and scale != 1.0:
                early.append((event, scale))
    for clip, scale in early[:1]:
        yield found(
            "clip before unscale", scale, clip.where,
            f"the norm {clip.norm:.4g} that was clipped to {clip.max_norm:g} is that of gradients "
            f"times the loss scale {scale:g}; the gradient's own is {clip.norm / scale:.4g}",
        )  # fmt: skip
    often = max(map(clipped_inside, windows_of(record)), key=len, default=[])
    if often:
        yield found(
            "clip of each micro-batch", len(often), often[0].where,
            f"clipped {len(often)} times in a window, to {often[0].max_norm:g}: each pass adds to "
            "what was clipped before",
        )  # fmt: skip
    vain = [event for event in record.events if isinstance(event, Clipped) and event.others]
    for clip in vain[:1]:
        yield found(
            "clip of other parameters", clip.others, clip.where,
            f"{clip.others} of the clipped parameters belong to no optimizer that steps",
        )  # fmt: skip


def scalers(record: Record) -> Found:
    """A GradScaler used out of order."""
    every = [events for window in windows_of(record) for events in parts(window)]
    for events in [] if record.wrapped else every:
        at = [i for i, event in enumerate(events) if isinstance(event, Pass)]
        updates = [e for e in events[at[0] : at[-1]] if is_call(e, "update")] if at else []
        scales = [event.scale for event in events if isinstance(event, Pass)]
        if updates:
            yield found(
                "scaler updated inside a window", len(updates), updates[0].where,
                f"{len(updates)} times between micro-batches whose gradients add up",
            )  # fmt: skip
        if scales and not same(min(scales), max(scales)):
            ratio = max(scales) / min(scales)
            yield found(
                "scales mixed in one sum", ratio, events[at[-1]].where,
                f"losses of one window were scaled with factors of ratio {ratio:.4g}, and their "
                "sum was divided by the last",
            )  # fmt: skip
        if updates or len({*scales}) > 1:
            break
    for fit in [] if record.wrapped else fits(record):
        scale, step = fit.shares[0].of.scale, fit.window.step
        unscaled = any(is_call(event, "unscale_") for event in fit.window.events)
        as_scaled = fit.equal and scale != 1.0 and same(fit.shares[0].factor, 1.0)
        if as_scaled and not (unscaled or step.through_scaler):
            evidence = f"the step used gradients times the loss scale, {scale:g}"
            yield found("unscale missing", scale, step.where, evidence)
            break


def nonfinite(record: Record) -> Found:
    """Steps on inf or NaN, and steps skipped for another reason than an overflow of the scale."""
    windows = windows_of(record)
    stepped = [w for w in windows if w.step.used is not None and not finite(w.step.used)]
    skipped = [window for window in windows if window.step.skipped]
    of_data = [w for w in skipped if not all(math.isfinite(one.value) for one in w.passes)]
    never = skipped if len(skipped) == len(windows) > 1 else []
    for name, cases in (("step on inf or nan", stepped), ("steps skipped", of_data or never)):
        if cases:
            passes, of_step = cases[0].passes, cases[0].step.used
            grads = [one.gradient for one in passes] if of_step is None else [of_step]
            bad = [n for n in sorted(record.audited) if any(not finite(g[n]) for g in grads)]
            at = [i for i, one in enumerate(passes, 1) if not math.isfinite(one.value)]
            yield found(
                name, len(cases), cases[0].step.where,
                f"{numbered(cases)} of {len(windows)}: inf or NaN"
                + (f" in the gradient of {some(record.names[n] for n in bad)}" if bad else "")
                + (f"; the loss of micro-batch {at[0]} is not finite" if at else ""),
            )  # fmt: skip


def schedules(record: Record) -> Found:
    """A schedule that counts micro-batches, or steps too early."""
    most: list[Event] = []
    for window in windows_of(record):
        events = [e for e in window.events if isinstance(e, Pass) or is_call(e, "schedule")]
        after = [b for a, b in pairwise(events) if isinstance(a, Pass) and is_call(b, "schedule")]
        if len(after) > 1:
            most = max(most, [e for e in events if is_call(e, "schedule")], key=len)
    first = next((i for i, e in enumerate(record.events) if isinstance(e, Stepped)), 0)
    early = [event for event in record.events[:first] if is_call(event, "schedule")]
    if most:
        yield found(
            "scheduler steps per micro-batch", len(most), most[0].where,
            f"the schedule went {len(most)} steps on before one step of the optimizer",
        )  # fmt: skip
    elif early:
        yield found(
            "scheduler before the first step", len(early), early[0].where,
            f"the schedule went {len(early)} steps on before the optimizer's first: its first "
            "learning rate is never used",
        )  # fmt: skip


# --- 7 to 9: memory, truncation, precision --------------------------------------------------------


def graphs(record: Record) -> Found:
    """One graph over many steps."""
    passes = [e for e in record.events if isinstance(e, Pass) and e.graph.calls >= _MANY_CALLS]
    for worst in [max(passes, key=lambda one: one.graph.bytes)] if passes else []:
        graph = worst.graph
        step = graph.bytes / graph.calls
        flat = graph.bytes - graph.class_bytes * (1 - 1 / graph.calls)
        if graph.bytes - step > record.bytes:
            yield found(
                "one graph over many steps", graph.bytes, worst.where,
                f"a pass keeps {mib(graph.bytes)} for {graph.calls} steps, "
                f"{mib(graph.bytes_per_call)} more for each; {mib(graph.class_bytes)} of it has an "
                f"element per class. Without logits it is {mib(flat)}, with one step {mib(step)}",
            )  # fmt: skip


def truncation(record: Record) -> Found:
    """What detaching the state costs."""
    measured = [event for event in record.events if isinstance(event, Truncated)]
    for event in [max(measured, key=lambda event: event.distance)] if measured else []:
        if event.distance > _SAME:
            yield found(
                "truncated gradient", event.distance, event.where,
                f"k1={event.k1}, k2={event.k2} of {event.steps} steps: {event.distance:.3g} from "
                "the exact gradient, relative to it",
            )  # fmt: skip


def half_sums(record: Record) -> Found:
    """Sums of half-precision gradients that have lost bits."""
    whole = [fit for fit in fits(record) if fit.equal and not fit.earlier]
    for fit in [max(whole, key=half_error)] if whole else []:
        error, once = half_error(fit)
        bits = math.log2(error / once) if error and once else 0.0
        if bits >= _LOST_BITS:
            yield found(
                "sum in half precision", error, fit.window.step.where,
                f"the sum of {len(fit.shares)} gradients in {len(record.half)} parameters is "
                f"{error:.3g} from their sum in float32, relative to it: {bits:.1f} bits lost "
                "beyond one rounding",
            )  # fmt: skip


def half_error(fit: Fit) -> tuple[float, float]:
    """Of a window's sum, relative to the sum in float32; and what rounding that once would cost."""
    sums = fit.window.step.half_sums
    whole = sum(one.square for one in sums)
    if not whole or sum(one.factor * one.square for one in sums) <= 0:
        return 0.0, 0.0
    clip = math.prod(e.factor for e in fit.window.events if isinstance(e, Clipped))
    near = sum(one.factor * one.square for one in sums) / whole
    # What clip and scaler multiplied with: the sums may be scaled yet, for a fused optimizer.
    factor = min((clip, clip / fit.shares[0].of.scale), key=lambda f: abs(math.log(near / f)))
    squares = [
        ((one.factor / factor - 1) ** 2 + one.rest * (one.factor / factor) ** 2) * one.square
        for one in sums
    ]
    return (sum(squares) / whole) ** 0.5, (sum(one.once for one in sums) / whole) ** 0.5


# --- 10 to 13: processes, parameters, determinism -------------------------------------------------


def processes(record: Record) -> Found:
    """DistributedDataParallel that reduces too often, or too little."""
    windows = windows_of(record)
    sums = [
        [event for event in events if isinstance(event, Pass)]
        for window in windows
        for events in parts(window)
    ]
    vain = max(sums, key=lambda passes: sum(one.sent for one in passes[:-1]), default=[])
    if wasted := sum(one.sent for one in vain[:-1]):
        yield found(
            "reduced every micro-batch", wasted, vain[0].where,
            f"{len(vain)} passes of a window reduced their gradients, where one has to: "
            f"{mib(wasted)} per rank for nothing",
        )  # fmt: skip
    differing: set[int] = set()
    for steps in zip(*map(windows_of, record.ranks), strict=False):
        used = [w.step.used for w in steps if w.step.used is not None and finite(w.step.used)]
        for a, b in pairwise(used):
            apart = (a - b).norm(dim=1) > _SAME_BITS * (a.norm(dim=1) + b.norm(dim=1))
            differing |= set(apart.nonzero()[:, 0].tolist())
    if differing:
        yield found(
            "parameters not reduced", len(differing), windows[0].step.where,
            "the ranks stepped on different gradients of "
            + some(record.names[n] for n in sorted(differing)),
        )  # fmt: skip


def parameters(record: Record) -> Found:
    """Parameters that are not trained, or by two."""
    windows = [window for window in windows_of(record) if window.step.present]
    passes = [event for event in record.events if isinstance(event, Pass)]
    reached = frozenset[int]().union(*(one.reached for one in passes))
    used = frozenset[int]().union(*(window.step.present for window in windows))
    for name, numbers, evidence in (
        ("parameters in two groups", record.twice, "two optimizers, or two groups of one, have"),
        ("parameters in no optimizer", reached - record.trained, "gradients reach, no step uses"),
        ("parameters without gradient", record.audited - used - reached, "no gradient reaches"),
    ):
        if numbers and windows:
            names = some(record.names[n] for n in sorted(numbers))
            yield found(name, len(numbers), windows[0].step.where, f"{evidence} {names}")


def determinism(record: Record) -> Found:
    """Two runs of the same windows that differ."""
    runs = [] if record.before is None else zip(_passes(record.before), _passes(record))
    for number, (a, b) in enumerate(runs, 1):
        size = float(a.gradient.nan_to_num(0.0, 0.0, 0.0).norm())
        apart = float((a.gradient - b.gradient).norm()) / (size or 1.0)
        if not a.gradient.allclose(b.gradient, 0.0, _SAME_BITS * size, equal_nan=True):
            yield found(
                "runs differ", number, b.where,
                f"the gradient of backward pass {number} is about {apart:.1g} from that of the "
                "first run, relative to it",
            )  # fmt: skip
            return


def _passes(record: Record) -> list[Pass]:
    return [event for event in record.events if isinstance(event, Pass)]


RULES: tuple[Callable[[Record], Found], ...] = (
    nonfinite, divisor, lost, again, scalers, clips, processes, weights, schedules, parameters,
    half_sums, truncation, determinism, graphs,
)  # fmt: skip
