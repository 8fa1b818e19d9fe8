"""The decoder by its definition: a plain autograd loop over tokens that are given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

CELLS = {
    "gru_cell": (nn.GRUCell, None),
    "lstm_cell": (nn.LSTMCell, None),
    "rnn_cell": (nn.RNNCell, None),
    "rnn_relu_cell": (nn.RNNCell, None),
    "gru": (nn.GRU, 2),
    "lstm": (nn.LSTM, 2),
    "rnn": (nn.RNN, 1),
    "rnn_relu": (nn.RNN, 2),
    "gru_1": (nn.GRU, 1),
}


@dataclass
class Decoder:
    """A small decoder, its initial state, and what its gradients are taken for."""

    embedding: nn.Embedding
    cell: Any
    head: nn.Linear
    state: Any
    step: Callable[..., Any]
    context: tuple[Tensor, ...] = ()
    leaves: list[Tensor] = field(default_factory=list)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves, materialize_grads=True))


def make_decoder(
    kind: str,
    vocabulary: int = 13,
    size: int = 5,
    batch: int = 3,
    dtype: torch.dtype = torch.float64,
    tied: bool = False,
    bias: bool = True,
    padding_idx: int | None = None,
    dropout: float = 0.0,
    inputs: int | None = None,  # E, else `size`
    cell_bias: bool = True,
    layers: int | None = None,  # of a module that has them, else those of CELLS
) -> Decoder:
    """A decoder around one of torch's cells."""
    factory, usual = CELLS[kind]
    layers = usual if usual is None or layers is None else layers
    inputs = size if inputs is None or tied else inputs
    embedding = nn.Embedding(vocabulary, inputs, padding_idx=padding_idx, dtype=dtype)
    head = nn.Linear(size, vocabulary, bias=bias, dtype=dtype)
    if tied:
        head.weight = embedding.weight
    options = {"nonlinearity": "relu"} if "relu" in kind else {}
    if layers is None:
        cell = factory(inputs, size, cell_bias, dtype=dtype, **options)
        shape: tuple[int, ...] = (batch, size)
    else:
        dropout = dropout if layers > 1 else 0.0
        options |= {"bias": cell_bias, "dropout": dropout, "dtype": dtype}
        cell = factory(inputs, size, layers, **options)
        shape = (layers, batch, size)
    pair = "lstm" in kind
    hidden = torch.randn(shape, dtype=dtype).requires_grad_()
    memory = torch.randn(shape, dtype=dtype).requires_grad_()
    state = (hidden, memory) if pair else hidden

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        if layers is not None:
            output, state = cell(x[None], state)
            return output[0], state
        state = cell(x, state)
        return (state[0] if pair else state), state

    leaves = {id(p): p for m in (embedding, cell, head) for p in m.parameters()}
    states = [hidden, memory] if pair else [hidden]
    return Decoder(embedding, cell, head, state, step, (), [*leaves.values(), *states])


def decode(
    decoder: Decoder,
    targets: Tensor,  # int64 [T, B]
    inputs: Tensor,  # int64 [T, B]
    live: Tensor | None = None,  # bool [T, B]
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    windows: tuple[int, int] | None = None,  # (k1, k2)
    resets: Tensor | None = None,  # bool [T, B]
    embedding_dropout: float = 0.0,
    output_dropout: float = 0.0,
    outputs: list[Tensor] | None = None,  # gets those of the cell, [B, H] of each step
    states: list[Any] | None = None,  # gets those at the ends of windows
    objective: Callable[[int, Tensor, Tensor], Tensor] | None = None,  # of `support.objectives`
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [T, B] per token, their divisor under "mean", and logits [T, B, V]; TBPTT(k1, k2) under
    `windows`."""
    live = torch.ones_like(targets, dtype=torch.bool) if live is None else live

    def run(begin: int, end: int, state: Any) -> tuple[list[tuple[Tensor, Tensor]], Any]:
        found = []
        for t in range(begin, end):
            x = F.dropout(decoder.embedding(inputs[t]), embedding_dropout)
            if resets is not None:
                state = _select(resets[t] & live[t], decoder.state, state)
            output, new = decoder.step(x, state, *decoder.context)
            state = _select(live[t], new, state)
            if outputs is not None:
                outputs.append(torch.where(live[t][:, None], output, 0))
            z = decoder.head(F.dropout(output, output_dropout))
            wanted = targets[t].where(live[t], ignore_index)
            options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
            loss = F.cross_entropy(z, wanted, class_weight, reduction="none", **options)
            if objective is not None:
                loss = objective(t, z, loss)
            counted = live[t] & (targets[t] != ignore_index)
            found.append(((loss + z_loss * z.logsumexp(-1).square()) * counted, z))
        if states is not None:
            states.append(state)
        return found, state

    found, _ = truncated(run, decoder.state, len(targets), *(windows or (None, None)))
    losses, logits = zip(*found)
    counted = live & (targets != ignore_index)
    weights = counted.to(losses[0].dtype)
    if class_weight is not None:
        weights = weights * class_weight[targets.where(counted, 0)]
    return torch.stack(losses), weights.sum(), torch.stack(logits).detach()


def plain_losses(
    step: Callable[[Tensor, Any], tuple[Tensor, Any]],
    targets: Tensor,  # int64 [T, B]
    state: Any,
    greedy: bool = True,  # else it is fed the targets
) -> Iterator[Tensor]:
    """The mean loss of each step of the loop that people write, fed the argmax of the one before:
    `step(token, state)` returns logits and state."""
    token = torch.zeros_like(targets[0])
    for target in targets:
        logits, state = step(token, state)
        token = logits.detach().argmax(-1) if greedy else target
        yield F.cross_entropy(logits, target)


def _select(live: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_select(live, n, o) for n, o in zip(new, old, strict=True))
    return torch.where(live[:, None], new, old)  # the batch is the last but one in every cell here


def truncated(
    run: Callable[[int, int, Any], tuple[list[Any], Any]],
    initial: Any,
    steps: int,
    k1: int | None,
    k2: int | None,
) -> tuple[list[Any], Any]:
    """TBPTT(k1, k2) by its definition: every window runs again from the detached state k2 steps
    before its end. `run(begin, end, state)` returns what each step gives, and the last state; so
    does this, with each step once. Without k2 there is one window."""
    if k2 is None:
        return run(0, steps, initial)
    states = [initial]  # before every step, without a graph but for the first
    for t in range(steps):
        states.append(detached(run(t, t + 1, detached(states[-1]))[1]))
    found: list[Any] = []
    state = initial
    for end in [*range(k1 or k2, steps, k1 or k2), steps]:
        begin = len(found)
        first = begin if k1 in (None, k2) else max(0, end - k2)
        some, state = run(first, end, states[first])
        found += some[begin - first :]
    return found, state


def detached(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, state)


def relative_distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Distance of two lists of gradients over the norm of the expected."""
    top = sum(
        float((a.double() - e.double()).square().sum())
        for a, e in zip(actual, expected, strict=True)
    )
    bottom = sum(float(e.double().square().sum()) for e in expected)
    return (top / bottom) ** 0.5 if bottom else top**0.5
