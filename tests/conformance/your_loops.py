"""The loops of examples/from_your_loop: their data, and what each of them is to compute."""

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support import ROOT
from support.decode_oracle import plain_losses
from support.optimizer_oracle import ByHand, parameters_of, windows_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


@pytest.fixture
def forget_accelerate():
    """Reset Accelerate's state, one per process, which no test may leave to the next."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


# Warnings of torch that Lightning causes, its advice where there are more cores, batches or a GPU
frameworks = [
    pytest.mark.usefixtures("forget_accelerate"),
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
        "ignore:.*does not have many workers",
        "ignore:GPU available but not used",
        "ignore:.*number of training batches",
        "ignore:.pin_memory. argument is set as true:UserWarning",
    ),
]
# Lightning's and transformers' trainers write, print and log nothing.
LIGHTNING = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
TRAINER = {
    "num_train_epochs": 1,
    "train_sampling_strategy": "sequential",
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
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


def drawn(
    count: int, numbers: tuple[int, ...], classes: tuple[int, ...], below: int
) -> list[Batch]:
    """Draw pairs of numbers and of classes, the same at every call."""
    g = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(numbers, generator=g, dtype=torch.float64),
            torch.randint(below, classes, generator=g),
        )
        for _ in range(count)
    ]


def steeper(batches: list[Batch]) -> list[Batch]:
    """The later half of the inputs enlarged, so that some windows are clipped and others not."""
    half = len(batches) // 2
    return batches[:half] + [(10 * x, y) for x, y in batches[half:]]


def rows(count: int = 3 * N, *size: int) -> list[Batch]:
    """Inputs [*size, 3] and classes [*size]; five rows if nothing is said."""
    size = size or (5,)
    return steeper(drawn(count, (*size, 3), size, 4))


def sentences(count: int = 3 * N) -> list[Batch]:
    """Target tokens [T, B] and a hidden state [B, H]."""
    return [(targets, hidden) for hidden, targets in drawn(count, (3, 6), (7, 3), 11)]


def states_of_layers(count: int = 2 * N) -> list[Batch]:
    return [(targets, hidden[None]) for targets, hidden in sentences(count)]


def padded(count: int = 2 * N) -> list[Batch]:
    """Inputs [2, 6, 3] and labels [2, 6], of which each batch has another number."""
    batches = rows(count, 2, 6)
    for i, (_, y) in enumerate(batches):
        y[:, 1 + i % 5 :] = -100
    return batches


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
    step = (lambda token, hidden: model(token, hidden.detach())) if cut else model
    return torch.stack([*plain_losses(step, targets, hidden)]).mean()


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


DECODER = Loop(model=Decoder, batches=sentences, loss=fed_its_argmax, max_norm=2.0, device=True)
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
    "greedy_decoder": DECODER,
    "backward_per_token": replace(DECODER, loss=partial(fed_its_argmax, cut=True)),
    "backward_once": DECODER,
    "head_slices": Loop(batches=lambda: rows(2 * N, 20)),
}
# Loops of another shape: one loss, and one step of one parameter.
OTHERS = ("liger_chunked", "whole_batch")


def by_definition(
    loop: Loop, batches: Sequence[Batch], n: int = N, divisor: float | None = None
) -> tuple[list[Tensor], list[float]]:
    """Parameters after a step on each window's gradient, and the norms before clipping.

    The weighted sum of a window's losses is divided by the weights, or by `divisor`.
    """
    model, make = loop.model(), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options = {"max_norm": loop.max_norm, "reduction": "sum" if divisor else "mean"}
    by_hand, norms = ByHand(model.parameters(), make, **options), []
    for window in windows_of(batches, n):
        for batch in window:
            by_hand.add(loop.loss(model, batch), loop.weight(batch) / (divisor or 1.0))
        norms.append(by_hand.norm())
        by_hand.step()
        by_hand.optimizer.param_groups[0]["lr"] *= loop.gamma
    return parameters_of(model), norms
