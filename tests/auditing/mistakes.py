"""Records with one mistake, each with its id, its value and its line: findings and questions."""

import math
from dataclasses import replace

import torch
from records import (
    BOTH,
    CALL,
    CLIP,
    COUNTS,
    LOOP,
    NAN,
    OTHER,
    QUARTERS,
    SCALE,
    SGD,
    STEP,
    Build,
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
    holding,
    in_eval,
    loss,
    no_sync,
    one_constant,
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
    ("clip.empty", 1, CLIP,  # of an iterator that was read before
     lambda: record(
         of := [backward()], clip(0.0, parameters=frozenset(), filled=False), step(total(of)))),
    ("clip.empty", 2, CLIP, lambda: record(  # where gradients are elsewhere
        after_each(passes([0.5, 0.5]), clip(0.0, filled=False)))),
    ("processes.not_reduced", 1, STEP, lambda: ranked(8.0, 8.0, differ=1e-9)),
    ("processes.reduced_each", 300, LOOP, lambda: no_sync(150, 150, 150)),
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
    ("accumulation.another_loss", 1, "train.py:12",  # both reach both
     lambda: generator_and_critic(order=(0, 1, 2))),
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
    ("schedule.per_micro_batch", 2, CALL, lambda: record(
        window([backward()]), after_each(passes([0.5, 0.5]), call("schedule")))),
    ("schedule.per_micro_batch", 2, CALL, lambda: record(  # after every second pass
        windows(1 / 4, 4), call("schedule"), a := passes(QUARTERS[:2]), call("schedule"),
        b := passes(QUARTERS[2:]), step(total([*a, *b])))),
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
