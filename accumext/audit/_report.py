"""A record and its findings for people, for programs, and as a picture."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from accumext.audit._events import (
    Call,
    Clipped,
    Event,
    Finding,
    Pass,
    Record,
    Stepped,
    Window,
    windows_of,
)
from accumext.audit._fit import fits
from accumext.audit._infer import count, main_losses, mass, mib

_WIDTH, _LINES = 98, 30
_SHOWN = 4  # findings, and windows


def text(record: Record, findings: tuple[Finding, ...]) -> str:
    """The report: what is wrong, and what the windows were, in at most 30 lines."""
    windows = windows_of(record)
    passes = sum(len(window.passes) for window in windows)
    lines = [
        f"accumext audit: {_number(len(findings), 'finding', 'no')} in "
        f"{_number(len(windows), 'window')} of {_number(passes, 'backward pass')}"
    ]
    ends = [line for window in windows[:_SHOWN] for line in _described(record, window)]
    for number, finding in enumerate(findings, 1):
        entry = ["", f"{number}. {finding.name}  ({finding.where})"[:_WIDTH]]
        for label, words in (("seen", finding.evidence), ("cure", finding.cure)):
            entry += textwrap.wrap(
                words, _WIDTH, initial_indent=f"   {label}  ", subsequent_indent=" " * 9,
                max_lines=3,
            )  # fmt: skip
        if len(lines) + len(entry) + len(ends) + 3 > _LINES:
            rest = ", ".join(finding.name for finding in findings[number - 1 :])
            lines += ["", textwrap.shorten(f"and: {rest}", _WIDTH)]
            break
        lines += entry
    return "\n".join([*lines, "", *ends])


def _number(n: int, noun: str, none: str = "0") -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{n or none} {noun if n == 1 else plural}"


def _described(record: Record, window: Window) -> tuple[str, str]:
    """What happened in a window, and what its gradient and its largest graph were."""
    parts = []
    for _, group in groupby(window.events, key=_word):
        words = [_word(event) for event in group]
        parts.append(f"{len(words)} x {words[0]}" if len(words) > 1 else words[0])
    graphs = [one.graph for one in window.passes]
    graph = max(graphs, key=lambda graph: graph.bytes, default=None)
    of = f" of {graph.calls} steps" if graph is not None and graph.calls > 1 else ""
    kept = "" if graph is None else f"; a graph{of} keeps {mib(graph.bytes)}"
    first = textwrap.shorten(f"window {window.index + 1}: {', '.join(parts)}", _WIDTH)
    return first, f"          {_gradient(record, window)}{kept}"


def _gradient(record: Record, window: Window) -> str:
    """The factor of a window's gradient, over the mean of its losses."""
    fit = next((fit for fit in fits(record) if fit.window.index == window.index), None)
    masses = [] if fit is None else [mass(share) for share in fit.shares]
    known = [m for m in masses if m is not None]
    if fit is None or len(known) < len(masses):
        return "no gradient" if window.step.skipped else "gradient: not a known sum of these passes"
    losses = sum(len(main_losses(share.of)) for share in fit.shares)
    return f"gradient: {sum(known):.4g} times the mean of {_number(losses, 'loss')}"


def _word(event: Event) -> str:
    """An event in a few words, the same for events that are alike."""
    match event:
        case Pass():
            counted, losses = count(event), len(main_losses(event))
            of = f" of {losses} losses" if losses > 1 else ""
            return f"backward{of}" + (f" ({counted:g} targets)" if counted else "")
        case Clipped():
            return f"clip {event.max_norm:g} (norm {event.norm:.3g}, times {event.factor:.3g})"
        case Stepped():
            return "step skipped" if event.skipped else "step"
        case Call():
            return event.name
    return type(event).__name__.lower()


def as_json(record: Record, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Plain lists, numbers and strings."""
    return {
        "findings": [asdict(finding) for finding in findings],
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
            for window in windows_of(record)
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
    """A row of events per window over its time, and the graph of every pass below."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        advice = "audit.plot needs matplotlib: pip install 'accumext[demo]'"
        raise ImportError(advice) from error

    windows = windows_of(record)
    figure = Figure(figsize=(10, 2.5 + 0.6 * len(windows)), layout="constrained")
    FigureCanvasAgg(figure)
    rows, memory = figure.subplots(2, 1, height_ratios=(max(len(windows), 1), 2))
    for window in windows:
        row, begin = window.index + 1, _begin(window)
        spans = [(one.start - begin, one.time - one.start) for one in window.passes]
        rows.broken_barh(spans, (row - 0.3, 0.6), color="C0", ec="white", label="_backward")
        for color, (kind, mark) in enumerate(_MARKS.items(), 1):
            times = [event.time - begin for event in window.events if _kind(event) == kind]
            name = f"_{kind}" if window.index else kind
            rows.plot(times, [row] * len(times), mark, color=f"C{color}", ms=9, label=name)
    rows.set(title="Windows", xlabel="seconds since the window began", ylabel="window")
    rows.set_yticks([window.index + 1 for window in windows])
    rows.invert_yaxis()
    if windows:
        rows.legend(loc="upper left", bbox_to_anchor=(1, 1))
    kept = [one.graph.bytes / 2**20 for window in windows for one in window.passes]
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
