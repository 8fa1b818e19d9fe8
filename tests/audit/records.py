"""Records by hand: what an audit would have seen of a loop that never ran.

Three parameters, of which the audited optimizer has two, with random sketches for gradients. A pass
has the gradient that its own factors say; a step has used a sum of passes, with factors that a test
chooses.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accumext.audit._events import (
    Call,
    Clipped,
    Event,
    Graph,
    HalfSum,
    Loss,
    Pass,
    Record,
    Stepped,
    Truncated,
    windows_of,
)

NAMES = ("weight", "bias", "other")
BOTH, OTHER = frozenset({0, 1}), frozenset({2})
COUNTS = (12.0, 3.0, 7.0, 5.0)  # of targets, where micro-batches differ
LOOP, STEP = "train.py:10", "train.py:20"
QUARTERS = [0.25] * 4
NAN, SCALE = math.nan, 1024.0
SMALL = Graph(bytes=100, calls=1, parameter=0, bytes_per_call=0.0, class_bytes=0)

_nodes = itertools.count(1)


def random_sketch(of: Iterable[int] = BOTH) -> Tensor:
    sketch = torch.zeros(len(NAMES), 8, dtype=torch.float64)
    sketch[list(of)] = torch.randn(len(list(of)), 8, dtype=torch.float64)
    return sketch


def loss(coefficient: float = 1.0, count: float | None = 8.0, **changes: Any) -> Loss:
    """A mean of torch's, in a graph of its own."""
    return replace(Loss(next(_nodes), True, "mean", count, coefficient), **changes)


def backward(
    coefficient: float = 1.0,
    count: float | None = 8.0,
    *,
    scale: float = 1.0,
    reduction: str | None = "mean",
    losses: Sequence[Loss] | None = None,
    **changes: Any,
) -> Pass:
    """A pass whose loss was multiplied by `coefficient` and by a loss scale."""
    total = coefficient * scale
    every = losses or [loss(total, count, reduction=reduction)]
    one = Pass(
        where=LOOP, time=0.0, start=0.0, gradient=random_sketch() * total, reached=BOTH,
        losses=tuple(every), coefficient=total, scale=scale, value=1.0, graph=SMALL, sent=0,
    )  # fmt: skip
    return replace(one, **changes)


def passes(coefficients: Iterable[float], counts: Iterable[float | None] = (), **changes: Any):
    """One pass for each coefficient."""
    pairs = itertools.zip_longest(coefficients, counts, fillvalue=8.0)
    return [backward(coefficient, count, **changes) for coefficient, count in pairs]


def other(**changes: Any) -> Pass:
    """A pass of another optimizer's loss, which reaches only what that one has."""
    own = {"gradient": random_sketch(OTHER), "reached": OTHER, "where": "train.py:99"}
    return backward(**{**own, **changes})


def call(name: str) -> Call:
    return Call("train.py:15", 0.0, name)


def clip(norm: float = 4.0, max_norm: float = 1.0, **changes: Any) -> Clipped:
    return replace(Clipped("train.py:16", 0.0, norm, max_norm, BOTH, others=0), **changes)


def total(of: Sequence[Pass], factors: float | Sequence[float] = 1.0) -> Tensor:
    """A sum of passes, all with one factor or each with its own."""
    each = [factors] * len(of) if isinstance(factors, float) else factors
    zero = torch.zeros(len(NAMES), 8, dtype=torch.float64)
    return sum((f * one.gradient for f, one in zip(each, of, strict=True)), zero)


def step(used: Tensor | None, **changes: Any) -> Stepped:
    """A step on a gradient, which stays in `.grad`; one that was skipped, without."""
    present = frozenset() if used is None else BOTH
    one = Stepped(
        where=STEP, time=0.0, used=used, left=used, present=present, factor=1.0,
        skipped=used is None, through_scaler=False, closure_calls=0, half_sums=(),
    )  # fmt: skip
    return replace(one, **changes)


def window(
    of: Sequence[Pass], factors: float | Sequence[float] = 1.0, **changes: Any
) -> list[Event]:
    """Passes, a step on their sum, and `zero_grad`."""
    return [*of, step(total(of, factors), **changes), call("zero_grad")]


def half_step(used: Tensor, error: float, once: float, factor: float = 1.0) -> Stepped:
    """On a sum in half precision with errors that are relative to it."""
    return step(used, half_sums=(HalfSum(factor, error**2, 25.0, 25.0 * once**2),))


def skipped(of: Sequence[Pass], **changes: Any) -> list[Event]:
    return [*of, step(None, through_scaler=True, **changes), call("zero_grad")]


def record(*events: Event | list[Event], **changes: Any) -> Record:
    """Of events, or lists of them, in a loop with two optimizers that step."""
    flat = [e for some in events for e in (some if isinstance(some, list) else [some])]
    one = Record(
        events=tuple(flat), names=NAMES, bytes=1000, trained=BOTH | OTHER, twice=frozenset(),
        audited=BOTH, wrapped=False, sums=False, half=frozenset(),
    )  # fmt: skip
    return replace(one, **changes)


def of_ranks(*records: Record) -> Record:
    """The first process's record, which has those of all."""
    return replace(records[0], ranks=records)


# --- loops that differ in one thing ---------------------------------------------------------------


def with_nan() -> Tensor:
    sketch = random_sketch()
    sketch[1, 0] = NAN
    return sketch


def ranked(*counts: float, differ: float = 0.0) -> Record:
    """Processes that average their gradients, with one micro-batch of so many targets each."""
    each = [backward(1.0, count) for count in counts]
    mean = total(each, 1 / len(each))
    mine = [mean.clone() for _ in each]
    mine[-1][1] *= 1 + differ
    return of_ranks(*(record(one, step(used)) for one, used in zip(each, mine, strict=True)))


def rerun(change: float) -> Record:
    """A loop that ran before; the first pass of its second window differs by so much."""
    first = record(window(passes(QUARTERS, [None] * 4)), window(passes(QUARTERS, [None] * 4)))
    changed = windows_of(first)[1].passes[0]
    again = replace(changed, gradient=changed.gradient * (1 + change))
    return record([again if e is changed else e for e in first.events], before=first)


def with_earlier(factor: float) -> Record:
    """Each window begins with so much of the gradient of the one before."""
    events, left = [], torch.zeros(3, 8, dtype=torch.float64)
    for _ in range(3):
        of = passes(QUARTERS)
        left = total(of) + factor * left
        events += [*of, step(left)]
    return record(events)


def of_steps(coefficient: float) -> Record:
    """Micro-batches whose losses are those of five steps, each with its coefficient."""
    many = [backward(losses=[loss(coefficient) for _ in range(5)]) for _ in range(4)]
    return record(window(many))


def with_penalty(**changes: Any) -> Record:
    """Micro-batches of unequal counts, whose losses have a term beside that counts nothing."""
    terms = [
        [loss(0.25, n, **changes), loss(0.1, None, known=False, reduction=None)] for n in COUNTS
    ]
    return record(window([backward(0.25, losses=both) for both in terms]))


def clipped_between(*more) -> Record:
    a, b = passes([0.5, 0.5])
    return record(a, clip(), *more, b, clip(), step(random_sketch()))


def scaled(*between, factor: float = 1 / SCALE, scale: float = SCALE, **changes) -> Record:
    """One micro-batch with a loss scale; something happens before its step."""
    of = [backward(scale=scale)]
    return record(of, *between, step(total(of, factor), **changes))


def graph(calls: int, size: int) -> Record:
    kept = replace(SMALL, calls=calls, bytes=size, class_bytes=size // 2)
    return record(window([backward(graph=kept)]))


def half(error: float, once: float, *clips, factor: float = 1.0, factors=1.0) -> Record:
    of = passes(QUARTERS, [None] * 4)
    stepped = half_step(total(of, factors) * factor, error, once, factor)
    return record(of, list(clips), stepped, half=BOTH)


def reached(*numbers: int, **changes) -> Record:
    """Only these parameters by the pass, and by the step those of them that are the optimizer's."""
    some = frozenset(numbers)
    one = backward(gradient=random_sketch(some), reached=some)
    used = one.gradient.clone()
    used[list(OTHER)] = 0
    return record(one, step(used, present=some & BOTH), **changes)


def truncated(distance: float) -> Truncated:
    return Truncated("train.py:5", 0.0, 5, 5, 50, distance)
