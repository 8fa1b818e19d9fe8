"""Loops that are wrong in ways which people have published, and in the classical ones.

Each with the name of its mistake, the size of it by definition, what the definition comes to where
that is a round number, and a word of the line that is at fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import by_definition as size
import torch
from audited import (
    SCALE,
    Decoder,
    N,
    Watch,
    decoded,
    network,
    of_labels,
    of_rows,
    rows,
    scaler_of,
    sentences,
    sgd,
    tagged,
    train,
    windows_of,
)
from by_definition import Plain
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import ExponentialLR

import accumext

STEPS, VOCABULARY = 50, 5000  # of the greedy decoder
MANY = 32  # micro-batches of a window in half precision
K1 = 5  # steps between two backward passes


@dataclass(frozen=True)
class Wrong:
    loop: Callable[[Watch], Any]
    name: str
    size: Callable[[Plain], float]
    known: float | None
    at: str
    also: tuple[str, ...]


WRONG: list[Wrong] = []


def wrong(
    name: str,
    size: Callable[[Plain], float],
    known: float | None = None,
    at: str = "backward(",
    also: tuple[str, ...] = (),
) -> Callable[[Callable[[Watch], Any]], Callable[[Watch], Any]]:
    """`also`: what else may be said, since it is true."""

    def listed(loop: Callable[[Watch], Any]) -> Callable[[Watch], Any]:
        WRONG.append(Wrong(loop, name, size, known, at, also))
        return loop

    return listed


def divided(model: nn.Module, by: float) -> None:
    for parameter in model.parameters():
        parameter.grad /= by


# --- what a micro-batch weighs --------------------------------------------------------------------


@wrong("divisor missing", size.times_the_mean(rows()), 4)
def divisor_forgotten(watch: Watch) -> Any:
    """A step every n batches, and nobody divides by n."""
    model = network()
    return train(watch, model, sgd(model), divisor=1)


@wrong("divided twice", size.times_the_mean(rows()), 1 / 4)
def divided_loss_and_gradient(watch: Watch) -> Any:
    """The loss is divided by n, and so is the gradient before the step."""
    model = network()
    return train(watch, model, sgd(model), before=lambda: divided(model, N))


@wrong("divided twice", size.times_the_mean_by_the_parameters, 1 / 4)
def divided_for_the_wrapper(watch: Watch) -> Any:
    """The loss is divided by n for an optimizer that divides by itself."""
    model = network()
    optimizer = accumext.AccumulatingOptimizer(sgd(model, lr=1.0), window=N)
    with watch(model, optimizer) as audit:
        for x, y in rows():
            optimizer.backward(of_rows(model, x, y) / N)
            optimizer.step()
    return audit


@wrong("divisor of a full window", size.times_the_mean(rows(2 * N + 2), window=2), 2 / 4)
def last_window_of_the_epoch(watch: Watch) -> Any:
    """The last window of an epoch holds two batches, and is divided by four."""
    model, loader = network(), rows(2 * N + 2)
    optimizer = sgd(model)

    def rest(i: int) -> None:
        if i + 1 == len(loader):
            optimizer.step()

    return train(watch, model, optimizer, loader, end=rest)


@wrong("micro-batches weighted equally", size.ratio_of_weights(tagged(), of_labels), 12 / 3)
def mean_of_each_micro_batch(watch: Watch) -> Any:
    """The mean over the tokens of each micro-batch instead of the mean over the window's tokens."""
    model = network()
    return train(watch, model, sgd(model), tagged(), of_labels)


@wrong("micro-batches weighted unequally", size.ratio_of_weights(rows()), 2)
def one_batch_twice_as_heavy(watch: Watch) -> Any:
    """Weights that were made for other counts: one of four equal micro-batches weighs double."""
    model, weights = network(), iter([0.4, 0.2, 0.2, 0.2] * N)
    return train(
        watch, model, sgd(model), None, lambda *of: of_rows(*of) * next(weights), divisor=1
    )


# --- which micro-batches are in the sum -----------------------------------------------------------


@wrong("micro-batches lost", size.absent(rows()), 3)
def zero_grad_before_every_backward(watch: Watch) -> Any:
    """The zero_grad of the loop without accumulation has stayed where it was."""
    model = network()
    optimizer = sgd(model)

    def loss_of(*of: Any) -> Tensor:
        optimizer.zero_grad()
        return of_rows(*of)

    return train(watch, model, optimizer, None, loss_of)


@wrong("micro-batches lost", size.absent(rows()), 2)
def gradients_freed_for_a_validation(watch: Watch) -> Any:
    """A validation in the middle of the window frees the gradients to have their memory."""
    model = network()

    def validate(i: int) -> None:
        for parameter in model.parameters() if i % N == 1 else ():
            parameter.grad = None
        with torch.no_grad():
            of_rows(model, *rows(1)[0])

    return train(watch, model, sgd(model), each=validate)


@wrong("micro-batches counted again", size.steps_that_one_is_in, 4, at="step(")
def zero_grad_forgotten(watch: Watch) -> Any:
    """No zero_grad at all: every step uses all gradients since the beginning."""
    model = network()
    return train(watch, model, sgd(model), clear=lambda: None)


@wrong("micro-batches counted again", size.ratio_of_weights(rows()), 4)
def running_total_with_retain_graph(watch: Watch) -> Any:
    """`total += loss; total.backward(retain_graph=True)`, the way out of an error message."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for window in windows_of(rows()):
            total = 0
            for x, y in window:
                total = total + of_rows(model, x, y) / N
                total.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    return audit


# --- clips, loss scales and schedules -------------------------------------------------------------


@wrong("clip before unscale", size.times_scale_in_the_norm, SCALE, at="clip_grad_norm_(")
def clip_of_scaled_gradients(watch: Watch) -> Any:
    """AMP: clipped without `unscale_` before."""
    model = network()
    return train(
        watch, model, sgd(model), scaler=scaler_of(),
        before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )  # fmt: skip


@wrong("clip of each micro-batch", lambda plain: plain.most("clip"), 4, at="clip_grad_norm_(")
def clip_after_every_backward(watch: Watch) -> Any:
    """Clipped with every micro-batch, not once for the window."""
    model = network()
    return train(
        watch, model, sgd(model),
        each=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )  # fmt: skip


@wrong("clip of other parameters", size.clipped_but_not_trained, 4, at="clip_grad_norm_(")
def clip_of_the_teacher(watch: Watch) -> Any:
    """Distillation: the parameters of the teacher are clipped, whom nobody trains."""
    student, teacher = network(), copy.deepcopy(network())
    return train(
        watch, student, sgd(student), rows(4), n=1,
        loss_of=lambda model, x, _: mse_loss(model(x), teacher(x).detach() + 1.0),
        before=lambda: nn.utils.clip_grad_norm_(teacher.parameters(), 1.0),
    )  # fmt: skip


@wrong(
    "scaler updated inside a window",
    lambda plain: plain.most_inside("update"),
    3,
    at="update(",
    also=("micro-batches lost",),  # the first is divided by the scale four times
)
def update_with_every_micro_batch(watch: Watch) -> Any:
    """AMP: `unscale_` for the log and `update` with every micro-batch, `step` once per window."""
    model = network()
    optimizer, scaler = sgd(model), scaler_of()
    return train(
        watch, model, optimizer, scaler=scaler, each=lambda _: scaler.unscale_(optimizer),
        step=lambda: scaler.step(optimizer), end=lambda _: scaler.update(),
    )  # fmt: skip


@wrong(
    "scales mixed in one sum",
    size.ratio_of_weights(rows()),
    2,
    also=("scaler updated inside a window",),
)
def scale_set_inside_the_window(watch: Watch) -> Any:
    """AMP: the scale is halved by hand between two micro-batches whose gradients add up."""
    model, scaler = network(), scaler_of()
    return train(
        watch, model, sgd(model), scaler=scaler,
        each=lambda i: i % N == 1 and scaler.update(scaler.get_scale() / 2),
    )  # fmt: skip


@wrong("unscale missing", size.times_the_mean(rows()), SCALE, at="step(")
def step_past_the_scaler(watch: Watch) -> Any:
    """AMP: `optimizer.step()` on scaled gradients, which Adam's normalisation hides."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return train(watch, model, optimizer, scaler=scaler_of(), step=lambda: optimizer.step())


@wrong("step on inf or nan", size.not_finite, 3, at="step(")
def step_on_nan(watch: Watch) -> Any:
    """One broken row in the second window, no scaler, and nobody looks at the loss."""
    model, batches = network(), rows()
    batches[N + 1][0][0, 0] = float("nan")
    return train(watch, model, sgd(model), batches)


@wrong("steps skipped", lambda p: p.calls.count("scaler step") - len(p.steps), 4, at="step(")
def broken_feature(watch: Watch) -> Any:
    """AMP: a feature that is NaN in all rows; the scaler skips every step, and nothing is said."""
    model, batches = network(), rows()
    for x, _ in batches:
        x[:, 3] = float("nan")
    return train(watch, model, sgd(model), batches, scaler=scaler_of())


@wrong("scheduler steps per micro-batch", lambda p: p.most("schedule"), 4, at="schedule.step(")
def schedule_with_every_micro_batch(watch: Watch) -> Any:
    """The schedule goes on with every batch, the optimizer with every fourth."""
    model = network()
    optimizer = sgd(model)
    schedule = ExponentialLR(optimizer, gamma=0.99)
    return train(watch, model, optimizer, end=lambda _: schedule.step())


@wrong(
    "scheduler before the first step",
    lambda plain: plain.windows_of_calls()[0].count("schedule"),
    1,
    at="schedule.step(",
)
def schedule_first(watch: Watch) -> Any:
    """`schedule.step()` above the step, as before torch 1.1: the first rate is never used."""
    model = network()
    optimizer = sgd(model)
    schedule = ExponentialLR(optimizer, gamma=0.9)
    return train(watch, model, optimizer, rows(4), n=1, before=lambda: schedule.step())


# --- decoders and half precision ------------------------------------------------------------------


def greedy_decoder(watch: Watch, validate: bool) -> Any:
    model = Decoder(VOCABULARY)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for sentence in sentences(2, STEPS, VOCABULARY):
            if validate:
                decoded(model, *sentence).item()
            decoded(model, *sentence).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def kept_for_a_pass(_: Plain) -> float:
    """Without the validation, whose graph is no part of it."""
    return max(greedy_decoder(Plain, validate=False).kept)


@wrong("one graph over many steps", kept_for_a_pass)
def greedy_decoder_in_one_graph(watch: Watch) -> Any:
    """A decoder fed its own argmax, whose losses are summed: the logits of all steps are kept."""
    return greedy_decoder(watch, validate=False)


@wrong("one graph over many steps", kept_for_a_pass)
def greedy_decoder_with_validation(watch: Watch) -> Any:
    """The same, after a validation that makes a graph as well, which is gone before the pass."""
    return greedy_decoder(watch, validate=True)


@wrong("truncated gradient", size.of_the_exact_gradient(1), at="tbptt(")
def backward_at_every_token(watch: Watch) -> Any:
    """Backward at every token, and the state detached: no gradient flows through time."""
    model = Decoder(11)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for sentence in sentences(1):
            accumext.tbptt(model, *sentence, criterion=cross_entropy, k1=1)
            optimizer.step()
    return audit


@wrong(
    "truncated gradient",
    size.of_the_exact_gradient(K1),
    at="measure_truncation(",
    also=("one graph over many steps",),  # the loop itself keeps the whole sentence
)
def measured_truncation(watch: Watch) -> Any:
    """A backward pass at the end of a sentence; what cutting it every five steps would cost."""
    model = Decoder(11)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for targets, hidden in sentences(1):
            audit.measure_truncation(model, targets, hidden, criterion=cross_entropy, k1=K1)
            accumext.tbptt(model, targets, hidden, criterion=cross_entropy, k1=len(targets))
            optimizer.step()
    return audit


@wrong("sum in half precision", size.of_the_sum_in_float32(MANY), at="step(")
def sum_of_many_in_bfloat16(watch: Watch) -> Any:
    """Parameters, and so gradients, in bfloat16, and a window of 32 micro-batches."""
    model, batches = network().bfloat16(), [(x.bfloat16(), y) for x, y in rows(MANY)]
    return train(watch, model, sgd(model), batches, n=MANY, windows=1)


# --- parameters that are not trained --------------------------------------------------------------


class TwoHeads(nn.Module):
    """A trunk with a head that is trained, and one for later."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.later = network(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@wrong("parameters without gradient", size.without_gradient, 2, at="step(")
def head_that_nothing_uses(watch: Watch) -> Any:
    """A head that no loss uses is in the optimizer."""
    model = TwoHeads()
    return train(watch, model, sgd(model), rows(4), n=1)


@wrong("parameters in two groups", lambda p: len(list(p.model[2].parameters())), 2, at="step(")
def head_in_two_optimizers(watch: Watch) -> Any:
    """An optimizer of its own for the head, which the other one has as well."""
    model = network()
    of_head = sgd(model[2], lr=0.01)
    return train(watch, model, sgd(model), rows(4), n=1, end=lambda _: of_head.step())


@wrong(
    "parameters in no optimizer",
    size.in_no_optimizer,
    2,
    at="step(",
    also=("parameters without gradient",),  # those of the old head
)
def head_replaced_after_the_optimizer(watch: Watch) -> Any:
    """Fine-tuning: a new head for new classes, and the optimizer has the old one."""
    model = network()
    optimizer = sgd(model)
    model[2] = nn.Linear(64, 8)
    return train(watch, model, optimizer, rows(4), n=1, clear=model.zero_grad)


@wrong("runs differ", size.first_that_differs)
def noise_from_a_generator_that_goes_on(watch: Watch) -> Any:
    """Augmented inputs, and nobody seeds the generator before the second run."""
    generator, run = torch.Generator().manual_seed(3), None
    for _ in range(2):
        model = network()
        batches = [(x + 0.01 * torch.randn(x.shape, generator=generator), y) for x, y in rows(4)]
        run = train(watch, model, sgd(model), batches, n=1, against=run)
    return run
