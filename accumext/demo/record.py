"""The settings of a run of the demo, and its results so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from accumext._checks import FeedbackWord


@dataclass(frozen=True)
class Settings:
    """The command line's choices."""

    steps: int  # optimizer steps
    seed: int
    device: str
    feedback: FeedbackWord
    batch: int
    length: int  # words decoded per row of a batch
    hidden: int
    vocab: int


@dataclass(frozen=True)
class TextFacts:
    """Sizes and entropy of the text that was read."""

    training_words: int
    held_out_words: int
    distinct_words: int  # in the vocabulary, with the unknown word
    entropy: float  # unigram, nats per word


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    loss: float  # mean over the window, before the step
    gradient_norm: float  # before clipping
    teacher_share: float
    words_per_second: float
    peak_memory: int | None  # bytes of the process so far


@dataclass(frozen=True)
class HeldOut:
    """Words that training has not seen, nats per word."""

    words: int
    loss: float  # teacher-forced
    unigram_loss: float  # of the training frequencies, on the same words


@dataclass(frozen=True)
class Continuation:
    """The beginning of a paragraph that training has not seen, and what the model goes on with."""

    beginning: str
    continuation: str


@dataclass(frozen=True)
class Row:
    """One way to train on the same batches."""

    name: str
    loss: float  # mean over the batches
    seconds: float  # median per batch, forward and backward
    peak_memory: int  # bytes over the parameters
    gradient_distance: float  # relative, to float64


@dataclass(frozen=True)
class MemoryPoint:
    """One way to train, on the first steps of a batch."""

    name: str
    steps: int  # T
    peak_memory: int  # bytes over the parameters


@dataclass
class Record:
    """Filled as the run goes, so that an interrupted one has what was done."""

    settings: Settings
    versions: dict[str, str]
    text: TextFacts | None = None
    precision: str | None = None
    training: list[Step] = field(default_factory=list)
    held_out: HeldOut | None = None
    continuations: list[Continuation] = field(default_factory=list)
    compared_batches: int = 0
    comparison: list[Row] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)  # where a plot was asked for
    seconds: float = 0.0
    interrupted: bool = False


def megabytes(size: int | None) -> str:
    """A size in MB (10^6 bytes), or a dash."""
    return "-" if size is None else f"{size / 1e6:,.0f} MB"
