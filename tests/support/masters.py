"""A half-precision model with float32 masters, and the same by hand."""

from __future__ import annotations

import torch

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from support.optimizer_oracle import make_batches

BATCHES = make_batches(12)


def adamw(parameters, **kwargs):
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **kwargs})


def with_masters(model, make=adamw, device=None, stochastic=False, **kwargs):
    """An optimizer on masters of all parameters of a model, and these."""
    masters = accumext.masters(model.parameters(), device, stochastic)
    return AccumulatingOptimizer(make(masters), masters=masters, **kwargs), masters


class ByHand:
    """float32 parameters that any optimizer steps on; a model of half precision gets them rounded.

    Gradients are those of the half-precision model, by plain autograd, summed in float32.
    """

    def __init__(self, model, make=adamw, **kwargs):
        self.model, self.parameters = model, list(model.parameters())
        self.wide = [p.detach().to(torch.float32) for p in self.parameters]
        self.optimizer = make(self.wide, **kwargs)

    def gradients(self, losses):
        """The sum of the gradients of these losses, each of half precision."""
        sums = [None] * len(self.wide)
        for loss in losses:
            grads = torch.autograd.grad(loss, self.parameters)
            wide = [g.to(torch.float32) for g in grads]
            sums = wide if sums[0] is None else [a + b for a, b in zip(sums, wide, strict=True)]
        return sums

    def step(self, gradients, factor=1.0):
        for wide, grad in zip(self.wide, gradients, strict=True):
            wide.grad = grad * factor
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self):
        for parameter, wide in zip(self.parameters, self.wide, strict=True):
            parameter.copy_(wide)


def halves_of(batches, dtype):
    return [batch.to(dtype) for batch in batches]


def values(tensors):
    return [t.detach().clone() for t in tensors]
