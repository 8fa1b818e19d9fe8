"""Loops that are wrong in ways which people have published, and in the classical ones.

Each with the id of its mistake, how large that is, and a word of the line that is at fault. Loops
that take no more than `watch` make a model and an optimizer of their own.
"""

import copy
import itertools

import audited
import by_definition
import torch
from audited import SCALE, N, judged, network, of_rows, rows, scaler_of, sgd, stepping, train
from by_definition import Plain
from cases import wrong
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    kl_div,
    log_softmax,
    mse_loss,
    one_hot,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

import accumext
from accumext import AccumulatingOptimizer

STEPS, VOCABULARY = 50, 5000  # of the greedy decoder
MANY = 32  # micro-batches of a window in half precision
K1 = 5  # steps between two backward passes


# --- what a micro-batch weighs --------------------------------------------------------------------


@wrong("accumulation.divisor_missing", 4, asks=True)
def divisor_forgotten(watch, model, optimizer):
    """A step every n batches, and nobody divides by n."""
    return train(watch, model, optimizer, divisor=1)


@wrong("accumulation.divided_by_more", 1 / 4, asks=True)
def divided_loss_and_gradient(watch, model, optimizer):
    """The loss is divided by n, and so is the gradient before the step."""

    def divide():
        for parameter in model.parameters():
            parameter.grad /= N

    return train(watch, model, optimizer, before=divide)


@wrong("accumulation.divided_by_more", 1 / 4, asks=True)
def divided_for_the_wrapper(watch, model, optimizer):
    """The loss is divided by n for an optimizer that divides by itself."""
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=N)
    with watch(model, optimizer):
        for x, y in rows():
            optimizer.backward(of_rows(model, x, y) / N)
            optimizer.step()


@wrong("accumulation.unequal_counts", 12 / 3, asks=True)
def mean_of_each_micro_batch(watch, model, optimizer):
    """The mean over the tokens of each micro-batch instead of the mean over the window's tokens."""
    return train(watch, model, optimizer, audited.tagged(), audited.of_labels)


@wrong("accumulation.unequal_weights", 2, asks=True)
def one_batch_twice_as_heavy(watch, model, optimizer):
    """Weights that were made for other counts: one of four equal micro-batches weighs double."""
    weights = iter([0.4, 0.2, 0.2, 0.2] * N)

    def weighted(*of):
        return of_rows(*of) * next(weights)

    return train(watch, model, optimizer, loss_of=weighted, divisor=1)


# --- which micro-batches are in the sum -----------------------------------------------------------


@wrong("accumulation.lost", 3)
def zero_grad_before_every_backward(watch, model, optimizer):
    """The zero_grad of the loop without accumulation has stayed where it was."""

    def loss_of(*of):
        optimizer.zero_grad()
        return of_rows(*of)

    return train(watch, model, optimizer, loss_of=loss_of)


@wrong("accumulation.counted_again", 4, at="step(")
def zero_grad_forgotten(watch, model, optimizer):
    """No zero_grad at all: every step uses all gradients since the beginning."""
    return train(watch, model, optimizer, clear=lambda: None)


# The last pass goes through the graphs of all four.
@wrong("accumulation.counted_again", 4, also=("memory.losses_summed",))
def running_total_with_retain_graph(watch, model, optimizer):
    """`total += loss; total.backward(retain_graph=True)`, the way out of an error message."""
    for window in stepping(watch, model, optimizer, audited.windows_of(rows())):
        total = 0
        for x, y in window:
            total = total + of_rows(model, x, y) / N
            total.backward(retain_graph=True)


@wrong("accumulation.counted_again", 2)
def own_pass_before_the_wrappers(watch, model, optimizer):
    """`loss.backward(retain_graph=True)` has stayed, and `opt.backward(loss)` adds to it."""
    optimizer = AccumulatingOptimizer(optimizer, window=N)
    with watch(model, optimizer):
        for x, y in rows():
            loss = of_rows(model, x, y)
            loss.backward(retain_graph=True)
            optimizer.backward(loss)
            optimizer.step()


# --- clips, loss scales and schedules -------------------------------------------------------------


@wrong("clip.before_unscale", SCALE, at="clip_grad_norm_(")
def clip_of_scaled_gradients(watch, model, optimizer):
    """AMP: clipped without `unscale_` before."""
    return train(watch, model, optimizer, scaler=scaler_of(), before=audited.clipping(model, 1.0))


@wrong("clip.per_micro_batch", 4, at="clip_grad_norm_(")
def clip_after_every_backward(watch, model, optimizer):
    """Clipped with every micro-batch, not once for the window."""
    return train(watch, model, optimizer, each=lambda _: clip_grad_norm_(model.parameters(), 0.1))


@wrong(
    "accumulation.divisor_missing",
    4,
    asks=True,
    also=("clip.before_unscale", "clip.per_micro_batch"),
)
def three_mistakes_at_once(watch, model, optimizer):
    """Nobody divides, and scaled gradients are clipped with every micro-batch."""
    return train(
        watch, model, optimizer, divisor=1, scaler=scaler_of(),
        each=lambda _: clip_grad_norm_(model.parameters(), 0.1),
    )  # fmt: skip


@wrong("clip.other_parameters", 4, at="clip_grad_norm_(")
def clip_of_the_teacher(watch, student, optimizer):
    """Distillation: the parameters of the teacher are clipped, whom nobody trains."""
    teacher = copy.deepcopy(student)
    return train(
        watch, student, optimizer, rows(4), n=1,
        loss_of=lambda model, x, _: mse_loss(model(x), teacher(x).detach() + 1.0),
        before=lambda: clip_grad_norm_(teacher.parameters(), 1.0),
    )  # fmt: skip


# The first micro-batch is divided by the scale four times.
@wrong("scaler.updated_inside", 3, at="update(", also=("accumulation.dropped",))
def update_with_every_micro_batch(watch, model, optimizer):
    """AMP: `unscale_` for the log and `update` with every micro-batch, `step` once per window."""
    scaler = scaler_of()
    return train(
        watch, model, optimizer, scaler=scaler, each=lambda _: scaler.unscale_(optimizer),
        step=lambda: scaler.step(optimizer), end=lambda _: scaler.update(),
    )  # fmt: skip


@wrong("scaler.mixed", 2, also=("scaler.updated_inside",))
def scale_set_inside_the_window(watch, model, optimizer):
    """AMP: the scale is halved by hand between two micro-batches whose gradients add up."""
    scaler = scaler_of()
    return train(
        watch, model, optimizer, scaler=scaler,
        each=lambda i: scaler.update(scaler.get_scale() / 2) if i % N == 1 else None,
    )  # fmt: skip


@wrong("scaler.unscale_missing", SCALE, at="step(")
def step_past_the_scaler(watch):
    """AMP: `optimizer.step()` on scaled gradients, which Adam's normalisation hides."""
    model = network()
    optimizer = audited.adam(model)
    return train(watch, model, optimizer, scaler=scaler_of(), step=lambda: optimizer.step())


@wrong("step.nonfinite", 3, at="step(")
def step_on_nan(watch, model, optimizer):
    """One broken row in the second window, no scaler, and nobody looks at the loss."""
    batches = rows()
    batches[N + 1][0][0, 0] = float("nan")
    return train(watch, model, optimizer, batches)


@wrong("step.skipped", 4, at="step(")
def broken_feature(watch, model, optimizer):
    """AMP: a feature that is NaN in all rows; the scaler skips every step, and nothing is said."""
    batches = rows()
    for x, _ in batches:
        x[:, 3] = float("nan")
    return train(watch, model, optimizer, batches, scaler=scaler_of())


@wrong("schedule.per_micro_batch", 4, at="schedule.step(", asks=True)
def schedule_with_every_micro_batch(watch, model, optimizer):
    """The schedule goes on with every batch, the optimizer with every fourth."""
    schedule = ExponentialLR(optimizer, gamma=0.99)
    return train(watch, model, optimizer, end=lambda _: schedule.step())


@wrong("schedule.before_first_step", 1, at="schedule.step(")
def schedule_first(watch, model, optimizer):
    """`schedule.step()` above the step, as before torch 1.1: the first rate is never used."""
    schedule = ExponentialLR(optimizer, gamma=0.9)
    return train(watch, model, optimizer, rows(4), n=1, before=lambda: schedule.step())


# --- decoders and half precision ------------------------------------------------------------------


def greedy_decoder(watch, validate=False):
    model, sentences = audited.Decoder(VOCABULARY), audited.sentences(2, STEPS, VOCABULARY)
    for sentence in stepping(watch, model, sgd(model), sentences):
        if validate:
            audited.decoded(model, *sentence).item()
        audited.decoded(model, *sentence).backward()


def kept_for_a_pass(_: Plain) -> float:
    """Without the validation, whose graph is no part of it."""
    return max(audited.run(greedy_decoder_in_one_graph, Plain)[0].kept)


@wrong("memory.graph", kept_for_a_pass, asks=True)
def greedy_decoder_in_one_graph(watch):
    """A decoder fed its own argmax, whose losses are summed: the logits of all steps are kept."""
    return greedy_decoder(watch)


@wrong("memory.graph", kept_for_a_pass, asks=True)
def greedy_decoder_with_validation(watch):
    """The same, after a validation that makes a graph as well, which is gone before the pass."""
    return greedy_decoder(watch, validate=True)


@wrong("truncation.distance", by_definition.of_the_exact_gradient(1), at="tbptt(", asks=True)
def backward_at_every_token(watch):
    """Backward at every token, and the state detached: no gradient flows through time."""
    model = audited.Decoder(11)
    optimizer = sgd(model)
    with watch(model, optimizer):
        for sentence in audited.sentences(1):
            accumext.tbptt(model, *sentence, criterion=cross_entropy, k1=1)
            optimizer.step()


@wrong(
    "truncation.distance",
    by_definition.of_the_exact_gradient(K1),
    at="measure_truncation(",
    asks=True,
    also=("memory.graph",),  # the loop itself keeps the whole sentence
)
def measured_truncation(watch):
    """A backward pass at the end of a sentence; what cutting it every five steps would cost."""
    model = audited.Decoder(11)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for targets, hidden in audited.sentences(1):
            audit.measure_truncation(model, targets, hidden, criterion=cross_entropy, k1=K1)
            accumext.tbptt(model, targets, hidden, criterion=cross_entropy, k1=len(targets))
            optimizer.step()
    return audit


@wrong("precision.sum", by_definition.of_the_sum_in_float32(MANY), at="step(", asks=True)
def sum_of_many_in_bfloat16(watch):
    """Parameters, and so gradients, in bfloat16, and a window of 32 micro-batches."""
    model, batches = network().bfloat16(), [(x.bfloat16(), y) for x, y in rows(MANY)]
    return train(watch, model, sgd(model), batches, n=MANY, windows=1)


# --- parameters that are not trained --------------------------------------------------------------


@wrong("parameters.no_gradient", 2, at="step(", asks=True)
def head_that_nothing_uses(watch):
    """A head that no loss uses is in the optimizer."""
    model = nn.ModuleDict({"used": network(), "later": nn.Linear(8, 8)})

    def loss_of(model, x, y):
        return cross_entropy(model["used"](x), y)

    return train(watch, model, sgd(model), rows(4), loss_of, n=1)


@wrong("parameters.twice", 2, at="step(")
def head_in_two_optimizers(watch, model, optimizer):
    """An optimizer of its own for the head, which the other one has as well."""
    of_head = sgd(model[2], lr=0.01)
    return train(watch, model, optimizer, rows(4), n=1, end=lambda _: of_head.step())


# The old head's are without gradient.
@wrong("parameters.no_optimizer", 2, at="step(", asks=True, also=("parameters.no_gradient",))
def head_replaced_after_the_optimizer(watch, model, optimizer):
    """Fine-tuning: a new head for new classes, and the optimizer has the old one."""
    model[2] = nn.Linear(64, 8)
    return train(watch, model, optimizer, rows(4), n=1, clear=model.zero_grad)


@wrong("determinism.differs", by_definition.first_that_differs)
def noise_from_a_generator_that_goes_on(watch):
    """Augmented inputs, and nobody seeds the generator before the second run."""
    generator, run = torch.Generator().manual_seed(3), None
    for _ in range(2):
        model = network()
        batches = [(x + 0.01 * torch.randn(x.shape, generator=generator), y) for x, y in rows(4)]
        run = train(watch, model, sgd(model), batches, n=1, against=run)
    return run


# --- parts that do not fit: divisors and sums -----------------------------------------------------


@wrong("accumulation.divided_by_more", 1 / N, asks=True)
def divided_by_two_functions(watch, model, optimizer):
    """The training step divides by n, and so does the trainer's backward, as Accelerate's does."""
    return train(watch, model, optimizer, loss_of=lambda *of: of_rows(*of) / N)


@wrong("accumulation.divisor_missing", N, asks=True)
def own_mean_undivided(watch, model, optimizer):
    """A mean by hand, `sum() / len(y)`, that nobody divides by n."""

    def loss_of(model, x, y):
        return -log_softmax(model(x), -1)[range(len(y)), y].sum() / len(y)

    return train(watch, model, optimizer, loss_of=loss_of, divisor=1)


@wrong("accumulation.divisor_missing", N, asks=True)
def batch_mean_undivided(watch, model, optimizer):
    """Distillation: `batchmean` is a mean over the rows of a micro-batch, not of a window."""

    def loss_of(model, x, y):
        soft = one_hot(y, 8).float()
        return kl_div(log_softmax(model(x), -1), soft, reduction="batchmean")

    return train(watch, model, optimizer, loss_of=loss_of, divisor=1)


# Gradients of windows 1 and 3 are in the steps of 2 and 4 as well.
@wrong("accumulation.counted_again", 2, at="step(")
def zero_grad_after_every_second_step(watch, model, optimizer):
    """A step after every n micro-batches, and `zero_grad` after every 2 n."""
    clears = itertools.cycle([False, True])

    def clear():
        if next(clears):
            optimizer.zero_grad()

    return train(watch, model, optimizer, clear=clear)


# In all windows: the discriminator's pass, after which it has stepped.
@wrong("accumulation.another_loss", 1, at="of_judge.backward(", asks=True)
def discriminator_in_the_generator(watch):
    """A GAN without `detach` that clears `g` after its step only: the generator steps on what the
    discriminator's loss has left there, too."""
    both = nn.ModuleDict({"g": network(8, 16), "d": network(16, 1)})
    g, d = both["g"], both["d"]
    of_g, of_d = sgd(g), sgd(d)
    noise = torch.Generator().manual_seed(4)
    with watch(both, of_g):
        for x, _ in rows(4):
            z = torch.randn(len(x), 8, generator=noise)
            of_d.zero_grad()
            of_judge = judged(d(x), 1) + judged(d(g(z)), 0)
            of_judge.backward()
            of_d.step()
            judged(d(g(z)), 1).backward()
            of_g.step()
            of_g.zero_grad()


# --- parts that do not fit: scalers, clips and schedules ------------------------------------------


@wrong("scaler.mixed", SCALE, at="unscale_(")
def unscaled_after_the_first_backward(watch, model, optimizer):
    """AMP: `i % n == 0` instead of `(i + 1) % n == 0`: three passes add scaled gradients to one
    that was unscaled, and the scaler's step does not unscale again."""
    scaler = scaler_of()
    return train(
        watch, model, optimizer, scaler=scaler,
        each=lambda i: scaler.unscale_(optimizer) if i % N == 0 else None,
    )  # fmt: skip


@wrong("clip.empty", N, at="clip_grad_norm_(")
def clip_beside_the_wrapper(watch, model, optimizer):
    """AccumulatingOptimizer sums by itself: `.grad` is empty, and a clip by hand has norm 0."""
    optimizer = AccumulatingOptimizer(optimizer, window=N)
    with watch(model, optimizer):
        for x, y in rows():
            optimizer.backward(of_rows(model, x, y))
            clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()


@wrong("clip.empty", 1, at="clip_grad_norm_(")
def clip_of_an_exhausted_generator(watch, model, optimizer):
    """`model.parameters()` is kept and handed to every clip: from the second on it is empty."""
    parameters = model.parameters()
    return train(watch, model, optimizer, before=lambda: clip_grad_norm_(parameters, 0.1))


@wrong("schedule.per_micro_batch", 2, at="schedule.step(", asks=True)
def schedule_twice_in_a_window(watch, model, optimizer):
    """The schedule steps with every second micro-batch, the optimizer with every fourth."""
    schedule = ExponentialLR(optimizer, gamma=0.99)
    return train(watch, model, optimizer, end=lambda i: schedule.step() if i % 2 else None)


# --- parts that do not fit: what is not trained ---------------------------------------------------


@wrong("parameters.no_optimizer", 1, at="step(", asks=True)
def weights_of_the_loss(watch, model, optimizer):
    """Log variances that the loss has, and neither the model nor the optimizer."""
    log_variance = nn.Parameter(torch.zeros(8))

    def loss_of(model, x, y):
        return cross_entropy(model(x) * torch.exp(-log_variance), y)

    return train(watch, model, optimizer, rows(4), loss_of, n=1)


class Listing(nn.Module):
    """Layers in a list of Python's, which `parameters()` does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(16, 16) for _ in range(3)], nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@wrong("parameters.no_optimizer", 2 * 3, at="step(", asks=True)
def layers_in_a_list(watch):
    """A list where nn.ModuleList is meant: the optimizer has the head alone."""
    model = Listing()
    return train(watch, model, sgd(model), rows(4), n=1)


@wrong("parameters.no_gradient", 2 * 2, at="step(", asks=True)
def optimizer_of_a_frozen_encoder(watch):
    """An encoder that is frozen when its optimizer is made, and never thawed."""
    encoder, head = network(16, 16).requires_grad_(False), nn.Linear(16, 8)
    model, of_head = nn.Sequential(encoder, head), sgd(head)
    return train(
        watch, model, sgd(encoder), rows(4), n=1, before=lambda: of_head.step(),
        clear=model.zero_grad,
    )  # fmt: skip
