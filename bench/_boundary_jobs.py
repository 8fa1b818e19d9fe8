"""The end of a window with the optimizer's own step: the loop people write, and the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from _gradient_jobs import SCALE, gradients
from _timing import Contender, Job, Shape, Traffic
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import accumext

WRITE_BACK = 4  # bytes per element: a fused optimizer stores what it divided by grad_scale


class Kind(NamedTuple):
    """An optimizer, and what its step moves."""

    make: Callable[[list[Tensor]], Optimizer]
    step: int  # bytes per element
    fused: bool  # divides by grad_scale in its own read


KINDS = {
    "AdamW fused": Kind(lambda parameters: AdamW(parameters, fused=True), 28, True),
    "SGD foreach": Kind(lambda parameters: SGD(parameters, lr=0.1, foreach=True), 12, False),
}


class Regime(NamedTuple):
    """The operations before the step."""

    scaled: bool  # and so unscaled and checked
    clipped: bool


REGIMES = {
    "unscale, clip": Regime(scaled=True, clipped=True),
    "unscale": Regime(scaled=True, clipped=False),  # stock: a fused optimizer unscales itself
    "clip": Regime(scaled=False, clipped=True),
}


def boundary_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    for kind in KINDS:
        for regime in REGIMES:
            yield _boundary(shape, device, kind, regime)


def _boundary(shape: Shape, device: torch.device, kind_name: str, regime_name: str) -> Job:
    """Have both sides take the same parameters from zero with the same gradients."""
    data = gradients(shape, "fp32", device)
    kind, regime = KINDS[kind_name], REGIMES[regime_name]
    parameters = [torch.zeros_like(tensor, requires_grad=True) for tensor in data.start]
    max_norm = data.max_norm if regime.scaled else data.max_norm * SCALE

    def prepare() -> None:
        data.restore()
        with torch.no_grad():
            torch._foreach_zero_(parameters)
        for parameter, grad in zip(parameters, data.tensors):
            parameter.grad = grad

    def outcome(optimizer: Optimizer) -> list[Tensor]:
        moments = [
            tensor
            for state in optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, Tensor) and tensor.dim()
        ]
        return [parameter.detach() for parameter in parameters] + moments

    def stock() -> Contender:
        optimizer, scaler = kind.make(parameters), _scaler(device)

        def run() -> Optimizer:
            if not regime.scaled:
                clip_grad_norm_(parameters, max_norm, foreach=True)
                optimizer.step()
                return optimizer
            if regime.clipped:
                scaler.unscale_(optimizer)
                clip_grad_norm_(parameters, max_norm, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            return optimizer

        update = 8 * regime.scaled + 8 * regime.clipped + kind.step
        if kind.fused and not regime.clipped:
            update += WRITE_BACK
        return Contender(run, Traffic(4 * regime.clipped, update), outcome)

    def ours() -> Contender:
        wrapper = accumext.AccumulatingOptimizer(
            kind.make(parameters),
            max_norm=max_norm if regime.clipped else None,
            scaler=_scaler(device) if regime.scaled else None,
        )

        def run() -> Optimizer:
            wrapper.step()
            return wrapper

        if kind.fused:
            return Contender(run, Traffic(4, kind.step + WRITE_BACK), outcome)
        return Contender(run, Traffic(4 * regime.clipped, 8 + kind.step), outcome)

    contenders = {"torch": stock(), "accumext": ours()}
    return Job(f"boundary, {kind_name}: {regime_name}", shape, contenders, prepare)


def _scaler(device: torch.device) -> GradScaler:
    """Return a scaler that has scaled a loss."""
    scaler = GradScaler(device.type, init_scale=SCALE, growth_interval=2**31 - 1)
    scaler.scale(torch.zeros((), device=device))
    return scaler
