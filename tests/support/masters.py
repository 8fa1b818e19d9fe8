"""A half-precision model with float32 masters."""

import torch

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from support.optimizer_oracle import loss_of, make_batches, make_model

BATCHES = make_batches(12, torch.bfloat16)


def adamw(parameters, **kwargs):
    return torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **kwargs})


def with_masters(
    make=adamw, device=None, stochastic=False, dtype=torch.bfloat16, model=None, **kwargs
):
    """Make a model, an optimizer on masters of all its parameters, and these masters."""
    model = make_model(dtype) if model is None else model
    masters = accumext.masters(model.parameters(), device, stochastic)
    return model, AccumulatingOptimizer(make(masters), masters=masters, **kwargs), masters


def train(opt, model, batches=BATCHES[:1]):
    for batch in batches:
        opt.backward(loss_of(model, batch))
        opt.step()


def values(tensors):
    return [t.detach().clone() for t in tensors]


def rounded(masters, dtype=torch.bfloat16):
    return [m.detach().to(dtype) for m in masters]
