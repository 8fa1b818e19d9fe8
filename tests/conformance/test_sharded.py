"""Sharded training (FSDP2, `fully_shard`), 2 and 3 processes."""

from __future__ import annotations

import math

import pytest
import ranks
import torch
from data_parallel import BATCHES, MAX_NORM, WEIGHTS, WINDOW, adam, own_share
from support.optimizer_oracle import (
    EXACT,
    INF,
    assert_close,
    loss_of,
    make_model,
    train_by_hand,
    window_gradient,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from accumext.optimizer._report import named

NORMS = (1.0, 2.0, 3.0, INF, -1.0, -INF)


def sharded(dtype=torch.float64, **kwargs):
    model = make_model(dtype)
    fully_shard(model[0], **kwargs)
    return fully_shard(model, **kwargs)


def wrapped(model, fused=False, **kwargs):
    inner = adam(model.parameters(), fused=fused)
    return AccumulatingOptimizer(inner, **{"window": WINDOW, **kwargs})


def outcome(model, opt, **more):
    full = [p.full_tensor().detach() for p in model.parameters()]
    seen = {"parameters": full, "stats": opt.stats(), "nonfinite": opt.last.nonfinite}
    return {**seen, **more}


def plain(rank, world):
    model = sharded()
    opt = wrapped(model, max_norm=MAX_NORM)
    for batch, _ in own_share(rank, world):
        opt.backward(loss_of(model, batch))
        opt.step()
    return outcome(model, opt)


def user_loop(rank, world):
    model = sharded()
    opt = wrapped(model, max_norm=MAX_NORM)
    for batch, _ in own_share(rank, world):
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return outcome(model, opt)


def parts(rank, world):
    model = sharded()
    opt = wrapped(model, max_norm=MAX_NORM)
    for batch, _ in own_share(rank, world):
        with opt.micro_batch(model):
            opt.backward(0.25 * loss_of(model, batch))
            opt.backward(0.75 * loss_of(model, batch))
        opt.step()
    return outcome(model, opt)


def weighted(rank, world):
    model = sharded()
    opt = wrapped(model, max_norm=MAX_NORM)
    for i, (batch, weight) in enumerate(own_share(rank, world)):
        given = weight if i % 2 else torch.tensor(weight)
        opt.backward(loss_of(model, batch), given)
        opt.step()
    return outcome(model, opt)


EVERY_LOOP = (plain, user_loop, parts)


def norms(rank, world):
    """The norm of one window for every p, without stepping on it."""
    seen = {}
    for norm_type in NORMS:
        model = sharded()
        opt = wrapped(model, norm_type=norm_type)
        for batch, _ in own_share(rank, world)[:WINDOW]:
            opt.backward(loss_of(model, batch))
        opt.step()
        seen[norm_type] = float(opt.last.total_norm)
    return {"norms": seen}


def unsummed_norm(rank, world):
    """A replicated weight under sharded inputs: DTensor leaves its gradient as unsummed parts."""
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(distribute_tensor(weight.clone(), mesh, [Replicate()]))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    opt = AccumulatingOptimizer(sgd, window=2, max_norm=0.5)
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
        for make, clip in (
            (sharded, accumext.clip_grad_norm_),
            (lambda: make_model(torch.float64), nn.utils.clip_grad_norm_),
        ):
            model = make()
            loss_of(model, BATCHES[0]).backward()
            norm = clip(model.parameters(), MAX_NORM, norm_type)
            grads = [p.grad for p in model.parameters()]
            if make is sharded:
                assert float(norm) == float(norm.full_tensor())  # whole on every rank already
                norm, *grads = (t.full_tensor() for t in (norm, *grads))
            results.append([norm, *grads])
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
        parameters.append(torch.nn.Parameter(torch.zeros_like(grad)))
        parameters[-1].grad = grad
    same_mesh = accumext.clip_grad_norm_(parameters, 1.0)
    parameters.append(torch.nn.Parameter(torch.zeros(6, 2)))
    parameters[-1].grad = whole.clone()
    mixed = accumext.clip_grad_norm_(parameters, math.inf)
    return {
        "whole": whole,
        "grads": [p.grad.full_tensor() for p in parameters[:3]],
        "norm": same_mesh.full_tensor(),
        "mixed": mixed,
    }


def poisoned(rank, world, bad_ranks, *, fused=False, own=True):
    """An inf in the first micro-batch of some ranks, then a good window."""
    model = sharded(torch.float32 if fused else torch.float64)
    dtype = next(model.parameters()).dtype
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = wrapped(model, fused, window=2, scaler=scaler if own else None)
    skipped, scales = [], []
    for i, (batch, _) in enumerate(own_share(rank, world, 4 * world)):
        loss = loss_of(model, batch.to(dtype)) * (INF if i == 0 and rank in bad_ranks else 1.0)
        if own:
            opt.backward(loss)
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if opt.stepped:
            skipped.append(opt.last.skipped)
        scales.append(scaler.get_scale())
    return outcome(model, opt, skipped=skipped, scales=scales)


def inf_on_one_rank(rank, world):
    return poisoned(rank, world, [1])


def inf_on_all_ranks(rank, world):
    return poisoned(rank, world, range(world))


def inf_with_a_fused_optimizer(rank, world):
    return poisoned(rank, world, range(world), fused=True)


def inf_under_the_users_scaler(rank, world):
    return poisoned(rank, world, [1], own=False)


def inf_under_the_users_scaler_fused(rank, world):
    return poisoned(rank, world, range(world), fused=True, own=False)


POISONED = (
    inf_on_one_rank,
    inf_on_all_ranks,
    inf_with_a_fused_optimizer,
    inf_under_the_users_scaler,
    inf_under_the_users_scaler_fused,
)


def raising(rank, world):
    model = sharded()
    opt = wrapped(model, on_nonfinite="raise")
    opt.backward(loss_of(model, BATCHES[rank]))
    try:
        opt.backward(loss_of(model, BATCHES[rank]) * (INF if rank == 1 else 1.0))
    except RuntimeError as error:
        return {"error": str(error), "held": opt._box.state.window.micro_batches}
    return {"error": "", "held": 0}


def one_bad_shard(rank, world):
    """Only one rank's part of a gradient is bad, as after a fault in its memory."""
    model = sharded()
    opt = wrapped(model, window=2)
    opt.backward(loss_of(model, BATCHES[rank]))
    if rank == 0:
        opt._box.state.window.sums[0].to_local()[0, 0] = INF
    opt.backward(loss_of(model, BATCHES[rank]))
    opt.step()
    return outcome(model, opt)


def half_precision(rank, world):
    """bfloat16 compute and reduction, float32 parameters; and bfloat16 parameters."""
    seen = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype, options in ((torch.float32, {"mp_policy": policy}), (torch.bfloat16, {})):
        model = sharded(dtype, **options)
        opt = wrapped(model)
        for batch, _ in own_share(rank, world)[:WINDOW]:
            opt.backward(loss_of(model, batch.to(dtype)).float())
        main = opt.main_grad(next(model.parameters()))
        seen.append([isinstance(main, DTensor), main.dtype, main.full_tensor().double() / WINDOW])
    return {"seen": seen}


def priming(rank, world):
    """A distributed checkpoint is asked for in the middle of the first window."""
    model = sharded()
    opt = wrapped(model)
    for batch, _ in own_share(rank, world)[:2]:
        opt.backward(loss_of(model, batch))
        opt.step()
    state = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    for batch, _ in own_share(rank, world)[2:WINDOW]:
        opt.backward(loss_of(model, batch))
        opt.step()
    return outcome(model, opt, primed=len(state["state"]) if rank == 0 else 4)


SCENARIOS = (
    *EVERY_LOOP,
    weighted,
    norms,
    unsummed_norm,
    *POISONED,
    raising,
    one_bad_shard,
    half_precision,
    priming,
    clipped_by_hand,
    clipped_parts,
)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}-processes")
def world(request):
    return request.param


@pytest.fixture(scope="module")
def seen(world, tmp_path_factory):
    return ranks.run_on(world, SCENARIOS, "sharded", tmp_path_factory)


@pytest.mark.parametrize("scenario", EVERY_LOOP, ids=lambda s: s.__name__)
def test_sharded_windows_equal_one_process(seen, world, scenario):
    """A window of four under `fully_shard` equals one process on the joined batch, clipped"""
    first = ranks.agreed(seen, scenario)
    expected = train_by_hand(adam, BATCHES, WINDOW * world, max_norm=MAX_NORM)
    assert_close(first["parameters"], expected)
    assert first["stats"]["clip_coef"] < 1.0


def test_sharded_token_weights(seen, world):
    """Token weights may differ between ranks under `fully_shard`"""
    first = ranks.agreed(seen, weighted)
    expected = train_by_hand(adam, BATCHES, WINDOW * world, weights=WEIGHTS, max_norm=MAX_NORM)
    assert_close(first["parameters"], expected)
    assert first["stats"]["weight"] == pytest.approx(sum(WEIGHTS[-WINDOW * world :]) / world)


def test_sharded_norm_is_the_unsharded_one(seen, world):
    """The norm of sharded gradients is the unsharded one, for any p"""
    count = WINDOW * world
    grads = window_gradient(make_model(), BATCHES[:count], [1.0] * count)
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


@pytest.mark.parametrize("scenario", POISONED, ids=lambda s: s.__name__)
def test_sharded_inf_skips_on_all_ranks(seen, world, scenario):
    """An inf on one rank or on all skips the sharded step everywhere; loss scales stay equal"""
    first = ranks.agreed(seen, scenario)
    for rank in seen:
        assert rank[scenario.__name__]["skipped"] == [True, False]
        assert rank[scenario.__name__]["scales"] == first["scales"]
    assert first["scales"][-1] == 4.0
    good = BATCHES[2 * world : 4 * world]
    if first["parameters"][0].dtype == torch.float64:
        assert_close(first["parameters"], train_by_hand(adam, good, 2 * world))
    else:  # each element of the gradient is rounded some ten times, and Adam divides by its size
        expected = train_by_hand(adam, good, 2 * world)
        assert_close([p.double() for p in first["parameters"]], expected, 1e-5)


def test_sharded_raise(seen):
    """`on_nonfinite="raise"` raises on all ranks, and the window stays as it was"""
    text = "AccumulatingOptimizer.backward: gradients must be finite, got inf or NaN in "
    for rank, saw in enumerate(seen):
        # Of the third process nothing is left to hold: it has no row of 4, nor of 2.
        where = named([0, 1, 2, 3]) if rank < 2 else "shards of other processes"
        assert saw["raising"]["error"] == text + where
        assert saw["raising"]["held"] == 1


def test_one_bad_shard_skips_on_all_ranks(seen):
    """A bad value in one rank's shard skips the step on all"""
    first = ranks.agreed(seen, one_bad_shard)
    assert first["stats"]["skipped"] == 1.0
    assert_close(first["parameters"], [p.detach() for p in make_model().parameters()])


def test_sharded_half_precision(seen, world):
    """Mixed-precision policies and bfloat16 shards accumulate in float32"""
    grads = window_gradient(make_model(), BATCHES[: WINDOW * world], [1.0] * WINDOW * world)
    for rank in seen:
        for is_sharded, dtype, main in rank["half_precision"]["seen"]:
            assert is_sharded
            assert dtype == torch.float32
            # Parameters and activations are rounded to 8 bits, so are products of a few of them.
            torch.testing.assert_close(main, grads[0], rtol=0.05, atol=0.01)


def primed_adam(parameters):
    """Adam after what torch.distributed.checkpoint does to any optimizer: a step on zeros."""
    optimizer = adam(parameters)
    optimizer.param_groups[0]["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    return optimizer


def test_sharded_checkpoint_in_the_middle_of_a_window(seen, world):
    """`torch.distributed.checkpoint` of shards in the middle of a window leaves it alone"""
    first = ranks.agreed(seen, priming)
    expected = train_by_hand(primed_adam, BATCHES[: WINDOW * world], WINDOW * world)
    assert_close(first["parameters"], expected)
    assert all(rank["priming"]["primed"] == 4 for rank in seen)
