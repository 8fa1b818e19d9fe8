"""What the demo found: while it runs, as text, as JSON and as a picture."""

from __future__ import annotations

import json
import math
import textwrap
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accumext.tensors.checks import FeedbackWord

BUDGET_STEPS = 10  # whose logits the memory budget of `decode_loss` holds in the comparison
_SHOWN = 2  # recitals


@dataclass(frozen=True)
class Settings:
    """The command line's choices."""

    steps: int | None  # optimizer steps; None: by the clock
    seed: int
    device: str
    feedback: FeedbackWord
    batch: int
    length: int  # words recited
    hidden: int
    vocab: int


@dataclass
class Step:
    """One optimizer step."""

    loss: float  # before the step, nats per word
    gradient_norm: float  # before clipping
    right: float | None = None  # share of words right, fed its own, after the step
    right_unseen: float | None = None  # the same of docstrings that it does not learn


@dataclass
class Row:
    """One way to train on the same batch."""

    name: str
    peak_memory: int  # bytes over the parameters
    gradient_distance: float  # relative, to float64
    loss: float = math.nan
    seconds: float = math.nan  # median, forward and backward


@dataclass(frozen=True)
class MemoryPoint:
    """One way to train, on the first steps of the batch."""

    name: str
    steps: int  # T
    peak_memory: int  # bytes over the parameters


@dataclass
class Record:
    """Filled as the run goes, so that an interrupted one has what was done."""

    settings: Settings
    versions: dict[str, str]
    training: list[Step] = field(default_factory=list)
    recitals: list[tuple[str, str]] = field(default_factory=list)  # opening, what was said
    comparison: list[Row] = field(default_factory=list)
    repetitions: int = 0
    memory: list[MemoryPoint] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0  # in all, at the end

    def __post_init__(self) -> None:
        self._begin = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        """A line of progress, at once."""
        print(f"{self.elapsed():4.0f} s  {text}", flush=True)


def summary(record: Record, columns: int) -> str:
    """Everything found, in the order in which it was found, in lines of that many columns."""
    lines = [""]
    if record.recitals:
        lines += [_filled(f"{_SHOWN} of the docstrings, and how the model goes on:", columns), ""]
        for opening, said in record.recitals[:_SHOWN]:
            lines += [_filled(f"{opening} ...", columns, 2), _filled(f"... {said}", columns, 6), ""]
    if record.repetitions:
        lines += [*_table(record, columns), ""]
    if record.interrupted:
        lines += ["interrupted: the figures above are what was done by then", ""]
    steps = len(record.training)
    return "\n".join([*lines, f"{record.seconds:.0f} s in all, {steps} step{'s' * (steps != 1)}"])


def write_json(record: Record, path: Path) -> None:
    """The whole record; sizes in bytes, times in seconds, losses in nats per word."""
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def write_plot(record: Record, path: Path) -> None:
    """Words right over the steps, and the peak memory of each way over T, as a PNG."""
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
    left.set(
        title="Share of words right, fed its own words", xlabel="optimizer step", ylim=(0, 1.03)
    )
    for name in dict.fromkeys(point.name for point in record.memory):
        points = [point for point in record.memory if point.name == name]
        megabytes = [point.peak_memory / 1e6 for point in points]
        right.plot([point.steps for point in points], megabytes, marker="o", label=name)
    right.set(title="Peak memory of forward and backward", xlabel="words recited (T)")
    right.set(ylabel="MB of tensors, without parameters")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # whole steps
        if axes.lines:
            axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _filled(text: str, columns: int, indent: int = 0) -> str:
    blank = " " * indent
    return textwrap.fill(text, columns, initial_indent=blank, subsequent_indent=blank)


def _table(record: Record, columns: int) -> list[str]:
    settings, (ours, plain, *_) = record.settings, record.comparison
    lines = [("", "loss", "s/batch", "peak memory", "gradient error")]
    lines += [
        (
            row.name,
            f"{row.loss:.5f}",
            f"{row.seconds:.2f}",
            f"{row.peak_memory / 1e6:,.0f} MB",
            f"{row.gradient_distance:.1e}",
        )
        for row in record.comparison
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = []
    for name, *numbers in lines:
        cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
        table.append("  ".join([name.ljust(widths[0]), *cells]))
    about = (
        f"T={settings.length}, B={settings.batch}, V={settings.vocab:,}, H=E={settings.hidden}, "
        f"float32, unseen docstrings, fed the model's own words, the same in every row; "
        f"time is the median of {record.repetitions}"
    )
    meaning = (
        "peak memory: tensors besides the parameters, gradients included; of decode_loss with a "
        f"memory_budget of {BUDGET_STEPS} steps' logits. "
        "gradient error: relative distance to autograd in float64"
    )
    ratios = (
        f"{ours.name} uses {plain.peak_memory / ours.peak_memory:.1f} times less memory than "
        f"{plain.name} and is {plain.seconds / ours.seconds:.1f} times as fast"
    )
    return [
        _filled(about, columns),
        *table,
        *(_filled(text, columns) for text in (meaning, ratios)),
    ]
