"""Peak memory against steps, drawn for pages of either theme."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from _decoder_report import MIB
from _decoders import OURS, PER_TOKEN, PLAIN
from matplotlib.axes import Axes


class Theme(NamedTuple):
    """Colours of text, and of lines: Okabe and Ito's, which are told apart with any colour vision,
    each with a contrast of 3 or more to the page."""

    text: str
    lines: dict[str, str]


THEMES = {
    "light": Theme("#000000", {PLAIN: "#D55E00", PER_TOKEN: "#009E73", OURS: "#0072B2"}),
    "dark": Theme("#cfd0d0", {PLAIN: "#E69F00", PER_TOKEN: "#009E73", OURS: "#56B4E9"}),
}
LABELS = {
    PLAIN: "plain PyTorch, one graph",
    PER_TOKEN: "per token (truncated)",
    OURS: "decode_loss",
}
MARKERS = {PLAIN: "s", PER_TOKEN: "^", OURS: "o"}
MARKS = 0.01, 0.1, 1, 10, 100, 1024, 10 * 1024, 100 * 1024  # MiB

# Large type in a small figure: on a phone the picture is 330 pixels wide, and its type 11 or more.
SETTINGS = {
    "figure.figsize": (6.0, 4.0),
    "font.size": 15.0,
    "font.sans-serif": ["DejaVu Sans"],  # whose widths the layout is made for; else sans-serif
    "lines.linewidth": 2.5,
    "lines.markersize": 8.0,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "accumext",  # the same bytes in every run
}


def plot(stem: Path, cases: Sequence[dict[str, Any]]) -> None:
    """STEM_light.svg and STEM_dark.svg, of the cases in a JSON of bench/memory.py."""
    for name, theme in THEMES.items():
        with plt.rc_context(SETTINGS):
            figure, axes = plt.subplots(layout="constrained")
            _lines(axes, cases, theme)
            _scales(axes, cases, theme)
            figure.savefig(
                stem.with_name(f"{stem.name}_{name}.svg"),
                transparent=True,
                metadata={"Date": None, "Creator": None},
            )
            plt.close(figure)


def _lines(axes: Axes, cases: Sequence[dict[str, Any]], theme: Theme) -> None:
    """A line for each way, with its name and last value at its end."""
    ends: dict[str, float] = {}
    for name in LABELS:
        found = [case for case in cases if name in case["contenders"]]  # the others did not fit
        steps = [case["steps"] for case in found]
        peaks = [case["contenders"][name]["peak_bytes"] / MIB for case in found]
        if found:
            axes.plot(steps, peaks, MARKERS[name] + "-", color=theme.lines[name])
            ends[name] = peaks[-1]
    for line, (name, end) in zip(axes.lines, ends.items()):
        steps, peaks = line.get_data()
        # Above the end; the lowest line, which rises towards the others, has its name below.
        below = end == min(ends.values())
        axes.annotate(
            f"{LABELS[name]}: {_memory(end)}",
            (steps[-1], peaks[len(peaks) // 2] if below else end),
            xytext=(7, -9 if below else 9),
            textcoords="offset points",
            ha="right",
            va="top" if below else "bottom",
            color=theme.text,
        )


def _scales(axes: Axes, cases: Sequence[dict[str, Any]], theme: Theme) -> None:
    """Doublings of T, and decades of memory."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    steps = [case["steps"] for case in cases]
    axes.set_xticks(steps, [f"{count:,}" for count in steps])
    low, high = axes.get_ylim()
    low, high = low / 2, high * 4  # room for names
    marks = [mark for mark in MARKS if low <= mark <= high]
    axes.set_yticks(marks, [_memory(mark) for mark in marks])
    axes.set_ylim(low, high)
    axes.minorticks_off()
    axes.set_xlabel("steps T", color=theme.text)
    what = "peak memory over parameters and gradients"
    axes.set_title(what, loc="right", fontsize="medium", color=theme.text)
    axes.tick_params(colors=theme.text)
    axes.spines[:].set_color(theme.text)
    axes.spines[["top", "right"]].set_visible(False)


def _memory(mebibytes: float) -> str:
    """Two digits, or the whole number where it has more: 0.25 MiB, 37 MiB, 121 MiB, 3.1 GiB."""
    unit = "GiB" if mebibytes >= 1024 else "MiB"
    value = mebibytes / 1024 if unit == "GiB" else mebibytes
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
