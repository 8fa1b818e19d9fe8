"""The demo's results as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accumext.demo.record import MemoryPoint, Record


def write_plot(record: Record, path: Path) -> None:
    """Loss over the steps, and the peak memory of each way over T, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _plot_loss(left, record)
    _plot_memory(right, record)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # whole steps
    figure.savefig(path, format="png", dpi=150)


def _plot_loss(axes: Any, record: Record) -> None:
    steps = range(1, len(record.training) + 1)
    axes.plot(steps, [step.loss for step in record.training], label="training")
    if record.text is not None:
        axes.axhline(record.text.entropy, color="0.5", ls=":", label="unigram entropy of the text")
    if record.held_out is not None:
        axes.axhline(record.held_out.loss, color="C1", ls="--", label="held-out, teacher-forced")
    axes.set(title="Loss", xlabel="optimizer step", ylabel="nats per word")
    axes.legend(framealpha=1)


def _plot_memory(axes: Any, record: Record) -> None:
    points: dict[str, list[MemoryPoint]] = {}
    for point in record.memory:
        points.setdefault(point.name, []).append(point)
    for name, some in points.items():
        axes.plot(
            [point.steps for point in some],
            [point.peak_memory / 1e6 for point in some],
            marker="o",
            label=name,
        )
    axes.set(title="Peak memory over the parameters, one batch", ylabel="MB")
    axes.set(xlabel="steps of the decoder (T)")
    axes.set_ylim(bottom=0)
    if points:
        axes.legend()
