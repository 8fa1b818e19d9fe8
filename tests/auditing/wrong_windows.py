"""Loops whose windows are wrong: what is in them, what each is divided by, what runs beside them.

As in wrong_loops.py, each with the id of its mistake, how large that is, and a word of the line
that is at fault.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import audited
import torch
from audited import N, judged, network, of_labels, of_rows, rows, sgd, stepping, train, unwatched
from by_definition import Plain
from cases import wrong
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

REST = 2  # micro-batches of an epoch beyond its full windows
SEEN = 10  # windows to look at, so that the end of a loop is seen
ROWS = 8  # of a micro-batch


def epochs(
    watch: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Sequence[audited.Batch],
    loss_of: Callable[..., Tensor] = of_rows,
    *,
    times: int = 3,
    divisor: int = N,
    steps_at_the_end: bool = False,
) -> None:
    """The loop of tutorials: a step after every N micro-batches, counted from the epoch's first."""
    with watch(model, optimizer, windows=SEEN):
        for _ in range(times):
            for i, (x, y) in enumerate(loader, 1):
                (loss_of(model, x, y) / divisor).backward()
                if i % N == 0 or (steps_at_the_end and i == len(loader)):
                    optimizer.step()
                    optimizer.zero_grad()


def divided(
    watch: Any, model: nn.Module, optimizer: Any, lengths: Sequence[int], divisors: Sequence[float]
) -> None:
    """Windows of so many micro-batches, each with a divisor of its own."""
    windows = zip(audited.in_windows(*lengths), divisors, strict=True)
    for window, divisor in stepping(watch, model, optimizer, windows, windows=SEEN):
        for x, y in window:
            (of_rows(model, x, y) / divisor).backward()


def of_own(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """A squared error written out, whose sum is divided by the rows."""
    return ((model(x) - 1) ** 2).sum() / ROWS


# --- which micro-batches are in a window ----------------------------------------------------------


# The last epoch's rest is in no step.
@wrong("accumulation.leftover", (N + REST) / N, also=("accumulation.unused",))
def rest_of_an_epoch(watch, model, optimizer):
    """`if (i + 1) % n == 0` over epochs of another length, as in most loops by hand, in ESPnet and
    in skorch's recipe; and over calls of fastai's `fit`."""
    return epochs(watch, model, optimizer, rows(2 * N + REST))


@wrong("accumulation.leftover", (N + REST) / N, also=("accumulation.unused",))
def rest_of_a_loss_of_ones_own(watch, model, optimizer):
    """The same with a loss whose number of targets cannot be known from its graph."""
    return epochs(watch, model, optimizer, rows(2 * N + REST), of_own)


@wrong("accumulation.leftover", (N + REST) / N, also=("accumulation.unused",))
def rest_of_masked_means(watch, model, optimizer):
    """The same with means over what a mask keeps: in some micro-batches all, which says nothing."""
    kept = itertools.cycle(range(1, 9))

    def loss_of(model, x, y):
        mask = (torch.arange(len(y)) < next(kept)).float()
        return (cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()

    return epochs(watch, model, optimizer, rows(2 * N + REST), loss_of)


@wrong("accumulation.leftover", (N + REST) / N, also=("accumulation.unused",))
def rest_of_another_loop(watch, model, optimizer):
    """Warm-up and training written one after the other: two lines add to one window."""
    with watch(model, optimizer, windows=SEEN):
        for x, y in stepping(unwatched, model, optimizer, rows(2 * N + REST), every=N):
            (of_rows(model, x, y) / N).backward()
        for x, y in stepping(unwatched, model, optimizer, rows(2 * N + REST), every=N):
            (of_rows(model, x, y) / N).backward()


@wrong("accumulation.unused", REST, asks=True)
def rest_of_the_training(watch, model, optimizer):
    """No step after the last full window, so the data's end is never used."""
    return epochs(watch, model, optimizer, rows(3 * N + REST), times=1)


# In all windows but the first: the generator's pass comes after the discriminator's step.
@wrong("accumulation.another_loss", 1, at="of_generator.backward(")
def generator_in_the_discriminator(watch):
    """A GAN that clears `d` after its step only: the generator's loss has left gradients there."""
    both = nn.ModuleDict({"g": network(8, 16), "d": network(16, 1)})
    g, d = both["g"], both["d"]
    of_g, of_d = sgd(g), sgd(d)
    noise = torch.Generator().manual_seed(4)
    with watch(both, of_d):
        for x, _ in rows(4):
            fake = g(torch.randn(len(x), 8, generator=noise))
            judged(d(x), 1).backward()
            judged(d(fake.detach()), 0).backward()
            of_d.step()
            of_d.zero_grad()
            of_generator = judged(d(fake), 1)
            of_generator.backward()
            of_g.step()
            of_g.zero_grad()


# --- what a window is divided by ------------------------------------------------------------------


@wrong("accumulation.partial", REST / N)
def last_window_of_every_epoch(watch, model, optimizer):
    """Lightning, Accelerate, darts: the last window is stepped on, and divided as a full one."""
    return epochs(watch, model, optimizer, rows(2 * N + REST), steps_at_the_end=True)


@wrong("accumulation.partial", REST / N)
def last_window_of_a_loss_of_ones_own(watch, model, optimizer):
    """The same with a loss whose number of targets cannot be known from its graph."""
    return epochs(watch, model, optimizer, rows(2 * N + REST), of_own, steps_at_the_end=True)


@wrong("accumulation.partial", REST / N)
def last_window_at_two_lines(watch, model, optimizer):
    """The same with DDP, whose loop has a line for the last micro-batch of a window."""
    return audited.at_two_lines(watch, model, optimizer, (N, N, REST) * 2, divisor=N)


@wrong("accumulation.varying", 1 / 3)
def tail_that_ends_early(watch, model, optimizer):
    """timm's train.py, 7 batches over 4: a tail of three is divided by 3, and makes two steps."""
    return divided(watch, model, optimizer, (4, 2, 1) * 2, (4, 3, 3) * 2)


# Of each micro-batch of two rows of six labels: some in both, some in the first alone.
MASKED = (12, 9, 7, 3, 3, 2, 4, 1, 12, 9, 7, 8)


def least_share(_: Plain) -> float:
    """Of a window's labels in labels and fully masked rows, which all are divided by."""
    shares = []
    for window in audited.windows_of(audited.tagged(3 * N, MASKED)):
        counts = torch.cat([(y != audited.IGNORED).sum(1) for _, y in window])
        shares.append(float(counts.sum() / (counts.sum() + (counts == 0).sum())))
    return min(shares)


@wrong("accumulation.varying", least_share)
def masked_rows_that_count_one(watch, model, optimizer):
    """miles, which trains by RL: `mask.sum(1).clamp_min(1)` adds a label per fully masked row."""
    windows = audited.windows_of(audited.tagged(3 * N, MASKED))
    for window in stepping(watch, model, optimizer, windows):
        divisor = sum((y != audited.IGNORED).sum(1).clamp_min(1).sum() for _, y in window)
        for x, y in window:
            (of_labels(model, x, y, "sum") / divisor).backward()


@wrong("accumulation.divided_by_less", 10 / N, asks=True)
def windows_longer_than_the_divisor(watch, model, optimizer):
    """Accelerate, two models with an `accumulate` each: one counter, and windows of all batches."""
    return divided(watch, model, optimizer, (10,) * 3, (N,) * 3)


TOKENS = 8  # of a sequence, the first of which is no label


@wrong("accumulation.divided_by_more", (TOKENS - 1) / TOKENS, asks=True)
def labels_counted_before_the_shift(watch):
    """GPT-2 in transformers' Trainer: labels are counted before the shift that drops one."""
    model = nn.Sequential(nn.Embedding(8, 16), network())
    sequences = [tokens[None] for _, tokens in rows(3 * N)]
    for window in stepping(watch, model, sgd(model), audited.windows_of(sequences)):
        counted = sum(tokens.numel() for tokens in window)
        for tokens in window:
            logits, labels = model(tokens)[:, :-1], tokens[:, 1:]
            (audited.of_tokens(logits, labels, "sum") / counted).backward()


@wrong("accumulation.window_of_one", 1 / N, asks=True)
def epochs_of_one_batch(watch, model, optimizer):
    """neuralforecast and darts on a small data set: nothing accumulates, all is divided."""
    return epochs(watch, model, optimizer, rows(1), times=4, steps_at_the_end=True)


# No question, as with windows of one length: nobody means a sum of as many as happen to be left.
@wrong("accumulation.divisor_missing", N)
def undivided_windows_of_two_lengths(watch, model, optimizer):
    """Nobody divides, and the last window of an epoch is shorter: 4 and 2 times the mean."""
    return epochs(
        watch, model, optimizer, rows(2 * N + REST), divisor=1, steps_at_the_end=True, times=2
    )


SIZES = (3, 1, 3, 1)  # rows of a window's micro-batches


@wrong("accumulation.unequal_counts", max(SIZES) / min(SIZES), asks=True)
def mean_of_a_mean(watch, model, optimizer):
    """`cross_entropy(...).mean()`, as code for DataParallel has it, of batches of unequal size."""
    batches = [(x[: SIZES[i % N]], y[: SIZES[i % N]]) for i, (x, y) in enumerate(rows(3 * N))]

    def loss_of(model, x, y):
        return cross_entropy(model(x), y).mean()

    return train(watch, model, optimizer, batches, loss_of)


# --- what is done to gradients before the step ----------------------------------------------------


def clipped_by_hand(model: nn.Module, limit: float) -> None:
    """What torch's function does, by a function of the loop's own."""
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1))


# Passes after which the sum was scaled, and to which others were added: all but the last.
@wrong("accumulation.scaled_between", N - 1)
def own_clip_after_every_backward(watch, model, optimizer):
    """Trainers with a clip of their own, which stands beside the backward pass."""
    return train(watch, model, optimizer, each=lambda _: clipped_by_hand(model, 0.05))


@wrong("clip.part", 2, at="clip_grad_norm_(", asks=True)
def clip_of_the_first_group(watch):
    """speechbrain clips `optimizer.param_groups[0]`; the head is in the second, at another rate."""
    model = network()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}], lr=0.1
    )
    first = optimizer.param_groups[0]["params"]
    return train(watch, model, optimizer, before=lambda: clip_grad_norm_(first, 0.1))


# Layer 3 makes inf of large negative numbers, and 0 of that: the loss and the head's gradients are
# finite, and those of layers 2 and 0 are not. Backward reaches 2.bias first.
@wrong("step.nonfinite", 3, at="step(", told="2.bias")
def sigmoid_by_hand(watch):
    """`1 / (1 + exp(-x))`, whose backward pass multiplies 0 by inf where one broken row leads."""

    class Sigmoid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / (1 + torch.exp(-x))

    first, head = network(16, 16), network(16, 8)
    model = nn.Sequential(first[0], nn.ReLU(), first[2], Sigmoid(), head)
    batches = rows()
    batches[N + 1][0][0] *= 1e5
    return train(watch, model, sgd(model), batches)


# --- what goes on beside the steps ----------------------------------------------------------------


@wrong("average.per_micro_batch", N, at="update_parameters(")
def average_with_every_micro_batch(watch, model, optimizer):
    """F5-TTS before its fix: the average of the weights goes on with every micro-batch."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    return train(watch, model, optimizer, end=lambda _: average.update_parameters(model))


# Of an average by hand one sees at the next pass that it has moved.
@wrong("average.per_micro_batch", N)
def teacher_with_every_micro_batch(watch, model, optimizer):
    """DINO-like: the teacher follows the student four times for each of its steps."""
    teacher = audited.copy_of(model)
    return train(
        watch, model, optimizer, loss_of=lambda model, x, _: mse_loss(model(x), teacher(x + 0.1)),
        end=lambda _: audited.follow(teacher, model, 0.01),
    )  # fmt: skip


def overflowing(
    watch: Any,
    model: nn.Module,
    optimizer: Any,
    after: Callable[[], object],
    windows: int = 4,
    growth_interval: int = 2000,
) -> Any:
    """AMP: sums over rows overflow at the scale's first value, and do not at a fourth of it."""
    scaler = audited.scaler_of(
        init_scale=2.0**127, growth_factor=4.0, backoff_factor=0.25, growth_interval=growth_interval
    )

    def loss_of(model, x, y):
        return cross_entropy(model(x), y, reduction="sum")

    def divide():
        for parameter in model.parameters():
            parameter.grad /= N * ROWS

    return train(
        watch, model, optimizer, rows(windows * N), loss_of, divisor=1, scaler=scaler,
        before=divide, after=after, windows=SEEN,
    )  # fmt: skip


@wrong("average.on_skipped", 1, at="update_parameters(", asks=True)
def average_after_a_skipped_step(watch, model, optimizer):
    """AMP: weights that did not move are averaged once more, as where the scaler is not asked."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    return overflowing(watch, model, optimizer, lambda: average.update_parameters(model))


# The scale grows after two steps that were not skipped, and then overflows again.
@wrong("schedule.on_skipped", 3, at="schedule.step(", asks=True)
def schedule_after_every_skipped_step(watch, model, optimizer):
    """AMP: Lightning's schedule per step moves on where the scaler skipped the step: in windows 1,
    4 and 7 of 8."""
    schedule = ExponentialLR(optimizer, gamma=0.9)
    return overflowing(watch, model, optimizer, lambda: schedule.step(), 8, growth_interval=2)


@wrong("modules.batchnorm_eval", 2, asks=True)
def validation_without_train(watch):
    """`model.eval()` for a validation in the second window, and no `model.train()` after it."""
    model = nn.Sequential(network(16, 16), nn.BatchNorm1d(16), network(16, 8), nn.BatchNorm1d(8))
    batches = rows()

    def validate(i):
        if i == N + 1:
            model.eval()
            with torch.no_grad():
                of_rows(model, *batches[0])

    return train(watch, model, sgd(model), batches, end=validate)


# --- what is kept ---------------------------------------------------------------------------------


@wrong("memory.losses_summed", N, asks=True)
def losses_summed_over_the_window(watch, model, optimizer):
    """torchtune in 2024, for a time: a window's losses are summed, and backward runs once."""
    for window in stepping(watch, model, optimizer, audited.windows_of(rows())):
        sum(of_rows(model, x, y) / N for x, y in window).backward()


PASSES = 10  # until the state is dropped


class Keeping(nn.Module):
    """An LSTM that goes on from where the last batch ended."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.lstm, self.head, self.state = nn.LSTM(16, 16), nn.Linear(16, 8), None

    def forward(self, x: Tensor) -> Tensor:
        out, self.state = self.lstm(x, self.state)
        return self.head(out)


@wrong("memory.growing", PASSES, asks=True)
def lstm_that_keeps_its_state(watch):
    """`backward(retain_graph=True)`, since torch's error message of a second backward names it."""
    model = Keeping()

    def drop():
        model.state = None

    batches = audited.tagged(3 * PASSES, [12])
    for x, y in stepping(watch, model, sgd(model), batches, every=PASSES, after=drop):
        (of_labels(model, x, y) / PASSES).backward(retain_graph=True)
