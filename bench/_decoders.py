"""A decoder that feeds its own greedy tokens back, trained in the ways that there are.

Each way is a function that runs forward and backward once and leaves the gradients of the mean loss
in `.grad`. The decoder is in float32; in bfloat16 all of them run under one torch.autocast, which
is around the backward pass, too, so that the parameters are rounded once per call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _head_peers import HeadLoss, head_losses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accumext

CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}
WINDOW = 8  # steps whose head the windowed ways run backward at once

PLAIN, PER_TOKEN = "plain autograd", "backward per token (truncated)"
CHECKPOINT, OURS = "checkpointed head", "accumext"
OURS_BF16, PRODUCTS = "accumext, bf16", "the head's products in torch"


class Shape(NamedTuple):
    """Steps, rows, vocabulary, and the size of embedding and state."""

    steps: int
    batch: int
    vocabulary: int
    size: int
    role: str = ""  # by which the figures know it

    @property
    def tokens(self) -> int:
        return self.steps * self.batch

    @property
    def logits(self) -> int:
        return self.tokens * self.vocabulary

    def __str__(self) -> str:
        return f"T={self.steps} B={self.batch} V={self.vocabulary:,} H={self.size}"


class Outcome(NamedTuple):
    loss: Tensor  # 0-dim
    inputs: Tensor  # int64 [T, B], the tokens fed: a teacher-forced run on them is the same run


class Decoder:
    """Parameters in float32, and the targets."""

    def __init__(self, shape: Shape, cell: str, device: torch.device) -> None:
        self.embedding = nn.Embedding(shape.vocabulary, shape.size, device=device)
        self.cell = CELLS[cell](shape.size, shape.size, device=device)
        self.head = nn.Linear(shape.size, shape.vocabulary, device=device)
        steps = shape.steps, shape.batch
        self.targets = torch.randint(shape.vocabulary, steps, device=device)
        self.start = torch.zeros(shape.batch, dtype=torch.int64, device=device)

    def parameters(self) -> list[Tensor]:
        modules = self.embedding, self.cell, self.head
        return [parameter for module in modules for parameter in module.parameters()]

    def forget(self) -> None:
        """Set every gradient to None, as an optimizer's zero_grad does."""
        for parameter in self.parameters():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output [B, H] and the state after it; the state None is zero."""
        state = self.cell(self.embedding(token), state)
        return (state[0] if isinstance(state, tuple) else state), state

    def cast(self, dtype: torch.dtype) -> Decoder:
        """Return a copy whose parameters are rounded to another precision."""
        other = copy.copy(self)
        for name in ("embedding", "cell", "head"):
            setattr(other, name, copy.deepcopy(getattr(self, name)).to(dtype))
        return other


Way = Callable[[Decoder], Outcome]


def plain(decoder: Decoder) -> Outcome:
    """Run all steps in one graph, which holds their probabilities, and one backward pass."""
    state, token = None, decoder.start
    inputs, losses = [], []
    for target in decoder.targets:
        inputs.append(token)
        output, state = decoder.step(token, state)
        logits = decoder.head(output)
        losses.append(F.cross_entropy(logits, target))
        token = logits.detach().argmax(-1)
    loss = torch.stack(losses).mean()
    loss.backward()
    return Outcome(loss.detach(), torch.stack(inputs))


def per_token(decoder: Decoder) -> Outcome:
    """Run backward after every step and detach the state: nothing flows back in time."""
    state, token = None, decoder.start
    inputs, losses = [], []
    for target in decoder.targets:
        inputs.append(token)
        output, state = decoder.step(token, state)
        logits = decoder.head(output)
        loss = F.cross_entropy(logits, target) / len(decoder.targets)
        loss.backward()
        losses.append(loss.detach())
        token = logits.detach().argmax(-1)
        state = detached(state)
    return Outcome(torch.stack(losses).sum(), torch.stack(inputs))


def checkpointed(decoder: Decoder) -> Outcome:
    """Run head and loss again in the backward pass, step by step, so that no logits are kept."""

    def head(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = decoder.head(output)
        return F.cross_entropy(logits, target), logits.detach().argmax(-1)

    state, token = None, decoder.start
    inputs, losses = [], []
    for target in decoder.targets:
        inputs.append(token)
        output, state = decoder.step(token, state)
        loss, token = checkpoint(head, output, target, use_reentrant=False)
        losses.append(loss)
    loss = torch.stack(losses).mean()
    loss.backward()
    return Outcome(loss.detach(), torch.stack(inputs))


def windowed(head_loss: HeadLoss, dtype: torch.dtype, decoder: Decoder) -> Outcome:
    """Run the head of every window backward at once, which frees what the loss keeps; the cells
    run backward at the end, so that the gradient is exact. The greedy token is a product more."""
    weight, bias = (parameter.to(dtype) for parameter in (decoder.head.weight, decoder.head.bias))
    state, token = None, decoder.start
    inputs, outputs = [], []
    gradients: list[Tensor] = []  # of the outputs
    total = torch.zeros((), device=token.device)
    for targets in decoder.targets.split(WINDOW):
        for _ in targets:
            inputs.append(token)
            output, state = decoder.step(token, state)
            outputs.append(output)
            with torch.no_grad():
                token = F.linear(output.to(dtype), weight, bias).argmax(-1)
        hidden = torch.cat([output.detach() for output in outputs[-len(targets) :]])
        hidden.requires_grad_()
        with torch.autocast(hidden.device.type, enabled=False):
            loss = head_loss(hidden.to(dtype), weight, bias, targets.flatten())
            loss = loss.float() / decoder.targets.numel()
            loss.backward()
        total += loss.detach()
        assert hidden.grad is not None
        gradients += hidden.grad.chunk(len(targets))
    torch.autograd.backward(outputs, gradients)
    return Outcome(total, torch.stack(inputs))


def ours(decoder: Decoder) -> Outcome:
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, decoder.targets, feedback="greedy"
    )
    out.loss.backward()
    return Outcome(out.loss.detach(), out.inputs)


def ways(device: torch.device, dtype: torch.dtype, batch: int) -> dict[str, Way]:
    """Return all ways in a precision, by name; the first is what the others are compared with."""

    def cast(way: Way) -> Way:
        return lambda decoder: _under_autocast(way, decoder)

    def in_windows(head_loss: HeadLoss) -> Way:
        return lambda decoder: windowed(head_loss, dtype, decoder)

    found: dict[str, Way] = {PLAIN: plain, PER_TOKEN: per_token, CHECKPOINT: checkpointed}
    peers = head_losses(device, dtype, WINDOW * batch)
    found |= {name: in_windows(head_loss) for name, head_loss in peers.items()}
    found[OURS] = ours
    if dtype != torch.float32:
        return {name: cast(way) for name, way in found.items()}
    if device.type == "cpu":
        found[OURS_BF16] = cast(ours)
    return found


def _under_autocast(way: Way, decoder: Decoder) -> Outcome:
    with torch.autocast(decoder.targets.device.type, dtype=torch.bfloat16):
        return way(decoder)


def products(decoder: Decoder, dtype: torch.dtype) -> Callable[[], None]:
    """Return a run of the head's products alone, into memory that exists: per step the logits, and
    per window of steps the gradients of the outputs and of the weight, as torch does them."""
    steps, batch = decoder.targets.shape
    weight = decoder.head.weight.detach().to(dtype)
    vocabulary, size = weight.shape
    rows = WINDOW * batch
    logits = weight.new_empty(vocabulary, batch)
    hidden, d_hidden = weight.new_empty(rows, size).normal_(), weight.new_empty(rows, size)
    d_logits, d_weight = weight.new_empty(rows, vocabulary).normal_(), torch.zeros_like(weight)

    def run() -> None:
        for first in range(0, steps, WINDOW):
            count = min(WINDOW, steps - first)
            for step in range(count):
                torch.mm(weight, hidden[step * batch : (step + 1) * batch].t(), out=logits)
            some = slice(count * batch)
            torch.mm(d_logits[some], weight, out=d_hidden[some])
            d_weight.addmm_(d_logits[some].t(), hidden[some])

    return run


class Exact(NamedTuple):
    """The results of plain autograd on given tokens, in the decoder's own precision."""

    loss: Tensor
    gradients: list[Tensor]
    greedy: Tensor  # int64 [T, B], the argmax of every step; perhaps without that of the last


def exact(decoder: Decoder, inputs: Tensor, state: Any = None, window: int | None = None) -> Exact:
    """Run plain autograd, backward at the end or after every window, which detaches the state."""
    window = window or len(inputs)
    total, greedy = torch.zeros((), dtype=decoder.head.weight.dtype, device=inputs.device), []
    gradients = [torch.zeros_like(parameter) for parameter in decoder.parameters()]
    for tokens, targets in zip(inputs.split(window), decoder.targets.split(window)):
        losses = []
        for token, target in zip(tokens, targets):
            output, state = decoder.step(token, state)
            logits = decoder.head(output)
            losses.append(F.cross_entropy(logits, target))
            greedy.append(logits.detach().argmax(-1))
        loss = torch.stack(losses).sum() / len(inputs)
        torch._foreach_add_(gradients, torch.autograd.grad(loss, decoder.parameters()))
        total += loss.detach()
        state = detached(state)
    return Exact(total, gradients, torch.stack(greedy))


def detached(state: Any) -> Any:
    return tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
