"""How far a truncated gradient is from the exact one."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accumext.audit._events import Truncated
from accumext.audit._observe import Observer, replaced
from accumext.recurrence import detach
from accumext.rollout import rollout


def watch_tbptt(observer: Observer) -> None:
    """Measure the first call of `accumext.tbptt`, by whatever name a loop has it."""
    module = sys.modules["accumext.tbptt"]
    observer.enter(replaced(module, "_check", functools.partial(_measure_first, observer)))


def _measure_first(observer: Observer, original: Any, *args: Any) -> Any:
    checked = original(*args)
    step, targets, state, criterion, feedback, start, inputs, resets, k1, k2 = args[:10]
    lengths, context, batch_dim = args[-3:]
    observer.settle()
    usual = lengths is None and feedback in ("greedy", "teacher") and targets.numel()
    alone = not (dist.is_available() and dist.is_initialized())  # no process waits for another
    new = observer.left and observer.parameters.tensors and not observer.measured
    if usual and alone and new:
        try:
            write_distance(
                observer, step, targets, state, criterion, k1, k2, feedback, start, inputs, context,
                resets, batch_dim,
            )  # fmt: skip
        except Exception as error:  # of a step that cannot be run again; the loop goes on
            words = f"audit: the truncated gradient was not measured: {error}"
            warnings.warn(words, stacklevel=2)
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
    resets: Tensor | None,
    batch_dim: int | None,
) -> float:
    """Write down the distance for one batch, and return it; of the graph behind the state none."""
    observer.measured = True
    state, context = detach(state), detach(tuple(context))
    k2 = k1 if k2 is None else k2
    if inputs is None:
        first = torch.as_tensor(start, dtype=targets.dtype, device=targets.device)
        first = first.expand_as(targets[0])
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
                start=first, feed=feed, resets=resets, k1=k1, k2=k2, batch_dim=batch_dim,
            )  # fmt: skip
            trained = [t for t in observer.parameters.tensors if t.requires_grad]
            return torch.autograd.grad(out.loss, trained, allow_unused=True)

    apart = size = 0.0
    for truncated, exact in zip(gradient(k1, k2), gradient(None, None), strict=True):
        if truncated is not None and exact is not None:
            apart += float((truncated.double() - exact.double()).square().sum())
            size += float(exact.double().square().sum())
    distance = (apart / size) ** 0.5 if size else 0.0
    observer.write(Truncated, k1=k1, k2=k2, steps=len(targets), distance=distance)
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
