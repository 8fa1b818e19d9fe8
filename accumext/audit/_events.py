"""What an audit records of a loop: one frozen event for each thing that happened.

Each has its line, such as "train.py:31", and its time in seconds. Numbers are plain Python, read
from the device when the audit closes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Sketch: TypeAlias = Tensor  # float64 [parameters, SIZE] on the host, linear in the gradient


@dataclass(frozen=True)
class Loss:
    """A loss in the graph of a backward pass, as near to its root as autograd names it."""

    node: int  # its number in the graph, the same in every pass that goes through it
    known: bool  # one of torch's losses
    reduction: str | None  # "mean", "sum", or not known
    count: float | None  # of the targets that it counts
    coefficient: float  # derivative of the pass's root by it


@dataclass(frozen=True)
class Graph:
    """What autograd keeps for a backward pass, when that begins."""

    bytes: int  # of saved tensors, without parameters
    calls: int  # uses of the parameter that is used most often
    parameter: int  # which one that is
    bytes_per_call: float
    class_bytes: int  # of tensors with an element for every class


@dataclass(frozen=True)
class Pass:
    """A backward pass that reached a parameter."""

    where: str
    time: float
    start: float
    gradient: Sketch  # this pass's own
    reached: frozenset[int]  # parameters
    losses: tuple[Loss, ...]
    coefficient: float  # derivative of its root by its loss, by all scalar factors at the end
    scale: float  # of the GradScaler that scaled it, else 1
    value: float  # of the root
    graph: Graph
    sent: int  # bytes that DistributedDataParallel reduced in it


@dataclass(frozen=True)
class Call:
    """`zero_grad`, `unscale_`, `update` of a GradScaler, or "schedule": a schedule's `step`."""

    where: str
    time: float
    name: str


@dataclass(frozen=True)
class Clipped:
    """`clip_grad_norm_`, by torch or by accumext."""

    where: str
    time: float
    norm: float
    max_norm: float
    parameters: frozenset[int]
    others: int  # parameters that are neither the optimizer's nor of another that steps

    @property
    def factor(self) -> float:
        return min(1.0, self.max_norm / (self.norm + 1e-6))


@dataclass(frozen=True)
class HalfSum:
    """The sum of a window's gradients in half precision, beside that in float32, S."""

    factor: float  # of S in the sum, which is factor * (S + rest), with the rest at right angles
    rest: float  # square of the rest, relative to that of S
    square: float  # of S
    once: float  # square of what rounding S once changes


@dataclass(frozen=True)
class Stepped:
    """A step of the optimizer, or one that a scaler or the wrapper skipped."""

    where: str
    time: float
    used: Sketch | None  # the gradient, after all factors; None if the step was skipped
    left: Sketch | None  # what was in `.grad`
    present: frozenset[int]  # parameters that had a gradient
    factor: float  # the wrapper's clip
    skipped: bool
    through_scaler: bool
    closure_calls: int
    half_sums: tuple[HalfSum, ...]


@dataclass(frozen=True)
class Truncated:
    """A truncated gradient, measured beside the exact one."""

    where: str
    time: float
    k1: int
    k2: int | None
    steps: int
    distance: float  # relative to the exact gradient


Event: TypeAlias = Pass | Call | Clipped | Stepped | Truncated


@dataclass(frozen=True, eq=False)
class Record:
    """All of an audit."""

    events: tuple[Event, ...]
    names: tuple[str, ...]  # of the parameters
    bytes: int  # of the parameters
    trained: frozenset[int]  # parameters that an optimizer which stepped has
    twice: frozenset[int]  # those that two groups, or two such optimizers, have
    audited: frozenset[int]  # those of the audited optimizer
    wrapped: bool  # in an AccumulatingOptimizer, which weights and unscales by itself
    sums: bool  # the wrapper's reduction is "sum"
    half: frozenset[int]  # parameters of half precision
    rank: int = 0
    ranks: tuple[Record, ...] = ()  # those of all processes, where they reduce gradients
    before: Record | None = None  # of the same loop, run earlier

    @property
    def windows(self) -> int:
        """How many were closed."""
        return sum(isinstance(event, Stepped) for event in self.events)


@dataclass(frozen=True)
class Finding:
    """Something that a loop does wrongly.

    Attributes:
        name: what it is, such as "divisor missing".
        evidence: what was seen, with numbers.
        cure: what to write instead.
        value: the number of the evidence, in the unit that it says.
        where: the line of the loop, "train.py:31".
    """

    name: str
    evidence: str
    cure: str
    value: float = math.nan
    where: str = ""


@dataclass(frozen=True)
class Window:
    """The events up to a step, and what came before."""

    index: int
    events: tuple[Event, ...]
    step: Stepped
    previous: Stepped | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(event for event in self.events if isinstance(event, Pass))


def windows_of(record: Record) -> list[Window]:
    """The closed windows of a record, without passes and clips of other optimizers' parameters."""
    windows: list[Window] = []
    since: list[Event] = []
    for event in record.events:
        touched = {Pass: "reached", Clipped: "parameters"}.get(type(event))
        if touched is None or getattr(event, touched) & record.audited:
            since.append(event)
        if isinstance(event, Stepped):
            previous = windows[-1].step if windows else None
            windows.append(Window(len(windows), tuple(since), event, previous))
            since = []
    return windows
