"""What AccumulatingOptimizer is compared with: the window's gradient by hand, in plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

# Both sides add the same float64 terms in another order, and divide at another place.
EXACT = 1e-12

INF, NAN = float("inf"), float("nan")

OP = "AccumulatingOptimizer"  # with which its messages begin
ONE_BY_ONE = 1  # bytes in a bundle of gradients that a backward pass hands over

OPTIMIZERS = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "sgd-momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.05, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, **kw),
    "adamw-foreach": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, foreach=True, **kw),
    "adamw-fused": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, fused=True, **kw),
    "sgd-fused": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True, **kw),
    "rmsprop": lambda p, **kw: torch.optim.RMSprop(p, lr=0.01, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
}


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


def sgd(parameters: Iterable[Tensor], **kwargs) -> torch.optim.SGD:
    """Steps by the gradient itself, so that a parameter says what it was."""
    return torch.optim.SGD(parameters, **{"lr": 1.0, **kwargs})


def scalar(value: float = 0.0) -> nn.Parameter:
    """A parameter of one number."""
    return nn.Parameter(torch.tensor(value))


def wrapped_scalar(window: int = 1, **kwargs) -> tuple[nn.Parameter, AccumulatingOptimizer]:
    """A parameter of one number, with a name, and an optimizer around it."""
    parameter = scalar()
    named = sgd([{"params": [("weight", parameter)]}])
    return parameter, AccumulatingOptimizer(named, window=window, **kwargs)


def accumulating(model: nn.Module, in_backward: bool = True, **kwargs) -> AccumulatingOptimizer:
    """With a window of three, to which backward passes add gradients themselves."""
    options = {"window": 3, "accumulate_in_backward": in_backward, **kwargs}
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AccumulatingOptimizer(momentum, **options)


def hooks_of(model: nn.Module) -> list[Callable]:
    """What is called behind the accumulation of a gradient."""
    return [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {})]


def growing_scaler(**kwargs) -> torch.amp.GradScaler:
    """On the CPU; grows every few updates, so that the scale changes inside windows."""
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 2, **kwargs})


def says(text: str) -> str:
    """A pattern of messages that begin so."""
    return "^" + re.escape(text)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def said_by(error: BaseException) -> str:
    """The words of an exception and of its notes, which Python 3.10 does not have."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def state_of(opt: AccumulatingOptimizer, parameters: Sequence[Tensor], grads: bool = True) -> list:
    """Everything that an exception leaves as before the call or as after it, to be compared."""
    window = opt.accumulation_state_dict()
    mains = {i: main.tolist() for i, main in window.pop("main_grads").items()}
    numbers = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in window.items()}
    lying = [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in parameters]
    values = [p.detach().tolist() for p in parameters]
    return [mains, numbers, lying if grads else [], values, torch.is_grad_enabled()]


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
