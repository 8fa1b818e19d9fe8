"""Sharded training (FSDP2, `fully_shard`), 3 processes."""

import math
from functools import partial

import pytest
import shares
import torch
from ranks import across
from shares import BATCHES, MAX_NORM, WEIGHTS, WINDOW, as_expected, by_hand, own_share, whole
from support import optimizer_oracle as oracle
from support.optimizer_oracle import EXACT, INF, adam, loss_of, make_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import accumext
from accumext.optimizer._report import named

NORMS = {str(p): {"norm_type": p} for p in (1.0, 2.0, 3.0, INF, -1.0, -INF)}


def sharded(dtype=torch.float64, fused=False, **options):
    """Make a model, and a wrapper of its shards."""
    options = {"synchronize": "backward", "max_norm": None, **options}
    return shares.training(dtype, make=partial(adam, fused=fused), **options)


def way(loop, mixed=False, **options):
    return {"loop": loop, "mixed": mixed, "options": options}


IN_PARTS = partial(shares.inside, parts=(0.25, 0.75))
WAYS = {
    "plain": way(shares.called),
    "weights_that_are_tensors": way(shares.called, mixed=True),
    "parts": way(IN_PARTS),
    "user_loop": way(shares.of_the_user),
    "once_per_window": way(shares.inside, mixed=True, synchronize="window"),
    "once_per_window_in_parts": way(IN_PARTS, mixed=True, synchronize="window"),
}


@across(3, cases=WAYS)
def test_sharded_windows_equal_one_process(rank, world, loop, mixed, options):
    """A window of four, sent at every backward or once, weights by rank: one process, clipped"""
    model, opt = sharded(max_norm=MAX_NORM, **options)
    shares.train(opt, model, own_share(rank, world), loop, mixed=mixed)
    assert opt.last.clip_coef < 1.0
    assert opt.last.micro_batches == WINDOW
    weights = None if loop is shares.of_the_user else WEIGHTS
    if loop in (shares.called, shares.inside):
        assert opt.last.weight == pytest.approx(sum(WEIGHTS[-WINDOW * world :]) / world)
    return as_expected(model, opt, by_hand(world, weights=weights))


@across(3, cases=NORMS)
def test_sharded_norm_is_the_unsharded_one(rank, world, norm_type):
    """The norm of sharded gradients is the unsharded one, for any p"""
    model, opt = sharded(norm_type=norm_type)
    shares.train(opt, model, own_share(rank, world, WINDOW))
    grads = oracle.window_gradient(make_model(), BATCHES[: WINDOW * world], WEIGHTS)
    norm = float(torch.cat([g.flatten() for g in grads]).norm(norm_type))
    assert float(opt.last.total_norm) == pytest.approx(norm, rel=EXACT)


@across(3)
def test_the_norm_of_unsummed_parts_is_that_of_their_sum(rank, world):
    """The norm and clip of replicated DTensor weights whose gradients are unsummed parts"""
    # A replicated weight under sharded inputs: DTensor leaves its gradient as such.
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    parameter = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Replicate()]))
    opt = oracle.wrapped(nn.ParameterList([parameter]), window=2, max_norm=0.5)
    for rows in inputs.split(3):
        output = distribute_tensor(rows, mesh, [Shard(0)]) @ parameter.T
        opt.backward(output.square().sum())
        assert opt._engine.state.window.sums[0].placements[0].is_partial()
        opt.step()
    moved = parameter.full_tensor().detach() - weight
    weight.requires_grad_()
    ((inputs @ weight.T).square().sum() / 2).backward()
    assert float(opt.last.total_norm) == pytest.approx(float(weight.grad.norm()), rel=EXACT)
    oracle.assert_close([moved], [-weight.grad * (0.5 / (weight.grad.norm() + 1e-6))])


@across(3, cases=NORMS | {"0.0": {"norm_type": 0.0}})
def test_clip_grad_norm_of_sharded_gradients_is_torchs(rank, world, norm_type):
    """`clip_grad_norm_` on the parameters of `fully_shard`"""
    results = []
    for model, clip in (
        (sharded()[0], accumext.clip_grad_norm_),
        (make_model(), nn.utils.clip_grad_norm_),
    ):
        loss_of(model, BATCHES[0]).backward()
        norm = clip(model.parameters(), MAX_NORM, norm_type)
        results.append(whole([norm, *(p.grad for p in model.parameters())]))
        assert float(norm) == float(results[-1][0])  # whole on every rank already
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


@across(3)
def test_clip_grad_norm_of_dtensors_of_every_placement(rank, world):
    """`clip_grad_norm_` of DTensor gradients in every placement: the norm and clip of the whole"""
    mesh = init_device_mesh("cpu", (world,))
    grad = torch.arange(1.0, 13).reshape(6, 2)
    kinds = [
        DTensor.from_local(grad / world, mesh, [Partial()]),
        distribute_tensor(grad.clone(), mesh, [Replicate()]),
        distribute_tensor(grad.clone(), mesh, [Shard(0)]),
        grad.clone(),
    ]
    parameters = [nn.Parameter(torch.zeros_like(kind)) for kind in kinds]
    for parameter, kind in zip(parameters, kinds):
        parameter.grad = kind
    found = accumext.clip_grad_norm_(parameters[:3], 1.0).full_tensor()
    mixed = accumext.clip_grad_norm_(parameters, math.inf)
    norm = math.sqrt(3) * grad.norm().item()
    assert found.item() == pytest.approx(norm, rel=1e-6)
    clipped = whole(p.grad for p in parameters[:3])
    torch.testing.assert_close(clipped, [grad / (norm + 1e-6)] * 3)
    norm = math.sqrt(3 * (grad.norm().item() / norm) ** 2 + grad.norm().item() ** 2)
    assert mixed.item() == pytest.approx(norm, rel=1e-5)
    assert not isinstance(mixed, DTensor)


FUSED = {"bad_ranks": range(3), "dtype": torch.float32, "fused": True}
POISONED = {
    "one_rank": {},
    "all_ranks": {"bad_ranks": range(3)},
    "a_fused_optimizer": FUSED,
    "the_users_scaler": {"loop": shares.of_the_user},
    "the_users_scaler_fused": {"loop": shares.of_the_user, **FUSED},
    "once_per_window": {"loop": shares.inside, "synchronize": "window"},
}


@across(3, cases=POISONED)
def test_sharded_inf_skips_on_all_ranks(rank, world, **options):
    """An inf on one rank or on all skips the sharded step everywhere; loss scales stay equal"""
    # In float32 a gradient is rounded some ten times, and Adam divides by the size of each element.
    tolerance = 1e-5 if "dtype" in options else EXACT
    return as_expected(*shares.poisoned(rank, world, sharded, **options), tolerance)


@across(3)
def test_sharded_raise(rank, world):
    """`on_nonfinite="raise"` raises on all ranks, and the window stays as it was"""
    model, opt = sharded(on_nonfinite="raise")
    bad = [1] if rank == 1 else []
    error = shares.error_of(shares.train, opt, model, own_share(rank, world, 2), bad=bad)
    # Of the third process nothing is left to hold: it has no row of 4, nor of 2.
    where = named([0, 1, 2, 3]) if rank < 2 else "shards of other processes"
    text = f"RuntimeError: {oracle.OP}.backward: gradients must be finite, got inf or NaN in "
    assert error == text + where
    assert shares.held(opt) == 1


@across(3)
def test_one_bad_shard_skips_on_all_ranks(rank, world):
    """A bad value in one rank's shard skips the step on all"""
    # As after a fault in its memory.
    model, opt = sharded(window=2)
    opt.backward(loss_of(model, BATCHES[rank]))
    if rank == 0:
        opt._engine.state.window.sums[0].to_local()[0, 0] = INF
    shares.called(opt, model, BATCHES[rank])
    assert opt.last.skipped
    return as_expected(model, opt, oracle.parameters_of(make_model()))


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "policy": {"dtype": torch.float32, "shards": {"mp_policy": HALF}},
    "parameters": {"dtype": torch.bfloat16, "shards": {}},
}


@across(3, cases=KINDS)
def test_sharded_half_precision(rank, world, dtype, shards):
    """Mixed-precision policies and bfloat16 shards accumulate in float32"""
    model, opt = sharded(dtype, shards=shards)
    for batch, _ in own_share(rank, world, WINDOW, dtype):
        opt.backward(loss_of(model, batch).float())
    main = opt.main_grad(next(model.parameters()))
    mean = main.full_tensor().double() / WINDOW
    assert isinstance(main, DTensor)
    assert main.dtype == torch.float32
    count = WINDOW * world
    grads = oracle.window_gradient(make_model(), BATCHES[:count], [1.0] * count)
    # Parameters and activations are rounded to 8 bits, so are products of a few of them.
    torch.testing.assert_close(mean, grads[0], rtol=0.05, atol=0.01)


def primed_adam(parameters):
    """Make Adam and step on zeros, as torch.distributed.checkpoint does with any optimizer."""
    optimizer = adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


@across(3)
def test_sharded_checkpoint_in_the_middle_of_a_window(rank, world):
    """`torch.distributed.checkpoint` of shards in the middle of a window leaves it alone"""
    model, opt = sharded()
    share = own_share(rank, world, WINDOW)
    shares.train(opt, model, share[:2])
    state = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    shares.train(opt, model, share[2:])
    seen = as_expected(model, opt, by_hand(world, 0, WINDOW, make=primed_adam, max_norm=None))
    assert rank > 0 or len(state["state"]) == 4
    return seen
