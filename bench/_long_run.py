"""Ten thousand micro-batches with overflows, beside the same training by hand, in float64.

By hand: plain autograd, sums, the clip and SGD with momentum as their definitions say. Nothing of
accumext, of torch.optim or of torch.amp is in it.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import accumext

WINDOW, MAX_NORM = 4, 0.7
LEARNING_RATE = 0.05
MOMENTUM = {torch.float64: 0.9, torch.bfloat16: 0.0}  # SGD would round the momenta, too
# About as many windows let the scale grow as let it shrink, so that it stays in float32's range.
SCALE, GROWTH_INTERVAL = 2.0**16, 8
OVERFLOWS = 0.02  # of the micro-batches
# 2,500 steps in float64, each with the same terms in another order; the training is stable.
EXACT = 1e-11
# bfloat16 parameters: the gradient and the step may each be rounded the other way, to 8 bits; the
# norm is one of float32 sums of bfloat16 gradients.
ULP, NORM = 2.0**-7, 1e-5


class MicroBatch(NamedTuple):
    inputs: Tensor  # [5, 8], one of them inf if the micro-batch overflows
    weight: int
    overflows: bool


class Findings(NamedTuple):
    windows: int
    overflows: int
    skipped: int
    steps_distance: float  # of parameters, the largest over all windows
    norm_distance: float  # of norms, relative
    grown_bytes: int  # resident memory, from the first tenth of the run to its end
    more_tensors: int


def micro_batches(count: int) -> list[MicroBatch]:
    generator, chance = torch.Generator().manual_seed(1), random.Random(1)
    drawn = []
    for _ in range(count):
        inputs = torch.randn(5, 8, generator=generator, dtype=torch.float64)
        overflows = chance.random() < OVERFLOWS
        if overflows:
            inputs[chance.randrange(5), chance.randrange(8)] = math.inf
        drawn.append(MicroBatch(inputs, chance.randrange(1, 9), overflows))
    return drawn


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def loss_of(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    inputs = micro_batch.inputs.to(next(model.parameters()).dtype)
    return (model(inputs) - inputs[:, :3]).square().mean()


class ByHand:
    """The training by its definition, with sums in float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = make_model(dtype)
        self.scale = SCALE
        self._momentum = MOMENTUM[dtype]
        self._momenta: list[Tensor] | None = None
        self._good = 0

    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def window(self, window: Sequence[MicroBatch]) -> float | None:
        """Take a step and return the norm of its gradient; None if the window is skipped."""
        if any(micro_batch.overflows for micro_batch in window):
            self.scale, self._good = self.scale / 2, 0
            return None
        parameters = self.parameters()
        total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        for micro_batch in window:
            gradients = torch.autograd.grad(loss_of(self.model, micro_batch), parameters)
            for sum_, gradient in zip(total, gradients):
                sum_ += micro_batch.weight * gradient.double()
        weight = sum(micro_batch.weight for micro_batch in window)
        norm = math.sqrt(sum(float((t / weight).square().sum()) for t in total))
        factor = min(1.0, MAX_NORM / (norm + 1e-6)) / weight
        gradients = [t * factor for t in total]
        if self._momenta is None:
            self._momenta = gradients
        else:
            self._momenta = [self._momentum * m + g for m, g in zip(self._momenta, gradients)]
        with torch.no_grad():
            for parameter, momentum in zip(parameters, self._momenta):
                parameter.copy_(parameter.double() - LEARNING_RATE * momentum)
        self._good += 1
        if self._good == GROWTH_INTERVAL:
            self.scale, self._good = self.scale * 2, 0
        return norm


def train(dtype: torch.dtype, count: int) -> Findings:
    """Run both; AssertionError if they differ in what is counted or exact."""
    drawn = micro_batches(count)
    model, truth = make_model(dtype), ByHand(dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM[dtype])
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL)
    opt = accumext.AccumulatingOptimizer(sgd, window=WINDOW, max_norm=MAX_NORM, scaler=scaler)
    windows = [drawn[i : i + WINDOW] for i in range(0, count, WINDOW)]
    skipped = taken = held = tensors = 0
    distance = norm_distance = 0.0
    for number, window in enumerate(windows):
        for micro_batch in window:
            opt.backward(loss_of(model, micro_batch), micro_batch.weight)
            opt.step()
        assert opt.stepped, f"window {number} is not closed after {WINDOW} micro-batches"
        norm = truth.window(window)
        skipped += bool(opt.last.skipped)
        taken += norm is not None
        assert bool(opt.last.skipped) == (norm is None), f"window {number} is skipped wrongly"
        assert scaler.get_scale() == truth.scale, f"after window {number} the loss scale differs"
        if norm is not None:
            off = abs(float(opt.last.total_norm) - norm) / norm
            norm_distance = max(norm_distance, off)
        for mine, theirs in zip(model.parameters(), truth.parameters()):
            off = (mine.double() - theirs.double()).abs() / theirs.double().abs().clamp_min(1e-2)
            distance = max(distance, float(off.detach().max()))
            if dtype != torch.float64:
                with torch.no_grad():
                    theirs.copy_(mine)  # the next window starts from the same bits
        if number == len(windows) // 10:
            held, tensors = resident_bytes(), living_tensors()
    limits = (EXACT, EXACT) if dtype == torch.float64 else (ULP, NORM)
    assert distance <= limits[0], f"parameters are off by {distance:.1e}"
    assert norm_distance <= limits[1], f"norms are off by {norm_distance:.1e}"
    assert skipped + taken == len(windows)
    return Findings(
        len(windows),
        sum(micro_batch.overflows for micro_batch in drawn),
        skipped,
        distance,
        norm_distance,
        resident_bytes() - held,
        living_tensors() - tensors,
    )


def resident_bytes() -> int:
    """Return the bytes of this process now; 0 if the system does not say."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * 4096


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
