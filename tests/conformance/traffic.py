"""What the ranks of test_data_parallel.py send, and what they read of a device."""

from __future__ import annotations

import math

import ranks
import torch
import torch.distributed as dist
from data_parallel import MAX_NORM, in_group, outcome, own_share
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import adam, loss_of, make_model
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


def traffic(rank, world, **kwargs):
    """Bytes and kind of every collective of two windows, with the backward passes between them."""
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4)))
    log = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kw):
        log.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kw)

    for number, layer in enumerate(model):
        layer.weight.register_hook(lambda grad, number=number: log.append(f"gradient {number}"))
    opt = in_group(model, window=2, **kwargs)
    dist.all_reduce = counting
    try:
        with ranks.small_buckets((64 + 8) * 8):  # a layer
            for _ in range(4):
                opt.backward(model(torch.ones(1, 8, dtype=torch.float64)).sum())
                opt.step()
    finally:
        dist.all_reduce = all_reduce
    return {"log": log}


def traffic_afterwards(rank, world):
    return traffic(rank, world)


def traffic_meanwhile(rank, world):
    return traffic(rank, world, reduce_in_backward=True)


def without_device_reads(rank, world, **kwargs):
    """The CPU plays a device: what two windows read of it."""
    model = make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fused = adam(model.parameters(), fused=True)
    options = {"window": 2, "max_norm": MAX_NORM, "scaler": scaler, **kwargs}
    opt = AccumulatingOptimizer(fused, process_group=dist.group.WORLD, **options)
    with cpu_as_device(), DeviceReads() as reads:
        for batch, weight in own_share(rank, world, 4 * world):
            opt.backward(loss_of(model, batch.float()), torch.tensor(weight))
            opt.step()
    return outcome(model, opt, reads=[reads.count, reads.lists])


def reads_at_the_step(rank, world):
    return without_device_reads(rank, world)


def reads_while_backward_runs(rank, world):
    return without_device_reads(rank, world, reduce_in_backward=True)


def layouts(rank, world):
    """Parameters of every layout; the gradients that the optimizer gets are laid out like them."""

    def numbers(*shape, dtype=torch.float64):
        return torch.arange(math.prod(shape)).view(shape).to(dtype)

    parameters = [
        nn.Parameter(tensor)
        for tensor in (
            numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            numbers(3, 4).T,
            numbers(6, 4)[::2, ::2],  # has gaps, which its gradient has not
            numbers(),
            numbers(0, 3),
            numbers(2, 3, dtype=torch.complex128).T,
        )
    ]
    before = [p.detach().clone() for p in parameters]
    sgd = torch.optim.SGD(parameters, lr=1.0)
    opt = AccumulatingOptimizer(sgd, window=2, process_group=dist.group.WORLD)
    strides = []
    sgd.register_step_pre_hook(lambda *args: strides.extend(p.grad.stride() for p in parameters))
    for factor in (rank + 1.0, 2.0):
        reals = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
        squares = [real.square().sum() / 2 for real in reals]
        opt.backward(sum(squares) * factor)
        opt.step()
    moved = [b - p.detach() for b, p in zip(before, parameters)]
    same = [s == torch.empty_like(p).stride() for s, p in zip(strides, parameters)]
    return {"before": before, "moved": moved, "same": same}


TRAFFIC = (traffic_afterwards, traffic_meanwhile)
READS = (reads_at_the_step, reads_while_backward_runs)
SCENARIOS = (*TRAFFIC, *READS, layouts)
