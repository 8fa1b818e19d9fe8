"""Rules about clips, loss scales, schedules, averages, processes, parameters, memory, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise, takewhile

from accumext.auditing._events import (
    Clipped,
    Event,
    Pass,
    Record,
    Stepped,
    Truncated,
    View,
    Window,
    calls,
    is_call,
    only,
)
from accumext.auditing._fit import Fit, finite, fits
from accumext.auditing._passes import UNNAMED
from accumext.auditing._sums import keeps_scale, same, still_scaled
from accumext.auditing._words import Found, finding, mib, named, numbered, several, some

_MANY_CALLS = 16  # uses of a parameter in the graph of one loss; shared layers have fewer
_SAME_BITS = 1e-13  # relative difference of equal sketches; their own rounding is smaller
_LOST_BITS = 1.0  # in a half-precision sum, beyond those that its last rounding costs
_SCALED = 0.1  # logarithm of the least factor that is no rounding error
_MEASURED = 1e-2  # least distance of a truncated gradient that is no rounding error


def _parts_of(view: View) -> list[list[Event]]:
    """Return the events of all windows, cut at `zero_grad`: gradients of one part add up."""
    return [
        list(events) for window in view.windows
        for clears, events in groupby(window.events, lambda event: is_call(event, "zero_grad"))
        if not clears
    ]  # fmt: skip


def _passes_at(events: Sequence[Event]) -> list[int]:
    return [i for i, event in enumerate(events) if isinstance(event, Pass)]


# --- clips, scalers, steps ------------------------------------------------------------------------


def clips(view: View) -> Found:
    """Report clips that come too early, too often, for a part of the parameters, or in vain."""
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
        yield finding(
            "clip.before_unscale", scale, clip.where,
            f"the norm {clip.norm:.4g} that was clipped to {clip.max_norm:g} is that of gradients "
            f"times the loss scale {scale:g}; the gradient's own is {clip.norm / scale:.4g}",
            asks=clip.max_norm >= scale,
        )  # fmt: skip
    often: list[Clipped] = []
    for events in _parts_of(view):
        before_last = events[: max(_passes_at(events), default=0)]
        if any(clip.factor < 1 for clip in only(before_last, Clipped)):
            often = max(often, only(events, Clipped), key=len)
    if often:
        yield finding(
            "clip.per_micro_batch", len(often), often[0].where,
            f"clipped {len(often)} times in a window, to {often[0].max_norm:g}: each pass adds to "
            "what was clipped before",
            asks=all(fit.by_hand for fit in fits(view)),
        )  # fmt: skip
    every = [clip for window in view.windows for clip in only(window.events, Clipped)]
    limits = [clip for clip in every if clip.max_norm < math.inf and not clip.others]
    empty = [clip for clip in limits if not clip.filled]
    if empty and (len(empty) == len(limits) or not all(clip.parameters for clip in empty)):
        times = max(sum(clip in empty for clip in window.events) for window in view.windows)
        yield finding(
            "clip.empty", times, empty[0].where,
            f"{several(times, 'time')} in a window a clip to {empty[0].max_norm:g} met no gradient",
        )  # fmt: skip
    for clip in [one for one in every if one.others][:1]:
        yield finding(
            "clip.other_parameters", clip.others, clip.where,
            f"{clip.others} of the clipped parameters belong to no optimizer that steps",
            asks=clip.filled,
        )  # fmt: skip
    yield from _clipped_in_part(view)


def _clipped_in_part(view: View) -> Found:
    left: list[tuple[frozenset[int], int, Clipped]] = []
    windows = [window for window in view.windows if window.step.present]
    for window in windows:
        present = window.step.present
        own = [clip for clip in only(window.events, Clipped) if clip.max_norm < math.inf]
        clipped = frozenset[int]().union(*(clip.parameters for clip in own))
        if clipped & present and present - clipped:
            left.append((present - clipped, len(present), own[-1]))
    if left and len(left) == len(windows):
        missing, number, clip = left[0]
        yield finding(
            "clip.part", len(missing), clip.where,
            f"{len(missing)} of the {number} parameters of the step were "
            f"not clipped: {named(view.record, missing)}",
        )  # fmt: skip


def scalers(view: View) -> Found:
    """Report a GradScaler whose methods are called in a wrong order."""
    for one in still_scaled(view)[:1]:
        scale = one.parts[0].of.scale
        yield finding(
            "scaler.unscale_missing", scale, one.window.step.where,
            f"the step used gradients times the loss scale, {scale:g}",
        )  # fmt: skip
    if view.optimizer.wrapped:
        return
    for events in _parts_of(view):
        at = _passes_at(events) or [0]
        inside, last = events[at[0] : at[-1]], events[at[-1]]
        updates = calls(inside, "update")
        scales = {one.scale for one in only(events, Pass)}
        if updates and (calls(inside, "unscale_") or len(scales) > 1):
            yield finding(
                "scaler.updated_inside", len(updates), updates[0].where,
                f"{len(updates)} times between micro-batches whose gradients add up",
            )  # fmt: skip
        if scales and not same(min(scales), max(scales)):
            ratio = max(scales) / min(scales)
            yield finding(
                "scaler.mixed", ratio, last.where,
                f"losses of one window were scaled with factors of ratio {ratio:.4g}, and their "
                "sum was divided by the last",
            )  # fmt: skip
        call = next(iter(calls(inside, "unscale_")), None)
        late = [] if call is None else only(events[events.index(call) :], Pass)
        if call is not None and not updates and len(scales) == 1 and late[0].scale != 1.0:
            yield finding(
                "scaler.mixed", late[0].scale, call.where,
                f"{several(len(late), 'pass')} added gradients times the loss scale, "
                f"{late[0].scale:g}, to a sum that had been unscaled",
            )  # fmt: skip
        if updates or call is not None or len(scales) > 1:
            break
    for fit in fits(view):
        scale, step = fit.parts[0].of.scale, fit.window.step
        unscaled = step.through_scaler or calls(fit.window.events, "unscale_")
        as_scaled = fit.equal and keeps_scale(scale, fit.parts[-1].factor, len(fit.parts))
        if as_scaled and not unscaled:
            evidence = f"the step used gradients times the loss scale, {scale:g}"
            yield finding("scaler.unscale_missing", scale, step.where, evidence)
            break


def nonfinite(view: View) -> Found:
    """Report steps on inf or NaN, and skipped steps that no overflow of the scale explains."""
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
            bad = [n for n in view.optimizer.parameters if any(not finite(g[n]) for g in grads)]
            first = [n for one in passes for n in one.order if not finite(one.gradient[n])][:1]
            names = view.record.names
            at = [i for i, one in enumerate(passes, 1) if not math.isfinite(one.value)]
            yield finding(
                id, len(cases), cases[0].step.where,
                f"{numbered(cases)} of {len(windows)}: inf or NaN"
                + (f" in the gradient of {named(view.record, bad)}" if bad else "")
                + (f", in the backward pass first in that of {names[first[0]]}" if first else "")
                + (f"; the loss of micro-batch {at[0]} is not finite" if at else ""),
                asks=not of_data,
            )  # fmt: skip


def _moved(window: Window, later: Sequence[Window]) -> bool:
    """Tell whether a step changed the parameters, as far as later passes show it."""
    after = [one.weights for following in later for one in following.passes][:1]
    return not (window.passes and after and window.passes[-1].weights == after[0])


# --- schedules and averages -----------------------------------------------------------------------


def schedules(view: View) -> Found:
    """Report a schedule that counts micro-batches, moves without a step, or steps too early."""
    most = _between_passes(view, "schedule")
    first = view.windows[0].events
    early, passes = calls(first, "schedule"), _passes_at(first)
    if most:
        yield finding(
            "schedule.per_micro_batch", len(most), most[0].where,
            f"the schedule went {len(most)} steps on before one step of the optimizer",
        )  # fmt: skip
    elif early:
        yield finding(
            "schedule.before_first_step", len(early), early[0].where,
            f"the schedule went {several(len(early), 'step')} on before the optimizer's first: its "
            "first learning rate is never used",
            asks=not (passes and calls(first[passes[-1] :], "schedule")),
        )  # fmt: skip
    yield from _on_skipped(view, "schedule", "the schedule went on")


def averages(view: View) -> Found:
    """Report an average of the model, or a teacher, that moves although the model has not."""
    if most := _between_passes(view, "average"):
        yield finding(
            "average.per_micro_batch", len(most), most[0].where,
            f"a copy of the model was written {len(most)} times between two steps: the same "
            "parameters count as often",
        )  # fmt: skip
    yield from _on_skipped(view, "average", "a copy of the model was written")


def _between_passes(view: View, name: str) -> Sequence[Event]:
    """Return the calls of a window with passes between them; of several windows, the most."""
    most: Sequence[Event] = ()
    for window in view.windows:
        found, passes = calls(window.events, name), window.passes
        kinds = [type(e) for e in window.events if isinstance(e, Pass) or is_call(e, name)]
        groups = [kind for kind, _ in groupby(kinds) if kind is not Pass]
        still = len({one.weights for one in passes}) == 1
        if len(passes) > 1 and len(groups) > 1 and (still or name == "schedule"):
            most = max(most, found, key=len)
    return most


def _on_skipped(view: View, name: str, words: str) -> Found:
    found = []
    following = [*(window.events for window in view.windows[1:]), view.rest]
    for window, events in zip(view.windows, following, strict=True):
        if window.step.skipped:
            before_passes = takewhile(lambda event: not isinstance(event, Pass), events)
            found += calls(before_passes, name)[:1]
    if found:
        yield finding(
            f"{name}.on_skipped", len(found), found[0].where,
            f"{words} after {several(len(found), 'step')} that the scaler had skipped",
        )  # fmt: skip


# --- processes and parameters ---------------------------------------------------------------------


def processes(view: View) -> Found:
    """Report a DistributedDataParallel that reduces too often, or not enough."""
    if differing := frozenset[int]().union(*apart(view).values()):
        kept = any(one.shares for one in view.passes)
        why = (
            ": DistributedDataParallel reduces one backward pass per forward pass, and the later "
            "ones through a retained graph stay local"
        ) * kept
        yield finding(
            "processes.not_reduced", len(differing), view.windows[0].step.where,
            f"the ranks stepped on different gradients of {named(view.record, differing)}{why}",
            cure="one pass, as accumext.chunked_loss makes of the slices of a head" * kept,
        )  # fmt: skip
        return
    sums = [only(events, Pass) for events in _parts_of(view)]
    most = max(sums, key=lambda some: sum(e.sent for e in _reduced_again(some)), default=[])
    vain = [one for one in _reduced_again(most) if one.sent]
    if vain:
        wasted, number = sum(one.sent for one in vain), sum(one.sent > 0 for one in most)
        need = "one has" if number == len(vain) + 1 else f"{number - len(vain)} have"
        alone = any(one.without_sync for one in vain)
        why = "; no_sync was on in the backward pass, and has to be in the forward pass" * alone
        yield finding(
            "processes.reduced_each", wasted, vain[0].where,
            f"{number} passes of a window reduced their gradients, where {need} to: "
            f"{mib(wasted)} per rank for nothing{why}",
            asks=not alone,
        )  # fmt: skip


def apart(view: View) -> dict[int, set[int]]:
    """Return the parameters whose gradients differ between the ranks, by the window."""
    found = dict[int, set[int]]()
    for number, steps in enumerate(zip(*(rank.windows for rank in view.ranks), strict=False)):
        used = [w.step.used for w in steps if w.step.used is not None and finite(w.step.used)]
        for a, b in pairwise(used):
            unlike = (a - b).norm(dim=1) > _SAME_BITS * (a.norm(dim=1) + b.norm(dim=1))
            if unlike.any():
                found.setdefault(number, set()).update(unlike.nonzero()[:, 0].tolist())
    return found


def _reduced_again(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes all of whose parameters later ones reach, which reduce the whole sum."""
    found, later = list[Pass](), frozenset[int]()
    for one in reversed(passes):
        if one.reached <= later:
            found.append(one)
        later |= one.reached
    return found[::-1]


def shared(view: View) -> Found:
    """Report parameters of two optimizers: a question, unless both stepped on one gradient."""
    own, used, both = view.optimizer.parameters, set[str](), frozenset[int]()
    at_once = False
    for event in view.events:
        if isinstance(event, Pass) or is_call(event, "zero_grad"):
            used = set()
        elif isinstance(event, Stepped):
            used.add("own")
        elif is_call(event, "step") and event.parameters & own:
            both |= event.parameters & own
            used.add("other")
        at_once |= len(used) == 2
    if both:
        how = ", and both step on one gradient" if at_once else ""
        yield finding(
            "parameters.twice", len(both), view.windows[0].step.where,
            f"two optimizers, or two groups of one, have {named(view.record, both)}{how}",
            asks=not at_once,
        )  # fmt: skip


def without_gradient(view: View) -> Found:
    """Report parameters of the optimizer that no pass reaches."""
    steps = [window.step for window in view.windows if window.step.present]
    reached = frozenset[int]().union(*(one.reached for one in view.passes))
    used = frozenset[int]().union(*(step.present for step in steps))
    own = view.optimizer.parameters
    left = own - used - reached
    if view.record.passes and not (used or reached & own):
        yield finding(
            "parameters.no_gradient", view.optimizer.size, view.windows[0].step.where,
            f"no gradient reaches any of the {view.optimizer.size} parameters of "
            f"{view.optimizer.name}: its steps change nothing",
            asks=not own or len(view.record.optimizers) > 1,  # frozen, or optimizers take turns
        )  # fmt: skip
    elif left and used and reached & own:
        evidence = f"no gradient reaches {named(view.record, left)}"
        yield finding("parameters.no_gradient", len(left), steps[0].where, evidence)


def untrained(record: Record) -> Found:
    """Report parameters that passes reach, and no optimizer has."""
    reached = frozenset[int]().union(*(one.reached for one in only(record.events, Pass)))
    steps = [step for step in only(record.events, Stepped) if step.present]
    # Only parameters of modules: not tensors that replace one for a pass.
    own = {n for n in reached if not record.names[n].startswith(f"{UNNAMED} ")}
    left = [*(record.names[n] for n in sorted(own - record.trained)), *record.strays]
    if steps and reached & record.trained and left:
        evidence = f"gradients reach, no step uses {some(left)}"
        yield finding("parameters.no_optimizer", len(left), steps[0].where, evidence)


def decay(view: View) -> Found:
    """Report weight decay of vectors that are in a group with matrices."""
    if numbers := view.optimizer.decayed:
        names = named(view.record, numbers)
        evidence = f"weights of {several(len(numbers), 'vector')} decay as matrices do: {names}"
        yield finding("optimizer.decay", len(numbers), view.windows[0].step.where, evidence)


def batch_norms(record: Record) -> Found:
    """Report batch norms that are trained in eval mode."""
    every = only(record.events, Pass)
    passes = [one for one in every if one.eval_norms]
    for one in passes[:1]:
        yield finding(
            "modules.batchnorm_eval", len(one.eval_norms), one.where,
            f"{some(one.eval_norms)} got gradients in eval, from {several(len(passes), 'pass')} of "
            f"{len(every)}",
        )  # fmt: skip


# --- memory, truncation, precision, determinism ---------------------------------------------------


def graphs(record: Record) -> Found:
    """Report one graph over many steps, or over the losses of a whole window."""
    passes = [
        one for one in only(record.events, Pass)
        if one.graph.calls >= _MANY_CALLS or 1 < one.graph.losses <= one.graph.calls
    ]  # fmt: skip
    worst = max(passes, key=lambda one: one.graph.bytes, default=None)
    if worst is None:
        return
    graph = worst.graph
    step = graph.bytes / graph.calls
    if graph.bytes - step <= record.bytes:
        return
    if graph.separate:
        evidence = f"the {graph.losses} losses of a pass have graphs of their own, of {mib(step)}"
        yield finding("memory.losses_summed", graph.losses, worst.where, evidence)
        return
    evidence = (
        f"a pass keeps {mib(graph.bytes)} for {graph.calls} steps, {mib(graph.bytes_per_call)} "
        f"more for each; {mib(graph.class_bytes)} of it has an element per class. "
    )
    if 2 * graph.class_bytes > graph.bytes:
        flat = graph.bytes - graph.class_bytes * (1 - 1 / graph.calls)
        evidence += f"Without logits it is {mib(flat)}, with one step {mib(step)}"
        cure = "accumext.decode_loss keeps no logits, with the same gradient; accumext.tbptt("
        cure += "k1=1, k2=1) keeps one step, and truncates the gradient"
    else:
        evidence += f"With one step it is {mib(step)}"
        exact = (
            "accumext.decode_loss"
            if graph.losses > 1 and graph.class_bytes
            else "torch.utils.checkpoint of a step"
        )
        cure = f"{exact} keeps the states alone, with the same gradient; accumext.tbptt keeps k2 "
        cure += "steps, and truncates it"
    yield finding("memory.graph", graph.bytes, worst.where, evidence, cure=cure)


def logits(record: Record) -> Found:
    """Report a pass, of no time loop, that keeps more of logits than of all else."""
    passes = [one for one in only(record.events, Pass) if one.graph.calls < _MANY_CALLS]
    worst = max(passes, key=lambda one: one.graph.class_bytes, default=None)
    if worst is None or worst.graph.losses > 1:  # of many losses `graphs` speaks
        return
    kept = worst.graph.class_bytes
    if kept > max(record.bytes, worst.graph.bytes / 2):
        yield finding(
            "memory.logits", kept, worst.where,
            f"{mib(kept)} of the {mib(worst.graph.bytes)} that a pass keeps have an element per "
            f"class; all parameters have {mib(record.bytes)}",
        )  # fmt: skip


def growth(record: Record) -> Found:
    """Report graphs that hold the graphs of earlier passes."""
    run: list[Pass] = []
    longest: list[Pass] = []
    passes = only(record.events, Pass)
    nodes = [loss.node for one in passes for loss in one.losses]
    for one in passes:
        more = bool(run) and one.graph.bytes > run[-1].graph.bytes
        run = [*run, one] if more and one.graph.held == len(run) else [one]
        longest = max(longest, run, key=len)
    if len(longest) > 2 and len(nodes) == len(set(nodes)):
        first, last = longest[0], longest[-1]
        yield finding(
            "memory.growing", len(longest), last.where,
            f"a pass holds the graphs of {len(longest)} passes, {mib(last.graph.bytes)} where the "
            f"first had {mib(first.graph.bytes)}",
        )  # fmt: skip
        return
    through = max(_runs(passes, lambda one: one.shares), key=len, default=[])
    number = len(through) + 1
    if number > 2 and len(nodes) == len(set(nodes)):
        yield finding(
            "memory.retained", number, through[0].where,
            f"{number} passes go through one graph, which retain_graph keeps: what they share runs "
            f"backward {number} times",
        )  # fmt: skip


def _runs(passes: Sequence[Pass], told: Callable[[Pass], bool]) -> list[list[Pass]]:
    """Return the runs of consecutive passes of which something is told."""
    return [list(run) for yes, run in groupby(passes, told) if yes]


def detached(view: View) -> Found:
    """Report a recurrent state that is detached from step to step, each with its own pass."""
    passes = max((w.passes for w in view.windows), key=_number_detached, default=())
    number = _number_detached(passes)
    if number >= _MANY_CALLS:
        yield finding(
            "truncation.detached", number, next(one.where for one in passes if one.detached),
            f"{number} of the {len(passes)} passes of a window begin at a state that was detached "
            "from the step before: no gradient goes further back",
        )  # fmt: skip


def _number_detached(passes: Sequence[Pass]) -> int:
    return sum(one.detached for one in passes)


def truncation(record: Record) -> Found:
    """Report how far truncation takes the gradient from the exact one."""
    measured = [one for one in only(record.events, Truncated) if one.distance > _MEASURED]
    if measured:
        one = max(measured, key=lambda one: one.distance)
        yield finding(
            "truncation.distance", one.distance, one.where,
            f"k1={one.k1}, k2={one.k2} of {one.steps} steps: {one.distance:.3g} from "
            "the exact gradient, relative to it",
        )  # fmt: skip


def half_sums(view: View) -> Found:
    """Report sums of half-precision gradients that have lost bits."""
    whole = [fit for fit in fits(view) if fit.equal and not fit.earlier and not fit.by_hand]
    if not whole:
        return
    fit = max(whole, key=_half_error)
    error, once = _half_error(fit)
    if error and once and (bits := math.log2(error / once)) >= _LOST_BITS:
        yield finding(
            "precision.sum", error, fit.window.step.where,
            f"the sum of {len(fit.parts)} gradients in {len(view.record.half)} parameters is "
            f"{error:.3g} from their sum in float32, relative to it: {bits:.1f} bits lost "
            "beyond one rounding",
        )  # fmt: skip


def _half_error(fit: Fit) -> tuple[float, float]:
    """Return the relative error of a window's half-precision sum, and that of one rounding."""
    sums = fit.window.step.half_sums
    whole, along = sum(one.square for one in sums), sum(one.factor * one.square for one in sums)
    if along <= 0:
        return 0.0, 0.0
    clip = math.prod(clip.factor for clip in only(fit.window.events, Clipped))
    near = along / whole
    # The product of the clips; a fused optimizer unscales later, so the sums may still be scaled.
    factor = min((clip, clip / fit.parts[0].of.scale), key=lambda f: abs(math.log(near / f)))
    if abs(math.log(near / factor)) > _SCALED:  # too far for rounding: the loop scaled it
        return 0.0, 0.0
    squares = [
        ((one.factor / factor - 1) ** 2 + one.rest * (one.factor / factor) ** 2) * one.square
        for one in sums
    ]
    return (sum(squares) / whole) ** 0.5, (sum(one.once for one in sums) / whole) ** 0.5


def determinism(record: Record) -> Found:
    """Report the first backward pass whose gradient differs from that of an earlier run."""
    before = record.before.events if record.before else ()
    pairs = zip(only(before, Pass), only(record.events, Pass), strict=False)
    for number, (a, b) in enumerate(pairs, 1):
        size = float(a.gradient.nan_to_num(0.0, 0.0, 0.0).norm())
        if not a.gradient.allclose(b.gradient, 0.0, _SAME_BITS * size, equal_nan=True):
            runs = [run for run, one in (("first", a), ("second", b)) if not finite(one.gradient)]
            apart = float((a.gradient - b.gradient).norm()) / (size or 1.0)
            how = f"about {apart:.1g} from that of the first run, relative to it"
            how = f"not finite in the {' and the '.join(runs)} run" if runs else how
            evidence = f"the gradient of backward pass {number} is {how}"
            yield finding("determinism.differs", number, b.where, evidence)
            return


OF_A_VIEW = (  # rules about one optimizer
    nonfinite, scalers, clips, processes, schedules, averages, shared, without_gradient, half_sums,
    decay, detached,
)  # fmt: skip
OF_A_RECORD = (untrained, growth, graphs, logits, truncation, determinism, batch_norms)
