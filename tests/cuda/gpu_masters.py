"""Masters on a GPU and on the host, beside an optimizer on the CPU: rows of gpu_checks.py."""

import functools
import itertools
from collections.abc import Sequence

import torch
from gpu_rows import Checks, Facts
from torch import Tensor, nn

import accumext

SHAPES = ((1023, 257), (4097,), (), (31, 5, 7), (300, 1000))
WINDOW, WINDOWS = 3, 4
RATE = 1e-3
UPDATE_RTOL = 1e-5  # of a step of Adam, from the roundings of its gradient


def leaves(device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(draw.to(device, dtype)) for draw in draws]


def gradients(number: int, dtype: torch.dtype) -> list[Tensor]:
    """On the CPU; the loss is linear, so that they are these in whatever dtype."""
    generator = torch.Generator().manual_seed(100 + number)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def loss_of(parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    products = [
        (p * grad.to(p.device)).float().sum() for p, grad in zip(parameters, grads, strict=True)
    ]
    return torch.stack(products).sum()


def check(place: str | None, fused: bool, stochastic: bool, in_backward: bool, dtype: torch.dtype,
          device: torch.device) -> Facts:  # fmt: skip
    """Windows of micro-batches, beside the same AdamW on float32 copies by hand."""
    parameters = leaves(device, dtype)
    masters = accumext.masters(parameters, place, stochastic)
    adam = torch.optim.AdamW(masters, lr=RATE, fused=fused)
    opt = accumext.AccumulatingOptimizer(
        adam, masters=masters, window=WINDOW, max_norm=1.0, accumulate_in_backward=in_backward
    )
    wide = [p.detach().to(place or device, torch.float32) for p in parameters]
    by_hand = torch.optim.AdamW(wide, lr=RATE, fused=fused)
    for window in range(WINDOWS):
        sums = [torch.zeros(shape) for shape in SHAPES]
        for number in range(window * WINDOW, (window + 1) * WINDOW):
            grads = gradients(number, dtype)
            sums = [a + b.float() for a, b in zip(sums, grads, strict=True)]
            opt.backward(loss_of(parameters, grads))
            opt.step()
        norm = torch.cat([total.flatten() / WINDOW for total in sums]).norm()
        for parameter, total in zip(wide, sums, strict=True):
            mean = total / WINDOW * min(1.0, 1.0 / (float(norm) + 1e-6))
            parameter.grad = mean.to(parameter.device)
        by_hand.step()
    off = 0.0
    for parameter, master, expected in zip(parameters, masters, wide, strict=True):
        assert master.device.type == (place or device.type)
        values, expected = master.detach().cpu(), expected.cpu()
        # In each window the sum may be rounded to the other neighbour.
        allowed = WINDOWS * (spacing(expected, torch.float32) + UPDATE_RTOL * RATE)
        off = max(off, float(((values - expected).abs() / allowed).max()))
        mine = parameter.detach().cpu()
        if stochastic:
            assert bool(((mine.float() - values).abs() <= spacing(values, dtype)).all())
        else:
            assert torch.equal(mine, values.to(dtype))
    assert off <= 1.0, f"{off:.2f} of what is allowed"
    return {
        "of the error allowed": off,
        "clip_coef": float(opt.last.clip_coef) if opt.last else None,
    }


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """At most the distance of two neighbours around these values."""
    limits = torch.finfo(dtype)
    return values.abs().clamp(min=limits.smallest_normal) * limits.eps * 1.01


def checks(device: torch.device, quick: bool) -> Checks:
    flags = (False, True)
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16)
    for place, fused, stochastic, in_backward, dtype in itertools.product(
        (None, "cpu"), flags, flags, flags, dtypes
    ):
        words = [
            "masters on the host" if place else "masters",
            "fused" if fused else "foreach",
            "stochastic" if stochastic else "nearest",
            "in backward" if in_backward else "afterwards",
            str(dtype).removeprefix("torch."),
        ]
        call = functools.partial(check, place, fused, stochastic, in_backward, dtype, device)
        yield ", ".join(words), call
