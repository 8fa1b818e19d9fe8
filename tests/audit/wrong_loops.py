"""Loops that are wrong in ways which people have published, and in the classical ones.

`watch` stands around each: the audit, or a test that looks on by itself. All data and parameters
are the same at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy

import accumext

N = 4  # micro-batches of a window
SCALE = 2.0**10
LABELS = (12, 3, 7, 5)  # of the micro-batches of each window
STEPS, VOCABULARY = 50, 5000  # of the greedy decoder
IGNORED = -100

Batch = tuple[Tensor, Tensor]
Watch = Callable[..., Any]


def network(inputs: int = 16, classes: int = 8) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, classes))


class Decoder(nn.Module):
    """`model(token, hidden)`, as people write it."""

    def __init__(self, vocabulary: int, size: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.embedding = nn.Embedding(vocabulary, size)
            self.cell = nn.GRUCell(size, size)
            self.head = nn.Linear(size, vocabulary)

    def forward(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.embedding(token), hidden)
        return self.head(hidden), hidden


def rows(count: int = 4 * N, size: int = 8) -> list[Batch]:
    """Inputs [size, 16] and classes [size]."""
    g = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 16, generator=g), torch.randint(8, (size,), generator=g))
        for _ in range(count)
    ]


def tagged(count: int = 4 * N) -> list[Batch]:
    """Inputs [2, 6, 16] and labels [2, 6], of which `LABELS` are not padding."""
    g = torch.Generator().manual_seed(2)
    batches = []
    for i in range(count):
        y = torch.randint(8, (12,), generator=g)
        y[LABELS[i % N] :] = IGNORED
        batches.append((torch.randn(2, 6, 16, generator=g), y.view(2, 6)))
    return batches


def sentences(count: int, steps: int = 30, vocabulary: int = 11) -> list[Batch]:
    """Tokens [steps, 4] and a state [4, 16]."""
    g = torch.Generator().manual_seed(2)
    return [
        (torch.randint(vocabulary, (steps, 4), generator=g), torch.randn(4, 16, generator=g))
        for _ in range(count)
    ]


def epochs_with_a_short_batch() -> list[Batch]:
    """Two epochs of eight batches, of which the last has three rows."""
    batches = rows(2 * N)
    x, y = batches[-1]
    return 2 * [*batches[:-1], (x[:3], y[:3])]


def of_rows(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(model(x), y, reduction=reduction)


def of_labels(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def scaler_of(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": SCALE, **options})


# --- what a micro-batch weighs --------------------------------------------------------------------


def divisor_forgotten(watch: Watch = accumext.audit) -> Any:
    """A step every n batches, and nobody divides by n."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            of_rows(model, x, y).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def divided_loss_and_gradient(watch: Watch = accumext.audit) -> Any:
    """The loss is divided by n, and so is the gradient before the step."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            loss = of_rows(model, x, y) / N
            loss.backward()
            if (i + 1) % N == 0:
                for parameter in model.parameters():
                    parameter.grad /= N
                optimizer.step()
                optimizer.zero_grad()
    return audit


def divided_by_items_and_steps(watch: Watch = accumext.audit) -> Any:
    """A sum over tokens divided by the window's tokens, and by the accumulation steps as well."""
    model, batches = network(), tagged()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for begin in range(0, len(batches), N):
            window = batches[begin : begin + N]
            items = sum((y != IGNORED).sum() for _, y in window)
            for x, y in window:
                loss = of_labels(model, x, y, "sum") / items
                (loss / N).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


def divided_for_the_wrapper(watch: Watch = accumext.audit) -> Any:
    """The loss is divided by n for an optimizer that divides by itself."""
    model = network()
    optimizer = accumext.AccumulatingOptimizer(sgd(model, lr=1.0), window=N)
    with watch(model, optimizer) as audit:
        for x, y in rows():
            optimizer.backward(of_rows(model, x, y) / N)
            optimizer.step()
    return audit


def last_window_of_the_epoch(watch: Watch = accumext.audit) -> Any:
    """The last window of an epoch holds two batches, and is divided by four."""
    model, loader = network(), rows(2 * N + 2)
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(loader):
            loss = of_rows(model, x, y) / N
            loss.backward()
            if (i + 1) % N == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return audit


def mean_of_each_micro_batch(watch: Watch = accumext.audit) -> Any:
    """The mean over the tokens of each micro-batch instead of the mean over the window's tokens."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(tagged()):
            loss = of_labels(model, x, y) / N
            loss.backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def short_last_batch(watch: Watch = accumext.audit) -> Any:
    """The last batch of an epoch has three rows instead of eight, and counts as a whole one."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(epochs_with_a_short_batch()):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def one_batch_twice_as_heavy(watch: Watch = accumext.audit) -> Any:
    """Weights that were made for other counts: one of four equal micro-batches weighs double."""
    model = network()
    optimizer = sgd(model)
    share = [0.4, 0.2, 0.2, 0.2]
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) * share[i % N]).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


# --- which micro-batches are in the sum -----------------------------------------------------------


def zero_grad_before_every_backward(watch: Watch = accumext.audit) -> Any:
    """The zero_grad of the loop without accumulation has stayed where it was."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            optimizer.zero_grad()
            loss = of_rows(model, x, y) / N
            loss.backward()
            if (i + 1) % N == 0:
                optimizer.step()
    return audit


def gradients_freed_for_a_validation(watch: Watch = accumext.audit) -> Any:
    """A validation in the middle of the window frees the gradients to have their memory."""
    model, batches = network(), rows()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(batches):
            (of_rows(model, x, y) / N).backward()
            if i % N == 1:
                for parameter in model.parameters():
                    parameter.grad = None
                with torch.no_grad():
                    of_rows(model, *batches[0])
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def zero_grad_forgotten(watch: Watch = accumext.audit) -> Any:
    """No zero_grad at all: every step uses all gradients since the beginning."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(rows()):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
    return audit


def running_total_with_retain_graph(watch: Watch = accumext.audit) -> Any:
    """`total += loss; total.backward(retain_graph=True)`, the way out of an error message."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        total = 0
        for i, (x, y) in enumerate(rows()):
            total = total + of_rows(model, x, y) / N
            total.backward(retain_graph=True)
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
                total = 0
    return audit
