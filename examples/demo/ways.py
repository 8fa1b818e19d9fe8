"""The same batch and tokens through accumext, plain PyTorch, and a backward pass per token."""

from __future__ import annotations

import argparse
import copy
import functools
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext._peak_memory import peak_memory

from .reciter import Reciter
from .report import BUDGET_STEPS, Record, Row
from .text import OPENING

TOTAL_SECONDS = 120.0  # no repetition but the first begins later
_REPETITIONS = 3
_EXACT_COLUMNS = 2  # columns of a batch at once in float64, to bound the memory
_CURVE = (1, 2, 4, 6)  # eighths of the steps at which memory is measured, besides all of them

Way = Callable[[Reciter, Tensor, Tensor], Tensor]  # (model, texts, tokens to feed) -> loss


def with_accumext(model: Reciter, texts: Tensor, tokens: Tensor) -> Tensor:
    """Run forward and backward with tokens that the decoder predicts itself; exact gradients."""
    budget = BUDGET_STEPS * texts.shape[1] * model.head.weight.shape[0] * 4
    out = model.decode(texts, "greedy", memory_budget=budget)
    out.loss.backward()
    return out.loss.detach()


def by_hand(model: Reciter, texts: Tensor, tokens: Tensor, per_token: bool) -> Tensor:
    """Run one backward pass over the losses of all steps: exact gradients. Or, `per_token`, one
    after every step, with a detached state: no gradient flows back in time."""
    state, total = model.encode(texts), torch.zeros((), device=texts.device)
    for token, target in zip(tokens, texts[OPENING:], strict=True):
        state = model.cell(model.embedding(token), state)
        loss = F.cross_entropy(model.head(state), target) / len(tokens)
        if per_token:
            loss.backward()
            state, loss = state.detach(), loss.detach()
        total = total + loss
    if not per_token:
        total.backward()
    return total.detach()


WAYS: dict[str, Way] = {
    "accumext.decode_loss": with_accumext,
    "plain PyTorch": functools.partial(by_hand, per_token=False),
    "backward per token": functools.partial(by_hand, per_token=True),
}


def compare(model: Reciter, texts: Tensor, args: argparse.Namespace, record: Record) -> None:
    """Measure every way on one batch, in float32, fed the model's own tokens.

    accumext predicts them as it goes. The other two replay them, which spares them the argmax.
    The exact gradient is plain autograd's in float64 on the same tokens. The ways take turns, so
    that other work of the machine slows all of them alike. For a plot, memory is also measured on
    the first steps only.
    """
    with torch.no_grad():
        tokens = model.decode(texts, "greedy").inputs
    record.say("comparing on docstrings that it has not seen: exact gradients in float64")
    exact = exact_gradients(model, texts, tokens)
    length = len(tokens)
    lengths = {max(1, length * n // 8) for n in _CURVE if args.plot is not None} | {length}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for name, way in WAYS.items():
            record.say(f"comparing: gradients and memory of {name}")
            memory: dict[int, int] = {}
            for steps in sorted(lengths):
                model.zero_grad()
                run = functools.partial(way, model, texts[: OPENING + steps], tokens[:steps])
                memory[steps] = peak_memory(run, texts.device)
            distance = relative_distance(gradients(model), exact)
            record.comparison.append(Row(name, memory, distance))
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        while record.repetitions < _REPETITIONS:
            if record.repetitions and record.elapsed() >= TOTAL_SECONDS:
                break
            record.say(f"comparing: times, repetition {record.repetitions + 1}")
            for row in record.comparison:
                model.zero_grad()
                begin = time.perf_counter()
                row.loss = float(WAYS[row.name](model, texts, tokens))  # waits for the device
                if args.device == "cuda":
                    torch.cuda.synchronize()
                times[row.name].append(time.perf_counter() - begin)
                row.seconds = statistics.median(times[row.name])
            record.repetitions += 1
    model.zero_grad()


def relative_distance(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """Return |g - exact| / |exact| over all parameters together."""
    pairs = zip(gradients, exact, strict=True)
    apart = sum(float((g.double() - e).square().sum()) for g, e in pairs)
    return math.sqrt(apart / sum(float(e.square().sum()) for e in exact))


def exact_gradients(model: Reciter, texts: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return the gradients of plain autograd in float64, a few columns at a time."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    for some in torch.arange(texts.shape[1]).split(_EXACT_COLUMNS):
        state, states = exact.encode(texts[:, some]), []
        for x in exact.embedding(tokens[:, some]):
            state = exact.cell(x, state)
            states.append(state)
        logits = exact.head(torch.stack(states).flatten(0, 1))
        losses = F.cross_entropy(logits, texts[OPENING:, some].flatten(), reduction="sum")
        (losses / tokens.numel()).backward()
    return gradients(exact)


def gradients(model: Reciter) -> list[Tensor]:
    """Return the gradients of all parameters."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
