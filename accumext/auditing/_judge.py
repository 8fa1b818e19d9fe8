"""What follows from a record: findings, questions, what was checked, what could not be judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accumext.auditing import _accumulation, _rules
from accumext.auditing._events import (
    Clipped,
    Finding,
    Pass,
    Record,
    View,
    Window,
    calls,
    only,
    views_of,
)
from accumext.auditing._fit import fits
from accumext.auditing._sums import runs_elsewhere, sums_of
from accumext.auditing._words import KINDS, is_question, several


@dataclass(frozen=True)
class Judgement:
    """The result of an audit."""

    seen: bool  # whether there was a pass, and a step of a followed optimizer
    findings: tuple[Finding, ...]
    questions: tuple[Finding, ...]
    checked: tuple[str, ...]  # what the rules have looked at
    unjudged: tuple[str, ...]  # what the rules could not judge, and why


def judge(record: Record) -> Judgement:
    """Apply all rules: findings and questions in the order of `KINDS`, the worst first. If one is
    said of several optimizers at one line, the one with the largest value is kept."""
    views = views_of(record)
    said = [one for view in views for rule in _accumulation.RULES for one in rule(view)]
    said += [one for view in views for rule in _rules.OF_A_VIEW for one in rule(view)]
    said += [one for rule in _rules.OF_A_RECORD for one in rule(record)]
    order, best = list(KINDS), dict[tuple[str, str, bool], Finding]()
    for one in sorted(said, key=lambda one: one.value):
        best[one.id, one.where, is_question(one)] = one
    listed = sorted(best.values(), key=lambda one: order.index(one.id))
    return Judgement(
        seen=bool(views) and record.passes > 0,
        findings=tuple(one for one in listed if not is_question(one)),
        questions=tuple(one for one in listed if is_question(one)),
        checked=tuple(_checked(record, views)),
        unjudged=(
            *dict.fromkeys(text for view in views for text in _unjudged(view)),
            *(f"{name} has not stepped: more windows would show it" for name in record.waiting),
        ),
    )


def _checked(record: Record, views: list[View]) -> Iterator[str]:
    factors = sum(len({one.window.index for one in sums_of(view)}) for view in views)
    yield f"factors of {several(factors, 'window')}"
    yield several(len(only(record.events, Pass)), "graph")
    for found, noun in (
        (calls(record.events, "schedule"), "schedule step"),
        (calls(record.events, "average"), "average update"),
        (only(record.events, Clipped), "clip"),
    ):
        if found:
            yield several(len(found), noun)
    if record.before is not None:
        passes = min(len(only(run.events, Pass)) for run in (record, record.before))
        yield f"the gradients of {several(passes, 'pass')} in two runs"


def _is_one_number(window: Window) -> bool:
    return window.step.used is not None and int(window.step.used.count_nonzero()) == 1


def _unjudged(view: View) -> Iterator[str]:
    """Yield what was seen but could not be judged, and why."""
    if not any(one.reached & view.optimizer.parameters for one in view.passes):
        yield (
            f"{view.optimizer.name} steps on tensors that no backward pass reaches, as ZeRO's "
            "parts are: nothing of its windows"
        )
        return
    sums, known = sums_of(view), {fit.window.index: fit for fit in fits(view)}
    sizes = {one.size for one in sums}
    if len(sizes) == 1 and max(sizes) > 1 and not view.record.ended:
        reached = several(len(view.windows), "window")
        yield f"the end of an epoch, which {reached} may not reach: give --windows or windows= more"
    used = {w.index for w in view.windows if not w.step.skipped and w.passes and w.step.present}
    unknown = used - known.keys()
    apart = unknown & _rules.apart(view).keys()
    few = {i for i in unknown - apart if _is_one_number(view.windows[i])}
    for what, indices, why in (
        ("factors", few, "a gradient of one number, which is no plain sum of the passes, nor their "
         "mean: any factor explains it"),
        ("factors", apart, "the ranks' gradients were not reduced alike"),
        ("factors", unknown - few - apart, "the gradient is no sum of the passes, as after a "
         "change of its elements, or after several calls of a closure"),
        ("factors", {i for i, fit in known.items() if fit.by_hand},
         "the loop keeps gradients by itself"),
        ("factors", {i for i, fit in known.items() if runs_elsewhere(view, fit)},
         "another process runs other lines"),
        ("factors", known.keys() - {one.window.index for one in sums} - {
            i for i, fit in known.items() if fit.by_hand or runs_elsewhere(view, fit)},
         "the gradient holds one of an earlier window, a loss twice, or the loss scale"),
        ("factors", set() if known else {w.index for w in view.windows} - used,
         "no step had a gradient, or all were skipped"),
        ("divisors", by_hand := {one.window.index for one in sums if one.has_given},
         "a pass was given its gradient, as after slices of a head, which accumext.chunked_loss "
         "runs in one pass"),
        ("divisors", {one.window.index for one in sums if not one.judged} - by_hand,
         "losses that end in sum(), of an unknown number of targets"),
    ):  # fmt: skip
        if indices:
            yield f"{what} of {several(len(indices), 'window')}: {why}"
