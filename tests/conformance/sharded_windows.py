"""Models of `fully_shard` that communicate once per window."""

from __future__ import annotations

from functools import partial

import shares
import torch
from shares import MAX_NORM, WINDOW, as_expected, by_hand, error_of, held, inside, own_share
from support.optimizer_oracle import adam, loss_of, make_model
from torch.distributed.fsdp import FSDPModule, fully_shard

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

# From torch 2.15 on FSDP can be told to reduce what it holds; before, the last backward pass does.
FINALIZES = hasattr(FSDPModule, "finalize_backward")
RECOVERS = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on


def sharded(dtype=torch.float64, model=None, **kwargs):
    """Two groups of parameters, and a root without any."""
    model = make_model(dtype) if model is None else model
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def wrapped(model, optimizer=adam, **kwargs):
    options = {"window": WINDOW, "max_norm": MAX_NORM, "synchronize": "window", **kwargs}
    return AccumulatingOptimizer(optimizer(model.parameters()), **options)


def training(dtype=torch.float64, model=None, optimizer=adam, shards=None, **options):
    """A sharded model, and a wrapper of it."""
    model = sharded(dtype, model, **(shards or {}))
    return model, wrapped(model, optimizer, **options)


train = partial(shares.train, loop=inside, mixed=True)


def after_a_failure(rank, world, fail, said, count, again=0):
    """After so many micro-batches one fails, and the window is dropped; others train on.

    `fail(opt, model, batch, weight)` raises what is `said`.
    """
    model, opt = training()
    share = own_share(rank, world)
    train(opt, model, share[:count])
    error, left = error_of(fail, opt, model, *share[count]), held(opt)
    grads = [p.grad for p in opt.param_groups[0]["params"]]
    train(opt, model, share[again:8])
    assert error == said
    assert left == 0
    assert all(grad is None for grad in grads)
    return as_expected(model, opt, by_hand(world, 0, 8))


def in_backward(opt, model, batch, weight, error=KeyError):
    """On the way to the first layer, when the gradients of the last are there."""

    def stop(grad):
        raise error

    with opt.micro_batch(model):
        hidden = model[0](batch)
        hidden.register_hook(stop)
        opt.backward(model[2](hidden).square().mean(), weight)


def before_backward(opt, model, batch, weight):
    with opt.micro_batch(model):
        loss_of(model, batch)
        raise KeyError
