"""Sharded training (FSDP2, `fully_shard`), 2 and 3 processes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import ranks
import shares
import torch
from shares import (
    BATCHES,
    MAX_NORM,
    WEIGHTS,
    WINDOW,
    by_hand,
    called,
    error_of,
    held,
    inside,
    of_the_user,
    outcome,
    own_share,
    train,
    whole,
)
from support.optimizer_oracle import (
    EXACT,
    INF,
    OP,
    adam,
    assert_close,
    loss_of,
    make_model,
    parameters_of,
    sgd,
    window_gradient,
    wrapped,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import accumext
from accumext.optimizer._report import named

NORMS = (1.0, 2.0, 3.0, INF, -1.0, -INF)


def sharded(dtype=torch.float64, fused=False, policy=None, **options):
    """A model, and a wrapper of its shards."""
    model = make_model(dtype)
    kwargs = {} if policy is None else {"mp_policy": policy}
    fully_shard(model[0], **kwargs)
    fully_shard(model, **kwargs)
    return model, wrapped(model, partial(adam, fused=fused), **{"window": WINDOW, **options})


trained = partial(shares.trained, make=sharded, max_norm=MAX_NORM)
LOOPS = {
    "plain": trained,
    "weights_that_are_tensors": partial(trained, mixed=True),
    "parts": partial(trained, loop=partial(inside, parts=(0.25, 0.75))),
    "user_loop": partial(trained, loop=of_the_user),
}


def norms(rank, world):
    """The norm of one window for every p, without stepping on it."""
    seen = {}
    for norm_type in NORMS:
        model, opt = sharded(norm_type=norm_type)
        train(opt, model, own_share(rank, world, WINDOW))
        seen[norm_type] = float(opt.last.total_norm)
    return {"norms": seen}


def unsummed_norm(rank, world):
    """A replicated weight under sharded inputs: DTensor leaves its gradient as unsummed parts."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    parameter = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Replicate()]))
    opt = wrapped(nn.ParameterList([parameter]), sgd, window=2, max_norm=0.5)
    for rows in inputs.split(3):
        output = distribute_tensor(rows, mesh, [Shard(0)]) @ parameter.T
        opt.backward(output.square().sum())
        kinds = [p.is_partial() for p in opt._box.state.window.sums[0].placements]
        opt.step()
    norm = float(opt.last.total_norm)
    moved = parameter.full_tensor().detach() - weight
    return {"partial": kinds, "norm": norm, "moved": moved, "weight": weight, "inputs": inputs}


def clipped_by_hand(rank, world):
    """clip_grad_norm_ on the gradients of one backward pass; torch's on those of one process."""
    seen = {}
    for norm_type in (*NORMS, 0.0):
        results = []
        for model, clip in (
            (sharded()[0], accumext.clip_grad_norm_),
            (make_model(), nn.utils.clip_grad_norm_),
        ):
            loss_of(model, BATCHES[0]).backward()
            norm = clip(model.parameters(), MAX_NORM, norm_type)
            results.append(whole([norm, *(p.grad for p in model.parameters())]))
            assert float(norm) == float(results[-1][0])  # whole on every rank already
        seen[norm_type] = results
    return seen


def clipped_parts(rank, world):
    """clip_grad_norm_ where gradients are unsummed parts, replicas, shards and plain tensors."""
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(1.0, 13).reshape(6, 2)
    kinds = [
        DTensor.from_local(whole / world, mesh, [Partial()]),
        distribute_tensor(whole.clone(), mesh, [Replicate()]),
        distribute_tensor(whole.clone(), mesh, [Shard(0)]),
    ]
    parameters = []
    for grad in kinds:
        parameters.append(nn.Parameter(torch.zeros_like(grad)))
        parameters[-1].grad = grad
    same_mesh = accumext.clip_grad_norm_(parameters, 1.0)
    parameters.append(nn.Parameter(torch.zeros(6, 2)))
    parameters[-1].grad = whole.clone()
    mixed = accumext.clip_grad_norm_(parameters, math.inf)
    return {
        "whole": whole,
        "grads": [p.grad.full_tensor() for p in parameters[:3]],
        "norm": same_mesh.full_tensor(),
        "mixed": mixed,
    }


poisoned = partial(shares.poisoned, make=sharded)
fused = partial(poisoned, bad_ranks=range(3), dtype=torch.float32, fused=True)
POISONED = {
    "inf_on_one_rank": poisoned,
    "inf_on_all_ranks": partial(poisoned, bad_ranks=range(3)),
    "inf_with_a_fused_optimizer": fused,
    "inf_under_the_users_scaler": partial(poisoned, loop=of_the_user),
    "inf_under_the_users_scaler_fused": partial(fused, loop=of_the_user),
}


def raising(rank, world):
    model, opt = sharded(on_nonfinite="raise")
    bad = [1] if rank == 1 else []
    return {
        "error": error_of(lambda: train(opt, model, own_share(rank, world, 2), bad=bad)),
        "held": held(opt),
    }


def one_bad_shard(rank, world):
    """Only one rank's part of a gradient is bad, as after a fault in its memory."""
    model, opt = sharded(window=2)
    opt.backward(loss_of(model, BATCHES[rank]))
    if rank == 0:
        opt._box.state.window.sums[0].to_local()[0, 0] = INF
    called(opt, model, BATCHES[rank])
    return outcome(model, opt)


def half_precision(rank, world):
    """bfloat16 compute and reduction, float32 parameters; and bfloat16 parameters."""
    seen = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype, options in ((torch.float32, {"policy": policy}), (torch.bfloat16, {})):
        model, opt = sharded(dtype, **options)
        for batch, _ in own_share(rank, world, WINDOW, dtype):
            opt.backward(loss_of(model, batch).float())
        main = opt.main_grad(next(model.parameters()))
        seen.append([isinstance(main, DTensor), main.dtype, main.full_tensor().double() / WINDOW])
    return {"seen": seen}


def priming(rank, world):
    """A distributed checkpoint is asked for in the middle of the first window."""
    model, opt = sharded()
    share = own_share(rank, world, WINDOW)
    train(opt, model, share[:2])
    state = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    train(opt, model, share[2:])
    return outcome(model, opt, primed=len(state["state"]) if rank == 0 else 4)


SCENARIOS = {
    **LOOPS,
    **POISONED,
    **ranks.named(norms, unsummed_norm, clipped_by_hand, clipped_parts),
    **ranks.named(raising, one_bad_shard, half_precision, priming),
}


@pytest.mark.parametrize("scenario", LOOPS)
def test_sharded_windows_equal_one_process(seen, world, scenario):
    """A window of four under `fully_shard` equals one process on the joined batch, clipped"""
    first = ranks.agreed(seen, scenario)
    weights = None if scenario == "user_loop" else WEIGHTS
    assert_close(first["parameters"], by_hand(world, weights=weights))
    assert first["stats"]["clip_coef"] < 1.0


@pytest.mark.parametrize("scenario", ["plain", "weights_that_are_tensors"])
def test_sharded_token_weights(seen, world, scenario):
    """Token weights may differ between ranks under `fully_shard`"""
    weight = ranks.agreed(seen, scenario)["stats"]["weight"]
    assert weight == pytest.approx(sum(WEIGHTS[-WINDOW * world :]) / world)


def test_sharded_norm_is_the_unsharded_one(seen, world):
    """The norm of sharded gradients is the unsharded one, for any p"""
    count = WINDOW * world
    grads = window_gradient(make_model(), BATCHES[:count], WEIGHTS)
    flat = torch.cat([g.flatten() for g in grads])
    for rank in seen:
        for norm_type, norm in rank["norms"]["norms"].items():
            assert norm == pytest.approx(float(flat.norm(norm_type)), rel=EXACT)


def test_the_norm_of_unsummed_parts_is_that_of_their_sum(seen):
    """The norm and clip of replicated DTensor weights whose gradients are unsummed parts"""
    for rank in seen:
        saw = rank["unsummed_norm"]
        weight = saw["weight"].requires_grad_()
        ((saw["inputs"] @ weight.T).square().sum() / 2).backward()
        assert saw["partial"] == [True]
        assert saw["norm"] == pytest.approx(float(weight.grad.norm()), rel=EXACT)
        assert_close([saw["moved"]], [-weight.grad * (0.5 / (weight.grad.norm() + 1e-6))])


@pytest.mark.parametrize("norm_type", [*NORMS, 0.0], ids=str)
def test_clip_grad_norm_of_sharded_gradients_is_torchs(seen, norm_type):
    """`clip_grad_norm_` on the parameters of `fully_shard`"""
    for rank in seen:
        ours, theirs = rank["clipped_by_hand"][norm_type]
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_clip_grad_norm_of_dtensors_of_every_placement(seen):
    """`clip_grad_norm_` of DTensor gradients in every placement: the norm and clip of the whole"""
    for rank in seen:
        found = rank["clipped_parts"]
        whole = found["whole"]
        norm = math.sqrt(3) * whole.norm().item()
        assert found["norm"].item() == pytest.approx(norm, rel=1e-6)
        for grad in found["grads"]:
            torch.testing.assert_close(grad, whole / (norm + 1e-6))
        norm = math.sqrt(3 * (whole.norm().item() / norm) ** 2 + whole.norm().item() ** 2)
        assert found["mixed"].item() == pytest.approx(norm, rel=1e-5)
        assert not isinstance(found["mixed"], DTensor)


@pytest.mark.parametrize("scenario", POISONED)
def test_sharded_inf_skips_on_all_ranks(seen, world, scenario):
    """An inf on one rank or on all skips the sharded step everywhere; loss scales stay equal"""
    first = ranks.agreed(seen, scenario)
    for closed in ranks.of(seen, scenario, "closed"):
        assert [report[:2] for report in closed] == [(True, 4.0), (False, 4.0)]
    weights = None if "users_scaler" in scenario else WEIGHTS
    expected = by_hand(world, 2, 4, 2, weights=weights, max_norm=None)
    # In float32 a gradient is rounded some ten times, and Adam divides by the size of each element.
    tolerance = EXACT if first["parameters"][0].dtype == torch.float64 else 1e-5
    assert_close([p.double() for p in first["parameters"]], expected, tolerance)


def test_sharded_raise(seen):
    """`on_nonfinite="raise"` raises on all ranks, and the window stays as it was"""
    text = f"RuntimeError: {OP}.backward: gradients must be finite, got inf or NaN in "
    for rank, saw in enumerate(seen):
        # Of the third process nothing is left to hold: it has no row of 4, nor of 2.
        where = named([0, 1, 2, 3]) if rank < 2 else "shards of other processes"
        assert saw["raising"]["error"] == text + where
        assert saw["raising"]["held"] == 1


def test_one_bad_shard_skips_on_all_ranks(seen):
    """A bad value in one rank's shard skips the step on all"""
    first = ranks.agreed(seen, "one_bad_shard")
    assert first["stats"]["skipped"] == 1.0
    assert_close(first["parameters"], parameters_of(make_model()))


def test_sharded_half_precision(seen, world):
    """Mixed-precision policies and bfloat16 shards accumulate in float32"""
    grads = window_gradient(make_model(), BATCHES[: WINDOW * world], [1.0] * WINDOW * world)
    for results in ranks.of(seen, "half_precision", "seen"):
        for is_sharded, dtype, main in results:
            assert is_sharded
            assert dtype == torch.float32
            # Parameters and activations are rounded to 8 bits, so are products of a few of them.
            torch.testing.assert_close(main, grads[0], rtol=0.05, atol=0.01)


def primed_adam(parameters):
    """Adam after what torch.distributed.checkpoint does to any optimizer: a step on zeros."""
    optimizer = adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def test_sharded_checkpoint_in_the_middle_of_a_window(seen, world):
    """`torch.distributed.checkpoint` of shards in the middle of a window leaves it alone"""
    first = ranks.agreed(seen, "priming")
    expected = by_hand(world, 0, WINDOW, make=primed_adam, max_norm=None)
    assert_close(first["parameters"], expected)
    assert ranks.of(seen, "priming", "primed") == [4] * world
