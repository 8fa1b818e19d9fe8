"""Records by hand: what an audit would have seen of a loop that never ran.

Three parameters, of which the followed optimizer has two, with random sketches for gradients. A
pass has the gradient that its own factors say; a step has used a sum of passes, with factors that a
test chooses.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accumext.auditing._events import (
    Call,
    Clipped,
    Constant,
    Event,
    Finding,
    Graph,
    HalfSum,
    Loss,
    Optimized,
    Pass,
    Record,
    Stepped,
    Truncated,
    view_of,
)
from accumext.auditing._judge import judge

NAMES = ("weight", "bias", "other")
BOTH, OTHER = frozenset({0, 1}), frozenset({2})
COUNTS = (12.0, 3.0, 7.0, 5.0)  # of targets, where micro-batches differ
LOOP, STEP = "train.py:10", "train.py:20"
CALL, CLIP, OTHERS = "train.py:15", "train.py:16", "train.py:99"
QUARTERS = [0.25] * 4
NAN, SCALE = math.nan, 1024.0
SMALL = Graph(bytes=100, calls=1, bytes_per_call=0.0, class_bytes=0)
SGD, ADAM = Optimized("SGD", BOTH), Optimized("Adam", OTHER)
WRAPPED = (replace(SGD, wrapped=True),)

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
    """A pass whose loss was divided by the inverse of `coefficient`, if that is not 1, and
    multiplied by a loss scale."""
    total = coefficient * scale
    every = losses or [loss(total, count, reduction=reduction)]
    one = Pass(
        where=LOOP, time=0.0, start=0.0, gradient=random_sketch() * total, order=(1, 0),
        losses=tuple(every), constants=(Constant(coefficient, True),) if coefficient != 1 else (),
        coefficient=total, scalar=True, scale=scale, value=1.0, graph=SMALL, sent=0,
        without_sync=False, weights=(0.0,), eval_norms=(),
    )  # fmt: skip
    return replace(one, **changes)


def passes(coefficients: Iterable[float], counts: Iterable[float | None] = (), **changes: Any):
    """One pass for each coefficient."""
    pairs = itertools.zip_longest(coefficients, counts, fillvalue=8.0)
    return [backward(coefficient, count, **changes) for coefficient, count in pairs]


def other(**changes: Any) -> Pass:
    """A pass of another optimizer's loss, which reaches only what that one has."""
    own = {"gradient": random_sketch(OTHER), "order": (2,), "where": OTHERS}
    return backward(**{**own, **changes})


def call(name: str, parameters: Iterable[int] = BOTH, where: str = CALL) -> Call:
    return Call(where, 0.0, name, frozenset(parameters))


def average() -> Call:
    return call("average", parameters=())


def clip(norm: float = 4.0, max_norm: float = 1.0, **changes: Any) -> Clipped:
    """Of gradients; of other parameters, which have none."""
    filled = "others" not in changes
    return replace(Clipped(CLIP, 0.0, norm, max_norm, BOTH, others=0, filled=filled), **changes)


def total(of: Sequence[Pass], factors: float | Sequence[float] = 1.0) -> Tensor:
    """A sum of passes, all with one factor or each with its own."""
    each = [factors] * len(of) if isinstance(factors, float) else factors
    zero = torch.zeros(len(NAMES), 8, dtype=torch.float64)
    return sum((f * one.gradient for f, one in zip(each, of, strict=True)), zero)


def step(used: Tensor | None, **changes: Any) -> Stepped:
    """A step on a gradient, which stays in `.grad`; one that was skipped, without."""
    present = frozenset() if used is None else BOTH
    one = Stepped(
        where=STEP, time=0.0, optimizer=0, used=used, left=used, present=present, factor=1.0,
        through_scaler=False, closure_calls=0, half_sums=(),
    )  # fmt: skip
    return replace(one, **changes)


def stepped(
    of: Sequence[Pass], *between: Event, factors: float | Sequence[float] = 1.0, **changes: Any
) -> list[Event]:
    """Passes, what comes between, and a step on the sum of the passes."""
    return [*of, *between, step(total(of, factors), **changes)]


def window(
    of: Sequence[Pass], factors: float | Sequence[float] = 1.0, **changes: Any
) -> list[Event]:
    """Passes, a step on their sum, and `zero_grad`."""
    return [*stepped(of, factors=factors, **changes), call("zero_grad")]


def after_each(
    of: Sequence[Pass], *events: Event, factors: float | Sequence[float] = 1.0
) -> list[Event]:
    """Passes, the same events after each of them, and a step on their sum."""
    return [*(e for one in of for e in (one, *events)), step(total(of, factors))]


def half_step(used: Tensor, error: float, once: float, factor: float = 1.0) -> Stepped:
    """On a sum in half precision with errors that are relative to it."""
    return step(used, half_sums=(HalfSum(factor, error**2, 25.0, 25.0 * once**2),))


def skipped(of: Sequence[Pass], **changes: Any) -> list[Event]:
    return [*of, step(None, through_scaler=True, **changes), call("zero_grad")]


def record(*events: Event | list[Event], **changes: Any) -> Record:
    """Of events, or lists of them, in a loop with two optimizers that step, of which one is
    followed."""
    flat = [e for some in events for e in (some if isinstance(some, list) else [some])]
    one = Record(
        events=tuple(flat), names=NAMES, bytes=1000, optimizers=(SGD,), trained=BOTH | OTHER,
        half=frozenset(), passes=sum(isinstance(event, Pass) for event in flat),
    )  # fmt: skip
    return replace(one, **changes)


def of_ranks(*records: Record) -> Record:
    """The first process's record, which has those of all."""
    each = tuple(replace(one, rank=rank) for rank, one in enumerate(records))
    return replace(each[0], ranks=each)


# --- loops that differ in one thing ---------------------------------------------------------------


def windows(coefficient: float, *sizes: int, **changes: Any) -> list[Event]:
    """Windows of so many micro-batches, each with the same coefficient."""
    return [e for size in sizes for e in window(passes([coefficient] * size, **changes))]


def own_sums(coefficient: float, *sizes: int, **changes: Any) -> list[Event]:
    """The same, of losses whose number of targets is not known."""
    return [
        event for size in sizes
        for event in window(passes([coefficient] * size, [None] * size, reduction="sum", **changes))
    ]  # fmt: skip


def with_nan() -> Tensor:
    sketch = random_sketch()
    sketch[1, 0] = NAN
    return sketch


def ranked(
    *counts: float, differ: float = 0.0, lines: Sequence[str] = (LOOP, LOOP), **changes: Any
) -> Record:
    """Two processes that average their gradients, with one micro-batch of so many targets each."""
    each = [backward(1.0, n, where=line, **changes) for n, line in zip(counts, lines, strict=True)]
    mean = total(each, 1 / len(each))
    mine = [mean.clone() for _ in each]
    mine[-1][1] *= 1 + differ
    return of_ranks(*(record(one, step(used)) for one, used in zip(each, mine, strict=True)))


def rerun(change: float) -> Record:
    """A loop that ran before; the first pass of its second window differs by so much."""
    first = record(window(passes(QUARTERS, [None] * 4)), window(passes(QUARTERS, [None] * 4)))
    changed = view_of(first, 0).windows[1].passes[0]
    again = replace(changed, gradient=changed.gradient * (1 + change))
    return record([again if e is changed else e for e in first.events], before=first)


def with_earlier(factor: float, coefficient: float = 1 / 4) -> Record:
    """Each window begins with so much of the gradient of the one before; after the first, which is
    a mean, losses have a coefficient."""
    events, left = [], torch.zeros(3, 8, dtype=torch.float64)
    for each in (1 / 4, coefficient, coefficient):
        of = passes([each] * 4)
        left = total(of) + factor * left
        events += [*of, step(left)]
    return record(events)


def of_steps(coefficient: float) -> Record:
    """Micro-batches whose losses are those of five steps, each with its coefficient."""
    many = [backward(losses=[loss(coefficient) for _ in range(5)]) for _ in range(4)]
    return record(window(many))


def summing(losses: int, calls: int) -> Record:
    """Four micro-batches, divided by four, of so many losses through one parameter each."""
    kept = replace(SMALL, calls=calls)
    many = [backward(0.25, losses=[loss(0.25) for _ in range(losses)], graph=kept) for _ in "four"]
    return record(window(many))


def divided_twice(size: int, losses: int, by: float) -> Record:
    """A window of means over so many losses, divided by its size and by something more."""
    constants = Constant(1 / size, True), Constant(by, True)
    return record(window([
        backward(by / size, losses=[loss(by / size / losses) for _ in range(losses)],
                 constants=constants) for _ in range(size)
    ]))  # fmt: skip


def with_penalty(**changes: Any) -> Record:
    """Micro-batches of unequal counts, whose losses have a term beside that counts nothing."""
    terms = [
        [loss(0.25, n, **changes), loss(0.1, None, known=False, reduction=None)] for n in COUNTS
    ]
    return record(window([backward(0.25, losses=both) for both in terms]))


def scaled(*between, factor: float = 1 / SCALE, scale: float = SCALE, **changes) -> Record:
    """One micro-batch with a loss scale; something happens before its step."""
    of = [backward(scale=scale)]
    return record(of, *between, step(total(of, factor), **changes))


def updated_inside(*between: Event, ratio: float = 1.0) -> Record:
    """The scaler is updated between the first two of three micro-batches, as it is or not."""
    a, b, c = (backward(1 / 3, scale=s * SCALE) for s in (1.0, ratio, ratio))
    return record(a, *between, call("update", ()), b, c, step(random_sketch(), through_scaler=True))


def generator_and_critic(*between: Event, order: tuple[int, ...] = (1, 0)) -> Record:
    """A loss that goes through both; its optimizer steps; then the second pass, of the other's
    loss, and the other steps."""
    first = backward(gradient=random_sketch(BOTH | OTHER), order=(0, 1, 2), where="train.py:12")
    second = backward(gradient=random_sketch(order), order=order)
    kept = 0.0 if between else 1.0
    used = [total([first]), total([first, second], [kept, 1.0])]
    used[0][list(BOTH)] = used[1][list(OTHER)] = 0.0
    return record(
        first, step(used[0], optimizer=1, present=OTHER), *between, second, step(used[1]),
        optimizers=(SGD, ADAM),
    )  # fmt: skip


def steps_at_the_end() -> Record:
    """A loss of one optimizer, a loss that goes through both, and the steps of both."""
    own, through = backward(), backward(gradient=random_sketch(BOTH | OTHER), order=(0, 1, 2))
    through = replace(through, where="train.py:12")
    used = [total([own, through]), total([through])]
    used[0][list(OTHER)] = used[1][list(BOTH)] = 0.0
    last = step(used[1], optimizer=1, present=OTHER)
    return record(own, through, step(used[0]), last, optimizers=(SGD, ADAM))


def graph(calls: int, size: int, classes: float = 0.5, **changes: Any) -> Record:
    """One pass, whose graph keeps so much."""
    kept = replace(SMALL, calls=calls, bytes=size, class_bytes=int(size * classes), **changes)
    return record(window([backward(graph=kept)]))


def holding(*held: int, **changes: Any) -> Record:
    """A window of passes whose graphs hold those of so many passes before."""
    of = passes([1 / len(held)] * len(held), **changes)
    graphs = [replace(SMALL, held=n, bytes=100 * (n + 1)) for n in held]
    return record(window([replace(one, graph=g) for one, g in zip(of, graphs, strict=True)]))


def retaining(*shares: bool, **changes: Any) -> Record:
    """A window of passes that go through nodes of the one before, or not."""
    return record(window([backward(1 / len(shares), shares=one, **changes) for one in shares]))


def detaching(*steps: int) -> Record:
    """Windows, each of a sentence's first pass, and as many whose states were detached."""
    sentence = {n: [False] + [True] * n for n in steps}
    return record(*(
        window([backward(1 / (n + 1), detached=cut) for cut in sentence[n]]) for n in steps
    ))  # fmt: skip


def half(error: float, once: float, *clips, factor: float = 1.0, factors=1.0) -> Record:
    of = passes(QUARTERS, [None] * 4)
    stepped = half_step(total(of, factors) * factor, error, once, factor)
    return record(of, list(clips), stepped, half=BOTH)


def reached(*numbers: int, **changes) -> Record:
    """Only these parameters by the pass, and by the step those of them that are the optimizer's."""
    some = frozenset(numbers)
    one = backward(gradient=random_sketch(some), order=numbers)
    used = one.gradient.clone()
    used[list(OTHER)] = 0
    return record(one, step(used, present=some & BOTH), **changes)


def truncated(distance: float) -> Truncated:
    return Truncated("train.py:5", 0.0, 5, 5, 50, distance)


def two(*events, **changes) -> Record:
    """With both optimizers followed."""
    return record(*events, optimizers=(SGD, ADAM), **changes)


def no_sync(*sent: int) -> Record:
    """Passes of which some reduced so many bytes, all in no_sync."""
    return record(window([backward(1 / len(sent), sent=n, without_sync=True) for n in sent]))


def with_empty(coefficient: float, reduction: str, *counts: float) -> list:
    """A window in which micro-batches without targets have a gradient of zeros."""
    of = passes([coefficient] * len(counts), counts, reduction=reduction)
    of = [one if n else replace(one, gradient=0 * one.gradient) for n, one in zip(counts, of)]
    return window(of)


def in_eval(*numbers: int) -> list:
    """A window of four passes, of which some reach batch norms in eval."""
    names = [("norm.1", "norm.2") if i in numbers else () for i in range(4)]
    return window([backward(0.25, eval_norms=some) for some in names])


def two_constants(own: float, divisor: float) -> Pass:
    """Of a loss that has a constant of its own beside the division."""
    constants = Constant(divisor, True), Constant(own, False)
    return backward(own * divisor, constants=constants)


def one_constant(value: float, divided: bool = True, **changes) -> Record:
    """Windows of one micro-batch each, whose loss was multiplied with a constant."""
    made = {"constants": (Constant(value, divided),), **changes}
    return record(*(window([backward(value, **made)]) for _ in range(2)))


def said(one: Record) -> tuple[Finding, ...]:
    """What is found, then what is asked."""
    judgement = judge(one)
    return (*judgement.findings, *judgement.questions)
