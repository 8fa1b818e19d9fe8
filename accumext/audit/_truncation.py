"""How far a truncated gradient is from the exact one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accumext.audit._events import Truncated
from accumext.audit._observe import Observer, replaced
from accumext.rollout import rollout


def watch_tbptt(observer: Observer) -> None:
    """Measure the first call of `accumext.tbptt`, by whatever name a loop has it."""
    module = sys.modules["accumext.tbptt"]
    observer.patch(replaced(module, "_check", functools.partial(_measure_first, observer)))


def _measure_first(observer: Observer, original: Any, *args: Any) -> Any:
    checked = original(*args)
    step, targets, state, criterion, feedback, start, inputs, k1, k2 = args[:9]
    lengths, context = args[-3:-1]
    simple = lengths is None and feedback in ("greedy", "teacher") and targets.numel()
    if simple and observer.left and not observer.measured:
        write_distance(
            observer, step, targets, state, criterion, k1, k2, feedback, start, inputs, context
        )
    return checked


def write_distance(
    observer: Observer,
    step: Callable[..., tuple[Tensor, Any]],
    targets: Tensor,
    state: Any,
    criterion: Callable[[Tensor, Tensor], Tensor],
    k1: int,
    k2: int | None,
    feedback: str,
    start: int | Tensor,
    inputs: Tensor | None,
    context: Sequence[Tensor],
) -> float:
    """Write down the distance for one batch, and return it."""
    observer.measured = True
    k2 = k1 if k2 is None else k2
    first = (
        inputs[0]
        if inputs is not None
        else torch.as_tensor(start).to(targets).expand_as(targets[0])
    )
    known = feedback == "teacher"

    def feed(output: Tensor, t: int) -> Tensor:
        if not known:
            return output.argmax(-1)
        following = targets if inputs is None else inputs[1:]
        return following[t].clamp(min=0) if inputs is None else following[t]

    def gradient(k1: int | None, k2: int | None) -> list[Tensor | None]:
        with torch.enable_grad(), _unchanged(observer, targets.device):
            out = rollout(
                lambda token, state: step(token, state, *context),
                state, len(targets), loss=lambda output, t: criterion(output, targets[t]),
                start=first, feed=feed, k1=k1, k2=k2,
            )  # fmt: skip
            trained = [t for t in observer.parameters.tensors if t.requires_grad]
            return list(torch.autograd.grad(out.loss, trained, allow_unused=True))

    truncated, exact = gradient(k1, k2), gradient(None, None)
    pairs = [
        (a, b) for a, b in zip(truncated, exact, strict=True) if a is not None and b is not None
    ]
    size = sum(b.double().square().sum() for _, b in pairs)
    apart = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    inner = sum((a.double() * b.double()).sum() for a, b in pairs)
    own = sum(a.double().square().sum() for a, _ in pairs)
    distance = float((apart / size) ** 0.5) if pairs else 0.0
    cosine = float(inner / (size * own) ** 0.5) if pairs else 1.0
    steps = len(targets)
    observer.write(
        Truncated,
        k1=lambda: k1, k2=lambda: k2, steps=lambda: steps,
        distance=lambda: distance, cosine=lambda: cosine,
    )  # fmt: skip
    return distance


@contextmanager
def _unchanged(observer: Observer, device: torch.device) -> Iterator[None]:
    """Generators and the model's buffers as they were, afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in observer.buffers()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
