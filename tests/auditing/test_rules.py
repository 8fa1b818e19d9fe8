"""What follows from a record: one finding or question with its value, and nothing from neighbours.

Records are made by hand, so that nothing here depends on how a loop is observed. Values are those
of the definition: how many micro-batches, which ratio, which distance.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from records import (
    ADAM,
    BOTH,
    CALL,
    CLIP,
    COUNTS,
    LOOP,
    NAN,
    OTHER,
    OTHERS,
    QUARTERS,
    SCALE,
    SGD,
    STEP,
    WRAPPED,
    after_each,
    average,
    backward,
    call,
    clip,
    clipped_between,
    clipped_twice,
    generator_and_critic,
    graph,
    half,
    half_step,
    holding,
    loss,
    of_steps,
    other,
    own_sums,
    passes,
    random_sketch,
    ranked,
    reached,
    record,
    rerun,
    scaled,
    skipped,
    step,
    steps_at_the_end,
    total,
    truncated,
    updated_inside,
    window,
    windows,
    with_earlier,
    with_nan,
    with_penalty,
)

from accumext.auditing import _accumulation, _rules
from accumext.auditing._events import Constant, Finding, Pass, Record, view_of
from accumext.auditing._judge import judge
from accumext.auditing._words import KINDS

Build = Callable[[], Record]


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


# What no one can mean: its id, its value, its line.
FINDINGS: list[tuple[str, float, str, Build]] = [
    ("step.nonfinite", 1, STEP,
     lambda: record(window(passes(QUARTERS)), passes(QUARTERS), step(with_nan()))),
    ("step.nonfinite", 1, STEP, lambda: record(backward(gradient=with_nan()),
                                               step(torch.full((3, 8), NAN)))),
    ("step.skipped", 1, STEP, lambda: record(window(passes(QUARTERS)),
                                             skipped([backward(0.5), backward(0.5, value=NAN)]))),
    ("scaler.unscale_missing", SCALE, STEP, lambda: scaled(factor=1.0)),
    ("scaler.unscale_missing", 0.5, STEP, lambda: scaled(factor=1.0, scale=0.5)),
    ("accumulation.lost", 3, LOOP, lambda: record(window(passes(QUARTERS), [0.0, 0.0, 0.0, 1.0]))),
    ("accumulation.lost", 4, LOOP,
     lambda: record(passes(QUARTERS), step(torch.zeros(3, 8), present=frozenset()))),
    ("accumulation.lost", 3, LOOP, lambda: record(  # the most of all windows
        window(passes([1 / 3] * 3), [0.0, 0.0, 1.0]),
        window(passes(QUARTERS), [0.0, 0.0, 0.0, 1.0]))),
    ("accumulation.counted_again", 2, LOOP, lambda: record(window(
        [backward(losses=[one]) for one in [loss(), *[loss(node=-7)] * 2]]))),
    ("accumulation.counted_again", 3, STEP, lambda: with_earlier(1.0)),
    ("accumulation.another_loss", 1, "train.py:12", generator_and_critic),
    ("accumulation.leftover", 6 / 4, LOOP, lambda: record(windows(1 / 4, 4, 4, 6))),
    ("accumulation.leftover", 6 / 4, LOOP, lambda: record(own_sums(1 / 4, 4, 4, 6))),
    ("accumulation.leftover", 6 / 4, LOOP, lambda: record(windows(1 / 2, 4, 4, 6))),  # none right
    ("accumulation.partial", 3 / 4, LOOP, lambda: record(windows(1 / 4, 4, 3))),
    ("accumulation.partial", 2 / 4, LOOP, lambda: record(windows(1 / 4, 4, 2))),  # also 1 / 2
    ("accumulation.partial", 1 / 4, LOOP, lambda: record(windows(1 / 4, 4, 3, 1, 4))),
    ("accumulation.partial", 3 / 4, LOOP, lambda: record(own_sums(1 / 4, 4, 3))),
    ("accumulation.varying", 1 / 3, LOOP,  # not by the size: other constants
     lambda: record(windows(1 / 4, 4), window(passes([1 / 6] * 2)))),
    ("accumulation.varying", 3, LOOP,  # none is right
     lambda: record(window(passes([0.5] * 4)), window(passes([0.75] * 4)))),
    ("accumulation.scaled_between", 3, LOOP,
     lambda: record(window(passes([0.3, 0.1, 0.2, 0.4]), [0.2, 0.4, 0.5, 1.0]))),
    ("accumulation.divisor_missing", 4, LOOP, lambda: record(windows(1.0, 4, 2))),
    ("accumulation.divisor_missing", 4, LOOP, lambda: record(windows(1.0, 4, 1, 4))),
    ("scaler.mixed", 2, LOOP,
     lambda: record([backward(0.5, scale=SCALE), backward(0.5, scale=2 * SCALE)],
                    step(random_sketch(), through_scaler=True))),
    ("scaler.mixed", 4, LOOP,  # of the largest and the smallest
     lambda: record([backward(1 / 3, scale=s * SCALE) for s in (2, 1, 4)], step(random_sketch()))),
    ("scaler.updated_inside", 1, CALL, lambda: updated_inside(call("unscale_"))),
    ("clip.before_unscale", SCALE, CLIP,
     lambda: scaled(clip(), call("unscale_"), through_scaler=True)),
    ("clip.before_unscale", SCALE, CLIP, lambda: scaled(clip(), through_scaler=True)),
    ("clip.before_unscale", SCALE, CLIP,  # the scale of what is there
     lambda: record(backward(scale=2 * SCALE), call("zero_grad"), backward(scale=SCALE), clip(),
                    step(random_sketch(), through_scaler=True))),
    ("clip.per_micro_batch", 2, CLIP, clipped_twice),
    ("clip.per_micro_batch", 3, CLIP, lambda: record(  # the most of all windows
        after_each(passes([0.5] * 2), clip()), call("zero_grad"),
        after_each(passes([1 / 3] * 3), clip()))),
    ("clip.other_parameters", 3, CLIP,
     lambda: record(backward(), clip(others=3), step(random_sketch()))),
    ("clip.other_parameters", 3, CLIP,  # and none of the optimizer's
     lambda: record(backward(), clip(parameters=frozenset(), max_norm=math.inf, others=3),
                    step(random_sketch()))),
    ("processes.not_reduced", 1, STEP, lambda: ranked(8.0, 8.0, differ=1e-9)),
    ("processes.reduced_each", 300, LOOP, lambda: no_sync(150, 150, 150)),
    ("schedule.per_micro_batch", 2, CALL, lambda: record(
        window([backward()]), after_each(passes([0.5, 0.5]), call("schedule")))),
    ("schedule.before_first_step", 1, CALL, lambda: record(
        of := [backward()], call("schedule"), step(total(of)), call("zero_grad"))),
    ("average.per_micro_batch", 2, CALL, lambda: record(
        after_each(passes([0.5, 0.5]), average()))),
    ("average.per_micro_batch", 3, CALL, lambda: record(  # the most of all windows
        after_each(passes([0.5] * 2), average()), call("zero_grad"),
        after_each(passes([1 / 3] * 3), average()))),
    ("parameters.twice", 1, STEP, lambda: record(
        of := [backward()], step(total(of)), call("step", {1, 2}))),
    ("parameters.twice", 2, STEP, lambda: record(
        of := [backward()], call("step"), step(total(of)))),
    ("determinism.differs", 5, LOOP, lambda: rerun(1e-11)),
    ("determinism.differs", 5, LOOP, lambda: rerun(NAN)),
]  # fmt: skip

# What may be meant.
QUESTIONS: list[tuple[str, float, str, Build]] = [
    ("clip.other_parameters", 3, CLIP,
     lambda: record(backward(), clip(others=3, filled=True), step(random_sketch()))),
    ("clip.before_unscale", SCALE, CLIP,
     lambda: scaled(clip(4 * SCALE, SCALE), call("unscale_"), through_scaler=True)),
    ("accumulation.another_loss", 1, "train.py:12", steps_at_the_end),
    ("memory.growing", 3, LOOP, lambda: holding(0, 1, 2)),
    ("memory.growing", 4, LOOP, lambda: holding(1, 0, 1, 2, 3)),
    ("clip.per_micro_batch", 2, CLIP, clipped_between),
    ("accumulation.varying", 2, LOOP,
     lambda: record(window(passes(QUARTERS)), window(passes([0.5] * 4)))),
    ("step.skipped", 2, STEP, lambda: record(skipped([backward()]), skipped([backward()]))),
    ("accumulation.scaled_between", 2, LOOP,  # by one ratio
     lambda: record(window(passes(QUARTERS[:3]), [0.25, 0.5, 1.0]))),
    ("accumulation.divisor_missing", 4, LOOP, lambda: record(window(passes([1.0] * 4)))),
    ("accumulation.divisor_missing", 4, LOOP,
     lambda: record(window(passes([1.0] * 4, scale=SCALE), 1 / SCALE))),
    ("accumulation.divided_by_more", 1 / 4, LOOP, lambda: record(window(passes(QUARTERS), 0.25))),
    ("accumulation.divided_by_more", 1 / 4, LOOP, lambda: record(window(passes([1 / 16] * 4)))),
    ("accumulation.divided_by_more", 0.4, LOOP, lambda: record(window(passes([0.1] * 4)))),
    ("accumulation.divided_by_less", 2, LOOP, lambda: record(window(passes([0.5] * 4)))),
    ("accumulation.window_of_one", 1 / 4, LOOP, lambda: one_constant(1 / 4)),
    ("accumulation.unequal_counts", 4, LOOP, lambda: record(window(passes(QUARTERS, COUNTS)))),
    ("accumulation.unequal_counts", 4, LOOP, lambda: record(
        window([backward(1 / (4 * n), n, reduction="sum") for n in COUNTS]))),
    ("accumulation.unequal_counts", 4, LOOP,  # the largest of all windows
     lambda: record(window(passes([0.5] * 2, [4, 2])), window(passes(QUARTERS, COUNTS)))),
    ("accumulation.unequal_counts", 4, LOOP, lambda: with_penalty(known=False)),
    ("accumulation.unequal_weights", 4, LOOP,
     lambda: record(window(passes([0.1, 0.2, 0.3, 0.4])))),
    ("accumulation.dropped", 3, LOOP,
     lambda: record(window(passes([1.0] * 4), [0.0, 0.0, 0.0, 1.0]))),
    ("accumulation.dropped", 1, LOOP,
     lambda: record(window(passes([1 / 3] * 4), [0.0, 1.0, 1.0, 1.0]))),
    ("accumulation.unused", 2, LOOP,
     lambda: record(windows(1 / 4, 4, 4), passes(QUARTERS[:2]))),
    ("accumulation.sum", 1 / 8, LOOP, lambda: record(
        window(passes([1 / 8] * 4, COUNTS, reduction="sum")),
        window(passes([1 / 8] * 2, [4.0, 9.0], reduction="sum")))),
    ("clip.part", 1, CLIP,
     lambda: record(backward(), clip(parameters=frozenset({0})), step(random_sketch()))),
    ("processes.reduced_each", 300, LOOP,
     lambda: record(window(passes([1 / 3] * 3, sent=150)))),
    ("processes.reduced_each", 300, LOOP,  # what was for nothing
     lambda: record(window([backward(1 / 3, sent=n) for n in (0, 0, 900)]),
                    window(passes([1 / 3] * 3, sent=150)))),
    ("processes.unequal_counts", 4, LOOP, lambda: ranked(12.0, 3.0)),
    ("schedule.before_first_step", 2, CALL,
     lambda: record(call("schedule"), call("schedule"), window([backward()]))),
    ("schedule.on_skipped", 1, CALL, lambda: record(
        window([backward()]), skipped([backward()]), call("schedule"), window([backward()]))),
    ("schedule.on_skipped", 2, CALL, lambda: record(
        window([backward()]), *([*skipped([backward()]), call("schedule")] for _ in range(2)))),
    ("average.on_skipped", 1, CALL, lambda: record(
        window([backward()]), skipped([backward()]), average(), window([backward()]))),
    ("parameters.twice", 1, STEP, lambda: record(
        window([backward()]), other(order=(1, 2)), call("step", {1, 2}))),
    ("parameters.twice", 1, STEP, lambda: record(  # a third one steps on one gradient
        of := [backward()], step(total(of)), call("step", OTHER), call("zero_grad"),
        other(order=(1, 2)), call("step", {1, 2}))),
    ("parameters.no_optimizer", 1, STEP, lambda: reached(0, 1, 2, trained=BOTH)),
    ("parameters.no_gradient", 1, STEP, lambda: reached(0)),
    ("memory.losses_summed", 4, LOOP, lambda: graph(4, 4000, losses=4, separate=True)),
    ("memory.graph", 16_000, LOOP, lambda: graph(16, 16_000)),
    ("memory.graph", 16_000, LOOP, lambda: graph(16, 16_000, classes=0.1)),
    ("memory.graph", 5000, LOOP, lambda: graph(5, 5000, losses=5)),
    ("precision.sum", 8e-3, STEP, lambda: half(8e-3, 1e-3)),
    ("precision.sum", 2.1e-3, STEP, lambda: half(2.1e-3, 1e-3)),
    ("precision.sum", 8e-3, STEP, lambda: half(8e-3, 1e-3, clip(), factor=0.25)),
    ("precision.sum", 4e-3, STEP, lambda: half(0.0, 1e-3, factor=1.004)),
    ("truncation.distance", 0.5, "train.py:5",
     lambda: record(truncated(0.1), truncated(0.5), window([backward()]))),
    ("modules.batchnorm_eval", 2, LOOP, lambda: record(in_eval(1, 2))),
    ("optimizer.decay", 1, STEP,
     lambda: record(window([backward()]), optimizers=(replace(SGD, decayed=(1,)),))),
]  # fmt: skip

# What differs in one thing from a case of that id, and is right, or could not be told.
NEIGHBOURS: dict[str, dict[str, Build]] = {
    "step.nonfinite": {
        "nan in a pass of others": lambda: record(
            other(gradient=with_nan()), window([backward()])),
        "an infinite loss whose gradient is none": lambda: record(
            window([backward(value=math.inf)])),
    },
    "step.skipped": {
        "a window skipped": lambda: record(window([backward()]), skipped([backward()])),
        "the only window": lambda: record(skipped([backward()])),
        "a skipped window with inf gradients": lambda: record(
            window([backward()]), skipped([backward(gradient=with_nan())])),
    },
    "scaler.unscale_missing": {
        "a scale of 1": lambda: scaled(clip(), factor=1.0, scale=1.0),
        "by the scaler": lambda: scaled(through_scaler=True),
        "by hand": scaled,
        "by a call": lambda: scaled(call("unscale_"), clip()),
        "by the wrapper": lambda: replace(scaled(factor=1.0), optimizers=WRAPPED),
        "scaled gradients, and a call": lambda: scaled(call("unscale_"), factor=1.0),
        "scaled gradients, and the scaler": lambda: scaled(factor=1.0, through_scaler=True),
    },
    "accumulation.lost": {
        "a pass for another line": lambda: record(
            window([backward(where="train.py:8"), backward()], [0.0, 1.0])),
        "the first pass of SAM, whose parameters moved": lambda: record(
            window([backward(weights=(0.0,)), backward(weights=(1.0,))], [0.0, 1.0])),
        "a loss that flows back again": lambda: record(window(
            [backward(losses=[one]) for one in [loss(node=-8)] * 2], [0.0, 1.0])),
        "a window that was skipped": lambda: record(
            window([backward()]), skipped(passes([1 / 4] * 4))),
        "a step without a pass": lambda: record(
            window([backward()]), step(torch.zeros(3, 8), present=frozenset())),
    },
    "accumulation.counted_again": {
        "half of the step before": lambda: with_earlier(0.5),
        "two losses of one pass": lambda: record(window(
            [backward(losses=[loss(1 / 4), loss(1 / 4)]) for _ in range(2)])),
        "cleared passes that the loop has kept": lambda: record(
            a := backward(losses=[loss(node=-9)]), call("zero_grad"),
            b := backward(losses=[loss(node=-9)]), step(total([a, b], [1.0, 0.5]))),
    },
    "accumulation.another_loss": {
        "zero_grad between": lambda: generator_and_critic(call("zero_grad")),
        "one loss for both": lambda: generator_and_critic(order=(0, 1, 2)),
        "a step of others without its own pass": lambda: record(
            a := backward(0.5), call("step", OTHER), b := backward(0.5), step(total([a, b]))),
        "a step of others after all passes": lambda: record(
            of := [backward(gradient=random_sketch(), order=(0, 1, 2))], call("step", OTHER),
            step(total(of))),
    },
    "accumulation.leftover": {
        "the divisor of what it holds": lambda: record(windows(1 / 4, 4, 4), windows(1 / 6, 6)),
        "losses of another line": lambda: record(
            windows(1 / 4, 4), window([*passes(QUARTERS), backward(where="train.py:12")]),
            windows(1 / 4, 4)),
        "sums of a loop's own without a constant": lambda: record(own_sums(1.0, 4, 4, 6)),
        "no equal constants": lambda: record(own_sums(1 / 4, 4), own_sums(1 / 5, 6)),
    },
    "accumulation.partial": {
        "the divisor of what it holds": lambda: record(windows(1 / 4, 4), windows(1 / 2, 2)),
        "skipped": lambda: record(windows(1 / 4, 4), skipped(passes(QUARTERS[:2]))),
        "sums over all targets": lambda: record(
            windows(1.0, 4, 2, reduction="sum")),
        "a second constant beside the divisor": lambda: record(*(
            window([two_constants(1 / 8, 1 / size) for _ in range(size)]) for size in (4, 2))),
    },
    "accumulation.varying": {
        "within the tolerance": lambda: record(windows(1 / 4, 4), windows(0.2504, 4)),
        "no sum of its passes": lambda: record(
            windows(1 / 4, 4), passes([1.0] * 4), step(random_sketch())),
        "two closure calls": lambda: record(
            windows(1 / 4, 4), window(passes([1.0] * 4), closure_calls=2)),
        "a wrapper that sums": lambda: record(
            windows(1.0, 4), windows(0.5, 4), optimizers=(replace(WRAPPED[0], sums=True),)),
        "roots that are no numbers": lambda: record(
            own_sums(1 / 4, 4, scalar=False), own_sums(1 / 2, 4, scalar=False)),
    },
    "accumulation.scaled_between": {
        "weights that rise": lambda: record(window(passes([0.1, 0.2, 0.3, 0.4], [None] * 4))),
        "factors that fall": lambda: record(
            window(passes(QUARTERS[:3], [None] * 3), [1.0, 0.5, 0.25])),
        "factors that rise and fall": lambda: record(
            window(passes(QUARTERS[:3], [None] * 3), [0.25, 1.0, 0.5])),
        "after unscale_": lambda: record(
            of := passes(QUARTERS[:3]), call("unscale_"), step(total(of, [0.25, 0.5, 1.0]))),
        "a clip that was seen": lambda: record(
            a := backward(0.5), clip(max_norm=5.0), b := backward(0.5), step(total([a, b]))),
        "once, before all": lambda: record(windows(1 / 2, 2), window(passes([1.0] * 2), 0.5)),
    },
    "accumulation.divisor_missing": {
        "a mean": lambda: record(window(passes(QUARTERS))),
        "a mean by the step": lambda: record(window(passes([1.0] * 4), 0.25)),
        "no window": lambda: record(passes([1.0] * 4)),
        "nothing": record,
        "one micro-batch": lambda: record(window([backward()])),
        "a sum by choice": lambda: record(window(passes([1.0] * 4, reduction="sum"))),
        "a sum of single targets": lambda: record(
            window(passes([1.0] * 4, [1] * 4, reduction="sum"))),
        "sums of a loop's own": lambda: record(own_sums(1.0, 4)),
        "means over five steps": lambda: of_steps(1 / 20),
        "sums over five steps": lambda: of_steps(1 / 4),
        "a wrapper that sums": lambda: record(
            windows(1.0, 4), optimizers=(replace(WRAPPED[0], sums=True),)),
    },
    "accumulation.divided_by_more": {
        "a mean within the tolerance": lambda: record(window(passes([0.2496] * 4))),
        "an average over windows": lambda: with_earlier(0.5, 1 / 8),
        "roots that are no numbers": lambda: record(own_sums(1 / 4, 3, 3, scalar=False)),
        "a mean of sums": lambda: record(window(passes(QUARTERS, COUNTS, reduction="sum"))),
        "the negative of a mean": lambda: record(window(passes([-0.25] * 4))),
        "a clip to a quarter": lambda: record(
            of := passes(QUARTERS), clip(), step(total(of, 0.25))),
        "a wrapper's clip": lambda: record(
            window(passes(QUARTERS), 0.25, factor=0.25), optimizers=WRAPPED),
        "a clip before the pass of others": lambda: record(
            of := passes(QUARTERS), clip(), other(), step(total(of, 0.25))),
    },
    "accumulation.divided_by_less": {
        "a mean within the tolerance": lambda: record(window(passes([0.2504] * 4))),
        "gradients that the loop has kept": lambda: record(
            a := backward(), call("zero_grad"), b := backward(), step(total([a, b]))),
        "a mean of two losses each": lambda: record(window(
            [backward(losses=[loss(0.25), loss(0.25)]) for _ in range(4)])),
    },
    "accumulation.window_of_one": {
        "multiplied, not divided": lambda: one_constant(1 / 4, divided=False),
        "divided in one window alone": lambda: record(*(
            window([backward(1 / 4, constants=(Constant(1 / 4, divided),))])
            for divided in (True, False))),
        "by no whole number": lambda: one_constant(1 / 2.5),
        "by a fraction": lambda: one_constant(4.0),
        "by others each time": lambda: record(window([backward(1 / 2)]), window([backward(1 / 4)])),
        "a mean over losses of its own": lambda: record(
            window([backward(1 / 2, losses=[loss(1 / 2), loss(1 / 2)])])),
        "what was left of more": lambda: record(
            backward(1 / 2), call("zero_grad"), window([backward(1 / 2, weights=(1.0,))])),
        "undone after the pass": lambda: record(
            window([backward(1 / 4)], 4.0), window([backward(1 / 4)], 2.0)),
        "windows of more as well": lambda: record(windows(1 / 4, 4), window([backward(1.0)])),
    },
    "accumulation.unequal_counts": {
        "not known": lambda: record(window(passes(QUARTERS, [None, 3.0, 7.0, 5.0]))),
        "not known of a second loss": lambda: record(window(
            [backward(0.5, losses=[loss(0.25, n), loss(0.25, None)]) for n in (2, 4)])),
        "targets that weigh the same": lambda: record(
            window(passes([n / sum(COUNTS) for n in COUNTS], COUNTS))),
        "sums over all targets": lambda: record(
            window(passes([1 / sum(COUNTS)] * 4, COUNTS, reduction="sum"))),
        "weights of classes, which are no counts": lambda: record(
            window(passes([0.5] * 2, [6.5, 3.25]))),
        "a penalty that counts nothing": lambda: record(window(
            [backward(0.5, losses=[loss(0.5, 8.0), loss(9.0, n, known=False)]) for n in (2, 4)])),
        "equal within the tolerance": lambda: record(window(passes([0.5] * 2, [1000, 1001]))),
    },
    "accumulation.unequal_weights": {
        "weights and counts that differ": lambda: record(
            window(passes([0.4, 0.1, 0.2, 0.3], COUNTS))),
        "counts that are not known": lambda: record(
            window(passes([0.1, 0.2, 0.3, 0.4], [None] * 4))),
        "of two lines": lambda: record(
            window([*passes([0.5] * 2), backward(where="train.py:12")])),
    },
    "accumulation.dropped": {
        "a pass for another line": lambda: record(
            window([backward(where="train.py:8"), backward()], [0.0, 1.0])),
        "a small weight": lambda: record(
            window(passes([1 - 1e-3, 1e-3], [None] * 2))),
    },
    "accumulation.unused": {
        "nothing after the last step": lambda: record(windows(1 / 4, 4, 4)),
        "cleared": lambda: record(windows(1 / 4, 4), passes(QUARTERS), call("zero_grad")),
        "of another line": lambda: record(
            windows(1 / 4, 4), backward(where="train.py:40")),
        "after the last window that was asked for": lambda: record(
            windows(1 / 4, 4, 4), passes(QUARTERS[:2]), ended=False),
        "of others": lambda: record(windows(1 / 4, 4), other()),
    },
    "accumulation.sum": {
        "sums over all targets": lambda: record(
            window(passes([1.0] * 4, COUNTS, reduction="sum")),
            window(passes([1.0] * 2, [4.0, 9.0], reduction="sum"))),
        "divided by the targets of each window": lambda: record(
            window(passes([1 / 27] * 4, COUNTS, reduction="sum")),
            window(passes([1 / 13] * 2, [4.0, 9.0], reduction="sum"))),
        "a micro-batch without targets, of a sum": lambda: record(
            *(with_empty(1 / 13, "sum", *counts) for counts in ([4.0, 0.0, 9.0], [6.0, 7.0]))),
        "a micro-batch without targets, of means": lambda: record(
            windows(1 / 3, 3),
            window([backward(1 / (3 * max(n, 1)), n, reduction="sum") for n in (4.0, 0.0, 4.0)])),
    },
    "scaler.mixed": {
        "for others": lambda: record(
            other(scale=SCALE), backward(scale=2 * SCALE),
            step(random_sketch(), through_scaler=True)),
        "of two windows": lambda: record(
            *([*window([backward(scale=s)], 1 / s, through_scaler=True), call("update")]
              for s in (SCALE, 2 * SCALE))),
        "before zero_grad": lambda: record(
            backward(scale=SCALE, where="train.py:8"), call("zero_grad"),
            window([backward(scale=2 * SCALE)], 0.5 / SCALE)),
        "in the wrapper": lambda: record(
            backward(scale=SCALE), call("update"), backward(scale=2 * SCALE),
            step(random_sketch()), optimizers=WRAPPED),
    },
    "scaler.updated_inside": {
        "an update that changes nothing": updated_inside,
        "an update after the last pass alone": lambda: record(
            backward(0.5, scale=SCALE), call("unscale_"), backward(0.5, scale=SCALE),
            call("update"), step(random_sketch(), through_scaler=True)),
        "after another's pass": lambda: record(other(), call("update"), windows(0.5, 2)),
        "before zero_grad": lambda: record(
            backward(where="train.py:8"), call("update"), call("zero_grad"), window([backward()])),
        "after the last pass": lambda: record(
            of := passes([0.5] * 2, scale=SCALE), call("unscale_"), call("update"),
            step(total(of, 1 / SCALE))),
        "in the wrapper": lambda: replace(
            updated_inside(call("unscale_")), optimizers=WRAPPED),
    },
    "clip.before_unscale": {
        "a clip that changes nothing": lambda: scaled(
            clip(norm=0.5), call("unscale_"), through_scaler=True),
        "in the wrapper": lambda: replace(scaled(clip()), optimizers=WRAPPED),
        "of other optimizers": lambda: scaled(clip(parameters=OTHER), call("unscale_")),
        "another's scale before the clip": lambda: record(
            backward(scale=SCALE), call("unscale_"), other(scale=SCALE), clip(),
            step(random_sketch(), through_scaler=True)),
    },
    "clip.per_micro_batch": {
        "before zero_grad": lambda: record(
            backward(where="train.py:8"), clip(), call("zero_grad"), window([backward()])),
        "two clips after the last pass": lambda: record(
            of := [backward()], clip(), clip(1.0), step(total(of, 0.25))),
        "before another's pass": lambda: record(
            backward(), clip(), other(), step(random_sketch())),
        "that changes nothing": lambda: record(
            a := backward(0.5), clip(0.5), b := backward(0.5), clip(), step(total([a, b], 0.25))),
    },
    "clip.other_parameters": {
        "of the optimizer's": lambda: record(
            of := [backward()], clip(), step(total(of, 0.25))),
        "of an optimizer that steps": lambda: record(
            backward(), clip(parameters=BOTH | OTHER), step(random_sketch())),
    },
    "clip.part": {
        "each by itself": lambda: record(
            backward(), *(clip(parameters=frozenset({n})) for n in BOTH), step(random_sketch())),
        "a norm without a clip": lambda: record(
            backward(), clip(max_norm=math.inf, parameters=frozenset({0})), step(random_sketch())),
        "whole in one window": lambda: record(
            backward(), clip(parameters=frozenset({0})), step(random_sketch()),
            backward(), clip(), step(random_sketch())),
        "the rest has no gradient": lambda: record(
            backward(), clip(parameters=frozenset({0})),
            step(random_sketch([0]), present=frozenset({0}))),
    },
    "processes.not_reduced": {
        "rounding": lambda: ranked(8.0, 8.0, differ=1e-15),
        "one process": lambda: record(window([backward()])),
    },
    "processes.reduced_each": {
        "one reduction": lambda: record(window([backward(1 / 3, sent=n) for n in (0, 0, 150)])),
        "before zero_grad": lambda: record(
            backward(where="train.py:8", sent=150), call("zero_grad"),
            window([backward(sent=150)])),
        "in windows of their own": lambda: record(*(window([backward(sent=150)]) for _ in "ab")),
    },
    "processes.unequal_counts": {
        "equal": lambda: ranked(8.0, 8.0),
        "not known": lambda: ranked(8.0, NAN),
        "of another line": lambda: ranked(12.0, 3.0, lines=(LOOP, OTHERS)),
    },
    "schedule.per_micro_batch": {
        "once per window": lambda: record(
            *([*window([backward()]), call("schedule")] for _ in range(3))),
        "two schedules": lambda: record(
            window([backward()]), call("schedule"), call("schedule"), window([backward()])),
        "after one of two passes": lambda: record(
            windows(0.5, 2), a := backward(0.5), call("schedule"), b := backward(0.5),
            step(total([a, b]))),
        "of another optimizer": lambda: record(
            after_each(passes([0.5, 0.5]), call("schedule", OTHER))),
    },
    "schedule.before_first_step": {
        "after it": lambda: record(window([backward()]), call("schedule"), window([backward()])),
        "of another optimizer": lambda: record(call("schedule", OTHER), window([backward()])),
        "before a later step": lambda: record(
            window([backward()]), of := [backward()], call("schedule"), step(total(of))),
    },
    "schedule.on_skipped": {
        "after the pass that follows": lambda: record(
            window([backward()]), skipped([backward()]), of := [backward()], call("schedule"),
            step(total(of))),
        "after a step": lambda: record(
            skipped([backward()]), window([backward()]), call("schedule")),
    },
    "average.per_micro_batch": {
        "once per window": lambda: record(*([*window([backward()]), average()] for _ in range(3))),
        "of parameters that moved between": lambda: record(
            after_each([backward(0.5, weights=(n,)) for n in (0, 2)], average())),
        "before the step": lambda: record(
            of := passes([0.5] * 2), average(), average(), step(total(of))),
    },
    "average.on_skipped": {
        "after a step": lambda: record(skipped([backward()]), window([backward()]), average()),
        "after the pass that follows": lambda: record(
            window([backward()]), skipped([backward()]), of := [backward()], average(),
            step(total(of))),
    },
    "parameters.twice": {
        "another optimizer's": lambda: record(
            of := [backward()], call("step", OTHER), step(total(of))),
        "others that are followed": lambda: two(
            of := [backward()], [theirs := other()], step(total(of)),
            step(total([theirs]), optimizer=1, present=OTHER)),
    },
    "parameters.no_optimizer": {
        "of another optimizer": lambda: reached(0, 1, 2),
        "before the first step": lambda: record(backward(order=(0, 1, 2)), trained=BOTH),
        "a loop of others alone": lambda: record(
            window([backward()]), trained=frozenset()),
    },
    "parameters.no_gradient": {
        "in another window": lambda: record(
            a := backward(gradient=random_sketch([0]), order=(0,)),
            step(total([a]), present=frozenset({0})), window([backward()])),
        "in a pass without a step": lambda: record(
            a := backward(gradient=random_sketch([0]), order=(0,)),
            step(total([a]), present=frozenset({0})),
            backward(gradient=random_sketch([1]), order=(1,), where="train.py:40")),
        "written by hand": lambda: record(
            backward(gradient=random_sketch([0]), order=(0,)), step(random_sketch())),
        "no pass for this optimizer": lambda: record(
            other(), step(random_sketch([0]), present=frozenset({0}))),
    },
    "memory.growing": {
        "two passes": lambda: holding(0, 1),
        "one graph that all use": lambda: holding(0, 1, 1, 1),
        "one loss that flows back again": lambda: record(
            list(holding(0, 1, 2, losses=[loss(node=-5)]).events[:3]), step(random_sketch())),
    },
    "memory.losses_summed": {
        "less than the parameters": lambda: graph(4, 1300, losses=4, separate=True),
        "one loss": lambda: graph(4, 4000, separate=True),
        "losses of one forward pass": lambda: graph(1, 4000, losses=4, separate=True),
    },
    "memory.graph": {
        "fifteen calls": lambda: graph(15, 16_000),
        "smaller than the parameters": lambda: graph(16, 1060),
        "more losses than calls": lambda: graph(4, 4000, losses=5),
    },
    "precision.sum": {
        "one bit": lambda: half(1.9e-3, 1e-3),
        "no rounding": lambda: half(8e-3, 0.0),
        "of a part": lambda: half(8e-3, 1e-3, factors=[1.0, 1.0, 1.0, 0.5]),
        "and a clip": lambda: half(1e-3, 1e-3, clip(), factor=0.25),
        "and a norm of others": lambda: half(1e-3, 1e-3, clip(math.inf, parameters=OTHER)),
        "of the wrong sign": lambda: record(
            of := passes([-1.0]), half_step(-total(of), 1e-3, 1e-3, -1.0), half=BOTH),
        "unscaled by the scaler": lambda: record(
            of := [backward(scale=SCALE, count=None)],
            half_step(total(of, 1 / SCALE), 1e-3, 1e-3, 1 / SCALE), half=BOTH),
        "scaled yet, for a fused optimizer": lambda: record(
            of := [backward(scale=SCALE, count=None)],
            replace(half_step(total(of), 1e-3, 1e-3), used=total(of, 1 / SCALE)), half=BOTH),
    },
    "truncation.distance": {
        "below the threshold": lambda: record(truncated(9e-3), window([backward()])),
        "not measured": lambda: record(window([backward()])),
    },
    "determinism.differs": {
        "the same run": lambda: rerun(0.0),
        "the same nan": lambda: replace(
            one := record(backward(gradient=with_nan()), step(random_sketch())), before=one),
        "rounding": lambda: rerun(1e-15),
        "a longer run": lambda: replace(
            one := record(window([backward()]), window([backward()])),
            before=replace(one, events=one.events[:3])),
    },
    "modules.batchnorm_eval": {
        "in training": lambda: record(in_eval()),
    },
    "optimizer.decay": {
        "a group of their own": lambda: record(window([backward()])),
        "of an optimizer that never stepped": lambda: record(
            window([backward()]), optimizers=(SGD, replace(ADAM, decayed=(2,)))),
    },
}  # fmt: skip

CASES = [*((case, False) for case in FINDINGS), *((case, True) for case in QUESTIONS)]
RULES = {
    **{rule.__name__: lambda one, rule=rule: rule(view_of(one, 0))
       for rule in (*_accumulation.RULES, *_rules.OF_A_VIEW)},
    **{rule.__name__: rule for rule in _rules.OF_A_RECORD},
}  # fmt: skip


def said(one: Record) -> tuple[Finding, ...]:
    judgement = judge(one)
    return (*judgement.findings, *judgement.questions)


@pytest.mark.parametrize(
    ("case", "asks"), CASES, ids=[f"{c[0]}-{c[1]:g}{'?' * asks}" for c, asks in CASES]
)
def test_a_mistake_is_all_that_is_said(case, asks):
    """Its id, its line, its value; and a question where it may be meant"""
    id, value, where, build = case
    judgement = judge(build())
    found = judgement.questions if asks else judgement.findings
    assert [(one.id, one.where) for one in found] == [(id, where)]
    assert (judgement.findings if asks else judgement.questions) == ()
    assert found[0].value == pytest.approx(value, rel=1e-4)
    assert found[0].name == KINDS[id].name
    begin = f"right if {KINDS[id].right_if}; else " if asks else ""
    if id != "memory.graph":  # whose cure depends on what the graph keeps
        begin += KINDS[id].cure
        assert found[0].cure == begin
    assert found[0].cure.startswith(begin)
    assert len(found[0].cure) > len(begin) - len(KINDS[id].cure)


@pytest.mark.parametrize(
    "build",
    [build for of_id in NEIGHBOURS.values() for build in of_id.values()],
    ids=[f"{id}-{words}" for id, of_id in NEIGHBOURS.items() for words in of_id],
)
def test_a_neighbour_of_a_mistake_is_none(build):
    assert said(build()) == ()


# --- the table ------------------------------------------------------------------------------------


def test_every_id_has_cases_and_neighbours():
    assert {case[0] for case, _ in CASES} == set(NEIGHBOURS) == {told[0] for told in TOLD}
    assert set(NEIGHBOURS) == set(KINDS)


def test_what_asks_is_right_if():
    """And what never asks has no such words"""
    assert {case[0] for case in QUESTIONS} == {id for id, kind in KINDS.items() if kind.right_if}


def test_ids_are_words_and_kinds_have_names_and_cures():
    assert [id for id in KINDS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", id)] == []
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)
    assert [id for id, kind in KINDS.items() if not kind.cure] == ["memory.graph"]
    words = " / ".join(word for kind in KINDS.values() for word in kind if word)
    assert not re.search(r"  |\n|right if| /  / ", words)
    assert all(word == word.strip() for kind in KINDS.values() for word in kind)


def test_every_rule_has_a_case():
    silent = [
        name for name, rule in RULES.items()
        if not any(list(rule(case[-1]())) for case, _ in CASES)
    ]  # fmt: skip
    assert silent == []


def test_an_update_that_changes_the_scale_inside_a_window():
    judgement = judge(updated_inside(ratio=2.0))
    assert [(one.id, one.value, one.where) for one in judgement.findings] == [
        ("scaler.mixed", 2.0, LOOP),
        ("scaler.updated_inside", 1, CALL),
    ]
    assert judgement.questions == ()


def test_the_worst_is_first():
    last = window(passes(QUARTERS), through_scaler=True)
    events = [
        call("schedule"),
        *window(passes([1.0] * 4, COUNTS)),
        *window([backward(scale=SCALE)]),
        *(replace(last[-2], used=with_nan()) if event is last[-2] else event for event in last),
    ]
    judgement = judge(record(events, optimizers=(replace(SGD, decayed=(1,)),)))
    assert [finding.id for finding in judgement.findings] == [
        "step.nonfinite",
        "scaler.unscale_missing",
    ]
    assert [question.id for question in judgement.questions] == [
        "accumulation.divisor_missing",
        "accumulation.unequal_counts",
        "schedule.before_first_step",
        "optimizer.decay",
    ]


# --- several optimizers ---------------------------------------------------------------------------


def of_two(first: float, second: float, lines: tuple[str, str] = (LOOP, OTHERS)) -> Record:
    """Windows of four and of two micro-batches, of optimizers each with its loss, in turn."""
    own = passes([first] * 4, where=lines[0])
    theirs = [other(coefficient=second, where=lines[1]) for _ in range(2)]
    return two(
        own, theirs, step(total(own)),
        step(total(theirs), optimizer=1, present=OTHER), call("zero_grad", BOTH | OTHER),
    )  # fmt: skip


def test_each_optimizer_is_judged():
    assert said(of_two(1 / 4, 1 / 2)) == ()
    found = said(of_two(1 / 4, 1.0))
    assert [(one.id, one.value, one.where) for one in found] == [
        ("accumulation.divisor_missing", pytest.approx(2.0), OTHERS)
    ]
    assert len(said(of_two(1.0, 1.0))) == 2


def test_of_one_line_the_largest_value_is_said():
    for first, second in ((1.0, 1.0), (1.0, 1 / 2), (1 / 4, 1.0)):
        right = 4.0 if first == 1.0 else 2.0
        (one,) = said(of_two(first, second, (LOOP, LOOP)))
        assert (one.id, one.value) == ("accumulation.divisor_missing", pytest.approx(right))


def test_a_question_and_a_finding_of_one_id_are_both_said():
    of = [backward(1.0, where=LOOP) for _ in range(4)]
    theirs = [other(coefficient=1.0, where=LOOP) for _ in range(3)]
    judgement = judge(two(
        of, theirs[:1], step(total(of)), step(total(theirs[:1]), optimizer=1, present=OTHER),
        call("zero_grad", BOTH | OTHER),
        theirs[1:], step(total(theirs[1:]), optimizer=1, present=OTHER),
    ))  # fmt: skip
    for found, value in ((judgement.questions, 4.0), (judgement.findings, 2.0)):
        assert [(one.id, one.value) for one in found] == [
            ("accumulation.divisor_missing", pytest.approx(value))
        ]


def test_a_view_has_what_is_about_its_parameters():
    one = of_two(1 / 4, 1 / 2)
    first, second = (view_of(one, number) for number in (0, 1))
    kinds = [[type(e).__name__ for e in view.windows[0].events] for view in (first, second)]
    assert kinds == [["Pass"] * 4 + ["Stepped"], ["Pass"] * 2 + ["Call", "Stepped"]]
    assert [e.name for e in (*first.rest, *second.rest)] == ["step", "zero_grad", "zero_grad"]
    assert [first.rest[0].parameters, second.windows[0].events[2].parameters] == [OTHER, BOTH]
    assert [len(view.passes) for view in (first, second)] == [4, 2]


def test_a_step_of_what_no_pass_reaches_is_about_nothing():
    one = two(window([backward()]), step(random_sketch(OTHER), optimizer=1, present=OTHER))
    (_, theirs) = view_of(one, 0).rest
    assert (theirs.name, theirs.parameters) == ("step", frozenset())


def test_a_window_knows_the_step_before():
    view = view_of(record(windows(1 / 4, 4, 4, 4)), 0)
    assert [one.index for one in view.windows] == [0, 1, 2]
    steps = [one.step for one in view.windows]
    assert [one.previous for one in view.windows] == [None, *steps[:2]]


# --- what was looked at ---------------------------------------------------------------------------


def test_nothing_was_seen():
    assert not judge(record()).seen
    assert not judge(record(passes(QUARTERS))).seen
    assert not judge(record(step(random_sketch()))).seen
    assert not judge(record(window([backward()]), optimizers=(ADAM,), events=())).seen
    assert judge(record(window([backward()]))).seen
    assert judge(record(skipped([backward()]))).seen
    assert judge(record(step(random_sketch()), passes=3)).seen  # of other parameters


CHECKED = [
    (lambda: record(windows(1 / 4, 4)), ("factors of 1 window", "4 graphs")),
    (lambda: record(window([*passes(QUARTERS), backward(where="train.py:12")])),
     ("factors of 1 window", "5 graphs")),
    (lambda: of_two(1 / 4, 1 / 2), ("factors of 2 windows", "6 graphs")),
    (lambda: record(backward(), step(random_sketch())), ("factors of 0 windows", "1 graph")),
    (lambda: record(window([backward()]), call("schedule"), average(), average(),
                    backward(), clip(), step(random_sketch())),
     ("factors of 1 window", "2 graphs", "1 schedule step", "2 average updates", "1 clip")),
]  # fmt: skip


@pytest.mark.parametrize(("build", "right"), CHECKED, ids=[" ".join(r) for _, r in CHECKED])
def test_what_was_checked(build, right):
    assert judge(build()).checked == right


UNJUDGED = {
    "factors of 2 windows: the gradient is no sum of the passes": lambda: record(
        windows(1 / 4, 4), *([one, step(random_sketch())] for one in passes([1.0] * 2))),
    "factors of 1 window: the gradient is no sum": lambda: record(
        window([backward()], closure_calls=2)),
    "factors of 1 window: the loop keeps gradients by itself": lambda: record(
        a := backward(), call("zero_grad"), b := backward(), step(total([a, b], [1.0, 0.5]))),
    "divisors of 2 windows: losses that end in sum()": lambda: record(own_sums(1.0, 4, 4)),
    "divisors of 1 window": lambda: record(window([backward(scalar=False)])),
    "Adam steps on tensors that no backward pass reaches": lambda: two(
        window([backward()]), step(random_sketch(OTHER), optimizer=1, present=OTHER)),
}  # fmt: skip


@pytest.mark.parametrize("words", UNJUDGED)
def test_what_could_not_be_told(words):
    (only,) = judge(UNJUDGED[words]()).unjudged
    assert only.startswith(words)


@pytest.mark.parametrize(
    "build",
    [lambda: record(windows(1 / 4, 4)), lambda: record(skipped([backward()])),
     lambda: record(step(torch.zeros(3, 8), present=frozenset()), window([backward()])),
     lambda: of_two(1 / 4, 1 / 2)],
    ids=["a mean", "skipped", "a step without a pass", "two optimizers"],
)  # fmt: skip
def test_all_was_told(build):
    assert judge(build()).unjudged == ()


# --- evidence -------------------------------------------------------------------------------------

# What the evidence must tell: windows, numbers, names.
TOLD: list[tuple[str, Build, tuple[str, ...]]] = [
    ("step.nonfinite",
     lambda: record(window([backward()]), [backward(0.5), backward(0.5, value=NAN)],
                    step(with_nan())),
     ("window 2 of 2: inf or NaN in the gradient of bias", "loss of micro-batch 2 is not finite")),
    ("step.nonfinite",
     lambda: record(backward(gradient=torch.full((3, 8), NAN)), step(torch.full((3, 8), NAN))),
     ("gradient of weight, bias, in the backward pass first in that of bias",)),
    ("step.skipped", lambda: record(*(skipped([backward(gradient=with_nan())]) for _ in range(8))),
     ("windows 1, 2, 3, 4, 5, 6 and 2 more of 8", "in the gradient of bias")),
    ("scaler.unscale_missing", lambda: scaled(factor=1.0), ("times the loss scale, 1024",)),
    ("accumulation.lost", lambda: record(window(passes(QUARTERS), [0.0, 0.0, 0.0, 1.0])),
     ("3 of the 4 micro-batches of a window are not in the gradient that",)),
    ("accumulation.lost",
     lambda: record(passes(QUARTERS), step(torch.zeros(3, 8), present=frozenset())),
     ("4 of the 4 micro-batches of a window are not in any gradient that",)),
    ("accumulation.counted_again", lambda: record(window(
        [backward(losses=[one]) for one in [loss(node=-7)] * 3])), ("is in 3 backward passes",)),
    ("accumulation.counted_again", lambda: with_earlier(1.0),
     ("windows 2, 3 began with the gradients of the step before", "up to 3 steps")),
    ("accumulation.another_loss", generator_and_critic, (
        "1 backward pass in the gradient of window 1", "which had stepped before they came")),
    ("accumulation.leftover", lambda: record(windows(1 / 4, 4, 4, 6)),
     ("1.5 times the mean over the 6 micro-batches of window 3", "multiplied by 0.25, as in a "
      "window of 4")),
    ("accumulation.leftover", lambda: record(own_sums(1 / 4, 4, 4, 6)),
     ("1.5 times what a window of its size should have of the 6 micro-batches of window 3",)),
    ("accumulation.leftover", lambda: record(windows(1 / 2, 4, 4, 6)),  # 3 times the mean
     ("1.5 times what a window of its size should have of the 6 micro-batches of window 3",)),
    ("accumulation.partial", lambda: record(windows(1 / 4, 4, 1, 2, 4)),
     ("0.25, 0.5 times the mean over the 1, 2 micro-batches of windows 2, 3",
      "0.25, as in a window of 4")),
    ("accumulation.varying", lambda: record(window(passes(QUARTERS)), window(passes([0.5] * 4))),
     ("2 times the mean over the 4 micro-batches of window 2", "multiplied by 0.5")),
    ("accumulation.scaled_between",
     lambda: record(window(passes(QUARTERS), [0.2, 0.4, 0.5, 1.0])),
     ("micro-batches of window 1", "factors 0.2, 0.4, 0.5, 1:", "scaled 3 times before")),
    ("accumulation.divisor_missing", lambda: record(windows(1.0, 4, 4)),
     ("4 times the mean over the 4 micro-batches of windows 1, 2", "multiplied by 1")),
    ("accumulation.divisor_missing", lambda: record(windows(1.0, 1, 4, 2)),
     ("4 times the mean over the 4 micro-batches of window 2;",)),
    ("accumulation.divisor_missing",
     lambda: record(window(passes([2.0, 0.5, 1.0, 0.5], scale=SCALE), 1 / SCALE)),
     ("multiplied by 0.5, 1, 2",)),
    ("accumulation.divided_by_more",
     lambda: record(windows(0.1, 4), window(passes([0.1] * 4, scale=SCALE), 1 / SCALE)),
     ("0.4 times the mean over the 4 micro-batches of windows 1, 2;", "multiplied by 0.1")),
    ("accumulation.divided_by_less", lambda: record(window(passes([0.5] * 4))),
     ("2 times the mean over the 4 micro-batches of window 1", "multiplied by 0.5")),
    ("accumulation.window_of_one", lambda: one_constant(1 / 4),
     ("0.25 times the mean over the 1 micro-batch of windows 1, 2", "multiplied by 0.25")),
    ("accumulation.unequal_counts", lambda: record(window(passes(QUARTERS, COUNTS))),
     ("12, 3, 7, 5 targets", "up to 4 times another")),
    ("accumulation.unequal_weights", lambda: record(window(passes([0.1, 0.2, 0.3, 0.4]))),
     ("8, 8, 8, 8 targets", "up to 4 times another")),
    ("accumulation.dropped", lambda: record(window(passes([1.0] * 4), [0.0, 0.0, 0.0, 1.0])),
     ("3 of the 4 micro-batches of a window are not in the gradient",)),
    ("accumulation.unused", lambda: record(windows(1 / 4, 4, 4), passes(QUARTERS[:2])),
     ("the last 2 micro-batches came after the last step, whose windows hold 4",)),
    ("accumulation.sum", lambda: record(
        window(passes([1 / 8] * 4, COUNTS, reduction="sum")),
        window(passes([1 / 8] * 2, [4.0, 9.0], reduction="sum"))),
     ("0.125 times", "4, 2 micro-batches of windows 1, 2", "multiplied by 0.125")),
    ("scaler.mixed",
     lambda: record([backward(1 / 3, scale=s * SCALE) for s in (2, 1, 4)], step(random_sketch())),
     ("factors of ratio 4",)),
    ("scaler.updated_inside", lambda: updated_inside(call("unscale_")), ("1 times between",)),
    ("clip.before_unscale",
     lambda: scaled(clip(norm=SCALE * 3), call("unscale_"), through_scaler=True),
     ("the norm 3072 that was clipped to 1", "loss scale 1024", "own is 3")),
    ("clip.per_micro_batch", clipped_between, ("clipped 2 times in a window, to 1",)),
    ("clip.other_parameters", lambda: record(backward(), clip(others=3), step(random_sketch())),
     ("3 of the clipped parameters",)),
    ("clip.part",
     lambda: record(backward(), clip(parameters=frozenset({0})), step(random_sketch())),
     ("1 of the 2 parameters of the step were not clipped: bias",)),
    ("processes.not_reduced", lambda: ranked(8.0, 8.0, differ=1e-3),
     ("different gradients of bias",)),
    ("processes.reduced_each", lambda: record(window(passes([1 / 3] * 3, sent=2048))),
     ("3 passes of a window reduced", "4 KiB per rank for nothing")),
    ("processes.reduced_each", lambda: no_sync(2048, 2048), ("no_sync was on in the backward",)),
    ("processes.unequal_counts", lambda: ranked(12.0, 3.0), ("12, 3 targets", "up to 4 times")),
    ("schedule.per_micro_batch",
     lambda: record(after_each(passes([1 / 3] * 3), call("schedule"))),
     ("went 3 steps on before one step",)),
    ("schedule.before_first_step", lambda: record(call("schedule"), window([backward()])),
     ("went 1 step on before the optimizer's first",)),
    ("schedule.on_skipped", lambda: record(
        window([backward()]), *([*skipped([backward()]), call("schedule")] for _ in range(2))),
     ("the schedule went on after 2 steps that the scaler had skipped",)),
    ("average.per_micro_batch",
     lambda: record(after_each(passes([1 / 3] * 3), average())),
     ("written 3 times between two steps",)),
    ("average.on_skipped",
     lambda: record(window([backward()]), skipped([backward()]), average()),
     ("a copy of the model was written after 1 step that",)),
    ("parameters.twice",
     lambda: record(of := [backward()], step(total(of)), call("step", {1, 2})),
     ("two optimizers, or two groups of one, have bias, and both step on one gradient",)),
    ("parameters.no_optimizer", lambda: reached(0, 1, 2, trained=BOTH),
     ("gradients reach, no step uses other",)),
    ("parameters.no_gradient", lambda: reached(0), ("no gradient reaches bias",)),
    ("memory.growing", lambda: holding(0, 1, 2),
     ("holds the graphs of 3 passes, 300 B where the first had 100 B",)),
    ("memory.losses_summed", lambda: graph(4, 4096, losses=4, separate=True),
     ("the 4 losses of a pass have graphs of their own, of 1 KiB",)),
    ("memory.graph", lambda: graph(16, 16 * 1024, classes=0.75),
     ("keeps 16 KiB for 16 steps", "12 KiB of it has an element per",
      "Without logits it is 4.75 KiB, with one step 1 KiB")),
    ("memory.graph", lambda: graph(16, 16 * 1024, classes=0.25, bytes_per_call=512.0),
     ("512 B more for each; 4 KiB of it", "With one step it is 1 KiB")),
    ("precision.sum", lambda: half(8e-3, 1e-3),
     ("sum of 4 gradients in 2 parameters is 0.008", "3.0 bits lost")),
    ("truncation.distance", lambda: record(truncated(0.1234), window([backward()])),
     ("k1=5, k2=5 of 50 steps: 0.123 from the exact gradient",)),
    ("determinism.differs", lambda: rerun(0.25), ("backward pass 5 is about 0.2 from",)),
    ("modules.batchnorm_eval", lambda: record(in_eval(1, 2)),
     ("norm.1, norm.2 got gradients in eval, from 2 passes of 4",)),
    ("optimizer.decay",
     lambda: record(window([backward()]), optimizers=(replace(SGD, decayed=(1,)),)),
     ("1 vector decay as matrices do: bias",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("id", "build", "parts"), TOLD, ids=[f"{id}-{parts[0]}" for id, _, parts in TOLD]
)
def test_evidence_has_the_numbers(id, build, parts):
    (evidence,) = (one.evidence for one in said(build()) if one.id == id)
    assert all(part in evidence for part in parts), evidence
    assert not re.search(r"\b(?:nan|0x)\b", evidence)
    json.dumps(evidence)


def test_distance_of_equal_weights_is_that_of_the_definition():
    of = passes(QUARTERS, COUNTS)
    (question,) = said(record(window(of)))
    plain = [one.gradient * 4 for one in of]
    right = sum(n * g for n, g in zip(COUNTS, plain, strict=True)) / sum(COUNTS)
    apart = (sum(plain) / 4 - right).norm() / right.norm()
    assert f"{apart:.2g} from the mean over all targets" in question.evidence


def test_cures_of_one_graph_say_what_is_lost():
    exact, cut = "accumext.decode_loss keeps no logits, with the same", "torch.utils.checkpoint"
    for classes, words in ((0.5, cut), (0.6, exact)):
        (question,) = said(graph(16, 16_000, classes))
        assert f"; else {words}" in question.cure
        assert "truncates" in question.cure
