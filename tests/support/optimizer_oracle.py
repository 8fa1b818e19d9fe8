"""The reference of AccumulatingOptimizer: the window's gradient by hand, in plain PyTorch."""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from support.tensors import assert_equal as assert_equal

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
    """Make a small network with the same parameters at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model.to(dtype)


def make_batches(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Make inputs [5, 3], the same at every call."""
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [draw.to(dtype) for draw in draws]


def adam(parameters: Iterable[Tensor], **kwargs) -> torch.optim.Adam:
    """Make the optimizer that most tests wrap."""
    return torch.optim.Adam(parameters, lr=0.05, **kwargs)


def sgd(parameters: Iterable[Tensor], **kwargs) -> torch.optim.SGD:
    """Make an optimizer that steps by the gradient itself, so that a parameter tells it."""
    return torch.optim.SGD(parameters, **{"lr": 1.0, **kwargs})


def scalar(value: float = 0.0) -> nn.Parameter:
    """Make a parameter of one number."""
    return nn.Parameter(torch.tensor(value))


def wrapped_zeros(
    window: int = 1, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32, **kwargs
) -> tuple[nn.Parameter, AccumulatingOptimizer]:
    """Make a parameter of zeros, with a name, and an optimizer around it."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    named = sgd([{"params": [("weight", parameter)]}])
    return parameter, AccumulatingOptimizer(named, window=window, **kwargs)


def wrapped(model: nn.Module, make: Callable = sgd, **options) -> AccumulatingOptimizer:
    """Wrap an optimizer of all parameters of a model."""
    return AccumulatingOptimizer(make(model.parameters()), **options)


def accumulating(model: nn.Module, in_backward: bool = True, **kwargs) -> AccumulatingOptimizer:
    """Wrap SGD with a window of three, to which backward passes add gradients themselves."""
    options = {"window": 3, "accumulate_in_backward": in_backward, **kwargs}
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AccumulatingOptimizer(momentum, **options)


def hooks_of(model: nn.Module) -> list[Callable]:
    """Return the hooks that are called behind the accumulation of a gradient."""
    return [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {})]


def growing_scaler(**kwargs) -> torch.amp.GradScaler:
    """Make a scaler that grows every few updates, so that scales change inside windows."""
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 2, **kwargs})


def says(text: str) -> str:
    """Return a pattern of messages that begin so."""
    return "^" + re.escape(text)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def said_by(error: BaseException) -> str:
    """Return an exception's words, and those of its notes, which Python 3.10 does not have."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def on_both(call: Callable[[int], Any]) -> list[Any]:
    """Return the results of a call with each of two ranks, in a thread each."""
    with ThreadPoolExecutor(2) as threads:
        return [done.result() for done in [threads.submit(call, rank) for rank in range(2)]]


def state_of(opt: AccumulatingOptimizer, parameters: Sequence[Tensor]) -> list:
    """Return all but `.grad` that an exception leaves as before or after the call, to compare."""
    window = opt.accumulation_state_dict()
    mains = {i: main.tolist() for i, main in window.pop("main_grads").items()}
    numbers = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in window.items()}
    return [mains, numbers, [p.detach().tolist() for p in parameters], torch.is_grad_enabled()]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


# One micro-batch, and a step, as training loops write it


def one_call(opt, loss, scaler=None, weight=1.0):
    opt.backward(loss, weight)
    opt.step()


def accumulated(opt, loss, scaler=None, weight=1.0):
    (loss if opt.scaler is None else opt.scaler.scale(loss)).backward()
    opt.accumulate(weight)
    opt.step()


def own_backward(opt, loss, scaler=None, weight=1.0):
    loss.backward()
    opt.step()
    opt.zero_grad()


def outer_scaler(opt, loss, scaler, weight=1.0, unscales=False):
    scaler.scale(loss).backward()
    if unscales:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


def outer_scaler_unscaled(opt, loss, scaler, weight=1.0):
    outer_scaler(opt, loss, scaler, unscales=True)


def in_parts(opt, model, batch, weight=1.0):
    """Call `opt.backward` thrice in one micro-batch, with shares that round nothing."""
    with opt.micro_batch():
        for share in (0.5, 0.25, 0.25):
            opt.backward(share * loss_of(model, batch), weight)
    opt.step()


def run(opt, model, batches, loop=one_call, weights=None, scaler=None):
    """Train on every batch, as one of these loops does."""
    for batch, weight in zip(batches, weights or [1.0] * len(batches)):
        if loop is in_parts:
            loop(opt, model, batch, weight)
        else:
            loop(opt, loss_of(model, batch), scaler, weight)


def closure_of(opt, model, batch, losses=None):
    """Make a closure for `step`: a forward and a backward pass. Losses are noted in a list."""

    def closure():
        opt.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if losses is not None:
            losses.append(loss.item())
        return loss

    return closure


def through_a_file(state, weights_only=True):
    """Return a state as `torch.load` reads it from a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


# By hand


def windows_of(items: Sequence, size: int) -> list[Sequence]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class ByHand:
    """The work of a window in plain PyTorch: sums of `autograd.grad`, and a step on them.

    Half-precision gradients are summed in float32. With `wide`, the optimizer has copies of that
    dtype, from which the parameters are rounded after every step.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: Callable[[list[Tensor]], torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        reduction: str = "mean",
        wide: torch.dtype | None = None,
    ) -> None:
        originals = list(parameters)
        self.stepped_on = [p.detach().to(wide) for p in originals] if wide else originals
        self.optimizer = make(self.stepped_on)
        self.max_norm, self.reduction = max_norm, reduction
        self._original = dict(zip(self.stepped_on, originals)) if wide else {}
        self._sums: dict[Tensor, Tensor] = {}
        self._weight = 0.0

    def _held(self) -> list[Tensor]:
        """Return the tensors that the optimizer steps on, groups that were added later too."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def add(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add a micro-batch. Parameters that the loss does not reach may have no gradient."""
        of = {self._original.get(p, p): p for p in self._held()}
        wanted = [p for p in of if p.requires_grad]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
        for p, grad in zip(wanted, grads):
            if grad is not None:
                term = weight * grad.to(torch.promote_types(grad.dtype, torch.float32))
                self._sums[of[p]] = self._sums[of[p]] + term if of[p] in self._sums else term
        self._weight += weight

    def gradient(self) -> list[Tensor | None]:
        """Return the window's gradient, before it is clipped."""
        divisor = (self._weight or 1.0) if self.reduction == "mean" else 1.0
        return [self._sums[p] / divisor if p in self._sums else None for p in self._held()]

    def norm(self) -> float:
        """Return the norm of the window's gradient, before it is clipped."""
        return torch.cat([g.flatten() for g in self.gradient() if g is not None]).norm().item()

    def clipped(self) -> list[Tensor | None]:
        coef = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (self.norm() + 1e-6))
        return [None if g is None else g * coef for g in self.gradient()]

    def give(self) -> None:
        """Put the window's gradient into `.grad` of what is stepped on; begin the next window."""
        for p, grad in zip(self._held(), self.clipped()):
            p.grad = None if grad is None else grad.to(p.dtype)
        self._sums, self._weight = {}, 0.0

    @torch.no_grad()
    def round(self) -> None:
        """Round the parameters from those that the optimizer steps on."""
        for p, original in self._original.items():
            original.copy_(p)

    def step(self) -> None:
        self.give()
        self.optimizer.step()
        self.round()


def window_gradient(
    model: nn.Module, batches: Sequence[Tensor], weights: Sequence[float], reduction: str = "mean"
) -> list[Tensor]:
    """Return sum(w * g), over sum(w) for "mean"; zero if that is zero."""
    by_hand = ByHand(model.parameters(), sgd, reduction=reduction)
    for batch, weight in zip(batches, weights):
        by_hand.add(loss_of(model, batch), weight)
    return by_hand.gradient()


def train_by_hand(
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    batches: Sequence[Tensor],
    window: int,
    *,
    weights: Sequence[float] | None = None,
    max_norm: float | None = None,
    reduction: str = "mean",
    dtype: torch.dtype = torch.float64,
    wide: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the parameters after a step on each window's gradient, the last one perhaps partial.

    With `wide` those of that dtype, which a model of `dtype` gets rounded.
    """
    model = make_model(dtype)
    by_hand = ByHand(
        model.parameters(), make_optimizer, max_norm=max_norm, reduction=reduction, wide=wide
    )
    weights = [1.0] * len(batches) if weights is None else weights
    for some, their in zip(windows_of(batches, window), windows_of(weights, window)):
        for batch, weight in zip(some, their):
            by_hand.add(loss_of(model, batch), weight)
        by_hand.step()
    return [p.detach() for p in by_hand.stepped_on]


def assert_close(
    actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = EXACT
) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
