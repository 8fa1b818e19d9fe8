"""fp32 masters of half-precision parameters.

Optimizers step on float32 masters; the model keeps half precision.
"""

from __future__ import annotations

import masters_in_ranks as does
import pytest
import ranks
import torch
from optimizer_cases import CLASSES, WITHOUT_CLOSURE, batches_for, cases, make_optimizer, model_for
from support.optimizer_oracle import assert_equal, loss_of, own_backward, parameters_of

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


class InFloat32:
    """Any optimizer on float32 copies, given the gradients of a half-precision model by hand."""

    def __init__(self, model, make):
        self.parameters = list(model.parameters())
        self.wide = [p.detach().to(torch.float32) for p in self.parameters]
        self.optimizer = make(self.wide)

    def step(self, closure=None):
        if closure is None:
            self._widen()
            self.optimizer.step()
        else:
            self.optimizer.step(lambda: self._evaluate(closure))
        self._round()

    def _evaluate(self, closure):
        self._round()
        value = closure()
        self._widen()
        return value

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def _widen(self):
        for wide, parameter in zip(self.wide, self.parameters, strict=True):
            wide.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)

    @torch.no_grad()
    def _round(self):
        for parameter, wide in zip(self.parameters, self.wide, strict=True):
            parameter.copy_(wide)


def on_masters(model, make):
    masters = accumext.masters(model.parameters())
    return AccumulatingOptimizer(make(masters), masters=masters), masters


def one_call(opt, loss):
    opt.backward(loss)
    opt.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loop", [one_call, own_backward])
@pytest.mark.parametrize(("name", "variant"), cases(WITHOUT_CLOSURE))
def test_masters_are_the_optimizer_in_float32(name, variant, loop, dtype):
    """Every class of `torch.optim` on masters: bit for bit itself in float32, `fused` too"""
    batches = [
        batch if name == "SparseAdam" else batch.to(dtype)
        for batch in batches_for(name, [5] * 6, torch.float32)
    ]

    def make(parameters):
        return make_optimizer(name, parameters, variant)

    reference, model = model_for(name, dtype), model_for(name, dtype)
    by_hand = InFloat32(reference, make)
    opt, masters = on_masters(model, make)
    for batch in batches:
        own_backward(by_hand, loss_of(reference, batch))
        loop(opt, loss_of(model, batch))
    assert_equal([m.detach() for m in masters], by_hand.wide)
    assert_equal(parameters_of(model), [wide.to(dtype) for wide in by_hand.wide])
    assert not torch.equal(parameters_of(model)[0], parameters_of(model_for(name, dtype))[0])


def test_lbfgs_on_masters():
    """LBFGS on masters: the model is rounded before every evaluation of the closure, bit for bit"""
    assert set(CLASSES) - set(WITHOUT_CLOSURE) == {"LBFGS"}

    def make(parameters):
        return make_optimizer("LBFGS", parameters)

    batch = batches_for("LBFGS", [5], torch.bfloat16)[0]
    results = []
    for make_both in (
        lambda model: (by_hand := InFloat32(model, make), by_hand.wide),
        lambda model: on_masters(model, make),
    ):
        model, losses = model_for("LBFGS", torch.bfloat16), []
        opt, wide = make_both(model)

        def closure(model=model, opt=opt, losses=losses):
            opt.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(3):
            opt.step(closure)
        results.append(([w.detach() for w in wide], parameters_of(model), losses))
    (wide, parameters, losses), (masters, ours, our_losses) = results
    assert len(losses) > 6
    assert losses == our_losses
    assert_equal(masters, wide)
    assert_equal(ours, parameters)


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
