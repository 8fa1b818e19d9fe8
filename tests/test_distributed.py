"""Windows over two processes (gloo, CPU) equal one process that sees every micro-batch."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from optimizer_oracle import (
    INF,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accumext.optimizer import AccumulatingOptimizer

WORLD = 2
BATCHES = make_batches(8)
WEIGHTS = [3.0, 1.0, 7.0, 2.0, 2.0, 5.0, 1.0, 4.0]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def wrap(model, group=True, **kwargs):
    group = dist.group.WORLD if group else None
    options = {"window": 2, "process_group": group, **kwargs}
    return AccumulatingOptimizer(adam(model.parameters()), **options)


def outcome(model, opt=None, **more):
    """What a scenario hands to its test, from one rank."""
    result = {"parameters": [p.detach() for p in model.parameters()], **more}
    if opt is not None:
        result |= {"stats": opt.stats(), "nonfinite": opt.last.nonfinite}
    return result


def reduced(rank, **kwargs):
    model = make_model()
    opt = wrap(model, max_norm=0.1, **kwargs)
    for batch, weight in zip(BATCHES[rank::WORLD], WEIGHTS[rank::WORLD]):
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    return outcome(model, opt)


def mean(rank):
    return reduced(rank)


def total(rank):
    return reduced(rank, reduction="sum")


def different_scales(rank):
    return reduced(rank, scaler=torch.amp.GradScaler("cpu", init_scale=[8.0, 24.0][rank]))


def ddp(rank):
    model = DistributedDataParallel(make_model())
    opt = wrap(model, group=False, max_norm=0.1)
    for batch, weight in zip(BATCHES[rank::WORLD], WEIGHTS[rank::WORLD]):
        with opt.micro_batch(model):
            opt.backward(0.5 * loss_of(model, batch), weight)
            opt.backward(0.5 * loss_of(model, batch), weight)
        opt.step()
    return outcome(model.module, opt)


def ddp_synchronising(rank):
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    opt = wrap(model, group=False, max_norm=0.1)
    for batch in BATCHES[rank::WORLD]:
        opt.backward(loss_of(model, batch))
        opt.step()
    return outcome(model.module, opt)


def inf_on_one_rank(rank):
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = wrap(model, scaler=scaler)
    for i, batch in enumerate(BATCHES[rank:4:WORLD]):
        factor = INF if (rank, i) == (1, 0) else 1.0
        opt.backward(loss_of(model, batch) * factor)
        opt.step()
    return outcome(model, opt, scale=scaler.get_scale())


def bad_micro_batch_on_one_rank(rank):
    model = make_model()
    opt = wrap(model, on_nonfinite="skip_micro_batch")
    for i, batch in enumerate(BATCHES[rank:4:WORLD]):
        factor = INF if (rank, i) == (1, 0) else 1.0
        opt.backward(loss_of(model, batch) * factor)
        opt.step()
    return outcome(model, opt)


def uneven_epochs(rank):
    """Rank 0 has three micro-batches, rank 1 two; both flush."""
    model = make_model()
    opt = wrap(model)
    for batch in BATCHES[: 3 - rank]:
        opt.backward(loss_of(model, batch))
        opt.step()
    opt.flush()
    stats = opt.stats()
    opt.flush()
    return outcome(model, stats=stats, stepped=opt.stepped)


def partial_models(rank):
    """One parameter per rank, one for both, one for none; weight decay shows which were stepped."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(4)])
    decay = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    opt = AccumulatingOptimizer(decay, process_group=dist.group.WORLD)
    opt.backward(model[rank].sum() + 3 * model[2].sum())
    opt.step()
    return outcome(model)


def sparse(rank):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    before = model.weight.detach().clone()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = AccumulatingOptimizer(sgd, window=1, process_group=dist.group.WORLD)
    opt.backward(model(torch.tensor([[0, 1], [1, 3]][rank])).sum())
    opt.step()
    return {"moved": before - model.weight.detach()}


def fsdp(rank):
    model = fully_shard(make_model())
    opt = wrap(model, group=False, max_norm=0.1)
    for batch in BATCHES[rank::WORLD]:
        with opt.micro_batch(model):
            opt.backward(0.5 * loss_of(model, batch))
            opt.backward(0.5 * loss_of(model, batch))
        opt.step()
    full = [p.full_tensor().detach() for p in model.parameters()]
    return {"parameters": full, "stats": opt.stats(), "nonfinite": opt.last.nonfinite}


def fsdp_inf_on_one_shard(rank):
    model = fully_shard(make_model())
    opt = wrap(model, group=False)
    opt.backward(loss_of(model, BATCHES[rank]))
    if rank == 0:
        next(iter(opt._progress.window.main.values())).to_local()[0, 0] = INF
    opt.backward(loss_of(model, BATCHES[rank + 2]))
    opt.step()
    return {"stats": opt.stats(), "nonfinite": opt.last.nonfinite}


SCENARIOS = (
    mean,
    total,
    different_scales,
    ddp,
    ddp_synchronising,
    inf_on_one_rank,
    bad_micro_batch_on_one_rank,
    uneven_epochs,
    partial_models,
    sparse,
    fsdp,
    fsdp_inf_on_one_shard,
)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    results = {scenario.__name__: scenario(rank) for scenario in SCENARIOS}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Every scenario, run once on both ranks; what each rank saw."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def both(results, scenario):
    """One scenario's results, equal on both ranks where they must be."""
    first, second = (result[scenario.__name__] for result in results)
    if "parameters" in first:
        assert_equal(first["parameters"], second["parameters"])
    if "stats" in first:
        shared = [{**r["stats"], "loss_scale": None} for r in (first, second)]
        assert str(shared[0]) == str(shared[1])  # as text, where NaN equals itself
    return first, second


@pytest.mark.parametrize("scenario", [mean, different_scales, ddp])
def test_weighted_mean(results, scenario):
    first, _ = both(results, scenario)
    expected = train_by_hand(adam, BATCHES, 4, weights=WEIGHTS, max_norm=0.1)
    assert_close(first["parameters"], expected)
    assert first["stats"]["weight"] == sum(WEIGHTS[4:])
    assert first["stats"]["micro_batches"] == 4


def test_sum(results):
    first, _ = both(results, total)
    expected = train_by_hand(adam, BATCHES, 4, weights=WEIGHTS, max_norm=0.1, reduction="sum")
    assert_close(first["parameters"], expected)


@pytest.mark.parametrize("scenario", [ddp_synchronising, fsdp])
def test_models_that_synchronise_every_backward(results, scenario):
    first, _ = both(results, scenario)
    assert_close(first["parameters"], train_by_hand(adam, BATCHES, 4, max_norm=0.1))
    assert first["stats"]["clip_coef"] < 1.0


def test_inf_on_one_rank_skips_on_both(results):
    first, second = both(results, inf_on_one_rank)
    assert_equal(first["parameters"], [p.detach() for p in make_model().parameters()])
    assert first["stats"]["skipped"] == 1.0
    assert first["scale"] == second["scale"] == 4.0
    assert first["nonfinite"] == second["nonfinite"] == [0, 1, 2, 3]


def test_bad_micro_batch_on_one_rank_is_dropped_alone(results):
    first, _ = both(results, bad_micro_batch_on_one_rank)
    expected = train_by_hand(adam, [BATCHES[0], BATCHES[2], BATCHES[3]], 3)
    assert_close(first["parameters"], expected)
    assert first["stats"]["micro_batches"] == 3


def test_flush_with_uneven_epochs(results):
    first, second = both(results, uneven_epochs)
    model = make_model()
    optimizer = adam(model.parameters())
    for batches in ([BATCHES[0], BATCHES[1]], [BATCHES[2]]):
        optimizer.zero_grad()
        (sum(loss_of(model, batch) for batch in batches) / len(batches)).backward()
        optimizer.step()
    assert_close(first["parameters"], [p.detach() for p in model.parameters()])
    assert first["stats"]["micro_batches"] == 1
    assert not first["stepped"]
    assert not second["stepped"]


def test_partial_models(results):
    first, _ = both(results, partial_models)
    stepped = [1.0 - 0.5 - grad for grad in (0.5, 0.5, 3.0)]
    assert [p.tolist() for p in first["parameters"]] == [[s, s] for s in [*stepped, 1.0]]


def test_sparse_gradients_are_summed(results):
    first, _ = both(results, sparse)
    assert first["moved"][:, 0].tolist() == pytest.approx([0.5, 1.0, 0.0, 0.5, 0.0], abs=1e-15)


def test_fsdp_inf_on_one_shard_skips_on_both(results):
    first, _ = both(results, fsdp_inf_on_one_shard)
    assert first["stats"]["skipped"] == 1.0
