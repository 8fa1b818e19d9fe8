"""Sharded training after errors, interrupts and misuse."""

from __future__ import annotations

import copy
import pickle
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from ranks import across
from sharded_windows import FINALIZES, after_a_failure, in_backward, train, training, wrapped
from shares import (
    MAX_NORM,
    WEIGHTS,
    as_expected,
    by_hand,
    by_windows,
    called,
    error_of,
    held,
    inside,
    of_the_user,
    own_share,
    whole,
)
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import (
    OP,
    assert_equal,
    loss_of,
    make_model,
    parameters_of,
    sgd,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

pytestmark = pytest.mark.process

BOTH = {synchronize: {"synchronize": synchronize} for synchronize in ("backward", "window")}


@across(2, cases=BOTH)
def test_a_micro_batch_after_a_sharded_step_that_failed(rank, world, synchronize):
    """A micro-batch after a sharded step that failed joins its window, and the next is its own"""
    descent = partial(sgd, lr=0.1)
    model, opt = training(optimizer=descent, max_norm=None, synchronize=synchronize)
    share, failures = own_share(rank, world), [KeyError("the first")]

    def fail_once(*args):
        if failures:
            raise failures.pop()

    def expected(*windows):
        return by_windows(world, *windows, make=descent, max_norm=None)

    opt.register_step_pre_hook(fail_once)
    error = error_of(train, opt, model, share[:4])
    inside(opt, model, *share[4])
    joined = as_expected(model, opt, expected((0, 5)))
    assert error == "KeyError: 'the first'"
    assert joined[1]["micro_batches"] == 5
    assert joined[1]["weight"] == pytest.approx(sum(WEIGHTS[: 5 * world]) / world)
    train(opt, model, share[4:8])
    return joined, as_expected(model, opt, expected((0, 5), (4, 8)))


def interrupted_reduction(opt, model, batch, weight):
    """Once FSDP has reduced something: when the window is closed, or in its last backward"""
    if not FINALIZES:
        in_backward(opt, model, batch, weight, KeyboardInterrupt)
    finalize = FSDPModule.finalize_backward

    def interrupted(self, **kwargs):
        finalize(self, **kwargs)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "finalize_backward", interrupted)
        inside(opt, model, batch, weight)


@across(2)
def test_an_interrupt_while_a_held_window_is_reduced(rank, world):
    """Ctrl-C while FSDP reduces a held window drops it and says so; training goes on"""
    where = "step: the open window was dropped: it was being reduced"
    if not FINALIZES:
        where = "backward: the open window was dropped: it had been added to"
    said = f"KeyboardInterrupt: \n{OP}.{where}"
    return after_a_failure(rank, world, interrupted_reduction, said, 3)


def without_a_batch(opt, model, batch, weight):
    with opt.micro_batch(model):
        raise KeyError("no batch")


@across(2)
def test_an_exception_before_the_first_forward(rank, world):
    """An exception inside the first `micro_batch`, before its forward, is the user's own"""
    return after_a_failure(rank, world, without_a_batch, "KeyError: 'no batch'", 0)


def part_of_a_model(opt, model, batch, weight):
    """A layer, which FSDP gathers with the rest of the model."""
    with opt.micro_batch(model[0]):
        opt.backward(loss_of(model, batch))


@across(2)
def test_a_part_of_a_sharded_model(rank, world):
    """`micro_batch` of a part of what FSDP gathers together is an error"""
    said = (
        f"ValueError: {OP}.micro_batch: model must be all of what FSDP gathers together, where "
        "synchronize='window', got a part of it"
    )
    return after_a_failure(rank, world, part_of_a_model, said, 4, 4)


@across(2)
def test_evaluation_inside_of_a_window(rank, world):
    """Evaluation, a saved model and `zero_grad` between a window's micro-batches; several roots"""
    model = make_model()  # a plain module around modules that do not know of one another
    fully_shard(model[0])
    fully_shard(model[2])
    opt = wrapped(model)
    train(opt, model, own_share(rank, world, 8))
    seen = [as_expected(model, opt, by_hand(world, 0, 8))]

    model, opt = training()
    for batch, weight in own_share(rank, world, 8):
        loss = loss_of(model, batch)  # the forward is outside, too
        with opt.micro_batch(model):
            opt.backward(loss, weight)
        opt.step()
        with torch.no_grad():
            model(batch)
        model.state_dict()
        opt.zero_grad()
    return [*seen, as_expected(model, opt, by_hand(world, 0, 8))]


@across(2)
def test_copies_of_a_window_that_fsdp_holds(rank, world):
    """Copies, pickles and `main_grad` of a window that FSDP holds are errors in words"""
    # A copy would have the numbers of the window, and FSDP its gradients.
    model, opt = training()
    share = own_share(rank, world, 8)
    train(opt, model, share[:2])
    parameter = opt.param_groups[0]["params"][0]
    calls = (
        partial(copy.deepcopy, opt),
        partial(pickle.dumps, opt),
        lambda: opt.main_grad(parameter),
    )
    errors = [error_of(call) for call in calls]
    train(opt, model, share[2:])
    assert opt.main_grad(parameter) is None
    assert errors == [
        f"RuntimeError: {OP}.{name}: the window must be closed, where FSDP holds its "
        "gradients unreduced, got an open one. Do this where opt.stepped is true"
        for name in ("__getstate__", "__getstate__", "main_grad")
    ]
    return as_expected(model, opt, by_hand(world, 0, 8))


@across(2, cases=BOTH if FINALIZES else {"backward": BOTH["backward"]})
def test_a_flush_where_one_rank_has_dropped_its_window(rank, world, synchronize):
    """A `flush` where one rank has discarded its micro-batches is an error on all, not a hang"""
    model, opt = training(synchronize=synchronize)
    share = own_share(rank, world)
    train(opt, model, share[:3])
    if rank == 1:
        opt.discard()
    start = time.monotonic()
    error, kept = error_of(opt.flush), held(opt)
    opt.discard()
    opt.flush()  # of nothing anywhere, which is nothing again
    seconds = time.monotonic() - start
    train(opt, model, share[:8])
    contract = "the window must hold the same number of micro-batches on every process"
    assert error.startswith(f"RuntimeError: {OP}.flush: {contract}, got 3, 0 by rank.")
    assert kept == (0 if rank == 1 else 3)
    assert seconds < 20.0  # of 60 that a hang would take
    return as_expected(model, opt, by_hand(world, 0, 8))


LOOPS = {
    "called": {"synchronize": "backward", "loop": called},
    "of_the_user": {"synchronize": "backward", "loop": of_the_user},
    "once_per_window": {"synchronize": "window", "loop": inside},
}


@across(2, cases=LOOPS)
def test_ranks_of_a_mesh_that_were_told_differently(rank, world, synchronize, loop):
    """Ranks of a mesh with other settings end in an error; with the same the window is closed"""
    share = own_share(rank, world, 8)
    model, opt = training(synchronize=synchronize, window=4 - rank)
    errors = [error_of(train, opt, model, share[:4], loop=loop)]
    opt.zero_grad()
    opt.window = 4
    train(opt, model, share[:4], loop=loop)
    opt.max_norm = MAX_NORM * (rank + 1)
    errors.append(error_of(train, opt, model, share[4:], loop=loop))
    opt.max_norm = MAX_NORM
    opt.step()
    assert "got full with 4, full with 3 by rank" in errors[0]
    said = "step: max_norm must be the same on every process"
    assert errors[1] == f"RuntimeError: {OP}.{said}, got {MAX_NORM}, {2 * MAX_NORM} by rank"
    weights = None if loop is of_the_user else WEIGHTS
    return as_expected(model, opt, by_hand(world, 0, 8, weights=weights))


@across(2)
def test_a_weight_of_zero_on_one_rank(rank, world):
    """`on_nonfinite="raise"` with a weight of zero on one rank: all look at the gradients"""
    weights = list(WEIGHTS)
    weights[world] = 0.0  # the second micro-batch of the first rank
    model, opt = training(synchronize="backward", on_nonfinite="raise")
    for (batch, _), weight in zip(own_share(rank, world, 8), weights[rank::world]):
        called(opt, model, batch, weight)
    return as_expected(model, opt, by_hand(world, 0, 8, weights=weights))


@across(2)
def test_a_run_that_is_resumed_where_a_window_is_closed(rank, world):
    """A sharded run is resumed where a window is closed, bit for bit"""
    share = own_share(rank, world, 8, torch.float32)
    model, opt = training(torch.float32)
    train(opt, model, share[:4])
    saved = [model.state_dict(), opt.state_dict(), opt.accumulation_state_dict()]
    saved = copy.deepcopy(saved)
    again, resumed = training(torch.float32)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.load_accumulation_state_dict(saved[2])
    for its, some in ((opt, model), (resumed, again)):
        train(its, some, share[4:] + share[:4])
    assert_equal(whole(parameters_of(again)), whole(parameters_of(model)))


@across(2, cases=BOTH)
def test_micro_batches_of_shards_read_no_device(rank, world, synchronize):
    """Micro-batches of sharded parameters whose weights are on a device read nothing from it"""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, opt = training(torch.float32, window=2, scaler=scaler, synchronize=synchronize)
    reads = DeviceReads()
    with cpu_as_device():
        for i, (batch, weight) in enumerate(own_share(rank, world, 4, torch.float32)):
            # At the first, ranks compare their settings.
            with reads if i > 0 else nullcontext(), opt.micro_batch(model):
                opt.backward(loss_of(model, batch), torch.tensor(weight))
            opt.step()
    assert (reads.count, reads.lists) == (0, 0)
    assert opt.last.weight == pytest.approx(sum(WEIGHTS[2 * world : 4 * world]) / world)


@across(2, cases=BOTH)
def test_gradients_that_fsdp_sums(rank, world, synchronize):
    """Where FSDP sums gradients, `reduction="sum"` does too, and "mean" is refused"""
    # As where losses are divided by the tokens of all ranks.
    share = own_share(rank, world, 8)
    model, opt = training(reduction="sum", synchronize=synchronize)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    if synchronize == "window":
        assert error_of(train, wrapped(model), model, share) == (
            f"ValueError: {OP}.micro_batch: model must average gradients over processes with "
            "reduction='mean', got set_gradient_divide_factor(1.0). Set the number of "
            "data-parallel processes, or use reduction='sum'"
        )
    for begin in (0, 4):
        tokens = sum(WEIGHTS[begin * world : (begin + 4) * world])
        for batch, weight in share[begin : begin + 4]:
            inside(opt, model, batch, factor=weight / tokens)
    return as_expected(model, opt, by_hand(world, 0, 8))
