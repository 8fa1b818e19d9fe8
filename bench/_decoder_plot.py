"""Time per token and peak memory of every contender, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from _decoder_report import MIB
from _decoders import OURS, OURS_BF16, PER_TOKEN, PRODUCTS
from _decoding import Result
from matplotlib.axes import Axes

# Of Okabe and Ito's palette, told apart with any colour vision; hatches tell them apart in print.
_BLUE, _ORANGE, _GREY, _SKY = "#0072B2", "#E69F00", "#999999", "#56B4E9"
_COLOURS = {OURS: _BLUE, OURS_BF16: _BLUE, PER_TOKEN: _ORANGE, PRODUCTS: _GREY}
_HATCHES = {PER_TOKEN: "//", PRODUCTS: ".."}


def plot(path: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Two panels per timed case: microseconds per token with quartiles, and MiB."""
    timed = [result for result in results if result.seconds]
    figure, axes = plt.subplots(
        len(timed),
        2,
        figsize=(13, sum(0.34 * len(result.seconds) + 1.4 for result in timed) + 0.5),
        height_ratios=[len(result.seconds) + 3 for result in timed],
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (left, right), result in zip(axes, timed):
        names = list(result.seconds)
        _times(left, names, result)
        _memory(right, names, result)
        left.set_title(str(result.case), loc="left")
        left.set_ylim(len(names) - 0.4, -0.6)  # the first on top
    figure.suptitle(
        f"One forward and backward pass, greedy feedback; torch {facts['torch']},"
        f" {facts.get('gpu', facts['cpu'])}, {facts['threads']} threads"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _times(axis: Axes, names: Sequence[str], result: Result) -> None:
    microseconds = 1e6 / result.case.shape.tokens
    spreads = [result.spread(name) for name in names]
    medians = [spread.median * microseconds for spread in spreads]
    ends = [spread.q3 * microseconds for spread in spreads]
    below = [(spread.median - spread.q1) * microseconds for spread in spreads]
    above = [end - median for end, median in zip(ends, medians)]
    _bars(axis, names, medians, ends)
    axis.errorbar(medians, names, xerr=[below, above], fmt="none", ecolor="black", capsize=2)
    axis.set_xlabel("µs per token: median, quartiles (less is better)")


def _memory(axis: Axes, names: Sequence[str], result: Result) -> None:
    some = [name for name in names if name in result.checked]  # the products have none
    values = [result.checked[name].peak_bytes / MIB for name in some]
    _bars(axis, some, values, values)
    axis.set_xlabel("peak MiB over parameters and gradients (less is better)")


def _bars(axis: Axes, names: Sequence[str], values: Sequence[float], ends: Sequence[float]) -> None:
    """Bars, and their values written behind what is drawn at their ends."""
    axis.barh(
        names,
        values,
        color=[_COLOURS.get(name, _SKY) for name in names],
        hatch=[_HATCHES.get(name, "") for name in names],
        edgecolor="white",
    )
    for name, value, end in zip(names, values, ends):
        text = f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}"
        axis.annotate(text, (end, name), xytext=(5, 0), textcoords="offset points", va="center")
    axis.set_xlim(0, 1.15 * max(ends))  # room for the text
    axis.spines[["top", "right"]].set_visible(False)
