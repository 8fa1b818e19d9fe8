"""Sharded training after errors, interrupts and misuse."""

from __future__ import annotations

import copy
import pickle
import time
from contextlib import nullcontext
from functools import partial

import pytest
import ranks
import torch
from sharded_windows import FINALIZES, failing, in_backward, train, training, wrapped
from shares import (
    MAX_NORM,
    WEIGHTS,
    by_hand,
    by_windows,
    called,
    error_of,
    held,
    inside,
    of_the_user,
    outcome,
    own_share,
)
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import (
    OP,
    assert_close,
    assert_equal,
    loss_of,
    make_model,
    sgd,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

pytestmark = pytest.mark.process

WORLD = 2


def step_that_fails(rank, world, synchronize):
    """The first full window's step fails; a fifth micro-batch joins it; then usual windows."""
    slow = partial(sgd, lr=0.1)
    model, opt = training(optimizer=slow, max_norm=None, synchronize=synchronize)
    share = own_share(rank, world)
    calls = []

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("the first")

    opt.register_step_pre_hook(fail_once)
    error = error_of(lambda: train(opt, model, share[:4]))
    inside(opt, model, *share[4])
    joined = outcome(model, opt)
    train(opt, model, share[4:8])
    return outcome(model, opt, error=error, joined=joined)


FAILING_STEPS = {
    "step_that_fails_every_backward": partial(step_that_fails, synchronize="backward"),
    "step_that_fails_once_per_window": partial(step_that_fails, synchronize="window"),
}


def interrupted_reduction(opt, model, batch, weight):
    """Ctrl-C once FSDP has reduced something: when the window is closed, or in its last backward"""

    if not FINALIZES:
        in_backward(opt, model, batch, weight, KeyboardInterrupt)
    finalize = FSDPModule.finalize_backward

    def interrupted(self, **kwargs):
        finalize(self, **kwargs)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "finalize_backward", interrupted)
        inside(opt, model, batch, weight)


def empty_handed(opt, model, batch, weight):
    with opt.micro_batch(model):
        raise KeyError("no batch")


def part_of_a_model(opt, model, batch, weight):
    """`micro_batch` of a layer, which FSDP gathers with the rest of the model."""
    with opt.micro_batch(model[0]):
        opt.backward(loss_of(model, batch))


def copied_while_held(rank, world):
    """A copy would have the numbers of the window, and FSDP its gradients."""
    model, opt = training()
    share = own_share(rank, world, 8)
    train(opt, model, share[:2])
    parameter = opt.param_groups[0]["params"][0]
    calls = (
        lambda: copy.deepcopy(opt),
        lambda: pickle.dumps(opt),
        lambda: opt.main_grad(parameter),
    )
    errors = [error_of(call) for call in calls]
    train(opt, model, share[2:])
    assert opt.main_grad(parameter) is None
    return outcome(model, opt, errors=errors)


def one_rank_discards(rank, world):
    """All flush: one has dropped its micro-batches. After that an empty flush is nothing again."""
    seen = []
    for synchronize in ("backward", "window") if FINALIZES else ("backward",):
        model, opt = training(synchronize=synchronize)
        share = own_share(rank, world)
        train(opt, model, share[:3])
        if rank == 1:
            opt.discard()
        start = time.monotonic()
        error = error_of(opt.flush)
        kept = held(opt)
        opt.discard()
        opt.flush()
        train(opt, model, share[:8])
        seen.append([error, kept, time.monotonic() - start])
    return outcome(model, opt, seen=seen)


def told_differently(rank, world):
    """Ranks with windows of other sizes, which call FSDP equally often; then alike; then with one
    that was assigned another clip."""
    seen = {}
    share = own_share(rank, world, 8)
    for synchronize, loop in (("backward", called), ("backward", of_the_user), ("window", inside)):
        model, opt = training(synchronize=synchronize, window=4 - rank)
        errors = [error_of(partial(train, opt, model, share[:4], loop=loop))]
        opt.zero_grad()
        opt.window = 4
        train(opt, model, share[:4], loop=loop)
        opt.max_norm = MAX_NORM * (rank + 1)
        errors.append(error_of(partial(train, opt, model, share[4:], loop=loop)))
        opt.max_norm = MAX_NORM
        opt.step()
        seen[loop.__name__] = [errors, outcome(model, opt)["parameters"]]
    return seen


def zero_weight_on_one_rank(rank, world):
    """With `on_nonfinite="raise"` all look at the gradients, whatever they weigh on one rank."""
    model, opt = training(synchronize="backward", on_nonfinite="raise")
    for i, (batch, weight) in enumerate(own_share(rank, world, 8)):
        called(opt, model, batch, 0.0 if rank == 0 and i == 1 else weight)
    return outcome(model, opt)


def several_roots(rank, world):
    """A plain module around `fully_shard` modules that do not know of one another."""
    model = make_model()
    fully_shard(model[0])
    fully_shard(model[2])
    opt = wrapped(model)
    train(opt, model, own_share(rank, world, 8))
    return outcome(model, opt)


def evaluation_inside(rank, world):
    """Between the micro-batches of a window: evaluation, a checkpoint of the model, zero_grad."""
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
    return outcome(model, opt)


def resumed_where_a_window_is_closed(rank, world):
    """A new model and optimizer, from what was saved after the first of three windows."""
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
    return outcome(model, opt, resumed=outcome(again, resumed)["parameters"])


def reads_of_a_device(rank, world):
    """The CPU plays a device: what the host reads while micro-batches of two windows run, after
    the first, at which ranks compare their settings."""
    seen = []
    for synchronize in ("backward", "window"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model, opt = training(torch.float32, window=2, scaler=scaler, synchronize=synchronize)
        reads = DeviceReads()
        with cpu_as_device():
            for i, (batch, weight) in enumerate(own_share(rank, world, 4, torch.float32)):
                with reads if i > 0 else nullcontext(), opt.micro_batch(model):
                    opt.backward(loss_of(model, batch), torch.tensor(weight))
                opt.step()
        seen.append([reads.count, reads.lists, opt.stats()["weight"]])
    return {"seen": seen}


def gradients_that_fsdp_sums(rank, world):
    """`set_gradient_divide_factor(1.0)`, as where losses are divided by the tokens of all ranks."""
    seen = {}
    share = own_share(rank, world, 8)
    for synchronize in ("backward", "window"):
        model, opt = training(reduction="sum", synchronize=synchronize)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        if synchronize == "window":
            seen["error"] = error_of(partial(train, wrapped(model), model, share))
        for begin in (0, 4):
            tokens = sum(WEIGHTS[begin * world : (begin + 4) * world])
            for batch, weight in share[begin : begin + 4]:
                inside(opt, model, batch, factor=weight / tokens)
        seen[synchronize] = outcome(model, opt)["parameters"]
    return seen


AS_USUAL = {
    "exception_before_the_first_forward": partial(failing, fail=empty_handed, count=0),
    "part_of_a_model": partial(failing, fail=part_of_a_model, count=4, again=4),
    **ranks.named(copied_while_held, one_rank_discards, several_roots, evaluation_inside),
}
SCENARIOS = {
    **FAILING_STEPS,
    **AS_USUAL,
    "reduction_that_fails": partial(failing, fail=interrupted_reduction, count=3),
    **ranks.named(told_differently, zero_weight_on_one_rank, resumed_where_a_window_is_closed),
    **ranks.named(reads_of_a_device, gradients_that_fsdp_sums),
}


def descent(*windows):
    return by_windows(WORLD, *windows, make=partial(sgd, lr=0.1), max_norm=None)


@pytest.mark.parametrize("scenario", FAILING_STEPS)
def test_a_micro_batch_after_a_sharded_step_that_failed(pair, scenario):
    """A micro-batch after a sharded step that failed joins its window, and the next is its own"""
    first = ranks.agreed(pair, scenario)
    assert first["error"] == "KeyError: 'the first'"
    assert_close(first["joined"]["parameters"], descent((0, 5)))
    assert first["joined"]["stats"]["micro_batches"] == 5
    weights = WEIGHTS[: 5 * WORLD]
    assert first["joined"]["stats"]["weight"] == pytest.approx(sum(weights) / WORLD)
    assert_close(first["parameters"], descent((0, 5), (4, 8)))


def test_an_interrupt_while_a_held_window_is_reduced(pair):
    """Ctrl-C while FSDP reduces a held window drops it and says so; training goes on"""
    first = ranks.agreed(pair, "reduction_that_fails")
    note = f"{OP}.backward: the open window was dropped: it had been added to"
    if FINALIZES:
        note = f"{OP}.step: the open window was dropped: it was being reduced"
    assert first["error"] == f"KeyboardInterrupt: \n{note}"
    assert first["left"] == 0
    assert not any(first["grads"])
    assert_close(first["parameters"], by_hand(WORLD, 0, 8))


@pytest.mark.parametrize("scenario", AS_USUAL)
def test_training_goes_on_as_in_one_process(pair, scenario):
    """Sharded training after such errors, or evaluation in a window, is that of one process"""
    assert_close(ranks.agreed(pair, scenario)["parameters"], by_hand(WORLD, 0, 8))


def test_an_exception_before_the_first_forward(pair):
    """An exception inside the first `micro_batch`, before its forward, is the user's own"""
    for error in ranks.of(pair, "exception_before_the_first_forward", "error"):
        assert error == "KeyError: 'no batch'"


def test_a_part_of_a_sharded_model(pair):
    """`micro_batch` of a part of what FSDP gathers together is an error"""
    for error in ranks.of(pair, "part_of_a_model", "error"):
        assert error == (
            f"ValueError: {OP}.micro_batch: model must be all of what FSDP gathers together, where "
            "synchronize='window', got a part of it"
        )


def test_copies_of_a_window_that_fsdp_holds(pair):
    """Copies, pickles and `main_grad` of a window that FSDP holds are errors in words"""
    for errors in ranks.of(pair, "copied_while_held", "errors"):
        assert errors == [
            f"RuntimeError: {OP}.{name}: the window must be closed, where FSDP holds its "
            "gradients unreduced, got an open one. Do this where opt.stepped is true"
            for name in ("__getstate__", "__getstate__", "main_grad")
        ]


def test_a_flush_where_one_rank_has_dropped_its_window(pair):
    """A `flush` where one rank has discarded its micro-batches is an error on all, not a hang"""
    for number, rank in enumerate(pair):
        for error, kept, seconds in rank["one_rank_discards"]["seen"]:
            assert error.startswith(
                f"RuntimeError: {OP}.flush: the window must hold the same number of "
                "micro-batches on every process, got 3, 0 by rank."
            )
            assert kept == (0 if number == 1 else 3)
            assert seconds < 20.0  # of 60 that a hang would take


def test_ranks_of_a_mesh_that_were_told_differently(pair):
    """Ranks of a mesh with other settings end in an error; with the same the window is closed"""
    for rank in pair:
        for loop, (errors, parameters) in rank["told_differently"].items():
            assert "got full with 4, full with 3 by rank" in errors[0]
            clip = f"got {MAX_NORM}, {2 * MAX_NORM} by rank"
            said = "step: max_norm must be the same on every process"
            assert errors[1] == f"RuntimeError: {OP}.{said}, {clip}"
            weights = None if loop == "of_the_user" else WEIGHTS
            assert_close(parameters, by_hand(WORLD, 0, 8, weights=weights))


def test_a_weight_of_zero_on_one_rank(pair):
    """`on_nonfinite="raise"` with a weight of zero on one rank: all look at the gradients"""
    weights = list(WEIGHTS)
    weights[WORLD] = 0.0  # the second micro-batch of the first rank
    first = ranks.agreed(pair, "zero_weight_on_one_rank")
    assert_close(first["parameters"], by_hand(WORLD, 0, 8, weights=weights))


def test_a_run_that_is_resumed_where_a_window_is_closed(pair):
    """A sharded run is resumed where a window is closed, bit for bit"""
    first = ranks.agreed(pair, "resumed_where_a_window_is_closed")
    assert_equal(first["resumed"], first["parameters"])


def test_micro_batches_of_shards_read_no_device(pair):
    """Micro-batches of sharded parameters whose weights are on a device read nothing from it"""
    for results in ranks.of(pair, "reads_of_a_device", "seen"):
        for count, lists, weight in results:
            assert (count, lists) == (0, 0)
            assert weight == pytest.approx(sum(WEIGHTS[2 * WORLD : 4 * WORLD]) / WORLD)


def test_gradients_that_fsdp_sums(pair):
    """Where FSDP sums gradients, `reduction="sum"` does too, and "mean" is refused"""
    for rank in pair:
        found = rank["gradients_that_fsdp_sums"]
        assert found["error"] == (
            f"ValueError: {OP}.micro_batch: model must average gradients over processes with "
            "reduction='mean', got set_gradient_divide_factor(1.0). Set the number of "
            "data-parallel processes, or use reduction='sum'"
        )
        for synchronize in ("backward", "window"):
            assert_close(found[synchronize], by_hand(WORLD, 0, 8))
