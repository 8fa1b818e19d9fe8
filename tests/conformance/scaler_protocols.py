"""The ways in which a GradScaler is called, and a problem in which nothing is rounded.

Losses are linear in the parameters and every number has few bits: gradients are three times whole
numbers, the learning rate is 1/8, windows have three micro-batches and scales are powers of two. So
parameters of any dtype must be those of a float64 calculation by hand, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch
from support.tensors import dtype_id
from torch import Tensor, nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 3
RATE = 0.125
SHAPES = [(3,), (2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# The scaler is the wrapper's own / is called for each micro-batch / once, after the user's own
# accumulation into `.grad` in a window of one.
OWN = ["own", "own-accumulate", "own-step"]
EACH = ["each", "each-unscaled"]
ONCE = ["once", "once-unscaled"]
WEIGHTED = ["none", "own", "own-accumulate"]  # where a micro-batch can be given a weight

# The weights of the first window: any two of them sum to a power of two.
WEIGHTS = [2.0, 6.0, 2.0]


def protocols(*names: str) -> list:
    """With every dtype that GradScaler takes: its `unscale_` refuses float16 gradients."""
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype_id(dtype)}")
        for name in names
        for dtype in DTYPES
        if not (name.endswith("unscaled") and dtype == torch.float16)
    ]


def make_scaler(protocol: str, **settings: float) -> torch.amp.GradScaler | None:
    """Growing every second update, so that it does so inside windows."""
    settings = {"init_scale": 4.0, "growth_interval": 2, **settings}
    return None if protocol == "none" else torch.amp.GradScaler("cpu", **settings)


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    starts = [torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) for shape in SHAPES]
    return [nn.Parameter((start / 16).to(dtype)) for start in starts]


def gradients(number: int) -> list[Tensor]:
    """Of micro-batch `number`, in float64."""
    generator = torch.Generator().manual_seed(number)
    return [3.0 * torch.randint(-3, 4, shape, generator=generator).double() for shape in SHAPES]


def loss_of(parameters: Sequence[Tensor], number: int, poison: float = 0.0) -> Tensor:
    """Its loss, with `poison` as the gradient of one element."""
    terms = [(p.float() * grad.float()).sum() for p, grad in zip(parameters, gradients(number))]
    return sum(terms) + (parameters[1][0, 0].float() * poison if poison else 0.0)


def make_optimizer(protocol, parameters, scaler, *, fused=False, **options):
    """The wrapper as the protocol wants it."""
    return AccumulatingOptimizer(
        torch.optim.SGD(parameters, lr=RATE, fused=fused),
        window=1 if protocol in ONCE else WINDOW,
        scaler=scaler if protocol in OWN else None,
        **options,
    )


def micro_batch(protocol, opt, scaler, loss, number, weight=1.0):
    """Train on one micro-batch as a training loop does."""
    if protocol in ("none", "own"):
        opt.backward(loss, weight)
        opt.step()
        return
    scaler.scale(loss / WINDOW if protocol in ONCE else loss).backward()
    if protocol == "own-accumulate":
        opt.accumulate(weight)
        opt.step()
    elif protocol == "own-step":
        opt.step()
        opt.zero_grad()
    elif protocol in EACH or number % WINDOW == WINDOW - 1:
        if protocol.endswith("unscaled"):
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def parameters_by_hand(
    windows: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
) -> list[Tensor]:
    """In float64, after a step on the weighted mean of the micro-batches of each window."""
    parameters = [p.detach() for p in make_parameters(torch.float64)]
    for numbers, its in zip(windows, weights, strict=True):
        for number, weight in zip(numbers, its, strict=True):
            for p, grad in zip(parameters, gradients(number)):
                p -= RATE * weight * grad / sum(its)
    return parameters


def scales_by_hand(protocol: str, count: int, bad: Collection[int] = ()) -> list[float]:
    """The scale after each of `count` micro-batches, by the rule that GradScaler documents."""
    scale, good, scales = 4.0, 0, []
    for number in range(count):
        last = number % WINDOW == WINDOW - 1
        since = range(number - WINDOW + 1, number + 1) if protocol not in EACH else [number]
        if protocol in EACH or last:
            if any(i in bad for i in since):
                scale, good = scale / 2, 0
            else:
                good += 1
                if good == 2:
                    scale, good = scale * 2, 0
        scales.append(scale)
    return scales


def assert_exact(parameters: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    for parameter, expected in zip(parameters, truth, strict=True):
        assert torch.equal(parameter.detach().double(), expected)
