"""fp32 masters of half-precision parameters.

Optimizers step on float32 masters; the model keeps half precision.
"""

from __future__ import annotations

from functools import partial

import masters_in_ranks as does
import pytest
import ranks
import torch
from optimizer_cases import CLASSES, WITHOUT_CLOSURE, batches_for, cases, make_optimizer, model_for
from support.optimizer_oracle import (
    ByHand,
    assert_equal,
    loss_of,
    one_call,
    own_backward,
    parameters_of,
)

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


def on_masters(model, make):
    masters = accumext.masters(model.parameters())
    return AccumulatingOptimizer(make(masters), masters=masters), masters


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

    def evaluated():
        opt.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        our_losses.append(loss.item())
        return loss

    for _ in range(3):
        by_hand.optimizer.step(evaluated_by_hand)
        by_hand.round()
        opt.step(evaluated)
    assert len(losses) > 6
    assert losses == our_losses
    assert_equal([m.detach() for m in masters], by_hand.stepped_on)
    assert_equal(parameters_of(model), parameters_of(reference))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return ranks.run_on(2, does.SCENARIOS, "masters", tmp_path_factory)


def test_masters_of_replicas(seen):
    """Masters under DistributedDataParallel: windows are summed over processes in float32"""
    first = ranks.agreed(seen, does.replicas)
    assert_equal(first["masters"], first["expected"])
    assert_equal(first["parameters"], [m.to(does.HALF) for m in first["masters"]])


def test_replicas_are_rounded_alike(seen):
    """Stochastic rounding gives all processes the same parameters, whatever their seeds"""
    first = ranks.agreed(seen, does.rounded_stochastically)
    assert_equal(first["masters"], seen[1]["rounded_stochastically"]["masters"])
    nearest = [m.to(does.HALF) for m in first["masters"]]
    same = [torch.equal(p, n) for p, n in zip(first["parameters"], nearest, strict=True)]
    assert not all(same)


def test_masters_of_shards(seen):
    """Masters of `fully_shard` parameters are shards, also in checkpoints; bit for bit by hand"""
    first = ranks.agreed(seen, does.shards)
    assert first["sharded"]
    assert_equal(first["masters"], first["expected"])
    assert_equal(first["parameters"], [m.to(does.HALF) for m in first["masters"]])
