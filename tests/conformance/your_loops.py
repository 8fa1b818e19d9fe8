"""The loops of examples/from_your_loop: their data, and what each of them is to compute."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support import ROOT
from support.optimizer_oracle import windows_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

FOLDER = ROOT / "examples" / "from_your_loop"
SIDES = ("before", "after")
N = 4  # batches of a step
WORLD = 2  # processes

Batch = tuple[Tensor, Tensor]


def function(name: str, side: str) -> Callable[..., Any]:
    """Return the function that the file of a loop defines for its user: `train`, or `loss_of`."""
    found = runpy.run_path(str(FOLDER / f"{name}_{side}.py"))
    return found["train"] if "train" in found else found["loss_of"]


class Trunk(nn.Sequential):
    """A trunk and a head, under names; the parameters are the same at every call."""

    def __init__(self, classes: int = 4) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
        self.head = nn.Linear(8, classes)
        self.double()


class Decoder(nn.Module):
    """`model(token, hidden)`, as people write it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.cell = nn.GRUCell(6, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight.data *= 10.0  # so that the first windows are clipped
        self.double()

    def forward(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.embedding(token), hidden)
        return self.head(hidden), hidden


class Recurrent(nn.Module):
    """A decoder that is fed its targets, all steps in one call."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.rnn = nn.GRU(6, 6)
        self.head = nn.Linear(6, 11)
        self.double()


def drawn(count: int, draw: Callable[[torch.Generator], Batch]) -> list[Batch]:
    """Batches that are the same at every call."""
    generator = torch.Generator().manual_seed(2)
    return [draw(generator) for _ in range(count)]


def steeper(batches: list[Batch]) -> list[Batch]:
    """The later half of the inputs enlarged, so that some windows are clipped and others not."""
    half = len(batches) // 2
    return batches[:half] + [(10 * x, y) for x, y in batches[half:]]


def rows(count: int = 3 * N, size: int = 5) -> list[Batch]:
    """Inputs [size, 3] and classes [size]."""
    like = {"dtype": torch.float64}
    draws = drawn(
        count,
        lambda g: (
            torch.randn(size, 3, generator=g, **like),
            torch.randint(4, (size,), generator=g),
        ),
    )
    return steeper(draws)


def sentences(count: int = 3 * N) -> list[Batch]:
    """Target tokens [T, B] and a hidden state [B, H]."""
    return drawn(
        count,
        lambda g: (
            torch.randint(11, (7, 3), generator=g),
            torch.randn(3, 6, generator=g, dtype=torch.float64),
        ),
    )


def states_of_layers(count: int = 2 * N) -> list[Batch]:
    return [(targets, hidden[None]) for targets, hidden in sentences(count)]


def padded(count: int = 2 * N) -> list[Batch]:
    """Inputs [2, 6, 3] and labels [2, 6], of which each batch has another number."""
    draws = drawn(
        count,
        lambda g: (
            torch.randn(2, 6, 3, generator=g, dtype=torch.float64),
            torch.randint(4, (2, 6), generator=g),
        ),
    )
    for i, (_, y) in enumerate(draws):
        y[:, 1 + i % 5 :] = -100
    return steeper(draws)


def loader(batches: Sequence[Batch]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


# The losses, each written once more, without any of the two sides.


def of_rows(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def labels(batch: Batch) -> float:
    return float((batch[1] != -100).sum())


def teacher_forced(model: Recurrent, batch: Batch) -> Tensor:
    targets, hidden = batch
    tokens = torch.cat([torch.zeros_like(targets[:1]), targets[:-1]])
    logits = model.head(model.rnn(model.embedding(tokens), hidden)[0])
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def fed_its_argmax(model: Decoder, batch: Batch, *, cut: bool = False) -> Tensor:
    """With `cut` no gradient flows from a step into the one before."""
    targets, hidden = batch
    token, losses = torch.zeros_like(targets[0]), []
    for target in targets:
        logits, hidden = model(token, hidden.detach() if cut else hidden)
        losses.append(cross_entropy(logits, target))
        token = logits.argmax(1)
    return torch.stack(losses).mean()


def cut_at_every_token(model: Decoder, batch: Batch) -> Tensor:
    return fed_its_argmax(model, batch, cut=True)


@dataclass(frozen=True)
class Loop:
    """A loop by its definition."""

    model: Callable[[], nn.Module] = Trunk
    batches: Callable[[], list[Batch]] = rows
    loss: Callable[[Any, Batch], Tensor] = of_rows
    weight: Callable[[Batch], float] = lambda batch: 1.0
    max_norm: float | None = None
    gamma: float = 1.0  # of the learning rate, after every step
    device: bool = False  # whether `train` is told where it runs


LOOPS = {
    "tutorial": Loop(),
    "amp": Loop(max_norm=1.0, gamma=0.9, device=True),
    "apex": Loop(max_norm=1.0, device=True),
    "ddp": Loop(max_norm=1.0, batches=lambda: rows(3 * N * WORLD)),
    "accelerate": Loop(max_norm=1.0, gamma=0.9),
    "lightning": Loop(max_norm=1.0),
    "ignite": Loop(max_norm=1.0),
    "trainer": Loop(max_norm=1.0, gamma=0.9),
    "liger": Loop(batches=padded, loss=of_labels, weight=labels, max_norm=1.0),
    "cce": Loop(model=Recurrent, batches=states_of_layers, loss=teacher_forced),
    "greedy_decoder": Loop(
        model=Decoder, batches=sentences, loss=fed_its_argmax, max_norm=2.0, device=True
    ),
    "backward_per_token": Loop(
        model=Decoder, batches=sentences, loss=cut_at_every_token, max_norm=2.0, device=True
    ),
    "backward_once": Loop(
        model=Decoder, batches=sentences, loss=fed_its_argmax, max_norm=2.0, device=True
    ),
    "head_slices": Loop(batches=lambda: rows(2 * N, size=20)),
}
# Loops of another shape: one loss, and one step of one parameter.
OTHERS = ("liger_chunked", "whole_batch")


def by_definition(
    loop: Loop, batches: Sequence[Batch], n: int = N, divisor: float | None = None
) -> tuple[list[Tensor], list[float]]:
    """Parameters after a step on each window's gradient, and the norms before clipping.

    The losses of a window are one graph, and their weighted sum is divided by the weights, or by
    `divisor`.
    """
    model = loop.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    norms = []
    for window in windows_of(batches, n):
        weights = [loop.weight(batch) for batch in window]
        losses = [w * loop.loss(model, batch) for w, batch in zip(weights, window)]
        total = torch.stack(losses).sum() / (divisor or sum(weights))
        grads = torch.autograd.grad(total, parameters)
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm().item())
        limit = loop.max_norm if loop.max_norm is not None else float("inf")
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad * min(1.0, limit / (norms[-1] + 1e-6))
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= loop.gamma
    return [p.detach() for p in parameters], norms


def whole_batch_loss(w: Tensor, x: Tensor) -> Tensor:
    return mse_loss(w * x, 2 * x)
