"""What an audit records of a loop: one frozen event for each thing that happened.

Each event has its line, such as "train.py:31", and its time in seconds. Numbers are plain Python,
read from the device when the audit closes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard, TypeVar

from torch import Tensor

Sketch: TypeAlias = Tensor  # float64 [parameters, SIZE] on the host, linear in the gradient


@dataclass(frozen=True)
class Loss:
    """A loss in the graph of a backward pass: the node nearest to the root that autograd names."""

    node: int  # its number in the graph, the same in every pass that goes through it
    known: bool  # one of torch's losses
    reduction: str | None  # "mean", "sum", or not known
    count: float | None  # number of targets that it averages or sums over
    coefficient: float  # derivative of the pass's root with respect to it
    over: float | None = None  # number of its elements or rows, if a sum is divided by it


@dataclass(frozen=True)
class Graph:
    """What autograd keeps for a backward pass at its beginning."""

    bytes: int  # of saved tensors, without parameters
    calls: int  # uses of the parameter that is used most often
    bytes_per_call: float
    class_bytes: int  # of tensors with an element for every class
    losses: int = 1  # number of losses that are torch's own, or means
    separate: bool = False  # whether these losses share no node
    held: int = 0  # number of earlier passes whose tensors are still alive


@dataclass(frozen=True)
class Constant:
    """A number that a loss was multiplied with on its way to the root of a pass."""

    value: float
    divided: bool  # whether the loop divided by 1 / value


@dataclass(frozen=True)
class Pass:
    """A backward pass that reached a parameter."""

    where: str
    time: float
    start: float
    gradient: Sketch  # of this pass alone
    order: tuple[int, ...]  # numbers of parameters, as their gradients came
    losses: tuple[Loss, ...]
    constants: tuple[Constant, ...]  # from the root to the losses, without the loss scale
    coefficient: float  # d root / d loss: the product of `constants` and `scale`
    scalar: bool  # its root is one number, and no `gradient` was passed
    scale: float  # of the GradScaler that scaled it, else 1
    value: float  # of the loss, unscaled
    graph: Graph
    sent: int  # bytes that DistributedDataParallel reduced in it
    without_sync: bool  # `no_sync` was on when it began
    weights: tuple[float, ...]  # a sample of the parameters, when it began
    eval_norms: tuple[str, ...]  # batch norms in eval mode that it reached
    shares: bool = False  # it goes through nodes of the pass before, which has retained them
    detached: bool = False  # it begins at a state that the loop detached from an earlier step

    @property
    def reached(self) -> frozenset[int]:
        return frozenset(self.order)


@dataclass(frozen=True)
class Call:
    """A call of `zero_grad`, or of a GradScaler's `unscale_` or `update`; "schedule": a scheduler's
    `step`; "average": an average of the parameters was written; "step": of another optimizer."""

    where: str
    time: float
    name: str
    parameters: frozenset[int] = frozenset()  # those that it concerns
    optimizer: int | None = None  # number of a scheduler's optimizer, if followed


@dataclass(frozen=True)
class Clipped:
    """`clip_grad_norm_`, by torch or by accumext."""

    where: str
    time: float
    norm: float
    max_norm: float
    parameters: frozenset[int]
    others: int  # clipped parameters that belong to no optimizer that steps
    filled: bool = False  # whether any of them had a gradient

    @property
    def factor(self) -> float:
        return min(1.0, self.max_norm / (self.norm + 1e-6))


@dataclass(frozen=True)
class HalfSum:
    """A window's sum of gradients in half precision, compared with S, their sum in float32."""

    factor: float  # the half-precision sum is factor * (S + R), with R orthogonal to S
    rest: float  # |R|^2 / |S|^2
    square: float  # |S|^2
    once: float  # squared error of rounding S once


@dataclass(frozen=True)
class Stepped:
    """A step of an optimizer, or one that a scaler or the wrapper skipped."""

    where: str
    time: float
    optimizer: int  # its number in the record
    used: Sketch | None  # the gradient, after all factors; None if the step was skipped
    left: Sketch | None  # what was in `.grad`
    present: frozenset[int]  # parameters that had a gradient
    factor: float  # the wrapper's clip coefficient
    through_scaler: bool
    closure_calls: int
    half_sums: tuple[HalfSum, ...]

    @property
    def skipped(self) -> bool:
        return self.used is None


@dataclass(frozen=True)
class Truncated:
    """A truncated gradient, measured beside the exact one."""

    where: str
    time: float
    k1: int | None
    k2: int | None
    steps: int
    distance: float  # relative to the exact gradient


Event: TypeAlias = Pass | Call | Clipped | Stepped | Truncated


@dataclass(frozen=True)
class Optimized:
    """An optimizer whose steps were observed."""

    name: str  # of its class
    parameters: frozenset[int]  # those that have required a gradient
    frozen: int = 0  # number of parameters that never required a gradient
    wrapped: bool = False  # in an AccumulatingOptimizer, which weights and unscales by itself
    sums: bool = False  # the wrapper's reduction is "sum"
    decayed: tuple[int, ...] = ()  # vectors that decay by the rate of matrices

    @property
    def size(self) -> int:
        return len(self.parameters) + self.frozen


@dataclass(frozen=True, eq=False)
class Record:
    """All that an audit has recorded."""

    events: tuple[Event, ...]
    names: tuple[str, ...]  # of the parameters
    bytes: int  # of the parameters
    optimizers: tuple[Optimized, ...]
    trained: frozenset[int]  # parameters of the optimizers that stepped
    half: frozenset[int]  # parameters of half precision
    waiting: tuple[str, ...] = ()  # optimizers that have not stepped before the last window closed
    strays: tuple[str, ...] = ()  # parameters that are in no module, and in no optimizer
    passes: int = 0  # backward passes of all kinds
    steps: tuple[tuple[str, int], ...] = ()  # optimizers that stepped, and how often
    ended: bool = True  # whether the loop ended before all windows were seen
    asked: str = ""  # the optimizer that the audit was told to follow
    rank: int = 0
    ranks: tuple[Record, ...] = ()  # records of all processes, if they reduce gradients
    before: Record | None = None  # of the same loop, run earlier

    @property
    def windows(self) -> int:
        """The number of windows that were closed."""
        return sum(isinstance(event, Stepped) for event in self.events)


@dataclass(frozen=True)
class Finding:
    """Something that a loop does wrongly, or that may be meant.

    Attributes:
        name: what it is, such as "rest of an epoch in the next window".
        evidence: what was seen, with numbers.
        cure: what to write instead; of a question it begins with "right if".
        value: the number of the evidence, in the unit that it says.
        where: the line of the loop, "train.py:31".
        id: the same in every release, such as "accumulation.leftover".
    """

    name: str
    evidence: str
    cure: str
    value: float = math.nan
    where: str = ""
    id: str = ""


@dataclass(frozen=True)
class Window:
    """The events up to a step, and the step before."""

    index: int
    events: tuple[Event, ...]
    step: Stepped
    previous: Stepped | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(only(self.events, Pass))


@dataclass(frozen=True, eq=False)
class View:
    """A record as one of its optimizers sees it: its windows, and the events after the last."""

    record: Record
    optimizer: Optimized
    windows: tuple[Window, ...]
    rest: tuple[Event, ...]
    ranks: tuple[View, ...] = ()

    @property
    def events(self) -> list[Event]:
        return [*(event for window in self.windows for event in window.events), *self.rest]

    @property
    def passes(self) -> list[Pass]:
        return only(self.events, Pass)


def views_of(record: Record) -> list[View]:
    """Return the views of the optimizers that have stepped."""
    views = [view_of(record, number) for number in range(len(record.optimizers))]
    return [view for view in views if view.windows]


def view_of(record: Record, number: int) -> View:
    """Return the events that concern one optimizer; steps of the others become calls."""
    own = record.optimizers[number]
    windows: list[Window] = []
    since: list[Event] = []
    of_passes = frozenset[int]().union(*(e.reached for e in record.events if isinstance(e, Pass)))
    for event in record.events:
        seen = event
        if isinstance(event, Stepped) and event.optimizer != number:
            others = record.optimizers[event.optimizer].parameters
            seen = Call(event.where, event.time, "step", others & of_passes)
        elif isinstance(event, Pass | Clipped | Call) and not _is_about(event, own, number):
            continue
        since.append(seen)
        if seen is event and isinstance(event, Stepped):
            previous = windows[-1].step if windows else None
            windows.append(Window(len(windows), tuple(since), event, previous))
            since = []
    ranks = tuple(view_of(replace(rank, ranks=()), number) for rank in record.ranks)
    return View(record, own, tuple(windows), tuple(since), ranks)


def _is_about(event: Pass | Clipped | Call, own: Optimized, number: int) -> bool:
    if isinstance(event, Call) and event.optimizer is not None:
        return event.optimizer == number
    touched = event.reached if isinstance(event, Pass) else event.parameters
    of_all = isinstance(event, Call) and event.name in ("step", "average", "update")
    in_vain = isinstance(event, Clipped) and (event.others > 0 or not event.parameters)
    return of_all or in_vain or bool(touched & own.parameters)


def is_call(event: Event, name: str) -> TypeGuard[Call]:
    return isinstance(event, Call) and event.name == name


T = TypeVar("T", bound=Event)


def only(events: Iterable[Event], kind: type[T]) -> list[T]:
    """Return the events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def calls(events: Iterable[Event], name: str) -> list[Call]:
    return [event for event in events if is_call(event, name)]
