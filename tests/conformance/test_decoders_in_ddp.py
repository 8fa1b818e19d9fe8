"""Decoders inside DistributedDataParallel with `window` above 1, 2 processes."""

import decoders
import torch.distributed as dist
from decoders import STEPS, by_decode_loss, by_rollout, in_slices, make, micro_batches, step_of
from ranks import across
from shares import as_expected
from support.optimizer_oracle import wrapped
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import accumext

WINDOW = 2
MAX_NORM = 0.05  # clips every window


class Inside(nn.Module):
    """DDP's forward is any use of the decoder."""

    def __init__(self):
        super().__init__()
        self.decoder = make("function")

    def forward(self, use, *args, **options):
        return use(self.decoder, *args, **options)


def in_one_backward(model, opt, features, targets, use):
    opt.backward(model(use, features, targets))


def backward_per_step(model, opt, features, targets, use):
    step = step_of(model.module.decoder)
    accumext.tbptt(
        lambda token, state: model(lambda decoder: step(token, state)),
        targets,
        model.module.decoder.state(features),
        criterion=cross_entropy,
        feedback="greedy",
        k1=2,
        k2=STEPS,
        backward=opt.backward,
    )


def way(use, run=in_one_backward, **options):
    return {"use": use, "run": run, **options}


WAYS = {
    "decode_loss": way(by_decode_loss),
    "decode_loss_while_backward_runs": way(by_decode_loss, reduce_in_backward=True),
    "decode_loss_into_main_grads": way(
        by_decode_loss, accumulate_in_backward=True, reduce_in_backward=True
    ),
    "chunked_loss": way(in_slices, accumulate_in_backward=True),
    "chunked_loss_while_backward_runs": way(in_slices, reduce_in_backward=True),
    "rollout": way(by_rollout),
    "rollout_while_backward_runs": way(by_rollout, reduce_in_backward=True),
    "tbptt": way(None, backward_per_step),
}


@across(2, cases=WAYS)
def test_decoders_in_ddp(rank, world, use, run, **options):
    """the decoder's functions and `chunked_loss` in DDP equal plain autograd on the joined batch"""
    model = DistributedDataParallel(Inside())
    opt = wrapped(model, decoders.momentum, window=WINDOW, max_norm=MAX_NORM, **options)
    for batch in micro_batches(rank, world):
        with opt.micro_batch(model):
            run(model, opt, *batch, use)
        opt.step()
    assert opt.last.clip_coef < 1.0
    return as_expected(model, opt, decoders.by_hand("function", WINDOW, max_norm=MAX_NORM))


@across(2, cases={"whole": {}, "in_parts": {"k1": 1, "k2": 3}})
def test_a_rollout_in_ddp_reduces_once(rank, world, **options):
    """a `rollout` in DDP reduces every bucket of gradients once"""
    model, sent = DistributedDataParallel(Inside()), []

    def hook(state, bucket):
        sent.append(bucket.index())
        reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return reduced.then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    model(by_rollout, *next(micro_batches(rank, world)), **options).backward()
    assert sent == [0]
