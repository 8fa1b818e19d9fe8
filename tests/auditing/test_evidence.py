"""What the evidence must tell: windows, numbers, names."""

import json
import re
from dataclasses import replace

import pytest
import torch
from records import (
    BOTH,
    COUNTS,
    NAN,
    QUARTERS,
    SCALE,
    SGD,
    Build,
    after_each,
    average,
    backward,
    call,
    clip,
    clipped_between,
    generator_and_critic,
    graph,
    half,
    holding,
    in_eval,
    loss,
    no_sync,
    one_constant,
    own_sums,
    passes,
    random_sketch,
    ranked,
    reached,
    record,
    rerun,
    said,
    scaled,
    skipped,
    step,
    total,
    truncated,
    updated_inside,
    window,
    windows,
    with_earlier,
    with_nan,
)

from accumext.auditing._words import KINDS

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
    ("clip.empty", lambda: record(after_each(passes([0.5, 0.5]), clip(0.0, filled=False))),
     ("2 times in a window",)),
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


def test_every_id_has_evidence():
    assert {id for id, *_ in TOLD} == set(KINDS)


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
