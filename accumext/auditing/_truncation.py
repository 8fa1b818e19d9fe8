"""How far a truncated gradient is from the exact one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import accumext
from accumext.auditing._events import Truncated
from accumext.auditing._observe import Observer
from accumext.auditing._torch_private import tree_map_only
from accumext.recurrence.observing import Call, observers

Gradient = tuple[Tensor | None, ...]


@contextmanager
def watch_truncation(observer: Observer) -> Iterator[None]:
    """Measure the first truncated call of `accumext.tbptt` or `accumext.decode_loss`."""
    see = functools.partial(_measure_first, observer)
    observers.append(see)
    try:
        yield
    finally:
        observers.remove(see)


def _measure_first(observer: Observer, call: Call) -> None:
    given = call.arguments
    observer.steps.settle()
    usual = given["lengths"] is None and given["feedback"] in ("greedy", "teacher")
    cut = call.function is accumext.tbptt or given["k2"] is not None
    drawn = given.get("truncation") == "random" or given["reduction"] == "none"
    alone = not (dist.is_available() and dist.is_initialized())  # else processes could wait forever
    new = observer.watching and observer.parameters.tensors and not observer.measured
    if usual and cut and not drawn and alone and new:
        measure = of_tbptt if call.function is accumext.tbptt else _of_decode_loss
        try:
            measure(observer, given)
        except Exception as error:  # the step cannot be run twice; the loop goes on
            words = f"audit: the truncated gradient was not measured: {error}"
            warnings.warn(words, stacklevel=2)


def _of_decode_loss(observer: Observer, given: Mapping[str, Any]) -> None:
    observer.measured = True
    like = given["inputs"] if given["targets"] is None else given["targets"]
    again = {**given, **{name: _detached(given[name]) for name in ("state", "inputs", "context")}}

    def gradient(**cuts: None) -> Gradient:
        with _unchanged(observer, like.device):
            return _gradient(observer, accumext.decode_loss(**{**again, **cuts}).loss)

    steps = like.shape[1 if given["batch_first"] else 0]
    _write(observer, given, steps, gradient(), gradient(k1=None, k2=None))


def of_tbptt(observer: Observer, given: Mapping[str, Any]) -> float:
    """Write down the distance for one batch, and return it, by the arguments of `tbptt`. The
    graph behind the state does not count."""
    observer.measured = True
    targets, k1 = given["targets"], given["k1"]
    # Detached: the graphs behind these belong to the loop, whose own passes free them.
    inputs, state, context = (_detached(given[name]) for name in ("inputs", "state", "context"))
    if inputs is None:
        first = torch.as_tensor(given["start"], dtype=targets.dtype, device=targets.device)
        first = first.expand_as(targets[0])
        following = targets if targets.is_floating_point() else targets.clamp(min=0)
    else:
        first, following = inputs[0], inputs[1:]

    def feed(output: Tensor, t: int) -> Tensor:
        return following[t] if given["feedback"] == "teacher" else output.argmax(-1)

    def gradient(k1: int | None, k2: int | None) -> Gradient:
        with _unchanged(observer, targets.device):
            out = accumext.rollout(
                lambda token, state: given["step"](token, state, *context),
                state, len(targets), loss=lambda output, t: given["criterion"](output, targets[t]),
                start=first, feed=feed, resets=given["resets"], k1=k1, k2=k2,
                batch_dim=given["batch_dim"],
            )  # fmt: skip
            return _gradient(observer, out.loss)

    truncated = gradient(k1, k1 if given["k2"] is None else given["k2"])
    return _write(observer, given, len(targets), truncated, gradient(None, None))


def _detached(state: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, state)


def _gradient(observer: Observer, loss: Tensor) -> Gradient:
    trained = [t for t in observer.parameters.tensors if t.requires_grad]
    return torch.autograd.grad(loss, trained, allow_unused=True)


def _write(
    observer: Observer, given: Mapping[str, Any], steps: int, truncated: Gradient, exact: Gradient
) -> float:
    apart = size = 0.0
    for a, b in zip(truncated, exact, strict=True):
        if a is not None and b is not None:
            apart += float((a.double() - b.double()).square().sum())
            size += float(b.double().square().sum())
    distance = (apart / size) ** 0.5 if size else 0.0
    k1, k2 = given["k1"] or given["k2"], given["k2"] or given["k1"]
    observer.journal.write(Truncated, k1=k1, k2=k2, steps=steps, distance=distance)
    return distance


@contextmanager
def _unchanged(observer: Observer, device: torch.device) -> Iterator[None]:
    """Enable gradients, and restore generators and the models' buffers afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in observer.buffers()]
    devices = [] if device.type == "cpu" else [device]
    kind = device.type if devices else "cuda"
    with torch.enable_grad(), torch.random.fork_rng(devices, device_type=kind):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
