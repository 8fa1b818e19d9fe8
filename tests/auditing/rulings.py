"""Records with one mistake, each with its id, its value and its line: findings and questions; and
records without a mistake, beside those.
"""

import math
from dataclasses import replace
from typing import Any

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
    detaching,
    divided_twice,
    generator_and_critic,
    graph,
    half,
    half_step,
    holding,
    in_eval,
    loss,
    no_sync,
    of_steps,
    one_constant,
    other,
    own_sums,
    passes,
    random_sketch,
    ranked,
    reached,
    record,
    rerun,
    retaining,
    scaled,
    skipped,
    step,
    stepped,
    steps_at_the_end,
    summing,
    total,
    truncated,
    two,
    two_constants,
    updated_inside,
    window,
    windows,
    with_earlier,
    with_empty,
    with_nan,
    with_penalty,
)

from accumext.auditing._events import Constant, Record

torch.manual_seed(0)  # the records are made here, once

SUMMING = (replace(WRAPPED[0], sums=True),)

# What no one can mean: its id, its value, its line, and words of the evidence: windows, numbers,
# names.
FINDINGS: list[tuple[Any, ...]] = [
    ("step.nonfinite", 1, STEP,
     record(window(passes(QUARTERS)), passes(QUARTERS), step(with_nan()))),
    ("step.nonfinite", 1, STEP,
     record(backward(gradient=with_nan()), step(torch.full((3, 8), NAN)))),
    ("step.nonfinite", 1, STEP,
     record(backward(gradient=torch.full((3, 8), NAN)), step(torch.full((3, 8), NAN))),
     "gradient of weight, bias, in the backward pass first in that of bias"),
    ("step.nonfinite", 1, STEP,
     record(window([backward()]), [backward(0.5), backward(0.5, value=NAN)], step(with_nan())),
     "window 2 of 2: inf or NaN in the gradient of bias", "loss of micro-batch 2 is not finite"),
    ("step.skipped", 1, STEP,
     record(window(passes(QUARTERS)), skipped([backward(0.5), backward(0.5, value=NAN)]))),
    ("scaler.unscale_missing", SCALE, STEP, scaled(factor=1.0), "times the loss scale, 1024"),
    ("scaler.unscale_missing", 0.5, STEP, scaled(factor=1.0, scale=0.5)),
    ("scaler.unscale_missing", SCALE, STEP,  # of a wrapper that has not been given the scaler
     record(window(passes([1.0] * 4, scale=SCALE), 1 / 4), optimizers=WRAPPED),
     "times the loss scale, 1024"),
    ("accumulation.lost", 3, LOOP, record(window(passes(QUARTERS), [0.0, 0.0, 0.0, 1.0])),
     "3 of the 4 micro-batches of a window are not in the gradient that"),
    ("accumulation.lost", 4, LOOP,
     record(passes(QUARTERS), step(torch.zeros(3, 8), present=frozenset())),
     "4 of the 4 micro-batches of a window are not in any gradient that"),
    ("accumulation.lost", 3, LOOP, record(  # the most of all windows
        window(passes([1 / 3] * 3), [0.0, 0.0, 1.0]),
        window(passes(QUARTERS), [0.0, 0.0, 0.0, 1.0]))),
    ("accumulation.counted_again", 2, LOOP, record(window(
        [backward(losses=[one]) for one in [loss(), *[loss(node=-7)] * 2]]))),
    ("accumulation.counted_again", 3, STEP, with_earlier(1.0),
     "windows 2, 3 began with the gradients of the step before", "up to 3 steps"),
    ("accumulation.counted_again", 3, LOOP, record(window(
        [backward(losses=[one]) for one in [loss(node=-7)] * 3])),
     "is in 3 backward passes"),
    ("accumulation.another_loss", 1, "train.py:12", generator_and_critic(),
     "1 backward pass in the gradient of window 1", "which had stepped before they came"),
    ("accumulation.leftover", 6 / 4, LOOP, record(windows(1 / 4, 4, 4, 6)),
     "1.5 times the mean over the 6 micro-batches of window 3",
     "multiplied by 0.25, as in a window of 4"),
    ("accumulation.leftover", 6 / 4, LOOP, record(own_sums(1 / 4, 4, 4, 6)),
     "1.5 times what a window of its size should have of the 6 micro-batches of window 3"),
    ("accumulation.leftover", 6 / 4, LOOP, record(windows(1 / 2, 4, 4, 6)),  # none right
     "1.5 times what a window of its size should have of the 6 micro-batches of window 3"),
    ("accumulation.partial", 3 / 4, LOOP, record(windows(1 / 4, 4, 3))),
    ("accumulation.partial", 2 / 4, LOOP, record(windows(1 / 4, 4, 2))),  # also 1 / 2
    ("accumulation.partial", 1 / 4, LOOP, record(windows(1 / 4, 4, 3, 1, 4))),
    ("accumulation.partial", 3 / 4, LOOP, record(own_sums(1 / 4, 4, 3))),
    ("accumulation.partial", 0.25, LOOP, record(windows(1 / 4, 4, 1, 2, 4)),
     "0.25, 0.5 times the mean over the 1 micro-batch of windows 2, 3 (2 in window 3)",
     "0.25, as in a window of 4"),
    ("accumulation.partial", 3 / 4, LOOP,  # divided, and summed by a wrapper
     record(windows(1 / 4, 4, 3), optimizers=SUMMING)),
    ("accumulation.varying", 1 / 3, LOOP,  # not by the size: other constants
     record(windows(1 / 4, 4), window(passes([1 / 6] * 2)))),
    ("accumulation.varying", 3, LOOP,  # none is right
     record(window(passes([0.5] * 4)), window(passes([0.75] * 4)))),
    ("accumulation.scaled_between", 3, LOOP,
     record(window(passes([0.3, 0.1, 0.2, 0.4]), [0.2, 0.4, 0.5, 1.0]))),
    ("accumulation.scaled_between", 3, LOOP,
     record(window(passes(QUARTERS), [0.2, 0.4, 0.5, 1.0])),
     "micro-batches of window 1", "factors 0.2, 0.4, 0.5, 1:", "scaled 3 times before"),
    ("accumulation.divisor_missing", 4, LOOP, record(windows(1.0, 4, 2))),
    ("accumulation.divisor_missing", 4, LOOP, record(windows(1.0, 4, 1, 4))),
    ("accumulation.divisor_missing", 4, LOOP, record(windows(1.0, 1, 4, 2)),
     "4 times the mean over the 4 micro-batches of window 2;"),
    ("scaler.mixed", 2, LOOP,
     record(
         [backward(0.5, scale=s * SCALE) for s in (1, 2)],
         step(random_sketch(), through_scaler=True))),
    ("scaler.mixed", 4, LOOP,  # of the largest and the smallest
     record([backward(1 / 3, scale=s * SCALE) for s in (2, 1, 4)], step(random_sketch())),
     "factors of ratio 4"),
    ("scaler.updated_inside", 1, CALL, updated_inside(call("unscale_")), "1 times between"),
    ("clip.before_unscale", SCALE, CLIP, scaled(clip(), through_scaler=True)),
    ("clip.before_unscale", SCALE, CLIP,  # the scale of what is there
     record(
         backward(scale=2 * SCALE), call("zero_grad"), backward(scale=SCALE), clip(),
         step(random_sketch(), through_scaler=True))),
    ("clip.before_unscale", SCALE, CLIP,
     scaled(clip(norm=SCALE * 3), call("unscale_"), through_scaler=True),
     "the norm 3072 that was clipped to 1", "loss scale 1024", "own is 3"),
    ("clip.per_micro_batch", 2, CLIP,  # a clip to a quarter
     record(after_each(passes([0.5] * 2), clip(), factors=[1 / 16, 1 / 4]))),
    ("clip.per_micro_batch", 3, CLIP, record(  # the most of all windows
        after_each(passes([0.5] * 2), clip()), call("zero_grad"),
        after_each(passes([1 / 3] * 3), clip()))),
    ("clip.other_parameters", 3, CLIP,
     record(backward(), clip(others=3), step(random_sketch())),
     "3 of the clipped parameters"),
    ("clip.other_parameters", 3, CLIP,  # and none of the optimizer's
     record(
         backward(), clip(parameters=frozenset(), max_norm=math.inf, others=3),
         step(random_sketch()))),
    ("clip.empty", 1, CLIP,  # of an iterator that was read before
     record(stepped([backward()], clip(0.0, parameters=frozenset(), filled=False)))),
    ("clip.empty", 2, CLIP, record(  # where gradients are elsewhere
        after_each(passes([0.5, 0.5]), clip(0.0, filled=False))),
     "2 times in a window"),
    ("processes.not_reduced", 1, STEP, ranked(8.0, 8.0, differ=1e-9),
     "different gradients of bias"),
    ("processes.not_reduced", 1, STEP,  # of slices with retain_graph; and not how often
     ranked(8.0, 8.0, differ=1e-9, shares=True, sent=100),
     "different gradients of bias: Distr", "ones through a retained graph stay local"),
    ("processes.reduced_each", 300, LOOP, no_sync(150, 150, 150), "no_sync was on in the backward"),
    ("schedule.before_first_step", 1, CALL, record(
        stepped([backward()], call("schedule")), call("zero_grad"))),
    ("average.per_micro_batch", 3, CALL, record(  # the most of all windows
        after_each(passes([0.5] * 2), average()), call("zero_grad"),
        after_each(passes([1 / 3] * 3), average()))),
    ("average.per_micro_batch", 3, CALL,
     record(after_each(passes([1 / 3] * 3), average())),
     "written 3 times between two steps"),
    ("parameters.twice", 1, STEP, record(
        stepped([backward()]), call("step", {1, 2})),
     "two optimizers, or two groups of one, have bias, and both step on one gradient"),
    ("parameters.twice", 2, STEP, record(stepped([backward()], call("step")))),
    ("determinism.differs", 5, LOOP, rerun(1e-11)),
    ("determinism.differs", 5, LOOP, rerun(0.004),
     "backward pass 5 is about 0.004 from that of the first run"),
    ("determinism.differs", 5, LOOP, rerun(NAN), "backward pass 5 is not finite in the second run"),
    ("determinism.differs", 5, LOOP, rerun(math.inf), "not finite in the second run"),
    ("determinism.differs", 5, LOOP,
     replace(one := rerun(NAN), events=one.before.events, before=replace(one, before=None)),
     "backward pass 5 is not finite in the first run"),
]  # fmt: skip

# What may be meant.
QUESTIONS: list[tuple[Any, ...]] = [
    ("clip.other_parameters", 3, CLIP,
     record(backward(), clip(others=3, filled=True), step(random_sketch()))),
    ("clip.before_unscale", SCALE, CLIP,
     scaled(clip(4 * SCALE, SCALE), call("unscale_"), through_scaler=True)),
    ("accumulation.another_loss", 1, "train.py:12", steps_at_the_end()),
    ("accumulation.another_loss", 1, "train.py:12",  # both reach both
     generator_and_critic(order=(0, 1, 2))),
    ("memory.growing", 3, LOOP, holding(0, 1, 2),
     "holds the graphs of 3 passes, 300 B where the first had 100 B"),
    ("memory.growing", 4, LOOP, holding(1, 0, 1, 2, 3)),
    ("clip.per_micro_batch", 2, CLIP,  # what the step used is no sum of these
     record(after_each(passes([0.5] * 2), clip())[:-1], step(random_sketch())),
     "clipped 2 times in a window, to 1"),
    ("accumulation.varying", 2, LOOP,
     record(window(passes(QUARTERS)), window(passes([0.5] * 4))),
     "2 times the mean over the 4 micro-batches of window 2", "multiplied by 0.5"),
    ("step.skipped", 2, STEP, record(skipped([backward()]), skipped([backward()]))),
    ("step.skipped", 8, STEP,
     record(*(skipped([backward(gradient=with_nan())]) for _ in range(8))),
     "windows 1, 2, 3, 4, 5, 6 and 2 more of 8", "in the gradient of bias"),
    ("accumulation.scaled_between", 2, LOOP,  # by one ratio
     record(window(passes(QUARTERS[:3]), [0.25, 0.5, 1.0]))),
    ("accumulation.divisor_missing", 4, LOOP,
     record(window(passes([1.0] * 4, scale=SCALE), 1 / SCALE))),
    ("accumulation.divisor_missing", 4, LOOP, record(windows(1.0, 4, 4)),
     "4 times the mean over the 4 micro-batches of windows 1, 2", "multiplied by 1"),
    ("accumulation.divisor_missing", 4, LOOP,  # or the second pass of a window is of another head
     record(
         windows(1.0, 4),
         window([backward(), backward(gradient=random_sketch([0]), order=(0,))]))),
    ("accumulation.divisor_missing", 4, LOOP, of_steps(1.0),
     "divided by 20 each (4 passes of 5 losses), they give the mean over all"),
    ("accumulation.divided_by_less", 16, LOOP, summing(16, 16),
     "a pass sums 16; divided by 64 each (4 passes of 16 losses in a window)"),
    ("accumulation.divided_by_more", 1 / 3, LOOP, divided_twice(4, 3, 1 / 3),
     "4 passes of 3 losses, and a division by 3 is one too many"),
    ("accumulation.divided_by_more", 1 / 12, LOOP, divided_twice(4, 3, 1 / 12), "by 12"),
    ("accumulation.divided_by_more", 1 / 4, LOOP, record(window(passes(QUARTERS), 0.25))),
    ("accumulation.divided_by_more", 1 / 4, LOOP, record(window(passes([1 / 16] * 4)))),
    ("accumulation.divided_by_more", 0.4, LOOP, record(window(passes([0.1] * 4)))),
    ("accumulation.divided_by_more", 0.4, LOOP,
     record(windows(0.1, 4), window(passes([0.1] * 4, scale=SCALE), 1 / SCALE)),
     "0.4 times the mean over the 4 micro-batches of windows 1, 2;", "multiplied by 0.1"),
    ("accumulation.divided_by_less", 2, LOOP, record(window(passes([0.5] * 4))),
     "2 times the mean over the 4 micro-batches of window 1", "multiplied by 0.5",
     "divided by 4 each, they give the mean"),
    ("accumulation.divided_by_less", 3.5, LOOP, record(window(passes([0.5] * 7))),
     "divided by 7 each, they give the mean"),
    ("accumulation.divided_by_less", 7 / 6, LOOP,
     record(window(passes([1 / 6] * 7, scale=SCALE), 1 / SCALE)), "divided by 7 each"),
    ("accumulation.window_of_one", 1 / 4, LOOP, one_constant(1 / 4),
     "0.25 times the mean over the 1 micro-batch of windows 1, 2", "multiplied by 0.25"),
    ("accumulation.unequal_counts", 4, LOOP, record(window(passes(QUARTERS, COUNTS))),
     "12, 3, 7, 5 targets", "up to 4 times another"),
    ("accumulation.unequal_counts", 4, LOOP, record(
        window([backward(1 / (4 * n), n, reduction="sum") for n in COUNTS]))),
    ("accumulation.unequal_counts", 4, LOOP,  # the largest of all windows
     record(window(passes([0.5] * 2, [4, 2])), window(passes(QUARTERS, COUNTS)))),
    ("accumulation.unequal_counts", 4, LOOP, with_penalty(known=False)),
    ("accumulation.unequal_weights", 4, LOOP,
     record(window(passes([0.1, 0.2, 0.3, 0.4]))),
     "8, 8, 8, 8 targets", "up to 4 times another"),
    ("accumulation.dropped", 3, LOOP,
     record(window(passes([1.0] * 4), [0.0, 0.0, 0.0, 1.0])),
     "3 of the 4 micro-batches of a window are not in the gradient"),
    ("accumulation.dropped", 1, LOOP, record(window(passes([1 / 3] * 4), [0.0, 1.0, 1.0, 1.0]))),
    ("accumulation.unused", 2, LOOP,
     record(windows(1 / 4, 4, 4), passes(QUARTERS[:2])),
     "the last 2 passes came after the last step, whose windows hold 4"),
    ("accumulation.sum", 1 / 8, LOOP, record(
        window(passes([1 / 8] * 4, COUNTS, reduction="sum")),
        window(passes([1 / 8] * 2, [4.0, 9.0], reduction="sum"))),
     "0.125 times", "4 micro-batches of windows 1, 2 (2 in window 2)", "multiplied by 0.125"),
    ("clip.part", 1, CLIP,
     record(backward(), clip(parameters=frozenset({0})), step(random_sketch())),
     "1 of the 2 parameters of the step were not clipped: bias"),
    ("processes.reduced_each", 300, LOOP,  # what was for nothing
     record(*(
         window([backward(1 / 3, sent=n) for n in sent]) for sent in ((0, 0, 900), [150] * 3)))),
    ("processes.reduced_each", 4096, LOOP, record(window(passes([1 / 3] * 3, sent=2048))),
     "3 passes of a window reduced", "4 KiB per rank for nothing"),
    ("processes.reduced_each", 2048, LOOP, record(window([  # of two modules
        backward(1 / of, sent=2048, gradient=random_sketch([n]), order=(n,), where=line)
        for n, of, line in ((0, 2, LOOP), (0, 2, LOOP), (1, 1, "train.py:12"))])),
     "3 passes of a window reduced", "where 2 have to: 2 KiB"),
    ("processes.unequal_counts", 4, LOOP, ranked(12.0, 3.0), "12, 3 targets", "up to 4 times"),
    ("schedule.per_micro_batch", 2, CALL, record(
        window([backward()]), after_each(passes([0.5, 0.5]), call("schedule")))),
    ("schedule.per_micro_batch", 2, CALL, record(  # after every second pass
        windows(1 / 4, 4), call("schedule"), a := passes(QUARTERS[:2]), call("schedule"),
        b := passes(QUARTERS[2:]), step(total([*a, *b])))),
    ("schedule.per_micro_batch", 3, CALL,
     record(after_each(passes([1 / 3] * 3), call("schedule"))),
     "went 3 steps on before one step"),
    ("schedule.before_first_step", 2, CALL,
     record(call("schedule"), call("schedule"), window([backward()])),
     "went 2 steps on before the optimizer's first"),
    ("schedule.on_skipped", 1, CALL, record(
        window([backward()]), skipped([backward()]), call("schedule"), window([backward()]))),
    ("schedule.on_skipped", 2, CALL, record(
        window([backward()]), *([*skipped([backward()]), call("schedule")] for _ in range(2))),
     "the schedule went on after 2 steps that the scaler had skipped"),
    ("average.on_skipped", 1, CALL, record(
        window([backward()]), skipped([backward()]), average(), window([backward()]))),
    ("average.on_skipped", 1, CALL,
     record(window([backward()]), skipped([backward()]), average()),
     "a copy of the model was written after 1 step that"),
    ("parameters.twice", 1, STEP, record(
        window([backward()]), other(order=(1, 2)), call("step", {1, 2}))),
    ("parameters.twice", 1, STEP, record(  # a third one steps on one gradient
        stepped([backward()]), call("step", OTHER), call("zero_grad"),
        other(order=(1, 2)), call("step", {1, 2}))),
    ("parameters.no_optimizer", 1, STEP, reached(0, 1, 2, trained=BOTH),
     "gradients reach, no step uses other"),
    ("parameters.no_gradient", 1, STEP, reached(0), "no gradient reaches bias"),
    ("memory.losses_summed", 4, LOOP, graph(4, 4096, losses=4, separate=True),
     "the 4 losses of a pass have graphs of their own, of 1 KiB"),
    ("memory.graph", 5000, LOOP, graph(5, 5000, losses=5)),
    ("memory.graph", 16384, LOOP, graph(16, 16 * 1024, classes=0.25, bytes_per_call=512.0),
     "512 B more for each; 4 KiB of it", "With one step it is 1 KiB"),
    ("memory.graph", 16384, LOOP, graph(16, 16 * 1024, classes=0.75),
     "keeps 16 KiB for 16 steps", "12 KiB of it has an element per",
     "Without logits it is 4.75 KiB, with one step 1 KiB"),
    ("memory.logits", 12_288, LOOP, graph(1, 16 * 1024, classes=0.75),
     "12 KiB of the 16 KiB that a pass keeps have an element per class"),
    ("precision.sum", 8e-3, STEP, half(8e-3, 1e-3),
     "sum of 4 gradients in 2 parameters is 0.008", "3.0 bits lost"),
    ("precision.sum", 2.1e-3, STEP, half(2.1e-3, 1e-3)),
    ("precision.sum", 8e-3, STEP, half(8e-3, 1e-3, clip(), factor=0.25)),
    ("precision.sum", 4e-3, STEP, half(0.0, 1e-3, factor=1.004)),
    ("precision.sum", 8e-3, STEP,
     record(
         of := [backward(scale=SCALE, count=None)],
         half_step(total(of, 1 / SCALE), 8e-3, 1e-3, 1 / SCALE), half=BOTH)),
    ("memory.retained", 3, LOOP, retaining(False, True, True),
     "3 passes go through one graph, which retain_graph keeps", "runs backward 3 times"),
    ("truncation.detached", 16, LOOP, detaching(4, 16),
     "16 of the 17 passes of a window begin at a state that was detached"),
    ("truncation.distance", 0.1234, "train.py:5",
     record(truncated(0.1), truncated(0.1234), window([backward()])),
     "k1=5, k2=5 of 50 steps: 0.123 from the exact gradient"),
    ("modules.batchnorm_eval", 2, LOOP, record(in_eval(1, 2)),
     "norm.1, norm.2 got gradients in eval, from 2 passes of 4"),
    ("optimizer.decay", 1, STEP,
     record(window([backward()]), optimizers=(replace(SGD, decayed=(1,)),)),
     "1 vector decay as matrices do: bias"),
]  # fmt: skip

# What differs in one thing from a case of that id, and is right, or could not be told.
NEIGHBOURS: dict[str, dict[str, Record]] = {
    "step.nonfinite": {
        "nan in a pass of others": record(other(gradient=with_nan()), window([backward()])),
        "a step that has moved nothing": record(backward(), step(with_nan()), window([backward()])),
        "an infinite loss whose gradient is none": record(window([backward(value=math.inf)])),
    },
    "step.skipped": {
        "a window skipped": record(window([backward()]), skipped([backward()])),
        "the only window": record(skipped([backward()])),
        "a skipped window with inf gradients": record(
            window([backward()]), skipped([backward(gradient=with_nan())])),
    },
    "scaler.unscale_missing": {
        "a scale of 1": scaled(clip(), factor=1.0, scale=1.0),
        "by the scaler": scaled(through_scaler=True),
        "by hand": scaled(),
        "by a call": scaled(call("unscale_"), clip()),
        "by the wrapper": record(
            window(passes([1.0] * 4, scale=SCALE), 1 / 4 / SCALE), optimizers=WRAPPED),
        "scaled gradients, and a call": scaled(call("unscale_"), factor=1.0),
        "scaled gradients, and the scaler": scaled(factor=1.0, through_scaler=True),
    },
    "accumulation.lost": {
        "a pass for another line": record(
            window([backward(where="train.py:8"), backward()], [0.0, 1.0])),
        "the first pass of SAM, whose parameters moved": record(
            window([backward(weights=(0.0,)), backward(weights=(1.0,))], [0.0, 1.0])),
        "a loss that flows back again": record(window(
            [backward(losses=[one]) for one in [loss(node=-8)] * 2], [0.0, 1.0])),
        "a window that was skipped": record(window([backward()]), skipped(passes([1 / 4] * 4))),
        "a step without a pass": record(
            window([backward()]), step(torch.zeros(3, 8), present=frozenset())),
    },
    "accumulation.counted_again": {
        "half of the step before": with_earlier(0.5),
        "two losses of one pass": record(window(
            [backward(losses=[loss(1 / 4), loss(1 / 4)]) for _ in range(2)])),
        "cleared passes that the loop has kept": record(
            a := backward(losses=[loss(node=-9)]), call("zero_grad"),
            b := backward(losses=[loss(node=-9)]), step(total([a, b], [1.0, 0.5]))),
    },
    "accumulation.another_loss": {
        "zero_grad between": generator_and_critic(call("zero_grad")),
        "a step of others without its own pass": record(
            a := backward(0.5), call("step", OTHER), b := backward(0.5), step(total([a, b]))),
        "a step of others after all passes": record(
            stepped([backward(gradient=random_sketch(), order=(0, 1, 2))], call("step", OTHER))),
    },
    "accumulation.leftover": {
        "the divisor of what it holds": record(windows(1 / 4, 4, 4), windows(1 / 6, 6)),
        "losses of another line": record(
            windows(1 / 4, 4), window([*passes(QUARTERS), backward(where="train.py:12")]),
            windows(1 / 4, 4)),
        "sums of a loop's own without a constant": record(own_sums(1.0, 4, 4, 6)),
        "no equal constants": record(own_sums(1 / 4, 4), own_sums(1 / 5, 6)),
    },
    "accumulation.partial": {
        "the divisor of what it holds": record(windows(1 / 4, 4), windows(1 / 2, 2)),
        "skipped": record(windows(1 / 4, 4), skipped(passes(QUARTERS[:2]))),
        "sums over all targets": record(windows(1.0, 4, 2, reduction="sum")),
        "a weight, and a wrapper that sums": record(windows(0.5, 4, 4, 2), optimizers=SUMMING),
        "a second constant beside the divisor": record(*(
            window([two_constants(1 / 8, 1 / size) for _ in range(size)]) for size in (4, 2))),
    },
    "accumulation.varying": {
        "within the tolerance": record(windows(1 / 4, 4), windows(0.2504, 4)),
        "no sum of its passes": record(windows(1 / 4, 4), passes([1.0] * 4), step(random_sketch())),
        "two closure calls": record(windows(1 / 4, 4), window(passes([1.0] * 4), closure_calls=2)),
        "a wrapper that sums": record(
            windows(1.0, 4), windows(0.5, 4), optimizers=SUMMING),
        "a wrapper that sums what is weighted by targets": record(
            window(passes(COUNTS, COUNTS)), window(passes([2.0, 9.0], [2.0, 9.0])),
            optimizers=SUMMING),
        "roots that are no numbers": record(
            own_sums(1 / 4, 4, scalar=False), own_sums(1 / 2, 4, scalar=False)),
    },
    "accumulation.scaled_between": {
        "weights that rise": record(window(passes([0.1, 0.2, 0.3, 0.4], [None] * 4))),
        "factors that fall": record(window(passes(QUARTERS[:3], [None] * 3), [1.0, 0.5, 0.25])),
        "factors that rise and fall": record(
            window(passes(QUARTERS[:3], [None] * 3), [0.25, 1.0, 0.5])),
        "after unscale_": record(
            stepped(passes(QUARTERS[:3]), call("unscale_"), factors=[0.25, 0.5, 1.0])),
        "a clip that was seen": record(
            a := backward(0.5), clip(max_norm=5.0), b := backward(0.5), step(total([a, b]))),
        "once, before all": record(windows(1 / 2, 2), window(passes([1.0] * 2), 0.5)),
    },
    "accumulation.divisor_missing": {
        "a mean": record(window(passes(QUARTERS))),
        "a mean by the step": record(window(passes([1.0] * 4), 0.25)),
        "no window": record(passes([1.0] * 4)),
        "nothing": record(),
        "one micro-batch": record(window([backward()])),
        "a sum by choice": record(window(passes([1.0] * 4, reduction="sum"))),
        "a sum of single targets": record(window(passes([1.0] * 4, [1] * 4, reduction="sum"))),
        "sums of a loop's own": record(own_sums(1.0, 4)),
        "means over five steps": of_steps(1 / 20),
        "sums over five steps": of_steps(1 / 4),
        "a wrapper that sums": record(
            windows(1.0, 4, 2), optimizers=SUMMING),
    },
    "accumulation.divided_by_more": {
        "a mean within the tolerance": record(window(passes([0.2496] * 4))),
        "a mean within that of half precision": record(window(passes([0.2425] * 4)), half=BOTH),
        "an average over windows": with_earlier(0.5, 1 / 8),
        "half of a mean over two": divided_twice(4, 2, 1 / 2),
        "a weight": divided_twice(4, 3, 1 / 5),
        "roots that are no numbers": record(own_sums(1 / 4, 3, 3, scalar=False)),
        "a mean of sums": record(window(passes(QUARTERS, COUNTS, reduction="sum"))),
        "the negative of a mean": record(window(passes([-0.25] * 4))),
        "a clip to a quarter": record(stepped(passes(QUARTERS), clip(), factors=0.25)),
        "a wrapper's clip": record(window(passes(QUARTERS), 0.25, factor=0.25), optimizers=WRAPPED),
        "a clip before the pass of others": record(
            stepped(passes(QUARTERS), clip(), other(), factors=0.25)),
    },
    "accumulation.divided_by_less": {
        "a mean within the tolerance": record(window(passes([0.2504] * 4))),
        "fifteen terms of a loss": summing(15, 15),
        "sixteen heads": summing(16, 1),
        "gradients that the loop has kept": record(
            a := backward(), call("zero_grad"), b := backward(), step(total([a, b]))),
        "a mean of two losses each": record(window(
            [backward(losses=[loss(0.25), loss(0.25)]) for _ in range(4)])),
    },
    "accumulation.window_of_one": {
        "multiplied, not divided": one_constant(1 / 4, divided=False),
        "divided in one window alone": record(*(
            window([backward(1 / 4, constants=(Constant(1 / 4, divided),))])
            for divided in (True, False))),
        "by no whole number": one_constant(1 / 2.5),
        "by a fraction": one_constant(4.0),
        "by others each time": record(window([backward(1 / 2)]), window([backward(1 / 4)])),
        "a mean over losses of its own": record(
            window([backward(1 / 2, losses=[loss(1 / 2), loss(1 / 2)])])),
        "what was left of more": record(
            backward(1 / 2), call("zero_grad"), window([backward(1 / 2, weights=(1.0,))])),
        "undone after the pass": record(
            window([backward(1 / 4)], 4.0), window([backward(1 / 4)], 2.0)),
        "windows of more as well": record(windows(1 / 4, 4), window([backward(1.0)])),
    },
    "accumulation.unequal_counts": {
        "not known": record(window(passes(QUARTERS, [None, 3.0, 7.0, 5.0]))),
        "not known of a second loss": record(window(
            [backward(0.5, losses=[loss(0.25, n), loss(0.25, None)]) for n in (2, 4)])),
        "targets that weigh the same": record(
            window(passes([n / sum(COUNTS) for n in COUNTS], COUNTS))),
        "sums over all targets": record(
            window(passes([1 / sum(COUNTS)] * 4, COUNTS, reduction="sum"))),
        "weights of classes, which are no counts": record(window(passes([0.5] * 2, [6.5, 3.25]))),
        "a penalty that counts nothing": record(window(
            [backward(0.5, losses=[loss(0.5, 8.0), loss(9.0, n, known=False)]) for n in (2, 4)])),
        "equal within the tolerance": record(window(passes([0.5] * 2, [1000, 1001]))),
    },
    "accumulation.unequal_weights": {
        "weights and counts that differ": record(window(passes([0.4, 0.1, 0.2, 0.3], COUNTS))),
        "counts that are not known": record(window(passes([0.1, 0.2, 0.3, 0.4], [None] * 4))),
        "of two lines": record(window([*passes([0.5] * 2), backward(where="train.py:12")])),
    },
    "accumulation.dropped": {
        "a pass for another line": record(
            window([backward(where="train.py:8"), backward()], [0.0, 1.0])),
        "a small weight": record(window(passes([1 - 1e-3, 1e-3], [None] * 2))),
    },
    "accumulation.unused": {
        "nothing after the last step": record(windows(1 / 4, 4, 4)),
        "cleared": record(windows(1 / 4, 4), passes(QUARTERS), call("zero_grad")),
        "of another line": record(windows(1 / 4, 4), backward(where="train.py:40")),
        "after the last window that was asked for": record(
            windows(1 / 4, 4, 4), passes(QUARTERS[:2]), ended=False),
        "of others": record(windows(1 / 4, 4), other()),
    },
    "accumulation.sum": {
        "sums over all targets": record(
            window(passes([1.0] * 4, COUNTS, reduction="sum")),
            window(passes([1.0] * 2, [4.0, 9.0], reduction="sum"))),
        "divided by the targets of each window": record(
            window(passes([1 / 27] * 4, COUNTS, reduction="sum")),
            window(passes([1 / 13] * 2, [4.0, 9.0], reduction="sum"))),
        "a micro-batch without targets, of a sum": record(
            *(with_empty(1 / 13, "sum", *counts) for counts in ([4.0, 0.0, 9.0], [6.0, 7.0]))),
        "a micro-batch without targets, of means": record(
            windows(1 / 3, 3),
            window([backward(1 / (3 * max(n, 1)), n, reduction="sum") for n in (4.0, 0.0, 4.0)])),
    },
    "scaler.mixed": {
        "for others": record(
            other(scale=SCALE), backward(scale=2 * SCALE),
            step(random_sketch(), through_scaler=True)),
        "of two windows": record(
            *([*window([backward(scale=s)], 1 / s, through_scaler=True), call("update")]
              for s in (SCALE, 2 * SCALE))),
        "before zero_grad": record(
            backward(scale=SCALE, where="train.py:8"), call("zero_grad"),
            window([backward(scale=2 * SCALE)], 0.5 / SCALE)),
        "in the wrapper": record(
            backward(scale=SCALE), call("update"), backward(scale=2 * SCALE),
            step(random_sketch()), optimizers=WRAPPED),
    },
    "scaler.updated_inside": {
        "an update that changes nothing": updated_inside(),
        "an update after the last pass alone": record(
            backward(0.5), call("unscale_"), backward(0.5), call("update"),
            step(random_sketch(), through_scaler=True)),
        "after another's pass": record(other(), call("update"), windows(0.5, 2)),
        "before zero_grad": record(
            backward(where="train.py:8"), call("update"), call("zero_grad"), window([backward()])),
        "after the last pass": record(
            stepped(
                passes([0.5] * 2, scale=SCALE), call("unscale_"), call("update"),
                factors=1 / SCALE)),
        "in the wrapper": replace(updated_inside(call("unscale_")), optimizers=WRAPPED),
    },
    "clip.before_unscale": {
        "a clip that changes nothing": scaled(
            clip(norm=0.5), call("unscale_"), through_scaler=True),
        "in the wrapper": replace(scaled(clip()), optimizers=WRAPPED),
        "of other optimizers": scaled(clip(parameters=OTHER), call("unscale_")),
        "another's scale before the clip": record(
            backward(scale=SCALE), call("unscale_"), other(scale=SCALE), clip(),
            step(random_sketch(), through_scaler=True)),
    },
    "clip.per_micro_batch": {
        "before zero_grad": record(
            backward(where="train.py:8"), clip(), call("zero_grad"), window([backward()])),
        "two clips after the last pass": record(
            stepped([backward()], clip(), clip(1.0), factors=0.25)),
        "before another's pass": record(backward(), clip(), other(), step(random_sketch())),
        "that changes nothing": record(
            a := backward(0.5), clip(0.5), b := backward(0.5), clip(), step(total([a, b], 0.25))),
    },
    "clip.other_parameters": {
        "of the optimizer's": record(stepped([backward()], clip(), factors=0.25)),
        "of an optimizer that steps": record(
            backward(), clip(parameters=BOTH | OTHER), step(random_sketch())),
    },
    "clip.empty": {
        "of gradients": record(stepped([backward()], clip(norm=0.5))),
        "of none in one of two windows": record(
            stepped([backward()], clip(0.0, filled=False)), stepped([backward()], clip(0.5))),
        "of gradients that are zeros": record(
            stepped([backward(gradient=0 * random_sketch())], clip(norm=0.0))),
    },
    "clip.part": {
        "each by itself": record(
            backward(), *(clip(parameters=frozenset({n})) for n in BOTH), step(random_sketch())),
        "a norm without a clip": record(
            backward(), clip(max_norm=math.inf, parameters=frozenset({0})), step(random_sketch())),
        "whole in one window": record(
            backward(), clip(parameters=frozenset({0})), step(random_sketch()),
            backward(), clip(), step(random_sketch())),
        "the rest has no gradient": record(
            backward(), clip(parameters=frozenset({0})),
            step(random_sketch([0]), present=frozenset({0}))),
    },
    "processes.not_reduced": {
        "rounding": ranked(8.0, 8.0, differ=1e-15),
        "one process": record(window([backward()])),
    },
    "processes.reduced_each": {
        "one reduction": record(window([backward(1 / 3, sent=n) for n in (0, 0, 150)])),
        "before zero_grad": record(
            backward(where="train.py:8", sent=150), call("zero_grad"),
            window([backward(sent=150)])),
        "in windows of their own": record(*(window([backward(sent=150)]) for _ in "ab")),
    },
    "processes.unequal_counts": {
        "equal": ranked(8.0, 8.0),
        "not known": ranked(8.0, NAN),
        "of another line": ranked(12.0, 3.0, lines=(LOOP, OTHERS)),
    },
    "schedule.per_micro_batch": {
        "once per window": record(*([*window([backward()]), call("schedule")] for _ in range(3))),
        "two schedules": record(
            window([backward()]), call("schedule"), call("schedule"), window([backward()])),
        "after one of two passes": record(
            windows(0.5, 2), a := backward(0.5), call("schedule"), b := backward(0.5),
            step(total([a, b]))),
        "of another optimizer": record(after_each(passes([0.5, 0.5]), call("schedule", OTHER))),
    },
    "schedule.before_first_step": {
        "after it": record(window([backward()]), call("schedule"), window([backward()])),
        "of another optimizer": record(call("schedule", OTHER), window([backward()])),
        "before a later step": record(
            window([backward()]), stepped([backward()], call("schedule"))),
    },
    "schedule.on_skipped": {
        "after the pass that follows": record(
            window([backward()]), skipped([backward()]), stepped([backward()], call("schedule"))),
        "after a step": record(skipped([backward()]), window([backward()]), call("schedule")),
    },
    "average.per_micro_batch": {
        "once per window": record(*([*window([backward()]), average()] for _ in range(3))),
        "of parameters that moved between": record(
            after_each([backward(0.5, weights=(n,)) for n in (0, 2)], average())),
        "before the step": record(stepped(passes([0.5] * 2), average(), average())),
    },
    "average.on_skipped": {
        "after a step": record(skipped([backward()]), window([backward()]), average()),
        "after the pass that follows": record(
            window([backward()]), skipped([backward()]), stepped([backward()], average())),
    },
    "parameters.twice": {
        "another optimizer's": record(stepped([backward()], call("step", OTHER))),
        "others that are followed": two(
            stepped([backward()], *(theirs := [other()])),
            step(total(theirs), optimizer=1, present=OTHER)),
    },
    "parameters.no_optimizer": {
        "of another optimizer": reached(0, 1, 2),
        "of no module": reached(0, 1, 2, trained=BOTH, names=("weight", "bias", "parameter 2")),
        "before the first step": record(backward(order=(0, 1, 2)), trained=BOTH),
        "a loop of others alone": record(window([backward()]), trained=frozenset()),
    },
    "parameters.no_gradient": {
        "in another window": record(
            a := backward(gradient=random_sketch([0]), order=(0,)),
            step(total([a]), present=frozenset({0})), window([backward()])),
        "in a pass without a step": record(
            a := backward(gradient=random_sketch([0]), order=(0,)),
            step(total([a]), present=frozenset({0})),
            backward(gradient=random_sketch([1]), order=(1,), where="train.py:40")),
        "written by hand": record(
            backward(gradient=random_sketch([0]), order=(0,)), step(random_sketch())),
        "no pass for this optimizer": record(
            other(), step(random_sketch([0]), present=frozenset({0}))),
    },
    "memory.growing": {
        "two passes": holding(0, 1),
        "one graph that all use": holding(0, 1, 1, 1),
        "one loss that flows back again": record(
            list(holding(0, 1, 2, losses=[loss(node=-5)]).events[:3]), step(random_sketch())),
    },
    "memory.retained": {
        "two passes": retaining(False, True),
        "graphs of their own": retaining(False, True, False, True, False),
        "one loss that flows back again": record(
            list(retaining(False, True, True, losses=[loss(node=-5)]).events[:3]),
            step(random_sketch())),
    },
    "memory.losses_summed": {
        "less than the parameters": graph(4, 1300, losses=4, separate=True),
        "one loss": graph(4, 4000, separate=True),
        "losses of one forward pass": graph(1, 4000, losses=4, separate=True),
    },
    "memory.graph": {
        "fifteen calls": graph(15, 16_000),
        "smaller than the parameters": graph(16, 1060),
        "more losses than calls": graph(4, 4000, losses=5),
    },
    "memory.logits": {
        "less than half": graph(1, 16 * 1024, classes=0.49),
        "less than the parameters": graph(1, 1060, classes=0.9),
        "of many losses": graph(1, 16 * 1024, classes=0.75, losses=4),
    },
    "precision.sum": {
        "one bit": half(1.9e-3, 1e-3),
        "no rounding": half(8e-3, 0.0),
        "of a part": half(8e-3, 1e-3, factors=[1.0, 1.0, 1.0, 0.5]),
        "and a clip": half(1e-3, 1e-3, clip(), factor=0.25),
        "and a norm of others": half(1e-3, 1e-3, clip(math.inf, parameters=OTHER)),
        "of the wrong sign": record(
            of := passes([-1.0]), half_step(-total(of), 1e-3, 1e-3, -1.0), half=BOTH),
        "unscaled by the scaler": record(
            of := [backward(scale=SCALE, count=None)],
            half_step(total(of, 1 / SCALE), 1e-3, 1e-3, 1 / SCALE), half=BOTH),
        "scaled yet, for a fused optimizer": record(
            of := [backward(scale=SCALE, count=None)],
            replace(half_step(total(of), 1e-3, 1e-3), used=total(of, 1 / SCALE)), half=BOTH),
    },
    "truncation.detached": {
        "fifteen steps": detaching(15),
        "in another window": detaching(8, 8, 8),
    },
    "truncation.distance": {
        "below the threshold": record(truncated(9e-3), window([backward()])),
        "not measured": record(window([backward()])),
    },
    "determinism.differs": {
        "the same run": rerun(0.0),
        "the same nan": replace(
            one := record(backward(gradient=with_nan()), step(random_sketch())), before=one),
        "rounding": rerun(1e-15),
        "a longer run": replace(
            one := record(window([backward()]), window([backward()])),
            before=replace(one, events=one.events[:3])),
    },
    "modules.batchnorm_eval": {
        "in training": record(in_eval()),
    },
    "optimizer.decay": {
        "a group of their own": record(window([backward()])),
        "of an optimizer that never stepped": record(
            window([backward()]), optimizers=(SGD, replace(ADAM, decayed=(2,)))),
    },
}  # fmt: skip
