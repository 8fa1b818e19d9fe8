"""Sharded training once per window (`synchronize="window"`), 2 and 4 processes."""

import copy
import gc
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import ranks
import shares
import torch
from ranks import across
from shares import WINDOW, as_expected, by_hand, error_of, inside, own_share, train_inside, training
from support import optimizer_oracle as oracle
from support.optimizer_oracle import OP, loss_of, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import accumext

pytestmark = pytest.mark.process

REFUSED = (
    "the window must be full to be synchronised, or torch 2.15 or later, got a part of one, with "
    f"torch {torch.__version__}. Call opt.discard(), or use synchronize='backward'"
)


@across(2)
def test_partial_windows(rank, world):
    """A partial window is sent once, or saved; before torch 2.15 it can be dropped alone"""
    model, opt = training()
    share = own_share(rank, world)
    train_inside(opt, model, share[:3])
    if not shares.FINALIZES:
        errors = [error_of(opt.flush), error_of(opt.accumulation_state_dict)]
        kept = shares.held(opt)
        opt.discard()
        train_inside(opt, model, share[:8])
        calls = ("flush", "accumulation_state_dict")
        assert errors == [f"RuntimeError: {OP}.{call}: {REFUSED}" for call in calls]
        assert kept == 3
        return as_expected(model, opt, by_hand(world, 0, 8))
    saved = copy.deepcopy(opt.accumulation_state_dict())
    opt.flush()
    train_inside(opt, model, share[3:8])
    opt.flush()
    assert opt.last.micro_batches == 1
    again, resumed = training()
    resumed.load_accumulation_state_dict(saved)
    train_inside(resumed, again, share[3:WINDOW])
    return (
        as_expected(model, opt, shares.by_windows(world, (0, 3), (3, 7), (7, 8))),
        as_expected(again, resumed, by_hand(world, 0, WINDOW)),
    )


def collectives(rank, world, make=training, flush=True, **options):
    """Count all-gathers, reduce-scatters and all-reduces of the second window, and of a flush,
    which sends nothing after a full one."""
    model, opt = make(**options)
    train_inside(opt, model, own_share(rank, world, WINDOW))
    with torch.profiler.profile() as profile:
        train_inside(opt, model, own_share(rank, world, WINDOW))
        if flush:
            opt.flush()
    counts = Counter({event.key: event.count for event in profile.key_averages()})
    kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    return [counts[f"c10d::{kind}"] for kind in kinds]


@across(2)
def test_a_window_is_sent_once(rank, world):
    """A window of 4, 2 groups: 10 all-gathers instead of 16, 2 reduce-scatters instead of 8"""
    assert collectives(rank, world, synchronize="backward") == [16, 8, 2]
    assert collectives(rank, world) == [10, 2, 2]


@across(2)
def test_frozen_parameters_of_windows_that_are_sent_once(rank, world):
    """Frozen parameters stay, others train as in one process"""
    models = [make_model(), make_model()]
    for some in models:
        some[0].weight.requires_grad_(False)
    model, opt = training(model=models[0])
    train_inside(opt, model, own_share(rank, world, 2 * WINDOW))
    expected = shares.by_windows(world, (0, WINDOW), (WINDOW, 2 * WINDOW), model=models[1])
    return as_expected(model, opt, expected)


@across(2)
def test_what_does_not_go_with_windows_that_are_sent_once(rank, world):
    """Gradients that FSDP would reduce at once, and held ones that were cleared, are errors in
    words"""
    model, opt = training()
    batch, weight = own_share(rank, world)[0]

    def cleared():
        inside(opt, model, batch, weight)
        model.zero_grad()
        inside(opt, model, batch, weight)

    def empty():
        with opt.micro_batch(model):
            pass

    errors = [error_of(opt.backward, loss_of(model, batch))]
    errors.append(error_of(oracle.own_backward, opt, loss_of(model, batch)))
    opt.zero_grad()
    errors.append(error_of(opt.micro_batch(nn.Linear(1, 1)).__enter__))
    errors += [error_of(empty), error_of(cleared)]
    opt.discard()
    train_inside(opt, model, own_share(rank, world, WINDOW))
    formed = "must be formed inside `with opt.micro_batch(model):` if synchronize='window'"
    assert errors == [
        f"RuntimeError: {OP}.backward: gradients {formed}, got some of another pass",
        f"RuntimeError: {OP}.step: gradients {formed}, got some of another pass",
        f"ValueError: {OP}.micro_batch: model must hold fully_shard modules if "
        "synchronize='window', got Linear",
        f"RuntimeError: {OP}.micro_batch: the micro-batch must have an opt.backward if "
        "synchronize='window', got none",
        f"RuntimeError: {OP}.micro_batch: gradients that FSDP holds must stay where they are until "
        "the window is closed, got some that were cleared. Use opt.zero_grad(), not that of the "
        "model; opt.discard() drops the window",
    ]
    return as_expected(model, opt, by_hand(world, 0, WINDOW))


def live_bytes():
    """Return the bytes of all tensors that Python can find, the least of several looks: a thread of
    the group may hold what it has sent for a moment longer than the collective takes."""
    gc.collect()
    looks = []
    for _ in range(5):
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        tensors += [t.grad for t in tensors if t.grad is not None]
        local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
        looks.append(sum(storages.values()))
        del tensors, local
        time.sleep(0.02)
    return min(looks)


IN_FLOAT32 = {"reduce_dtype": torch.float32}
KINDS = {
    "float32": {"dtype": torch.float32, "policy": {}},
    "mixed": {"dtype": torch.float32, "policy": {"param_dtype": torch.bfloat16, **IN_FLOAT32}},
    "bfloat16": {"dtype": torch.bfloat16, "policy": IN_FLOAT32},
}


@across(2, cases=KINDS)
def test_the_memory_of_a_window_is_as_predicted(rank, world, dtype, policy):
    """`window_memory` within 10 % of what is measured, for float32, mixed precision and bfloat16"""
    for synchronize in ("backward", "window"):
        # Layers that no number of processes here divides.
        layers = nn.Sequential(*(nn.Linear(301, 301, dtype=dtype) for _ in range(3)))
        shards = {"mp_policy": MixedPrecisionPolicy(**policy)}
        model, opt = training(model=layers, shards=shards, synchronize=synchronize)
        batch = torch.randn(2, 301, dtype=dtype)
        before = live_bytes()
        for _ in range(2):
            inside(opt, model, batch)
        predicted = accumext.window_memory(model, synchronize)
        assert predicted == pytest.approx(live_bytes() - before, rel=0.1)
        opt.discard()


@across(2)
def test_half_precision_is_held_in_float32(rank, world):
    """bfloat16 parameters with `reduce_dtype=float32` hold float32 gradients, and have masters"""
    model = shares.sharded(torch.bfloat16, mp_policy=MixedPrecisionPolicy(**IN_FLOAT32))
    masters = accumext.masters(model.parameters())
    options = {"window": WINDOW, "masters": masters, "synchronize": "window"}
    opt = accumext.AccumulatingOptimizer(oracle.sgd(masters), **options)
    before = [m.detach().clone() for m in shares.whole(masters)]
    train_inside(opt, model, own_share(rank, world, WINDOW, torch.bfloat16))
    moved = [(a - b).detach().double() for a, b in zip(before, shares.whole(masters), strict=True)]
    grads = oracle.window_gradient(make_model(), shares.BATCHES[: WINDOW * world], shares.WEIGHTS)
    # Activations, weights and their products are rounded to 8 bits.
    torch.testing.assert_close(moved, grads, rtol=0.05, atol=0.01)


def hybrid(replicated=False, **options):
    """Make a model of HSDP, `fully_shard` on a mesh of two dimensions; or of shards in pairs, whose
    replicas the optimizer's own group sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if replicated:
        options["process_group"] = mesh["replicate"].get_group()
    return training(shards={"mesh": mesh["shard"] if replicated else mesh}, **options)


HYBRIDS = {
    f"{kind}-{synchronize}": {"replicated": replicated, "synchronize": synchronize}
    for kind, replicated in (("hybrid", False), ("shards_of_replicas", True))
    for synchronize in ("backward", "window")
}


@across(4, cases=HYBRIDS)
def test_hybrid_shards_equal_one_process(rank, world, **options):
    """HSDP on a 2x2 mesh, and shards in pairs whose replicas the wrapper sums: as one process"""
    model, opt = hybrid(**options)
    train_inside(opt, model, own_share(rank, world))
    return as_expected(model, opt, by_hand(world, 0, WINDOW))


@across(4)
def test_partial_windows_of_hybrid_shards(rank, world):
    """A partial window of HSDP is sent once; before torch 2.15 it is refused"""
    model, opt = hybrid()
    train_inside(opt, model, own_share(rank, world, 3))
    error = error_of(opt.flush)
    if shares.FINALIZES:
        return as_expected(model, opt, by_hand(world, 0, 3))
    opt.discard()
    assert error == f"RuntimeError: {OP}.flush: {REFUSED}"


@across(4)
def test_a_window_of_hybrid_shards_is_sent_once(rank, world):
    """HSDP 2x2: 10 all-gathers, 2 reduce-scatters, and 2 small all-reduces beside the gradients'"""
    assert collectives(rank, world, hybrid, synchronize="backward") == [16, 8, 8 + 2]
    assert collectives(rank, world, hybrid) == [10, 2, 2 + 2]
    # One bucket holds this model's gradients.
    assert collectives(rank, world, hybrid, flush=False, replicated=True) == [10, 2, 1 + 2]


def uneven(rank: int, folder: str) -> None:
    """Train with three of four micro-batches on rank 1; write what the error said."""
    ranks.join(rank, 2, f"{folder}/meeting", seconds=4)
    model, opt = training()
    error = error_of(train_inside, opt, model, own_share(rank, 2, WINDOW - rank))
    Path(folder, f"said-{rank}").write_text(error or error_of(opt.flush), encoding="utf-8")
    os._exit(0)  # the group has failed


def test_a_rank_with_fewer_micro_batches(tmp_path):
    """A rank with fewer micro-batches is an error on all after the group's timeout, not a hang"""
    ranks.spawn(uneven, (str(tmp_path),), 2)
    said = [(tmp_path / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0]  # in a collective of the model, which waited for the other rank's
    text = f"RuntimeError: {OP}.flush: the window must be closed by every process, got no answer"
    assert said[1].startswith(text)
    assert "Give every process the same number" in said[1]
