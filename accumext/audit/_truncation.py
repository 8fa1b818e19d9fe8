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
    observer.enter(replaced(module, "_check", functools.partial(_measure_first, observer)))


def _measure_first(observer: Observer, original: Any, *args: Any) -> Any:
    checked = original(*args)
    step, targets, state, criterion, feedback, start, inputs, k1, k2 = args[:9]
    lengths, context = args[-3:-1]
    observer.settle()
    usual = lengths is None and feedback in ("greedy", "teacher") and targets.numel()
    if usual and observer.left and observer.parameters.tensors and not observer.measured:
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
    if inputs is None:
        first = torch.as_tensor(start).to(targets).expand_as(targets[0])
        following = targets if targets.is_floating_point() else targets.clamp(min=0)
    else:
        first, following = inputs[0], inputs[1:]

    def feed(output: Tensor, t: int) -> Tensor:
        return following[t] if feedback == "teacher" else output.argmax(-1)

    def gradient(k1: int | None, k2: int | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad(), _unchanged(observer, targets.device):
            out = rollout(
                lambda token, state: step(token, state, *context),
                state, len(targets), loss=lambda output, t: criterion(output, targets[t]),
                start=first, feed=feed, k1=k1, k2=k2,
            )  # fmt: skip
            trained = [t for t in observer.parameters.tensors if t.requires_grad]
            return torch.autograd.grad(out.loss, trained, allow_unused=True)

    grads = zip(gradient(k1, k2), gradient(None, None), strict=True)
    pairs = [(a.double(), b.double()) for a, b in grads if a is not None and b is not None]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    distance = (apart / size) ** 0.5 if size else 0.0
    observer.write(
        Truncated,
        k1=k1, k2=k2, steps=len(targets), distance=distance,
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
