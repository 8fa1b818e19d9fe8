"""What training loops are made of: the loop itself, small models, and data.

Everywhere `watch` stands around a loop: the audit, or `Plain`, which looks on by itself. All data
and parameters are the same at every call.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

N = 4  # micro-batches of a window
SCALE = 2.0**10
LABELS = (12, 3, 7, 5)  # of the micro-batches of each window
IGNORED = -100

Batch = tuple[Tensor, Tensor]
Watch = Callable[..., Any]
Looping = Callable[..., Any]  # of a watch, or of a watch, a model and its optimizer


# --- models ---------------------------------------------------------------------------------------


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


class LanguageModel(nn.Module):
    """`model(tokens, state)`, of which the embedding may be sparse or tied to the head."""

    def __init__(self, *, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16, sparse=sparse)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 11)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, state=None):
        output, state = self.lstm(self.embedding(tokens), state)
        return self.head(output), state


def copy_of(model: nn.Module) -> nn.Module:
    """A target or a teacher: a frozen copy."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, model: nn.Module, rate: float) -> None:
    """A moving average of parameters."""
    for slow, fast in zip(target.parameters(), model.parameters()):
        slow.lerp_(fast, rate)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def adam(model: nn.Module, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, **options)


def scaler_of(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": SCALE, **options})


# --- data -----------------------------------------------------------------------------------------


def rows(count: int = 4 * N) -> list[Batch]:
    """Inputs [8, 16] and classes [8]."""
    g = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 16, generator=g), torch.randint(8, (8,), generator=g)) for _ in range(count)
    ]


def tagged(count: int = 4 * N, labels: Sequence[int] = LABELS, seed: int = 2) -> list[Batch]:
    """Inputs [2, 6, 16] and labels [2, 6], of which so many are not padding, in turn."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        y = torch.randint(8, (12,), generator=g)
        y[labels[i % len(labels)] :] = IGNORED
        batches.append((torch.randn(2, 6, 16, generator=g), y.view(2, 6)))
    return batches


def sentences(count: int, steps: int = 30, vocabulary: int = 11) -> list[Batch]:
    """Tokens [steps, 4] and a state [4, 16]."""
    g = torch.Generator().manual_seed(2)
    return [
        (torch.randint(vocabulary, (steps, 4), generator=g), torch.randn(4, 16, generator=g))
        for _ in range(count)
    ]


def pairs(count: int, classes: int = 11, length: int = 6) -> list[Batch]:
    """Tokens [4, length], and those that follow each."""
    tokens = torch.randint(classes, (count, 4, length + 1))
    return [(row[:, :-1], row[:, 1:]) for row in tokens]


def of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def of_labels(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def of_tokens(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def slopes(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Gradients for the inputs, of which a gradient can be taken again."""
    return torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]


def judged(scores: Tensor, label: float) -> Tensor:
    """The loss of a discriminator that shall give all of these one label."""
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def windows_of(batches: Sequence[Batch]) -> list[Sequence[Batch]]:
    return [batches[begin : begin + N] for begin in range(0, len(batches), N)]


def in_windows(*lengths: int) -> list[Sequence[Batch]]:
    """Windows of so many micro-batches."""
    batches = iter(rows(sum(lengths)))
    return [[next(batches) for _ in range(length)] for length in lengths]


# --- the loop -------------------------------------------------------------------------------------


def run(loop: Looping, watch: Watch) -> tuple[Any, nn.Module, Any]:
    """Run a loop, with a network and SGD if it takes them.

    Returns:
        what looked on last; the model and the optimizer that it was told.
    """
    seen: list[tuple[Any, nn.Module, Any]] = []

    def watching(model: nn.Module, optimizer: Any, **options: Any) -> Any:
        seen.append((watch(model, optimizer, **options), model, optimizer))
        return seen[-1][0]

    model = network()
    own = len(signature(loop).parameters) == 1
    loop(*([watching] if own else [watching, model, sgd(model)]))
    return seen[-1]


def nothing(*_: object) -> None:
    """What most loops do more."""


def clipping(model: nn.Module, max_norm: float) -> Callable[[], object]:
    """A clip, to be done before a step."""
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def unwatched(*_: object, **options: Any) -> Any:
    """Where nothing looks on, or something around it does."""
    return nullcontext()


def train(
    watch: Watch,
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Batch] | None = None,
    loss_of: Callable[..., Tensor] = of_rows,
    *,
    n: int = N,
    divisor: Any = None,
    scaler: GradScaler | None = None,
    each: Callable[[int], object] = nothing,
    before: Callable[[], object] = nothing,
    step: Callable[[], object] | None = None,
    clear: Callable[[], object] | None = None,
    after: Callable[[], object] = nothing,
    end: Callable[[int], object] = nothing,
    **options: Any,
) -> Any:
    """Losses divided by `n` or another divisor, and after every `n` a step and `zero_grad`.

    A loop does more after `each` pass, `before` and `after` its steps and at the `end` of every
    micro-batch, or it has another `step` or another way to `clear` gradients.
    """

    def usual_step():
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    step, clear = step or usual_step, clear or optimizer.zero_grad
    with watch(model, optimizer, **options) as audit:
        for i, (x, y) in enumerate(rows() if batches is None else batches):
            loss = loss_of(model, x, y) / (n if divisor is None else divisor)
            (loss if scaler is None else scaler.scale(loss)).backward()
            each(i)
            if (i + 1) % n == 0:
                before()
                step()
                clear()
                after()
            end(i)
    return audit


def stepping(
    watch: Watch,
    model: nn.Module,
    optimizer: Any,
    parts: Iterable[Any],
    *,
    every: int = 1,
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
    **options: Any,
) -> Iterator[Any]:
    """Yield parts of the data, whose passes the caller runs; after `every` so many comes a step,
    then `zero_grad`."""
    with watch(model, optimizer, **options):
        for i, part in enumerate(parts, 1):
            yield part
            if i % every == 0:
                before()
                optimizer.step()
                optimizer.zero_grad()
                after()


def at_two_lines(
    watch: Watch,
    model: nn.Module,
    optimizer: Any,
    lengths: Sequence[int],
    divisor: int | None = None,
) -> None:
    """The last micro-batch of each window has a line of its own, as with DDP, whose `no_sync` is
    around the others. Divided by what the window holds, or by another divisor."""
    for window in stepping(watch, model, optimizer, in_windows(*lengths), windows=len(lengths)):
        for x, y in window[:-1]:
            (of_rows(model, x, y) / (divisor or len(window))).backward()
        (of_rows(model, *window[-1]) / (divisor or len(window))).backward()


def decoded(model: nn.Module, targets: Tensor, hidden: Tensor, cut: int | None = None) -> Tensor:
    """The mean loss of a decoder that is fed its own argmax; cut: its state is detached before
    every so many tokens."""
    token, loss = torch.zeros_like(targets[0]), torch.zeros(())
    for t, target in enumerate(targets):
        logits, hidden = model(token, hidden.detach() if cut and t % cut == 0 else hidden)
        loss = loss + cross_entropy(logits, target) / len(targets)
        token = logits.argmax(1)
    return loss
