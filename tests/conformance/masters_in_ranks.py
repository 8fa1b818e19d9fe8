"""What the ranks of test_optimizers_on_masters.py do: each takes a rank and their number."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.optimizer_oracle import loss_of, make_batches, make_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 2
HALF = torch.bfloat16
BATCHES = [batch.to(HALF) for batch in make_batches(12)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def on_masters(model, **kwargs):
    masters = accumext.masters(model.parameters(), **kwargs)
    opt = AccumulatingOptimizer(adamw(masters), masters=masters, window=WINDOW)
    return opt, masters


def own_windows(rank, world):
    mine = BATCHES[rank::world]
    return [mine[i : i + WINDOW] for i in range(0, len(mine), WINDOW)]


def by_hand(model, rank, world, gradients):
    """float32 copies that AdamW steps on, given the mean of `gradients(window)` over all ranks."""
    wide = [p.detach().to(torch.float32) for p in model.parameters()]
    adam = adamw(wide)
    for window in own_windows(rank, world):
        for parameter, grad in zip(wide, gradients(window), strict=True):
            parameter.grad = grad * (1.0 / (WINDOW * world))
        adam.step()
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), wide, strict=True):
                parameter.copy_(values)
    return wide


def whole(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach() for t in tensors]


def replicas(rank, world, **kwargs):
    """DistributedDataParallel that is held back; the window is summed over the group in float32."""
    model = make_model(HALF)
    replica = DistributedDataParallel(model)
    opt, masters = on_masters(model, **kwargs)
    for window in own_windows(rank, world):
        for batch in window:
            with opt.micro_batch(replica):
                opt.backward(loss_of(replica, batch))
            opt.step()
    reference = make_model(HALF)

    def gradients(window):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in reference.parameters()]
        for batch in window:
            grads = torch.autograd.grad(loss_of(reference, batch), list(reference.parameters()))
            sums = [total + grad.float() for total, grad in zip(sums, grads, strict=True)]
        for total in sums:
            dist.all_reduce(total)
        return sums

    expected = by_hand(reference, rank, world, gradients)
    return {
        "masters": whole(masters),
        "parameters": whole(model.parameters()),
        "expected": whole(expected),
    }


def rounded_stochastically(rank, world):
    torch.manual_seed(rank)
    return replicas(rank, world, stochastic_rounding=True)


def shards(rank, world):
    """`fully_shard`, bfloat16: masters of shards, beside shards in float32 by hand."""

    def sharded():
        model = make_model(HALF)
        fully_shard(model[0])
        return fully_shard(model)

    model = sharded()
    opt, masters = on_masters(model)
    kinds = [isinstance(m, DTensor) and m.dtype == torch.float32 for m in masters]
    for window in own_windows(rank, world):
        for batch in window:
            opt.backward(loss_of(model, batch))
            opt.step()
    reference = sharded()

    def gradients(window):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in reference.parameters()]
        for batch in window:
            loss_of(reference, batch).backward()
            for total, parameter in zip(sums, reference.parameters(), strict=True):
                total += parameter.grad.float() * world
                parameter.grad = None
        return sums

    expected = by_hand(reference, rank, world, gradients)
    saved = opt.state_dict()["masters"]["parameters"]
    return {
        "masters": whole(masters),
        "parameters": whole(model.parameters()),
        "expected": whole(expected),
        "sharded": all(kinds) and all(isinstance(saved[i], DTensor) for i in range(len(masters))),
    }


SCENARIOS = (replicas, rounded_stochastically, shards)
