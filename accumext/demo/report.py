"""The demo's results as text and JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from accumext.demo.record import Record, megabytes


def summary(record: Record, columns: int) -> str:
    """Everything found, in the order in which it was found, in lines of that many columns."""
    if not record.training:
        return "interrupted before the first step was done"
    first, last = record.training[0], record.training[-1]
    lines = [
        "",
        textwrap.fill(
            f"training: {len(record.training)} of {record.settings.steps} optimizer steps, "
            f"loss {first.loss:.3f} -> {last.loss:.3f}, {record.precision}",
            columns,
        ),
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
    if record.continuations:
        lines += ["paragraphs that training has not seen, and how the model goes on:", ""]
    for continuation in record.continuations:
        lines += [
            textwrap.fill(
                f"{continuation.beginning} ...",
                columns,
                initial_indent="  ",
                subsequent_indent="  ",
            ),
            textwrap.fill(
                f"... {continuation.continuation}",
                columns,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
            ),
            "",
        ]
    if record.comparison:
        lines += [*_table(record, columns), ""]
    if record.interrupted:
        lines += ["interrupted: the figures above are what was done by then", ""]
    return "\n".join([*lines, f"{record.seconds:.0f} s in all"])


def write_json(record: Record, path: Path) -> None:
    """The whole record; sizes in bytes, times in seconds, losses in nats per word."""
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def _table(record: Record, columns: int) -> list[str]:
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
    table = []
    for line in (header, *body):
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        table.append("  ".join([line[0].ljust(widths[0]), *numbers]))
    lines += table
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
    return [line if line in table else textwrap.fill(line, columns) for line in lines]
