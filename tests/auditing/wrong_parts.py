"""Loops whose parts do not fit: what two of them do, what none does, and what one does in vain.

As in wrong_loops.py, each with the id of its mistake, how large that is, and a word of the line
that is at fault.
"""

import itertools

import torch
from audited import SCALE, N, network, of_rows, rows, scaler_of, sgd, train
from cases import wrong
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    log_softmax,
    one_hot,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

from accumext import AccumulatingOptimizer

# --- divisors and sums ----------------------------------------------------------------------------


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
            ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            z = torch.randn(len(x), 8, generator=noise)
            of_d.zero_grad()
            of_judge = binary_cross_entropy_with_logits(d(x), ones)
            of_judge = of_judge + binary_cross_entropy_with_logits(d(g(z)), zeros)
            of_judge.backward()
            of_d.step()
            binary_cross_entropy_with_logits(d(g(z)), ones).backward()
            of_g.step()
            of_g.zero_grad()


# --- scalers, clips and schedules -----------------------------------------------------------------


@wrong("scaler.mixed", SCALE, at="unscale_(")
def unscaled_after_the_first_backward(watch, model, optimizer):
    """AMP: `i % n == 0` instead of `(i + 1) % n == 0`: three passes add scaled gradients to one
    that was unscaled, and the scaler's step does not unscale again."""
    scaler = scaler_of()

    def unscale(i):
        if i % N == 0:
            scaler.unscale_(optimizer)

    return train(watch, model, optimizer, scaler=scaler, each=unscale)


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

    def end(i):
        if i % 2 == 1:
            schedule.step()

    return train(watch, model, optimizer, end=end)


# --- parameters that are not trained --------------------------------------------------------------


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
