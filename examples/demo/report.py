"""The results of the demo: while it runs, as text and as a picture."""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

BUDGET_STEPS = 10  # steps whose logits fit into `decode_loss`'s memory budget
_SHOWN = 2  # number of recitals


@dataclass
class Step:
    """One optimizer step."""

    loss: float  # before the step, nats per word
    gradient_norm: float  # before clipping
    right: float | None = None  # share of right words, fed its own, after the step
    right_unseen: float | None = None  # the same for docstrings that it does not learn


@dataclass
class Row:
    """One way to train on the same batch."""

    name: str
    memory: dict[int, int]  # peak bytes, by the number of first steps T of the batch
    gradient_distance: float  # relative, to float64
    loss: float = math.nan
    seconds: float = math.nan  # median, forward and backward

    @property
    def peak_memory(self) -> int:
        """Bytes beside the parameters, on all steps."""
        return self.memory[max(self.memory)]


@dataclass
class Record:
    """The results of a run, filled as it goes, so that an interrupted run has a report."""

    settings: argparse.Namespace
    versions: dict[str, str]
    training: list[Step] = field(default_factory=list)
    recitals: list[tuple[str, str]] = field(default_factory=list)  # opening, words of the model
    comparison: list[Row] = field(default_factory=list)
    repetitions: int = 0
    interrupted: bool = False
    seconds: float = 0.0  # in all, at the end

    def __post_init__(self) -> None:
        self._begin = time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        """Print a line of progress, at once."""
        print(f"{self.elapsed():4.0f} s  {text}", flush=True)


def filled(text: str, indent: int = 0) -> str:
    """Wrap the text to the width of the terminal."""
    blank, columns = " " * indent, shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, initial_indent=blank, subsequent_indent=blank)


def summary(record: Record) -> str:
    """Return all results as text, in the order in which they were measured."""
    lines = [""]
    if record.recitals:
        lines += [filled(f"{_SHOWN} of the docstrings, and how the model goes on:"), ""]
        for opening, said in record.recitals[:_SHOWN]:
            lines += [filled(f"{opening} ...", 2), filled(f"... {said}", 6), ""]
    if record.repetitions:
        lines += [*_table(record), ""]
    if record.interrupted:
        lines += ["interrupted: the figures above are what was done by then", ""]
    steps = len(record.training)
    return "\n".join([*lines, f"{record.seconds:.0f} s in all, {steps} step{'s' * (steps != 1)}"])


def _table(record: Record) -> list[str]:
    args, (ours, plain, *_) = record.settings, record.comparison
    return [
        filled(
            f"T={args.length}, B={args.batch}, V={args.vocab:,}, H=E={args.hidden}, float32, "
            "unseen docstrings, fed the model's own words, the same in every row; time is the "
            f"median of {record.repetitions}"
        ),
        f"{'':20}{'loss':>9}{'s/batch':>9}{'peak memory':>13}{'gradient error':>16}",
        *(
            f"{row.name:20}{row.loss:9.5f}{row.seconds:9.2f}{row.peak_memory / 1e6:10,.0f} MB"
            f"{row.gradient_distance:16.1e}"
            for row in record.comparison
        ),
        filled(
            "peak memory: tensors besides the parameters, gradients included; of decode_loss with "
            f"a memory_budget of {BUDGET_STEPS} steps' logits. "
            "gradient error: relative distance to autograd in float64"
        ),
        filled(
            f"{ours.name} uses {plain.peak_memory / ours.peak_memory:.1f} times less memory than "
            f"{plain.name} and is {plain.seconds / ours.seconds:.1f} times as fast"
        ),
    ]


def write_plot(record: Record, path: Path) -> None:
    """Draw the right words over the steps, and each way's peak memory over T, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    recited = [(n, step) for n, step in enumerate(record.training, 1) if step.right is not None]
    steps = [n for n, _ in recited]
    left.plot(steps, [step.right for _, step in recited], label="docstrings that it learns")
    left.plot(steps, [step.right_unseen for _, step in recited], label="others")
    left.set(title="Share of words right, fed its own words", xlabel="optimizer step")
    left.set_ylim(0, 1.03)
    for row in record.comparison:
        megabytes = [peak / 1e6 for peak in row.memory.values()]
        right.plot(list(row.memory), megabytes, marker="o", label=row.name)
    right.set(title="Peak memory of forward and backward", xlabel="words recited (T)")
    right.set(ylabel="MB of tensors, without parameters")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # whole steps
        if axes.lines:
            axes.legend()
    figure.savefig(path, format="png", dpi=150)
