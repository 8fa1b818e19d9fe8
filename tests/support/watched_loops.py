"""Loops that the tests of warnings share."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from support import optimizer_oracle as oracle
from support.optimizer_oracle import OP, loss_of, one_call
from support.recorded_warnings import warnings_as

RATES = {"number": 0.1, "tensor": torch.tensor(0.1)}


def warnings_of(use: Callable[[], object]) -> list[Any]:
    with warnings_as("always") as said:
        use()
    return [w for w in said if str(w.message).startswith(OP)]


def train(body, count=12, **options):
    """A body for every batch, with the number of it, and a GradScaler that it may use."""
    model, scaler = oracle.make_model(), oracle.growing_scaler()
    opt = oracle.wrapped(model, **options)
    for number, batch in enumerate(oracle.make_batches(count)):
        body(opt, model, batch, number, scaler)
    opt.discard()


def scheduled(opt, model, x, number, scaler, whenever):
    one_call(opt, loss_of(model, x))
    if whenever or opt.stepped:
        opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"] * 0.5


class Outer(torch.optim.Optimizer):
    """It would use the gradients, which lie in the window."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self):
        self.inner.step()


def inside_another(opt, model, x, number, scaler, kind=Outer):
    outer = vars(opt).setdefault("_outer", kind(opt))
    opt.backward(loss_of(model, x))
    outer.step()


def unscaled_and_clipped(opt, model, x, number, scaler, max_norm=1e-3):
    """As in timm's NativeScaler."""
    scaler.scale(loss_of(model, x)).backward()
    scaler.unscale_(opt)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


def counted(opt, model, x, number, scaler, loss=functional.cross_entropy, ignored=0, **options):
    """A loss whose weight is the number of targets that are not ignored, as many from batch on."""
    logits, some = model(x), ignored and number % 2
    targets = torch.zeros(len(x), dtype=torch.long)
    targets[:some] = -100
    targets = targets if loss is functional.cross_entropy else torch.ones_like(logits)
    opt.backward(loss(logits, targets, **options), weight=len(x) - some)
    opt.step()


def quotient(of):
    return lambda opt, model, x, *_: one_call(opt, of(model, x))


def entropy(model, x, **options):
    return functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long), **options)
