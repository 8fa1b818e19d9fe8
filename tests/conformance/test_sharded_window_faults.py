"""Sharded training after errors, interrupts and misuse."""

import copy
import pickle
import time
from contextlib import nullcontext
from functools import partial

import pytest
import shares
import torch
from ranks import across
from shares import as_expected, by_hand, error_of, inside, own_share, train_inside, training
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import OP, assert_equal, loss_of, make_model, parameters_of, sgd
from torch.distributed.fsdp import FSDPModule, fully_shard

pytestmark = pytest.mark.process

BOTH = {synchronize: {"synchronize": synchronize} for synchronize in ("backward", "window")}


@across(2, cases=BOTH)
def test_a_micro_batch_after_a_sharded_step_that_failed(rank, world, synchronize):
    """A micro-batch after a sharded step that failed joins its window, and the next is its own"""
    descent = partial(sgd, lr=0.1)
    model, opt = training(make=descent, max_norm=None, synchronize=synchronize)
    share, failures = own_share(rank, world), [KeyError("the first")]

    def fail_once(*args):
        if failures:
            raise failures.pop()

    def expected(*windows):
        return shares.by_windows(world, *windows, make=descent, max_norm=None)

    opt.register_step_pre_hook(fail_once)
    error = error_of(train_inside, opt, model, share[:4])
    inside(opt, model, *share[4])
    joined = as_expected(model, opt, expected((0, 5)))
    assert error == "KeyError: 'the first'"
    assert joined[1]["micro_batches"] == 5
    assert joined[1]["weight"] == pytest.approx(sum(shares.WEIGHTS[: 5 * world]) / world)
    train_inside(opt, model, share[4:8])
    return joined, as_expected(model, opt, expected((0, 5), (4, 8)))


# Micro-batches of held windows that fail


def before_its_backward(opt, model, batch, weight):
    with opt.micro_batch(model):
        loss_of(model, batch)
        raise KeyError


def in_its_backward(opt, model, batch, weight, error=KeyError):
    """Fail on the way to the first layer, when the gradients of the last are there."""

    def stop(grad):
        raise error

    with opt.micro_batch(model):
        hidden = model[0](batch)
        hidden.register_hook(stop)
        opt.backward(model[2](hidden).square().mean(), weight)


def interrupted(opt, model, batch, weight):
    """Interrupt once FSDP has reduced something: at the close, or in the last backward pass."""
    if not shares.FINALIZES:
        in_its_backward(opt, model, batch, weight, KeyboardInterrupt)
    finalize = FSDPModule.finalize_backward

    def finalize_and_stop(self, **kwargs):
        finalize(self, **kwargs)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "finalize_backward", finalize_and_stop)
        inside(opt, model, batch, weight)


def before_the_first_forward(opt, model, batch, weight):
    """Fail while nothing is held: the error is the user's own."""
    with opt.micro_batch(model):
        raise KeyError("no batch")


def of_a_part(opt, model, batch, weight):
    """Hold a layer alone, which FSDP gathers with the rest of the model."""
    with opt.micro_batch(model[0]):
        opt.backward(loss_of(model, batch))


DROPPED, ADDED = "the open window was dropped: ", "backward: the open window was dropped: it had"
REDUCED = f"step: {DROPPED}it was being reduced" if shares.FINALIZES else f"{ADDED} been added to"
FAILURES = {  # what fails, after how many micro-batches; what is said
    before_its_backward: (2, f"KeyError: \n{OP}.micro_batch: {DROPPED}FSDP holds it in one sum"),
    in_its_backward: (2, f"KeyError: \n{OP}.{ADDED} been added to"),
    interrupted: (3, f"KeyboardInterrupt: \n{OP}.{REDUCED}"),
    before_the_first_forward: (0, "KeyError: 'no batch'"),
    of_a_part: (
        shares.WINDOW,
        f"ValueError: {OP}.micro_batch: model must be all of what FSDP gathers together if "
        "synchronize='window', got a part of it",
    ),
}
if not shares.RECOVERS:
    del FAILURES[in_its_backward]


@across(2, cases={fails.__name__: {"fails": fails} for fails in FAILURES})
def test_a_micro_batch_that_fails(rank, world, fails):
    """An exception in a held window, Ctrl-C too, drops it and says so; training goes on"""
    count, said = FAILURES[fails]
    model, opt = training()
    share = own_share(rank, world)
    train_inside(opt, model, share[:count])
    error, left = error_of(fails, opt, model, *share[count]), shares.held(opt)
    grads = [p.grad for p in opt.param_groups[0]["params"]]
    train_inside(opt, model, share[count // shares.WINDOW * shares.WINDOW : 8])
    assert error == said
    assert left == 0
    assert all(grad is None for grad in grads)
    return as_expected(model, opt, by_hand(world, 0, 8))


@across(2)
def test_evaluation_inside_of_a_window(rank, world):
    """Evaluation, a saved model and `zero_grad` between a window's micro-batches; several roots"""
    model = make_model()  # a plain module around modules that do not know of one another
    fully_shard(model[0])
    fully_shard(model[2])
    opt = shares.once_per_window(model)
    train_inside(opt, model, own_share(rank, world, 8))
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
    train_inside(opt, model, share[:2])
    parameter = opt.param_groups[0]["params"][0]
    errors = [error_of(copy.deepcopy, opt), error_of(pickle.dumps, opt)]
    errors.append(error_of(opt.main_grad, parameter))
    train_inside(opt, model, share[2:])
    assert opt.main_grad(parameter) is None
    assert errors == [
        f"RuntimeError: {OP}.{name}: the window must be closed while FSDP holds its "
        "gradients unreduced, got an open one. Do this when opt.stepped is True"
        for name in ("__getstate__", "__getstate__", "main_grad")
    ]
    return as_expected(model, opt, by_hand(world, 0, 8))


@across(2, cases={"empty": {"count": 0}, "open": {"count": 2}})
def test_accumulate_with_a_window_that_is_sent_once(rank, world, count):
    """`accumulate` with `synchronize="window"` is refused, also in a window; nothing is lost"""
    model, opt = training()
    share, parameters = own_share(rank, world, 8), opt.param_groups[0]["params"]
    train_inside(opt, model, share[:count])
    if count == 0:
        loss_of(model, share[0][0]).backward()  # FSDP reduces it at once
    else:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

    def seen():
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        return [t.detach().to_local().clone() for t in tensors], shares.held(opt)

    before, error, after = seen(), error_of(opt.accumulate), seen()
    opt.zero_grad()
    train_inside(opt, model, share[count:])
    assert error == (
        f"RuntimeError: {OP}.accumulate: gradients must be formed inside `with "
        "opt.micro_batch(model):` if synchronize='window', got some of another pass"
    )
    assert_equal(after[0], before[0])
    assert after[1] == before[1] == count
    return as_expected(model, opt, by_hand(world, 0, 8))


@across(2, cases=BOTH if shares.FINALIZES else {"backward": BOTH["backward"]})
def test_a_flush_where_one_rank_has_dropped_its_window(rank, world, synchronize):
    """A `flush` where one rank has discarded its micro-batches is an error on all, not a hang"""
    model, opt = training(synchronize=synchronize)
    share = own_share(rank, world)
    train_inside(opt, model, share[:3])
    if rank == 1:
        opt.discard()
    start = time.monotonic()
    error, kept = error_of(opt.flush), shares.held(opt)
    opt.discard()
    opt.flush()  # of nothing anywhere, which is nothing again
    seconds = time.monotonic() - start
    train_inside(opt, model, share[:8])
    contract = "the window must hold the same number of micro-batches on every process"
    assert error.startswith(f"RuntimeError: {OP}.flush: {contract}, got 3, 0 by rank.")
    assert kept == (0 if rank == 1 else 3)
    assert seconds < 20.0  # of 60 that a hang would take
    return as_expected(model, opt, by_hand(world, 0, 8))


LOOPS = {
    "called": {"synchronize": "backward", "loop": shares.called},
    "of_the_user": {"synchronize": "backward", "loop": shares.of_the_user},
    "once_per_window": {"synchronize": "window", "loop": inside},
}


@across(2, cases=LOOPS)
def test_ranks_of_a_mesh_that_were_told_differently(rank, world, synchronize, loop):
    """Ranks of a mesh with other settings end in an error; with the same the window is closed"""
    share = own_share(rank, world, 8)
    model, opt = training(synchronize=synchronize, window=4 - rank)
    errors = [error_of(shares.train, opt, model, share[:4], loop)]
    opt.zero_grad()
    opt.window = 4
    shares.train(opt, model, share[:4], loop)
    opt.max_norm = shares.MAX_NORM * (rank + 1)
    errors.append(error_of(shares.train, opt, model, share[4:], loop))
    opt.max_norm = shares.MAX_NORM
    opt.step()
    assert "got full with 4, full with 3 by rank" in errors[0]
    said = "step: max_norm must be the same on every process, got 0.02, 0.04 by rank"
    assert errors[1] == f"RuntimeError: {OP}.{said}"
    weights = None if loop is shares.of_the_user else shares.WEIGHTS
    return as_expected(model, opt, by_hand(world, 0, 8, weights=weights))


@across(2)
def test_a_weight_of_zero_on_one_rank(rank, world):
    """`on_nonfinite="raise"` with a weight of zero on one rank: all look at the gradients"""
    weights = list(shares.WEIGHTS)
    weights[world] = 0.0  # the second micro-batch of the first rank
    model, opt = training(synchronize="backward", on_nonfinite="raise")
    for (batch, _), weight in zip(own_share(rank, world, 8), weights[rank::world]):
        shares.called(opt, model, batch, weight)
    return as_expected(model, opt, by_hand(world, 0, 8, weights=weights))


@across(2)
def test_a_run_that_is_resumed_where_a_window_is_closed(rank, world):
    """A sharded run is resumed where a window is closed, bit for bit"""
    share = own_share(rank, world, 8, torch.float32)
    model, opt = training(torch.float32)
    train_inside(opt, model, share[:4])
    saved = [model.state_dict(), opt.state_dict(), opt.accumulation_state_dict()]
    saved = copy.deepcopy(saved)
    again, resumed = training(torch.float32)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.load_accumulation_state_dict(saved[2])
    for its, some in ((opt, model), (resumed, again)):
        train_inside(its, some, share[4:] + share[:4])
    assert_equal(shares.whole(parameters_of(again)), shares.whole(parameters_of(model)))


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
    assert opt.last.weight == pytest.approx(sum(shares.WEIGHTS[2 * world : 4 * world]) / world)


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
        assert error_of(train_inside, shares.once_per_window(model), model, share) == (
            f"ValueError: {OP}.micro_batch: model must average gradients over processes with "
            "reduction='mean', got set_gradient_divide_factor(1.0). Set the number of "
            "data-parallel processes, or use reduction='sum'"
        )
    for begin in (0, 4):
        tokens = sum(shares.WEIGHTS[begin * world : (begin + 4) * world])
        for batch, weight in share[begin : begin + 4]:
            inside(opt, model, batch, factor=weight / tokens)
    return as_expected(model, opt, by_hand(world, 0, 8))
