"""What follows from a record: one finding with its value, and nothing from close neighbours.

Records are made by hand, so that nothing here depends on how a loop is observed. Values are those
of the definition: how many micro-batches, which ratio, which distance.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from records import (
    BOTH,
    COUNTS,
    LOOP,
    NAN,
    OTHER,
    QUARTERS,
    SCALE,
    STEP,
    backward,
    call,
    clip,
    clipped_between,
    graph,
    half,
    half_step,
    loss,
    of_steps,
    other,
    passes,
    random_sketch,
    ranked,
    reached,
    record,
    rerun,
    scaled,
    skipped,
    step,
    total,
    truncated,
    window,
    with_earlier,
    with_nan,
    with_penalty,
)

from accumext.audit._events import Record
from accumext.audit._infer import CURES, RULES, findings

Build = Callable[[], Record]


WRONG: list[tuple[str, float, str, Build]] = [
    ("step on inf or nan", 1, STEP,
     lambda: record(window(passes(QUARTERS)), passes(QUARTERS), step(with_nan()))),
    ("step on inf or nan", 1, STEP, lambda: record(backward(gradient=with_nan()),
                                                   step(torch.full((3, 8), NAN)))),
    ("steps skipped", 1, STEP, lambda: record(window(passes(QUARTERS)),
                                              skipped([backward(0.5), backward(0.5, value=NAN)]))),
    ("steps skipped", 2, STEP, lambda: record(skipped([backward()]), skipped([backward()]))),
    ("unscale missing", SCALE, STEP, lambda: scaled(factor=1.0)),
    ("unscale missing", 0.5, STEP, lambda: scaled(factor=1.0, scale=0.5)),
    ("divisor missing", 4, LOOP, lambda: record(window(passes([1.0] * 4)))),
    ("divisor missing", 4, LOOP, lambda: record(window(passes([1.0] * 4, scale=SCALE), 1 / SCALE))),
    ("divided twice", 1 / 4, LOOP, lambda: record(window(passes(QUARTERS), 0.25))),
    ("divided twice", 1 / 4, LOOP, lambda: record(window(passes([1 / 16] * 4)))),
    ("divisor of a full window", 3 / 4, LOOP,
     lambda: record(window(passes(QUARTERS)), window(passes(QUARTERS[:3])))),
    ("divisor of a full window", 2 / 4, LOOP,  # which is also 1 / 2
     lambda: record(window(passes(QUARTERS)), window(passes(QUARTERS[:2])))),
    ("micro-batches lost", 3, LOOP, lambda: record(window(passes(QUARTERS), [0.0, 0.0, 0.0, 1.0]))),
    ("micro-batches lost", 4, LOOP,
     lambda: record(passes(QUARTERS), step(torch.zeros(3, 8), present=frozenset()))),
    ("micro-batches counted again", 2, LOOP, lambda: record(window(
        [backward(losses=[one]) for one in [loss(node=-7)] * 2]))),
    ("micro-batches counted again", 3, STEP, lambda: with_earlier(1.0)),
    ("scales mixed in one sum", 2, LOOP,
     lambda: record([backward(0.5, scale=SCALE), backward(0.5, scale=2 * SCALE)],
                    step(random_sketch(), through_scaler=True))),
    ("scaler updated inside a window", 2, "train.py:15", lambda: record(
        *([one, call("update")] for one in passes([1 / 3] * 2)), backward(1 / 3),
        step(random_sketch()))),
    ("clip before unscale", SCALE, "train.py:16",
     lambda: scaled(clip(), call("unscale_"), through_scaler=True)),
    ("clip of each micro-batch", 2, "train.py:16", clipped_between),
    ("clip of other parameters", 3, "train.py:16",
     lambda: record(backward(), clip(others=3), step(random_sketch()))),
    ("parameters not reduced", 1, STEP, lambda: ranked(8.0, 8.0, differ=1e-9)),
    ("reduced every micro-batch", 300, LOOP,
     lambda: record(window(passes([1 / 3] * 3, sent=150)))),
    ("ranks weighted equally", 4, LOOP, lambda: ranked(12.0, 3.0)),
    ("micro-batches weighted equally", 4, LOOP, lambda: record(window(passes(QUARTERS, COUNTS)))),
    ("micro-batches weighted equally", 4, LOOP, lambda: record(
        window([backward(1 / (4 * n), n, reduction="sum") for n in COUNTS]))),
    ("micro-batches weighted equally", 4, LOOP,  # the largest of all windows
     lambda: record(window(passes([0.5] * 2, [4, 2])), window(passes(QUARTERS, COUNTS)))),
    ("micro-batches weighted equally", 4, LOOP, lambda: with_penalty(known=False)),
    ("micro-batches weighted unequally", 4, LOOP,
     lambda: record(window(passes([0.1, 0.2, 0.3, 0.4])))),
    ("scheduler steps per micro-batch", 2, "train.py:15", lambda: record(
        window([backward()]), *([one, call("schedule")] for one in passes([0.5, 0.5])),
        step(random_sketch()))),
    ("scheduler before the first step", 1, "train.py:15",
     lambda: record(call("schedule"), window([backward()]))),
    ("parameters in two groups", 1, STEP, lambda: reached(0, 1, twice=frozenset({1}))),
    ("parameters in no optimizer", 1, STEP, lambda: reached(0, 1, 2, trained=BOTH)),
    ("parameters without gradient", 1, STEP, lambda: reached(0)),
    ("sum in half precision", 8e-3, STEP, lambda: half(8e-3, 1e-3)),
    ("sum in half precision", 2.1e-3, STEP, lambda: half(2.1e-3, 1e-3)),
    ("sum in half precision", 8e-3, STEP, lambda: half(8e-3, 1e-3, clip(), factor=0.25)),
    ("sum in half precision", 4e-3, STEP, lambda: half(0.0, 1e-3, factor=1.004)),
    ("truncated gradient", 0.5, "train.py:5",
     lambda: record(truncated(0.1), truncated(0.5), window([backward()]))),
    ("runs differ", 5, LOOP, lambda: rerun(1e-11)),
    ("runs differ", 5, LOOP, lambda: rerun(NAN)),
    ("one graph over many steps", 16_000, LOOP, lambda: graph(16, 16_000)),
]  # fmt: skip

RIGHT: dict[str, Build] = {
    "a mean": lambda: record(window(passes(QUARTERS))),
    "no window": lambda: record(passes([1.0] * 4)),
    "nothing": record,
    "one micro-batch": lambda: record(window([backward()])),
    "a mean by the step": lambda: record(window(passes([1.0] * 4), 0.25)),
    "a mean within the tolerance": lambda: record(window(passes([0.2504] * 4))),
    "an unknown factor": lambda: record(window(passes([0.1] * 4))),
    "a wrapper that sums": lambda: record(window(passes([1.0] * 4)), wrapped=True, sums=True),
    "no sum of its passes": lambda: record(passes([1.0] * 4), step(random_sketch())),
    "a sum by choice": lambda: record(window(passes([1.0] * 4, reduction="sum"))),
    "a sum of single targets": lambda: record(window(passes([1.0] * 4, [1] * 4, reduction="sum"))),
    "sums of a loop's own": lambda: record(
        window(passes([1.0] * 4, [None] * 4, reduction="sum"))),
    "means over five steps": lambda: of_steps(1 / 20),
    "sums over five steps": lambda: of_steps(1 / 4),
    "two closure calls": lambda: record(window(passes([1.0] * 4), closure_calls=2)),
    "a partial window": lambda: record(window(passes(QUARTERS)), window(passes([0.5] * 2))),
    "an auxiliary loss once per window": lambda: record(
        window([*passes(QUARTERS), backward(0.25, where="train.py:12")])),
    "a clip to a quarter": lambda: record(
        of := passes(QUARTERS), clip(), step(total(of, 0.25))),
    "a wrapper's clip": lambda: record(window(passes(QUARTERS), 0.25, factor=0.25), wrapped=True),
    "a clip before the pass of others": lambda: record(
        of := passes(QUARTERS), clip(), other(), step(total(of, 0.25))),
    "a window skipped": lambda: record(window([backward()]), skipped([backward()])),
    "the only window skipped": lambda: record(skipped([backward()])),
    "a skipped window with inf gradients": lambda: record(
        window([backward()]), skipped([backward(gradient=with_nan())])),
    "nan in a pass of others": lambda: record(
        other(gradient=with_nan()), window([backward()])),
    "a pass whose gradient is for another line": lambda: record(
        window([backward(where="train.py:8"), backward()], [0.0, 1.0])),
    "half of the step before": lambda: with_earlier(0.5),
    "a scale of 1": lambda: scaled(clip(), factor=1.0, scale=1.0),
    "unscaled by the scaler": lambda: scaled(through_scaler=True),
    "unscaled by hand": scaled,
    "unscaled by a call": lambda: scaled(call("unscale_"), clip()),
    "a scale in the wrapper": lambda: replace(scaled(factor=1.0), wrapped=True),
    "a clip in the wrapper": lambda: replace(scaled(clip()), wrapped=True),
    "a clip of other optimizers": lambda: scaled(
        clip(parameters=OTHER), call("unscale_")),
    "scales that differ for others": lambda: record(
        other(scale=SCALE), backward(scale=2 * SCALE), step(random_sketch(), through_scaler=True)),
    "another's scale before the clip": lambda: record(
        backward(scale=SCALE), call("unscale_"), other(scale=SCALE), clip(),
        step(random_sketch(), through_scaler=True)),
    "the scales of two windows": lambda: record(
        *([*window([backward(scale=s)], 1 / s, through_scaler=True), call("update")]
          for s in (SCALE, 2 * SCALE))),
    "an update after another's pass": lambda: record(
        other(), call("update"), window(passes([0.5, 0.5]))),
    "an update before zero_grad": lambda: record(
        backward(where="train.py:8"), call("update"), call("zero_grad"), window([backward()])),
    "a clip before zero_grad": lambda: record(
        backward(where="train.py:8"), clip(), call("zero_grad"), window([backward()])),
    "a reduction before zero_grad": lambda: record(
        backward(where="train.py:8", sent=150), call("zero_grad"), window([backward(sent=150)])),
    "mixed scales in the wrapper": lambda: record(
        backward(scale=SCALE), call("update"), backward(scale=2 * SCALE), step(random_sketch()),
        wrapped=True),
    "two clips after the last pass": lambda: record(
        of := [backward()], clip(), clip(1.0), step(total(of, 0.25))),
    "a clip before another's pass": lambda: record(
        backward(), clip(), other(), step(random_sketch())),
    "rounding between ranks": lambda: ranked(8.0, 8.0, differ=1e-15),
    "one reduction": lambda: record(window([backward(1 / 3, sent=n) for n in (0, 0, 150)])),
    "counts that are not known": lambda: record(window(passes(QUARTERS, [None, 3.0, 7.0, 5.0]))),
    "targets that weigh the same": lambda: record(
        window(passes([n / sum(COUNTS) for n in COUNTS], COUNTS))),
    "sums over all targets": lambda: record(
        window(passes([1 / sum(COUNTS)] * 4, COUNTS, reduction="sum"))),
    "weights and counts that differ": lambda: record(
        window(passes([0.4, 0.1, 0.2, 0.3], COUNTS))),
    "a schedule once per window": lambda: record(
        *([*window([backward()]), call("schedule")] for _ in range(3))),
    "two schedules": lambda: record(
        window([backward()]), call("schedule"), call("schedule"), window([backward()])),
    "one bit lost": lambda: half(1.9e-3, 1e-3),
    "no rounding": lambda: half(8e-3, 0.0),
    "half sums of a part": lambda: half(8e-3, 1e-3, factors=[1.0, 1.0, 1.0, 0.5]),
    "half sums, and a clip": lambda: half(1e-3, 1e-3, clip(), factor=0.25),
    "half sums, and an inf clip of others": lambda: half(
        1e-3, 1e-3, clip(math.inf, parameters=OTHER)),
    "half sums of the wrong sign": lambda: record(
        of := passes([-1.0]), half_step(-total(of), 1e-3, 1e-3, -1.0), half=BOTH),
    "a distance below the threshold": lambda: record(truncated(9e-3), window([backward()])),
    "the same run": lambda: rerun(0.0),
    "the same nan": lambda: replace(
        one := record(backward(gradient=with_nan()), step(random_sketch())), before=one),
    "rounding between runs": lambda: rerun(1e-15),
    "fifteen calls": lambda: graph(15, 16_000),
    "a graph smaller than the parameters": lambda: graph(16, 1060),
    "parameters of another optimizer": lambda: reached(0, 1, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "where", "build"), WRONG, ids=[f"{w[0]}-{w[1]:g}" for w in WRONG]
)
def test_a_mistake_is_the_only_finding(name, value, where, build):
    (finding,) = findings(build())
    assert (finding.name, finding.where, finding.cure) == (name, where, CURES[name])
    assert finding.value == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("build", RIGHT.values(), ids=RIGHT)
def test_a_neighbour_of_a_mistake_is_none(build):
    assert findings(build()) == ()


def test_every_finding_and_every_rule_has_a_case():
    assert {name for name, *_ in WRONG} == set(CURES)
    assert all(any(list(rule(build())) for *_, build in WRONG) for rule in RULES)


def test_the_worst_is_first():
    last = window(passes(QUARTERS), through_scaler=True)
    events = [
        call("schedule"),
        *window(passes([1.0] * 4, COUNTS)),
        *window([backward(scale=SCALE)]),
        *(replace(last[-2], used=with_nan()) if event is last[-2] else event for event in last),
    ]
    found = [finding.name for finding in findings(record(events, twice=BOTH))]
    assert found == [
        "step on inf or nan",
        "unscale missing",
        "divisor missing",
        "micro-batches weighted equally",
        "scheduler before the first step",
        "parameters in two groups",
    ]


# What the evidence must tell: windows, numbers, names.
TOLD: list[tuple[Build, tuple[str, ...]]] = [
    (lambda: record(window(passes(QUARTERS)), window(passes([1.0] * 4)), window(passes([1.0] * 4))),
     ("4 times the mean over the 4 micro-batches of windows 2, 3", "multiplied by 1")),
    (lambda: record(window(passes([2.0, 0.5, 1.0, 0.5], scale=SCALE), 1 / SCALE)),
     ("multiplied by 0.5, 1, 2",)),
    (lambda: record(window(passes(QUARTERS, COUNTS))),
     ("12, 3, 7, 5 targets", "up to 4 times another")),
    (lambda: scaled(clip(norm=SCALE * 3), call("unscale_"), through_scaler=True),
     ("the norm 3072 that was clipped to 1", "loss scale 1024", "own is 3")),
    (lambda: record(window([backward()]), [backward(0.5), backward(0.5, value=NAN)],
                    step(with_nan())),
     ("window 2 of 2", "gradient of bias", "loss of micro-batch 2 is not finite")),
    (lambda: ranked(8.0, 8.0, differ=1e-3), ("different gradients of bias",)),
    (lambda: reached(0, 1, 2, trained=BOTH), ("gradients reach, no step uses other",)),
    (lambda: reached(0), ("no gradient reaches bias",)),
    (lambda: half(8e-3, 1e-3), ("sum of 4 gradients in 2 parameters", "3.0 bits lost")),
    (lambda: rerun(0.25), ("backward pass 5 is about 0.2 from",)),
    (lambda: graph(16, 16 * 1024), ("keeps 16 KiB for 16 steps", "8 KiB of it has an element per",
                                    "Without logits it is 8.5 KiB, with one step 1 KiB")),
]  # fmt: skip


@pytest.mark.parametrize(("build", "parts"), TOLD, ids=[parts[0] for _, parts in TOLD])
def test_evidence_has_the_numbers(build, parts):
    evidence = " / ".join(finding.evidence for finding in findings(build()))
    assert all(part in evidence for part in parts), evidence


def test_distance_of_equal_weights_is_that_of_the_definition():
    of = passes(QUARTERS, COUNTS)
    (finding,) = findings(record(window(of)))
    plain = [one.gradient * 4 for one in of]
    right = sum(n * g for n, g in zip(COUNTS, plain, strict=True)) / sum(COUNTS)
    apart = (sum(plain) / 4 - right).norm() / right.norm()
    assert f"{apart:.2g} from the mean over all targets" in finding.evidence
