"""The demo's results as text, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accumext.demo.record import Record, Row, megabytes


def summary(record: Record) -> str:
    """Everything found, in the order in which it was found."""
    lines: list[str] = []
    if record.training:
        first, last = record.training[0], record.training[-1]
        lines += [
            f"training: {len(record.training)} of {record.settings.steps} optimizer steps, "
            f"loss {first.loss:.3f} -> {last.loss:.3f}, {record.precision}",
            "",
        ]
    if record.held_out is not None and record.text is not None:
        loss = record.held_out.loss
        lines += [
            f"held-out loss, teacher-forced      {loss:.3f} nats per word "
            f"({record.held_out.words:,} words)",
            f"unigram loss of the same words     {record.held_out.unigram_loss:.3f}   "
            f"({record.held_out.unigram_loss - loss:+.3f})",
            f"unigram entropy of the text        {record.text.entropy:.3f}   "
            f"({record.text.entropy - loss:+.3f})",
            "",
        ]
    for n, continuation in enumerate(record.continuations, 1):
        lines += [
            f"continuation {n}",
            f"    {continuation.context}",
            f" -> {continuation.greedy}",
            "",
        ]
    if record.comparison:
        lines += [*_table(record), ""]
    if record.interrupted:
        lines += ["interrupted: the figures above are what was done by then", ""]
    return "\n".join([*lines, f"{record.seconds:.0f} s in all"])


def write_json(record: Record, path: Path) -> None:
    """The whole record; sizes in bytes, times in seconds, losses in nats per word."""
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def write_plot(record: Record, path: Path) -> None:
    """Loss over the steps, and the peak memory of each way, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _plot_loss(left, record)
    _plot_memory(right, record.comparison)
    figure.savefig(path, format="png", dpi=150)


def _table(record: Record) -> list[str]:
    settings, rows = record.settings, record.comparison
    header = ("", "loss", "s/batch", "peak memory", "gradient error")
    body = [
        (
            row.name,
            f"{row.loss:.5f}",
            f"{row.seconds:.2f}",
            megabytes(row.peak_memory),
            f"{row.gradient_distance:.1e}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        f"T={settings.length}, B={settings.batch}, V={settings.vocab:,}, H=E={settings.hidden}, "
        f"float32, {settings.feedback} feedback; median of {record.compared_batches} "
        f"{'batch' if record.compared_batches == 1 else 'batches'}, the same in every row",
    ]
    for line in (header, *body):
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        lines.append("  ".join([line[0].ljust(widths[0]), *numbers]))
    lines.append(
        "peak memory: tensors over the parameters, gradients included. "
        "gradient error: relative distance to autograd in float64"
    )
    if len(rows) > 1:
        ours, plain = rows[0], rows[1]
        lines.append(
            f"{ours.name} uses {plain.peak_memory / ours.peak_memory:.1f} times less memory than "
            f"{plain.name} and is {plain.seconds / ours.seconds:.1f} times as fast"
        )
    return lines


def _plot_loss(axes: Any, record: Record) -> None:
    steps = range(1, len(record.training) + 1)
    axes.plot(steps, [step.loss for step in record.training], label="training")
    if record.text is not None:
        axes.axhline(record.text.entropy, color="0.5", ls=":", label="unigram entropy of the text")
    if record.held_out is not None:
        axes.axhline(record.held_out.loss, color="C1", ls="--", label="held-out, teacher-forced")
    axes.set(title="Loss", xlabel="optimizer step", ylabel="nats per word")
    axes.legend()


def _plot_memory(axes: Any, rows: list[Row]) -> None:
    bars = axes.bar([row.name for row in rows], [row.peak_memory / 1e6 for row in rows])
    axes.bar_label(bars, [f"{row.peak_memory / 1e6:,.0f} MB\n{row.seconds:.2f} s" for row in rows])
    axes.margins(y=0.2)
    axes.set(title="Peak memory over the parameters, one batch", ylabel="MB")
