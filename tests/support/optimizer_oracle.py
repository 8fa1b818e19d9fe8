"""What AccumulatingOptimizer is compared with: the window's gradient by hand, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

# Both sides add the same float64 terms in another order, and divide at another place.
EXACT = 1e-12

INF = float("inf")


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small network with the same parameters at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model.to(dtype)


def make_batches(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Inputs [5, 3], the same at every call."""
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [draw.to(dtype) for draw in draws]


def adam(parameters: Iterable[Tensor], **kwargs) -> torch.optim.Adam:
    """What most tests wrap."""
    return torch.optim.Adam(parameters, lr=0.05, **kwargs)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def fail_in_backward(model, batch):
    """A loss whose backward pass reaches the last layer, and then raises."""
    hidden = model[1](model[0](batch))
    hidden.register_hook(lambda grad: 1 / 0)
    return model[2](hidden).square().mean()


def one_call(opt, loss, scaler=None):
    opt.backward(loss)
    opt.step()


def own_backward(opt, loss, scaler=None):
    loss.backward()
    opt.step()
    opt.zero_grad()


def outer_scaler(opt, loss, scaler):
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


def run(opt, model, batches):
    """A micro-batch and a step for every batch."""
    for batch in batches:
        one_call(opt, loss_of(model, batch))


def windows_of(items: Sequence, size: int) -> list[Sequence]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def window_gradient(
    model: nn.Module, batches: Sequence[Tensor], weights: Sequence[float], reduction: str = "mean"
) -> list[Tensor]:
    """sum(w * g), over sum(w) for "mean"; zero where that is zero."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for batch, weight in zip(batches, weights):
        grads = torch.autograd.grad(loss_of(model, batch), parameters)
        total = [t + weight * g for t, g in zip(total, grads)]
    divisor = (sum(weights) or 1.0) if reduction == "mean" else 1.0
    return [t / divisor for t in total]


def train_by_hand(
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    batches: Sequence[Tensor],
    window: int,
    *,
    weights: Sequence[float] | None = None,
    max_norm: float | None = None,
    reduction: str = "mean",
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """The parameters after stepping on each window's gradient, the last window perhaps partial."""
    model = make_model(dtype)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    weights = [1.0] * len(batches) if weights is None else weights
    for some, their in zip(windows_of(batches, window), windows_of(weights, window)):
        for parameter, grad in zip(
            parameters, window_gradient(model, some, their, reduction), strict=True
        ):
            parameter.grad = grad
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return [p.detach() for p in parameters]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit."""
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e), f"differ by up to {(a - e).abs().max()}"


def assert_close(
    actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = EXACT
) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
