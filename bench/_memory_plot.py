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
from matplotlib.ticker import MaxNLocator


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
    OURS: "decode_loss",
    PER_TOKEN: "backward per token, truncated",
}
LINES = {PLAIN: "-", OURS: "-", PER_TOKEN: ":"}  # dotted, so that what lies below it shows

# Large type in a small figure: on a phone the picture is 330 pixels wide, and its type 11 or more.
SETTINGS = {
    "figure.figsize": (6.0, 4.0),
    "font.size": 15.0,
    "font.sans-serif": ["DejaVu Sans"],  # whose widths the layout is made for; else sans-serif
    "lines.linewidth": 3.0,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "accumext",  # the same bytes in every run
}


def plot(stem: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw STEM_light.svg and STEM_dark.svg, of the rows in a JSON of bench/memory.py."""
    for name, theme in THEMES.items():
        with plt.rc_context(SETTINGS):
            figure, axes = plt.subplots(layout="constrained")
            _lines(axes, rows, theme)
            _scales(axes, theme)
            figure.savefig(
                stem.with_name(f"{stem.name}_{name}.svg"),
                transparent=True,
                metadata={"Date": None, "Creator": None},
            )
            plt.close(figure)


def _lines(axes: Axes, rows: Sequence[dict[str, Any]], theme: Theme) -> None:
    """Draw a line for each way, and a legend with its largest value."""
    for name, line in LINES.items():
        found = [row for row in rows if row["contender"] == name and "peak_bytes" in row]
        steps = [row["steps"] for row in found]
        peaks = [row["peak_bytes"] / MIB for row in found]
        if found:
            label = f"{LABELS[name]}: {_memory(max(peaks))}"
            label += " at most" * (max(peaks) > peaks[-1])
            axes.plot(steps, peaks, line, color=theme.lines[name], label=label)
    axes.legend(loc="upper left", frameon=False, labelcolor=theme.text, borderaxespad=0)


def _scales(axes: Axes, theme: Theme) -> None:
    """Draw the scales of steps and memory, both linear and from zero."""
    axes.set_xlim(0, axes.dataLim.x1 * 1.03)
    highest = axes.dataLim.y1
    axes.set_ylim(0, highest * 1.5)  # room for the legend
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    unit = 1024 if highest >= 1024 else 1
    marks = [mark * unit for mark in MaxNLocator(4, integer=True).tick_values(0, highest / unit)]
    axes.set_yticks([mark for mark in marks if mark <= highest * 1.1])
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.0f}")
    axes.yaxis.set_major_formatter(lambda mebibytes, _: _memory(mebibytes) if mebibytes else "0")
    axes.set_xlabel("steps", color=theme.text)
    what = "peak memory over parameters and gradients"
    axes.set_title(what, loc="right", fontsize="medium", color=theme.text)
    axes.tick_params(colors=theme.text)
    axes.spines[:].set_color(theme.text)
    axes.spines[["top", "right"]].set_visible(False)


def _memory(mebibytes: float) -> str:
    """Return two digits, or the whole number if it has more: 0.25 MiB, 37 MiB, 121 MiB, 3.1 GiB."""
    unit = "GiB" if mebibytes >= 1024 else "MiB"
    value = mebibytes / 1024 if unit == "GiB" else mebibytes
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
