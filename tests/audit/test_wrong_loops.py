"""Wrong loops: the audit names the mistake, and its size is that of the definition."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import wrong_calls as calls
import wrong_loops as loops
import wrong_models as models
from by_definition import Plain, Step, at, distance, flat, gradients, weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from wrong_loops import N, of_labels, of_rows

import accumext

pytestmark = [  # what is said of three of these loops without an audit
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. the loss was divided:UserWarning"),
]

Seen = Callable[[Plain], float]


# --- the sizes of mistakes, by definition ---------------------------------------------------------


def losses_of(batches: Sequence[loops.Batch], of: Callable[..., Tensor], reduction: str) -> list:
    """The loss of each micro-batch, as a function of a float64 model."""
    return [lambda m, x=x, y=y: of(m, x.double(), y, reduction) for x, y in batches]


def windows(batches: Sequence[loops.Batch]) -> list[Sequence[loops.Batch]]:
    return [batches[begin : begin + N] for begin in range(0, len(batches), N)]


def in_steps(plain: Plain, batches, of=of_rows, reduction="mean") -> list[Tensor]:
    """What each micro-batch of a window is multiplied with in the gradient of its step."""
    pairs = zip(plain.steps, windows(batches), strict=True)
    return [
        weights(s.gradient, gradients(plain.model, s, losses_of(some, of, reduction)))
        for s, some in pairs
    ]


def times_the_mean(batches: Sequence[loops.Batch], window: int = 0) -> Seen:
    """The factor of the mean over the micro-batches."""

    def of(plain: Plain) -> float:
        used = in_steps(plain, batches)[window]
        torch.testing.assert_close(used, used.mean().expand_as(used), rtol=1e-3, atol=0)
        return float(used.sum())

    return of


def times_the_mean_of_tokens(plain: Plain) -> float:
    used = in_steps(plain, loops.tagged(), of_labels, "sum")[0]
    torch.testing.assert_close(used, used.mean().expand_as(used), rtol=1e-3, atol=0)
    return float(used.mean()) * sum(loops.LABELS)


def times_the_mean_by_the_parameters(plain: Plain) -> float:
    """From how far a step of rate 1 has gone, since the sums are the wrapper's own."""
    step = plain.steps[0]
    moved = Step(step.before, step.before - step.after, step.after)
    used = in_steps(copy_with(plain, [moved]), loops.rows()[:N])[0]
    return float(used.sum())


def copy_with(plain: Plain, steps: list[Step]) -> Plain:
    return Plain(plain.model, plain.optimizer, steps=steps)


def ratio_of_weights(batches: Sequence[loops.Batch], of=of_rows, reduction="sum") -> Seen:
    """Of two terms of the losses' sums, at most."""

    def largest(plain: Plain) -> float:
        ratios = [used.max() / used.min() for used in in_steps(plain, batches, of, reduction)]
        return float(max(ratios))

    return largest


def absent(batches: Sequence[loops.Batch]) -> Seen:
    """Micro-batches of a window whose gradient is not in the step."""
    return lambda plain: float(max((u.abs() < 1e-4).sum() for u in in_steps(plain, batches)))


def steps_that_one_is_in(plain: Plain) -> float:
    """From the last step, whose gradient is a sum over all micro-batches so far."""
    columns = [
        gradients(plain.model, step, losses_of(some, of_rows, "mean"))
        for step, some in zip(plain.steps, windows(loops.rows()), strict=True)
    ]
    counts = torch.zeros(N, dtype=torch.float64)
    for number, step in enumerate(plain.steps, 1):
        used = weights(step.gradient, torch.cat(columns[:number], 1))
        counts += (used[:N] > 1e-4).double()
    return float(counts.max())


def times_scale_in_the_norm(plain: Plain) -> float:
    grads = gradients(plain.model, plain.steps[0], losses_of(loops.rows()[:N], of_rows, "mean"))
    return plain.norms[0] / float(grads.mean(1).norm())


def clipped_but_not_trained(plain: Plain) -> float:
    trained = {p for group in plain.optimizer.param_groups for p in group["params"]}
    return float(len(set(plain.clipped) - trained))


def not_finite(plain: Plain) -> float:
    return float(sum(not step.gradient.isfinite().all() for step in plain.steps))


def cut(model: nn.Module, step: Step, every: int) -> Tensor:
    """The gradient of a decoder fed its argmax, whose state is detached every so many tokens."""
    targets, hidden = loops.sentences(1)[0]
    model, hidden = at(model, step.before), hidden.double()
    token, total = torch.zeros_like(targets[0]), torch.zeros(())
    for t, target in enumerate(targets):
        logits, hidden = model(token, hidden.detach() if t % every == 0 else hidden)
        total = total + cross_entropy(logits, target) / len(targets)
        token = logits.argmax(1)
    return flat(torch.autograd.grad(total, list(model.parameters())), model.parameters())


def of_the_exact_gradient(k1: int) -> Seen:
    def of(plain: Plain) -> float:
        exact = cut(plain.model, plain.steps[0], len(loops.sentences(1)[0][0]))
        return distance(cut(plain.model, plain.steps[0], k1), exact)

    return of


def of_the_sum_in_float32(plain: Plain) -> float:
    """Every pass by itself, in bfloat16; their sum in float64; and the sum that was stepped on."""
    model = copy.deepcopy(plain.model)
    nn.utils.vector_to_parameters(plain.steps[0].before.bfloat16(), model.parameters())
    parameters, whole = list(model.parameters()), torch.zeros(())
    for x, y in loops.rows(models.MANY):
        loss = of_rows(model, x.bfloat16(), y) / models.MANY
        whole = whole + flat(torch.autograd.grad(loss, parameters), parameters)
    return distance(plain.steps[0].gradient, whole)


def kept_for_a_pass(_: Plain) -> float:
    """Without the validation, whose graph is no part of it."""
    return max(models.greedy_decoder_in_one_graph(Plain).kept)


def without_gradient(plain: Plain) -> float:
    """Tensors of the optimizer whose gradient is zero, or is not there, in all steps."""
    sizes = [p.numel() for p in plain.model.parameters()]
    parts = zip(*(step.gradient.split(sizes) for step in plain.steps), strict=True)
    return float(sum(all(not g.any() for g in of_one) for of_one in parts))


def in_no_optimizer(plain: Plain) -> float:
    held = {p for group in plain.optimizer.param_groups for p in group["params"]}
    return float(sum(p not in held for p in plain.model.parameters()))


def first_that_differs(plain: Plain) -> float:
    """A window has one pass here."""
    pairs = zip(plain.steps, plain.against.steps, strict=True)
    return 1.0 + [torch.equal(a.gradient, b.gradient) for a, b in pairs].index(False)


@dataclass(frozen=True)
class Case:
    loop: Callable[..., Any]
    name: str
    value: Seen
    also: tuple[str, ...] = ()  # what else may be said, and why it is true


CASES = [
    Case(loops.divisor_forgotten, "divisor missing", times_the_mean(loops.rows())),
    Case(loops.divided_loss_and_gradient, "divided twice", times_the_mean(loops.rows())),
    Case(loops.divided_by_items_and_steps, "divided twice", times_the_mean_of_tokens),
    Case(loops.divided_for_the_wrapper, "divided twice", times_the_mean_by_the_parameters),
    Case(
        loops.last_window_of_the_epoch,
        "divisor of a full window",
        times_the_mean(loops.rows(2 * N + 2), window=2),
    ),
    Case(
        loops.mean_of_each_micro_batch,
        "micro-batches weighted equally",
        ratio_of_weights(loops.tagged(), of_labels),
    ),
    Case(
        loops.short_last_batch,
        "micro-batches weighted equally",
        ratio_of_weights(loops.epochs_with_a_short_batch()),
    ),
    Case(
        loops.one_batch_twice_as_heavy,
        "micro-batches weighted unequally",
        ratio_of_weights(loops.rows()),
    ),
    Case(loops.zero_grad_before_every_backward, "micro-batches lost", absent(loops.rows())),
    Case(loops.gradients_freed_for_a_validation, "micro-batches lost", absent(loops.rows())),
    Case(loops.zero_grad_forgotten, "micro-batches counted again", steps_that_one_is_in),
    Case(
        loops.running_total_with_retain_graph,
        "micro-batches counted again",
        ratio_of_weights(loops.rows()),  # the last is in one pass, the first in all
    ),
    Case(calls.clip_of_scaled_gradients, "clip before unscale", times_scale_in_the_norm),
    Case(calls.clip_after_every_backward, "clip of each micro-batch", lambda p: p.most("clip")),
    Case(calls.clip_of_the_teacher, "clip of other parameters", clipped_but_not_trained),
    Case(
        calls.update_with_every_micro_batch,
        "scaler updated inside a window",
        lambda plain: plain.most_inside("update"),
        also=("micro-batches lost",),  # the first is divided by the scale four times
    ),
    Case(
        calls.scale_set_inside_the_window,
        "scales mixed in one sum",
        ratio_of_weights(loops.rows()),
        also=("scaler updated inside a window",),
    ),
    Case(calls.step_past_the_scaler, "unscale missing", times_the_mean(loops.rows())),
    Case(calls.step_on_nan, "step on inf or nan", not_finite),
    Case(
        calls.broken_feature,
        "steps skipped",
        lambda plain: plain.calls.count("scaler step") - plain.calls.count("step"),
    ),
    Case(
        calls.schedule_with_every_micro_batch,
        "scheduler steps per micro-batch",
        lambda plain: plain.most("schedule"),
    ),
    Case(
        calls.schedule_first,
        "scheduler before the first step",
        lambda plain: plain.windows_of_calls()[0].count("schedule"),
    ),
    Case(models.greedy_decoder_in_one_graph, "one graph over many steps", kept_for_a_pass),
    Case(models.greedy_decoder_with_validation, "one graph over many steps", kept_for_a_pass),
    Case(models.backward_at_every_token, "truncated gradient", of_the_exact_gradient(1)),
    Case(
        models.measured_truncation,
        "truncated gradient",
        of_the_exact_gradient(models.K1),
        also=("one graph over many steps",),  # the loop itself keeps the whole sentence
    ),
    Case(models.sum_of_many_in_bfloat16, "sum in half precision", of_the_sum_in_float32),
    Case(models.head_that_nothing_uses, "parameters without gradient", without_gradient),
    Case(models.trunk_under_no_grad, "parameters without gradient", without_gradient),
    Case(
        models.head_in_two_optimizers,
        "parameters in two groups",
        lambda plain: len(list(plain.model[2].parameters())),
    ),
    Case(models.layer_added_after_the_optimizer, "parameters in no optimizer", in_no_optimizer),
    Case(
        models.head_replaced_after_the_optimizer,
        "parameters in no optimizer",
        in_no_optimizer,
        also=("parameters without gradient",),  # those of the old head
    ),
    Case(models.noise_from_a_generator_that_goes_on, "runs differ", first_that_differs),
]
EXPECTED = {  # what the definitions come to, where that is a round number
    "divisor_forgotten": 4,
    "divided_loss_and_gradient": 1 / 4,
    "divided_by_items_and_steps": 1 / 4,
    "divided_for_the_wrapper": 1 / 4,
    "last_window_of_the_epoch": 2 / 4,
    "mean_of_each_micro_batch": 12 / 3,
    "short_last_batch": 8 / 3,
    "one_batch_twice_as_heavy": 2,
    "zero_grad_before_every_backward": 3,
    "gradients_freed_for_a_validation": 2,
    "zero_grad_forgotten": 4,
    "running_total_with_retain_graph": 4,
    "clip_of_scaled_gradients": loops.SCALE,
    "clip_after_every_backward": 4,
    "clip_of_the_teacher": 4,
    "update_with_every_micro_batch": 3,
    "scale_set_inside_the_window": 2,
    "step_past_the_scaler": loops.SCALE,
    "step_on_nan": 3,
    "broken_feature": 4,
    "schedule_with_every_micro_batch": 4,
    "schedule_first": 1,
    "head_that_nothing_uses": 2,
    "trunk_under_no_grad": 2,
    "head_in_two_optimizers": 2,
    "layer_added_after_the_optimizer": 2,
    "head_replaced_after_the_optimizer": 2,
}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.loop.__name__)


@every_case
def test_the_loop_is_wrong_in_that_way(case: Case) -> None:
    """By its definition, without any audit"""
    value = case.value(case.loop(Plain))
    if case.loop.__name__ in EXPECTED:
        assert value == pytest.approx(EXPECTED[case.loop.__name__], rel=1e-3)
    else:
        assert value > 0


@every_case
def test_the_audit_names_it(case: Case) -> None:
    """Its name, its size to 1 %, its line, and nothing else"""
    audit = case.loop()
    assert {f.name for f in audit.findings} - set(case.also) == {case.name}, str(audit)
    (found,) = [f for f in audit.findings if f.name == case.name]
    assert found.value == pytest.approx(case.value(case.loop(Plain)), rel=0.01)
    assert found.evidence
    assert found.cure

    file, line = re.fullmatch(r"(\w+\.py):(\d+)", found.where).groups()
    if case.loop is not models.greedy_decoder_with_validation:  # which calls the one above
        source, first = inspect.getsourcelines(case.loop)
        assert first <= int(line) < first + len(source)
    assert file == f"{case.loop.__module__}.py"


@pytest.mark.parametrize("loop", [loops.divisor_forgotten, calls.update_with_every_micro_batch])
def test_the_report(loop: Callable[..., Any], tmp_path) -> None:
    """At most 30 lines; `check` raises with it; JSON and a plot of the same"""
    audit = loop()
    text = str(audit)
    assert len(text.splitlines()) <= 30
    with pytest.raises(RuntimeError) as error:
        audit.check()
    assert text in str(error.value)
    read = json.dumps(audit.to_json())
    for found in audit.findings:
        assert found.name in text
        assert found.where in text
        assert found.name in read
    with pytest.raises(AttributeError):
        audit.findings[0].value = 0.0

    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    figure = audit.plot(tmp_path / "windows.png")
    assert isinstance(figure, matplotlib.figure.Figure)
    assert (tmp_path / "windows.png").stat().st_size > 0


def test_the_worst_is_first() -> None:
    """A step on NaN comes before a schedule; each mistake has one finding"""
    model, batches = loops.network(), loops.rows()
    batches[-1][0][0, 0] = float("nan")
    optimizer = loops.sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with accumext.audit(model, optimizer) as audit:
        for i, (x, y) in enumerate(batches):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    names = [f.name for f in audit.findings]
    assert names == ["step on inf or nan", "scheduler steps per micro-batch"]


def test_the_report_of_many_findings() -> None:
    """Four mistakes in one loop, and the report is still short"""
    model, teacher = models.TwoHeads(), loops.network()
    optimizer = loops.sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with accumext.audit(model, optimizer) as audit:
        for i, (x, y) in enumerate(loops.rows()):
            of_rows(model, x, y).backward()
            nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    assert {f.name for f in audit.findings} == {
        "divisor missing",
        "clip of other parameters",
        "scheduler steps per micro-batch",
        "parameters without gradient",
    }
    assert len(str(audit).splitlines()) <= 30
