"""fp32 masters of half-precision parameters.

Optimizers step on float32 masters; the model keeps half precision.
"""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
from optimizer_cases import CLASSES, WITHOUT_CLOSURE, batches_for, cases, make_optimizer, model_for
from shares import inside, outcome, own_share, train, whole
from support.masters import adamw, rounded
from support.optimizer_oracle import (
    ByHand,
    assert_equal,
    closure_of,
    loss_of,
    make_batches,
    make_model,
    one_call,
    own_backward,
    parameters_of,
    train_by_hand,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW, COUNT = 2, 6  # micro-batches of a rank
HALF = torch.bfloat16


def on_masters(model, make=adamw, window=1, **options):
    masters = accumext.masters(model.parameters(), **options)
    return AccumulatingOptimizer(make(masters), masters=masters, window=window), masters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loop", [one_call, own_backward])
@pytest.mark.parametrize(("name", "variant"), cases(WITHOUT_CLOSURE))
def test_masters_are_the_optimizer_in_float32(name, variant, loop, dtype):
    """Every class of `torch.optim` on masters: bit for bit itself in float32, `fused` too"""
    batches = batches_for(name, [5] * 6, torch.float32)
    make = partial(make_optimizer, name, variant=variant)
    reference, model = model_for(name, dtype), model_for(name, dtype)
    by_hand = ByHand(reference.parameters(), make, wide=torch.float32)
    opt, masters = on_masters(model, make)
    for batch in batches:
        batch = batch if name == "SparseAdam" else batch.to(dtype)
        by_hand.add(loss_of(reference, batch))
        by_hand.step()
        loop(opt, loss_of(model, batch))
    assert_equal([m.detach() for m in masters], by_hand.stepped_on)
    assert_equal(parameters_of(model), parameters_of(reference))
    assert not torch.equal(parameters_of(model)[0], parameters_of(model_for(name, dtype))[0])


def test_lbfgs_on_masters():
    """LBFGS on masters: the model is rounded before every evaluation of the closure, bit for bit"""
    assert set(CLASSES) - set(WITHOUT_CLOSURE) == {"LBFGS"}

    make, batch = partial(make_optimizer, "LBFGS"), batches_for("LBFGS", [5], torch.bfloat16)[0]
    reference, model = (model_for("LBFGS", torch.bfloat16) for _ in range(2))
    by_hand = ByHand(reference.parameters(), make, wide=torch.float32)
    opt, masters = on_masters(model, make)
    losses, our_losses = [], []

    def evaluated_by_hand():
        by_hand.round()
        loss = loss_of(reference, batch)
        by_hand.add(loss)
        by_hand.give()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        by_hand.optimizer.step(evaluated_by_hand)
        by_hand.round()
        opt.step(closure_of(opt, model, batch, our_losses))
    assert len(losses) > 6
    assert losses == our_losses
    assert_equal([m.detach() for m in masters], by_hand.stepped_on)
    assert_equal(parameters_of(model), parameters_of(reference))


def replicas(rank, world, seed=0, **options):
    """DistributedDataParallel that is held back; the window is summed over the group in float32."""
    torch.manual_seed(seed * rank)
    model = make_model(HALF)
    opt, masters = on_masters(model, window=WINDOW, **options)
    replica = DistributedDataParallel(model)
    train(opt, replica, own_share(rank, world, COUNT, HALF, weighted=False), inside)
    return outcome(model, opt, masters=[m.detach() for m in masters])


def sharded():
    model = make_model(HALF)
    fully_shard(model[0])
    return fully_shard(model)


def shards(rank, world):
    """`fully_shard`, bfloat16: masters of shards, beside shards in float32 by hand."""
    model, reference = sharded(), sharded()
    opt, masters = on_masters(model, window=WINDOW)
    kinds = [isinstance(m, DTensor) and m.dtype == torch.float32 for m in masters]
    share = own_share(rank, world, COUNT, HALF, weighted=False)
    train(opt, model, share)

    pairs = [(p, p.detach().float().requires_grad_()) for p in reference.parameters()]
    adam = adamw([wide for _, wide in pairs])
    for number, (batch, _) in enumerate(share, 1):
        loss_of(reference, batch).backward()
        for parameter, wide in pairs:
            mean = parameter.grad.float() / WINDOW
            wide.grad = mean if wide.grad is None else wide.grad + mean
        reference.zero_grad()
        if number % WINDOW == 0:
            adam.step()
            adam.zero_grad()
            with torch.no_grad():
                for parameter, wide in pairs:
                    parameter.copy_(wide)
    saved = opt.state_dict()["masters"]["parameters"]
    return outcome(
        model,
        opt,
        masters=[m.detach() for m in whole(masters)],
        expected=[wide.detach() for wide in whole(wide for _, wide in pairs)],
        sharded=all(kinds) and all(isinstance(saved[i], DTensor) for i in range(len(masters))),
    )


SCENARIOS = {
    "replicas": replicas,
    "rounded_stochastically": partial(replicas, seed=1, stochastic_rounding=True),
    "shards": shards,
}


def assert_nearest(first):
    """The parameters are the masters, rounded."""
    assert_equal(first["parameters"], rounded(first["masters"]))


def test_masters_of_replicas(pair):
    """Masters under DistributedDataParallel: windows are summed over processes in float32"""
    first = ranks.agreed(pair, "replicas")
    batches = make_batches(2 * COUNT, HALF)
    numbers = {"dtype": HALF, "wide": torch.float32}
    assert_equal(first["masters"], train_by_hand(adamw, batches, 2 * WINDOW, **numbers))
    assert_nearest(first)


def test_replicas_are_rounded_alike(pair):
    """Stochastic rounding gives all processes the same parameters, whatever their seeds"""
    first = ranks.agreed(pair, "rounded_stochastically")
    assert_equal(first["masters"], pair[1]["rounded_stochastically"]["masters"])
    assert not all(map(torch.equal, first["parameters"], rounded(first["masters"])))


def test_masters_of_shards(pair):
    """Masters of `fully_shard` parameters are shards, also in checkpoints; bit for bit by hand"""
    first = ranks.agreed(pair, "shards")
    assert first["sharded"]
    assert_equal(first["masters"], first["expected"])
    assert_nearest(first)
