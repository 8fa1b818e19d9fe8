"""A record and its judgement as text, as plain data for programs, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

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
    views_of,
)
from accumext.auditing._fit import fits
from accumext.auditing._judge import Judgement
from accumext.auditing._sums import Sum, count, main_losses, sums_of
from accumext.auditing._words import mib, several

_WIDTH, _LINES = 98, 30
_SHOWN = 4  # windows


def text(record: Record, judgement: Judgement) -> str:
    """Return the findings, the questions and what happened in windows, in at most 30 lines."""
    if not judgement.seen:
        return "\n".join(_nothing(record))
    views = views_of(record)
    passes = len(_passes(views))
    number = sum(len(view.windows) for view in views)
    findings, questions = judgement.findings, judgement.questions
    lines = [
        f"accumext audit: {several(len(findings), 'finding', 'no')}"
        + (f", {several(len(questions), 'question')}" if questions else "")
        + f" in {several(number, 'window')} of {several(passes, 'backward pass')}"
    ]
    ends = _wrapped("checked", ", ".join(judgement.checked), 1)
    ends += _wrapped("not judged", "; ".join(judgement.unjudged), 2)
    entries = [(f"{n}.", "cure", one) for n, one in enumerate(findings, 1)]
    entries += [("?", "is it", one) for one in questions]
    shown = _SHOWN if len(entries) < 4 else 2
    each = max(shown // max(len(views), 1), 1)
    windows = [(view, window) for view in views for window in view.windows[:each]][:shown]
    ends += ["", *(line for pair in windows for line in _described(*pair, len(views) > 1))]
    if more := number - len(windows):
        ends += [f"and {several(more, 'window')} more, which to_json() and --json have"]
    for place, (mark, label, found) in enumerate(entries):
        entry = ["", f"{mark} {found.name}  ({found.where})  {found.id}"[:_WIDTH]]
        entry += _wrapped("seen", found.evidence, 3) + _wrapped(label, found.cure, 3)
        if len(lines) + len(entry) + len(ends) + 3 > _LINES:
            rest = ", ".join(found.name for _, _, found in entries[place:])
            lines += ["", textwrap.shorten(f"and: {rest}", _WIDTH)]
            break
        lines += entry
    return "\n".join([*lines, "", *ends])


def _wrapped(label: str, words: str, most: int) -> list[str]:
    first = f"   {label}  "
    return textwrap.wrap(
        words, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), max_lines=most
    )


def _nothing(record: Record) -> Iterable[str]:
    """Yield why there is nothing to judge, or which argument would help."""
    asked = f" of {record.asked}" if record.asked else ""
    yield f"accumext audit: nothing was judged: {several(record.windows, 'step')}{asked} after " + (
        f"{several(record.passes, 'backward pass')}"
    )
    steps = ", ".join(f"{name} ({times})" for name, times in record.steps)
    yield f"   seen  steps of optimizers of torch: {steps or 'none'}"
    if record.windows:
        label, advice = "why", "no backward() went through a graph; torch.autograd.grad and "
        advice += "torch.func are not seen"
    elif steps:
        label = "pass"
        advice = "the optimizer that steps, audit(model, optimizer), or none, which follows all; "
        advice += "for --optimizer the number of one that steps"
    else:
        label = "why"
        advice = (
            "no step of a torch.optim.Optimizer ran: run as far as one. In place of w -= lr * "
            "w.grad write torch.optim.SGD([w], lr=lr), step() and zero_grad(). Not seen: processes "
            "that the script starts (torchrun -m accumext audit), optimizers of Keras, thinc and "
            "fastai"
        )
    yield from _wrapped(label, advice, 3)


def _passes(views: list[View]) -> list[Pass]:
    """Return the passes of the windows, each once."""
    every = [one for view in views for window in view.windows for one in window.passes]
    return list({id(one): one for one in every}.values())


def _described(view: View, window: Window, named: bool) -> tuple[str, str]:
    """Describe what happened in a window, and its gradient and largest graph."""
    parts = []
    for _, group in groupby(window.events, key=_word):
        words = [_word(event) for event in group]
        parts.append(f"{len(words)} x {words[0]}" if len(words) > 1 else words[0])
    graphs = [one.graph for one in window.passes]
    graph = max(graphs, key=lambda graph: graph.bytes, default=None)
    of = f" of {graph.calls} steps" if graph is not None and graph.calls > 1 else ""
    kept = "" if graph is None else f"; a graph{of} keeps {mib(graph.bytes)}"
    name = f"{view.optimizer.name}, " if named else ""
    first = textwrap.shorten(f"{name}window {window.index + 1}: {', '.join(parts)}", _WIDTH)
    return first, " " * 10 + textwrap.shorten(f"{_gradient(view, window)}{kept}", _WIDTH - 10)


def _gradient(view: View, window: Window) -> str:
    """Describe the factor between a window's gradient and the mean of its losses."""
    fit = next((fit for fit in fits(view) if fit.window.index == window.index), None)
    sums = [one for one in sums_of(view) if one.window.index == window.index]
    if fit is None or not sums:
        return "no gradient" if window.step.skipped else "gradient: no sum of these passes"
    gone = len(fit.parts) - sum(len(one.parts) for one in sums)
    without = f", without {several(gone, 'pass')}" if gone else ""
    return f"gradient: {' + '.join(map(_amount, sums))}{without}"


def _amount(one: Sum) -> str:
    if one.judged:
        losses = sum(len(main_losses(part.of)) for part in one.parts)
        return f"{sum(one.weights()):.4g} times the mean of {several(losses, 'loss')}"
    factors = [
        part.factor * (part.of.coefficient if part.of.scalar else part.of.scale)
        for part in one.parts
    ]
    given = " or ".join(dict.fromkeys(f"{factor:.4g}" for factor in factors[:3]))
    return f"{given} of each of {several(one.size, 'pass')}"


def _targets(number: float) -> str:
    return "1 target" if number == 1 else f"{number:g} targets"


def _word(event: Event) -> str:
    """Describe an event in a few words, the same for similar events."""
    match event:
        case Pass():
            counted, losses = count(event), len(main_losses(event))
            of = f" of {losses} losses" if losses > 1 else ""
            return f"backward{of}" + (f" ({_targets(counted)})" if counted else "")
        case Clipped():
            return f"clip {event.max_norm:g} (norm {event.norm:.3g}, times {event.factor:.3g})"
        case Truncated():
            return "truncated" if (event.k2 or event.steps) < event.steps else "exact"
        case Stepped():
            return "step skipped" if event.skipped else "step"
        case Call():
            return "step of another" if event.name == "step" else event.name
    return type(event).__name__.lower()


def as_json(record: Record, judgement: Judgement) -> dict[str, Any]:
    """Return a record and its judgement as plain lists, numbers and strings."""
    return {
        "findings": [asdict(finding) for finding in judgement.findings],
        "questions": [asdict(question) for question in judgement.questions],
        "seen": judgement.seen,
        "checked": list(judgement.checked),
        "not_judged": list(judgement.unjudged),
        "optimizers": [view.optimizer.name for view in views_of(record) for _ in view.windows],
        "windows": [
            [
                {
                    "what": _word(event),
                    "where": event.where,
                    "time": event.time,
                    "graph_bytes": event.graph.bytes if isinstance(event, Pass) else None,
                }
                for event in window.events
            ]
            for view in views_of(record)
            for window in view.windows
        ],
    }


_MARKS = {
    "zero_grad": "|",
    "unscale_": "x",
    "clip": "v",
    "step": "*",
    "update": "+",
    "schedule": "^",
}


def plot(record: Record, path: str | Path | None) -> Any:
    """Draw a row of events per window over its time; below, the graph's bytes of every pass."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        advice = "audit.plot needs matplotlib: pip install 'accumext[demo]'"
        raise ImportError(advice) from error

    views = views_of(record)
    windows = [window for view in views for window in view.windows]
    figure = Figure(figsize=(10, 2.5 + 0.6 * len(windows)), layout="constrained")
    FigureCanvasAgg(figure)
    rows, memory = figure.subplots(2, 1, height_ratios=(max(len(windows), 1), 2))
    for row, window in enumerate(windows, 1):
        begin = _begin(window)
        spans = [(one.start - begin, one.time - one.start) for one in window.passes]
        rows.broken_barh(spans, (row - 0.3, 0.6), color="C0", ec="white", label="_backward")
        for color, (kind, mark) in enumerate(_MARKS.items(), 1):
            times = [event.time - begin for event in window.events if _kind(event) == kind]
            name = f"_{kind}" if row > 1 else kind
            rows.plot(times, [row] * len(times), mark, color=f"C{color}", ms=9, label=name)
    rows.set(title="Windows", xlabel="seconds since the window began", ylabel="window")
    rows.set_yticks(range(1, len(windows) + 1))
    rows.invert_yaxis()
    if windows:
        rows.legend(loc="upper left", bbox_to_anchor=(1, 1))
    kept = [one.graph.bytes / 2**20 for one in _passes(views)]
    memory.bar(range(1, len(kept) + 1), kept, color="C0")
    memory.set(title="Saved for backward", xlabel="backward pass", ylabel="MiB")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _kind(event: Event) -> str:
    names = {Clipped: "clip", Stepped: "step", Pass: "backward"}
    return event.name if isinstance(event, Call) else names.get(type(event), "")


def _begin(window: Window) -> float:
    return min(e.start if isinstance(e, Pass) else e.time for e in window.events)
