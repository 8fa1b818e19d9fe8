"""Rules about clips, loss scales, schedules, averages, processes, parameters, memory, precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from accumext.auditing._events import (
    Call,
    Clipped,
    Event,
    Pass,
    Record,
    Stepped,
    Truncated,
    View,
    Window,
    is_call,
)
from accumext.auditing._fit import Fit, finite, fits
from accumext.auditing._passes import UNNAMED
from accumext.auditing._sums import same
from accumext.auditing._words import Found, Said, mib, numbered, several, some

_MANY_CALLS = 16  # of one parameter in a graph with one loss; layers that share one call it less
_SAME_BITS = 1e-13  # of sketches, whose own rounding is smaller
_LOST_BITS = 1.0  # of a sum in half precision, beyond those that its last rounding costs
_SCALED = 0.1  # logarithm of a factor that is no rounding
_MEASURED = 1e-2  # distance of a truncated gradient that is no rounding


def parts_of(window: Window) -> list[list[Event]]:
    """The events of a window between calls of `zero_grad`: gradients of one part add up."""
    groups = groupby(window.events, lambda event: is_call(event, "zero_grad"))
    return [list(events) for clears, events in groups if not clears]


# --- clips, scalers, steps ------------------------------------------------------------------------


def clips(view: View) -> Found:
    """Clipped too early, too often, in part or in vain; not where a clip changed nothing."""
    early: list[tuple[Clipped, float]] = []
    for window in [] if view.optimizer.wrapped else view.windows:
        scale = 1.0
        for event in window.events:
            if isinstance(event, Pass):
                scale = event.scale
            elif is_call(event, "unscale_"):
                scale = 1.0
            elif isinstance(event, Clipped) and scale != 1.0 and event.factor < 1:
                early.append((event, scale))
    for clip, scale in early[:1]:
        yield Said(
            "clip.before_unscale", scale, clip.where,
            f"the norm {clip.norm:.4g} that was clipped to {clip.max_norm:g} is that of gradients "
            f"times the loss scale {scale:g}; the gradient's own is {clip.norm / scale:.4g}",
            asks=clip.max_norm >= scale,
        )  # fmt: skip
    often = max(map(_clipped_inside, view.windows), key=len, default=[])
    judged = {fit.window.index for fit in fits(view) if not fit.by_hand}
    if often:
        yield Said(
            "clip.per_micro_batch", len(often), often[0].where,
            f"clipped {len(often)} times in a window, to {often[0].max_norm:g}: each pass adds to "
            "what was clipped before",
            asks=not judged,
        )  # fmt: skip
    every = [e for w in view.windows for e in w.events if isinstance(e, Clipped)]
    for clip in [event for event in every if event.others][:1]:
        yield Said(
            "clip.other_parameters", clip.others, clip.where,
            f"{clip.others} of the clipped parameters belong to no optimizer that steps",
            asks=clip.filled,
        )  # fmt: skip
    yield from _clipped_in_part(view)


def _clipped_inside(window: Window) -> list[Clipped]:
    """The clips of gradients to which passes were added later."""
    for events in parts_of(window):
        last = max((i for i, event in enumerate(events) if isinstance(event, Pass)), default=0)
        if any(isinstance(event, Clipped) and event.factor < 1 for event in events[:last]):
            return [event for event in events if isinstance(event, Clipped)]
    return []


def _clipped_in_part(view: View) -> Found:
    left: list[tuple[Window, frozenset[int], Clipped]] = []
    for window in view.windows:
        own = [e for e in window.events if isinstance(e, Clipped) and e.max_norm < math.inf]
        clipped = frozenset[int]().union(*(event.parameters for event in own))
        if clipped & window.step.present and window.step.present - clipped:
            left.append((window, window.step.present - clipped, own[-1]))
    if left and len(left) == len([w for w in view.windows if w.step.present]):
        _, missing, clip = left[0]
        names = some(view.record.names[n] for n in sorted(missing))
        yield Said(
            "clip.part", len(missing), clip.where,
            f"{len(missing)} of the {len(left[0][0].step.present)} parameters of the step were "
            f"not clipped: {names}",
            asks=True,
        )  # fmt: skip


def scalers(view: View) -> Found:
    """A GradScaler used out of order."""
    if view.optimizer.wrapped:
        return
    for events in [events for window in view.windows for events in parts_of(window)]:
        at = [i for i, event in enumerate(events) if isinstance(event, Pass)]
        updates = [e for e in events[at[0] : at[-1]] if is_call(e, "update")] if at else []
        scales = [event.scale for event in events if isinstance(event, Pass)]
        again = at and any(is_call(event, "unscale_") for event in events[at[0] : at[-1]])
        if updates and (again or len({*scales}) > 1):
            yield Said(
                "scaler.updated_inside", len(updates), updates[0].where,
                f"{len(updates)} times between micro-batches whose gradients add up",
            )  # fmt: skip
        if scales and not same(min(scales), max(scales)):
            ratio = max(scales) / min(scales)
            yield Said(
                "scaler.mixed", ratio, events[at[-1]].where,
                f"losses of one window were scaled with factors of ratio {ratio:.4g}, and their "
                "sum was divided by the last",
            )  # fmt: skip
        if updates or len({*scales}) > 1:
            break
    for fit in fits(view):
        scale, step = fit.parts[0].of.scale, fit.window.step
        unscaled = any(is_call(event, "unscale_") for event in fit.window.events)
        shares = (1.0, 1 / len(fit.parts))
        as_scaled = (
            fit.equal and scale != 1.0 and any(same(fit.parts[-1].factor, s) for s in shares)
        )
        if as_scaled and not (unscaled or step.through_scaler):
            evidence = f"the step used gradients times the loss scale, {scale:g}"
            yield Said("scaler.unscale_missing", scale, step.where, evidence)
            break


def nonfinite(view: View) -> Found:
    """Steps on inf or NaN, and steps skipped for another reason than an overflow of the scale."""
    windows = view.windows
    stepped = [
        w for i, w in enumerate(windows)
        if w.step.used is not None and not finite(w.step.used) and _moved(w, windows[i + 1 :])
    ]  # fmt: skip
    skipped = [window for window in windows if window.step.skipped]
    of_data = [w for w in skipped if not all(math.isfinite(one.value) for one in w.passes)]
    never = skipped if len(skipped) == len(windows) > 1 else []
    for id, cases in (("step.nonfinite", stepped), ("step.skipped", of_data or never)):
        if cases:
            passes, of_step = cases[0].passes, cases[0].step.used
            grads = [one.gradient for one in passes] if of_step is None else [of_step]
            own = sorted(view.optimizer.parameters)
            bad = [n for n in own if any(not finite(g[n]) for g in grads)]
            first = [n for one in passes for n in one.order if not finite(one.gradient[n])][:1]
            at = [i for i, one in enumerate(passes, 1) if not math.isfinite(one.value)]
            names = view.record.names
            yield Said(
                id, len(cases), cases[0].step.where,
                f"{numbered(cases)} of {len(windows)}: inf or NaN"
                + (f" in the gradient of {some(names[n] for n in bad)}" if bad else "")
                + (f", in the backward pass first in that of {names[first[0]]}" if first else "")
                + (f"; the loss of micro-batch {at[0]} is not finite" if at else ""),
                asks=id == "step.skipped" and not of_data,
            )  # fmt: skip


def _moved(window: Window, later: Sequence[Window]) -> bool:
    """Whether a step changed the parameters, as far as the passes after it tell."""
    after = [one.weights for following in later for one in following.passes][:1]
    return not (window.passes and after and window.passes[-1].weights == after[0])


# --- schedules and averages -----------------------------------------------------------------------


def schedules(view: View) -> Found:
    """A schedule that counts micro-batches, moves without a step, or steps too early."""
    most = _between_passes(view, "schedule")
    first = view.windows[0].events if view.windows else ()
    early = [event for event in first if is_call(event, "schedule")]
    passes = [i for i, event in enumerate(first) if isinstance(event, Pass)]
    if most:
        yield Said(
            "schedule.per_micro_batch", len(most), most[0].where,
            f"the schedule went {len(most)} steps on before one step of the optimizer",
        )  # fmt: skip
    elif early:
        yield Said(
            "schedule.before_first_step", len(early), early[0].where,
            f"the schedule went {several(len(early), 'step')} on before the optimizer's first: its "
            "first learning rate is never used",
            asks=not any(is_call(event, "schedule") for event in first[max(passes, default=0) :])
            or not passes,
        )  # fmt: skip
    yield from _on_skipped(view, "schedule", "the schedule went on")


def averages(view: View) -> Found:
    """An average of the model, or a teacher, that moves though the model has not."""
    most = _between_passes(view, "average")
    if most:
        yield Said(
            "average.per_micro_batch", len(most), most[0].where,
            f"a copy of the model was written {len(most)} times between two steps: the same "
            "parameters count as often",
        )  # fmt: skip
    yield from _on_skipped(view, "average", "a copy of the model was written")


def _between_passes(view: View, name: str) -> list[Event]:
    """The calls of the window with most, if they come after several of its passes."""
    most: list[Event] = []
    for window in view.windows:
        events = [e for e in window.events if isinstance(e, Pass) or is_call(e, name)]
        at = [i for i, event in enumerate(events) if isinstance(event, Pass)]
        each = all(any(is_call(e, name) for e in events[a:b]) for a, b in pairwise(at))
        found = [event for event in events if is_call(event, name)]
        still = len({one.weights for one in window.passes}) == 1
        if len(at) > 1 and each and len(found) > 1 and (still or name == "schedule"):
            most = max(most, found, key=len)
    return most


def _on_skipped(view: View, name: str, words: str) -> Found:
    calls = []
    following = [*(window.events for window in view.windows[1:]), view.rest]
    for window, events in zip(view.windows, following, strict=False):
        begun = next((i for i, e in enumerate(events) if isinstance(e, Pass)), len(events))
        if window.step.skipped:
            calls += [event for event in events[:begun] if is_call(event, name)][:1]
    if calls:
        yield Said(
            f"{name}.on_skipped", len(calls), calls[0].where,
            f"{words} after {several(len(calls), 'step')} that the scaler had skipped",
            asks=True,
        )  # fmt: skip


# --- processes and parameters ---------------------------------------------------------------------


def processes(view: View) -> Found:
    """DistributedDataParallel that reduces too often, or too little."""
    record, windows = view.record, view.windows
    sums = [
        [event for event in events if isinstance(event, Pass)]
        for window in windows
        for events in parts_of(window)
    ]
    vain = max(sums, key=lambda passes: sum(one.sent for one in passes[:-1]), default=[])
    if wasted := sum(one.sent for one in vain[:-1]):
        alone = any(one.without_sync for one in vain)
        why = "; no_sync was on in the backward pass, and has to be in the forward pass" * alone
        yield Said(
            "processes.reduced_each", wasted, vain[0].where,
            f"{len(vain)} passes of a window reduced their gradients, where one has to: "
            f"{mib(wasted)} per rank for nothing{why}",
            asks=not alone,
        )  # fmt: skip
    differing: set[int] = set()
    for steps in zip(*(rank.windows for rank in view.ranks), strict=False):
        used = [w.step.used for w in steps if w.step.used is not None and finite(w.step.used)]
        for a, b in pairwise(used):
            apart = (a - b).norm(dim=1) > _SAME_BITS * (a.norm(dim=1) + b.norm(dim=1))
            differing |= set(apart.nonzero()[:, 0].tolist())
    if differing:
        yield Said(
            "processes.not_reduced", len(differing), windows[0].step.where,
            "the ranks stepped on different gradients of "
            + some(record.names[n] for n in sorted(differing)),
        )  # fmt: skip


def shared(view: View) -> Found:
    """Parameters that another optimizer has as well: a question, unless both used one gradient."""
    own, used, both = view.optimizer.parameters, set[str](), frozenset[int]()
    every: list[Event] = [*(e for w in view.windows for e in w.events), *view.rest]
    at_once = False
    for event in every:
        if isinstance(event, Pass) or is_call(event, "zero_grad"):
            used = set()
        elif isinstance(event, Stepped):
            at_once |= "other" in used
            used.add("own")
        elif isinstance(event, Call) and event.name == "step" and event.parameters & own:
            both |= event.parameters & own
            at_once |= "own" in used
            used.add("other")
    if both and view.windows:
        names = some(view.record.names[n] for n in sorted(both))
        how = ", and both step on one gradient" if at_once else ""
        yield Said(
            "parameters.twice", len(both), view.windows[0].step.where,
            f"two optimizers, or two groups of one, have {names}{how}",
            asks=not at_once,
        )  # fmt: skip


def without_gradient(view: View) -> Found:
    """Parameters of the optimizer that no pass reaches."""
    windows = [window for window in view.windows if window.step.present]
    reached = frozenset[int]().union(*(one.reached for one in view.passes))
    used = frozenset[int]().union(*(window.step.present for window in windows))
    own = view.optimizer.parameters
    numbers = own - used - reached
    if view.windows and view.record.passes and not (used or reached & own):
        yield Said(
            "parameters.no_gradient", len(own), view.windows[0].step.where,
            f"no gradient reaches any of the {len(own)} parameters of {view.optimizer.name}: its "
            "steps change nothing",
        )  # fmt: skip
    elif numbers and windows and reached & own:
        names = some(view.record.names[n] for n in sorted(numbers))
        evidence = f"no gradient reaches {names}"
        where = windows[0].step.where
        yield Said("parameters.no_gradient", len(numbers), where, evidence, asks=True)


def untrained(record: Record) -> Found:
    """Parameters that passes reach, and no optimizer has."""
    passes = _passes(record)
    reached = frozenset[int]().union(*(one.reached for one in passes))
    steps = [event for event in record.events if isinstance(event, Stepped) and event.present]
    left = reached - record.trained  # those of modules: not what takes their place for a pass
    numbers = sorted(n for n in left if not record.names[n].startswith(f"{UNNAMED} "))
    if steps and reached & record.trained and numbers:
        evidence = f"gradients reach, no step uses {some(record.names[n] for n in numbers)}"
        where = steps[0].where
        yield Said("parameters.no_optimizer", len(numbers), where, evidence, asks=True)


def decay(view: View) -> Found:
    """Weight decay of vectors, in a group with matrices."""
    numbers = view.optimizer.decayed
    if numbers and view.windows:
        names = some(view.record.names[n] for n in numbers)
        evidence = f"weights of {several(len(numbers), 'vector')} decay as matrices do: {names}"
        where = view.windows[0].step.where
        yield Said("optimizer.decay", len(numbers), where, evidence, asks=True)


def batch_norms(record: Record) -> Found:
    """Batch norms in eval that are trained."""
    passes = [one for one in _passes(record) if one.eval_norms]
    for one in passes[:1]:
        yield Said(
            "modules.batchnorm_eval", len(one.eval_norms), one.where,
            f"{some(one.eval_norms)} got gradients in eval, from {several(len(passes), 'pass')} of "
            f"{len(_passes(record))}",
            asks=True,
        )  # fmt: skip


# --- memory, truncation, precision, determinism ---------------------------------------------------


def graphs(record: Record) -> Found:
    """One graph over many steps, or over a whole window's losses."""
    passes = [
        one for one in _passes(record)
        if one.graph.calls >= _MANY_CALLS or 1 < one.graph.losses <= one.graph.calls
    ]  # fmt: skip
    for worst in [max(passes, key=lambda one: one.graph.bytes)] if passes else []:
        graph = worst.graph
        step = graph.bytes / graph.calls
        if graph.bytes - step <= record.bytes:
            continue
        evidence = (
            f"a pass keeps {mib(graph.bytes)} for {graph.calls} steps, {mib(graph.bytes_per_call)} "
            f"more for each; {mib(graph.class_bytes)} of it has an element per class. "
        )
        if graph.separate:
            evidence = (
                f"the {graph.losses} losses of a pass have graphs of their own, of {mib(step)}"
            )
            yield Said("memory.losses_summed", graph.losses, worst.where, evidence, asks=True)
            continue
        if 2 * graph.class_bytes > graph.bytes:
            flat = graph.bytes - graph.class_bytes * (1 - 1 / graph.calls)
            evidence += f"Without logits it is {mib(flat)}, with one step {mib(step)}"
            cure = "accumext.decode_loss keeps no logits, with the same gradient; accumext.tbptt("
            cure += "k1=1, k2=1) keeps one step, and truncates the gradient"
        else:
            evidence += f"With one step it is {mib(step)}"
            cure = "torch.utils.checkpoint around a step, with the same gradient; accumext.tbptt "
            cure += "keeps k2 steps, and truncates it"
        yield Said("memory.graph", graph.bytes, worst.where, evidence, True, cure)


def growth(record: Record) -> Found:
    """Graphs that hold those of the passes before."""
    run: list[Pass] = []
    longest: list[Pass] = []
    nodes = [loss.node for one in _passes(record) for loss in one.losses]
    for one in _passes(record):
        more = bool(run) and one.graph.bytes > run[-1].graph.bytes
        run = [*run, one] if more and one.graph.held == len(run) else [one]
        longest = max(longest, run, key=len)
    if len(longest) > 2 and len(nodes) == len(set(nodes)):
        one = longest[-1]
        yield Said(
            "memory.growing", len(longest), one.where,
            f"a pass holds the graphs of {len(longest)} passes, {mib(one.graph.bytes)} where the "
            f"first had {mib(longest[0].graph.bytes)}",
            asks=True,
        )  # fmt: skip


def truncation(record: Record) -> Found:
    """What detaching the state costs."""
    measured = [event for event in record.events if isinstance(event, Truncated)]
    for event in [max(measured, key=lambda event: event.distance)] if measured else []:
        if event.distance > _MEASURED:
            yield Said(
                "truncation.distance", event.distance, event.where,
                f"k1={event.k1}, k2={event.k2} of {event.steps} steps: {event.distance:.3g} from "
                "the exact gradient, relative to it",
                asks=True,
            )  # fmt: skip


def half_sums(view: View) -> Found:
    """Sums of half-precision gradients that have lost bits."""
    whole = [fit for fit in fits(view) if fit.equal and not fit.earlier and not fit.by_hand]
    for fit in [max(whole, key=_half_error)] if whole else []:
        error, once = _half_error(fit)
        bits = math.log2(error / once) if error and once else 0.0
        if bits >= _LOST_BITS:
            yield Said(
                "precision.sum", error, fit.window.step.where,
                f"the sum of {len(fit.parts)} gradients in {len(view.record.half)} parameters is "
                f"{error:.3g} from their sum in float32, relative to it: {bits:.1f} bits lost "
                "beyond one rounding",
                asks=True,
            )  # fmt: skip


def _half_error(fit: Fit) -> tuple[float, float]:
    """Of a window's sum, relative to the sum in float32; and what rounding that once would cost."""
    sums = fit.window.step.half_sums
    whole = sum(one.square for one in sums)
    if not whole or sum(one.factor * one.square for one in sums) <= 0:
        return 0.0, 0.0
    clip = math.prod(e.factor for e in fit.window.events if isinstance(e, Clipped))
    near = sum(one.factor * one.square for one in sums) / whole
    # What clip and scaler multiplied with: the sums may be scaled yet, for a fused optimizer.
    factor = min((clip, clip / fit.parts[0].of.scale), key=lambda f: abs(math.log(near / f)))
    if abs(math.log(near / factor)) > _SCALED:  # by the loop, which no error in rounding does
        return 0.0, 0.0
    squares = [
        ((one.factor / factor - 1) ** 2 + one.rest * (one.factor / factor) ** 2) * one.square
        for one in sums
    ]
    return (sum(squares) / whole) ** 0.5, (sum(one.once for one in sums) / whole) ** 0.5


def determinism(record: Record) -> Found:
    """Two runs of the same windows that differ."""
    runs = [] if record.before is None else zip(_passes(record.before), _passes(record))
    for number, (a, b) in enumerate(runs, 1):
        size = float(a.gradient.nan_to_num(0.0, 0.0, 0.0).norm())
        apart = float((a.gradient - b.gradient).norm()) / (size or 1.0)
        if not a.gradient.allclose(b.gradient, 0.0, _SAME_BITS * size, equal_nan=True):
            yield Said(
                "determinism.differs", number, b.where,
                f"the gradient of backward pass {number} is about {apart:.1g} from that of the "
                "first run, relative to it",
            )  # fmt: skip
            return


def _passes(record: Record) -> Sequence[Pass]:
    return [event for event in record.events if isinstance(event, Pass)]


OF_A_VIEW = (
    nonfinite, scalers, clips, processes, schedules, averages, shared, without_gradient, half_sums,
    decay,
)  # fmt: skip
OF_A_RECORD = (untrained, growth, graphs, truncation, determinism, batch_norms)
