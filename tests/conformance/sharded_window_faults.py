"""What the ranks of test_sharded_window_faults.py do."""

from __future__ import annotations

import copy
import pickle
import time
from functools import partial

import torch
from data_parallel import WEIGHTS, own_share
from sharded_windows import FINALIZES, outcome, run, sharded, train, wrapped
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import loss_of, make_model
from torch.distributed.fsdp import FSDPModule, fully_shard

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


def error_of(call):
    """The exception that a call raises, as text, with its notes."""
    try:
        call()
    except BaseException as error:
        return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return ["no error"]


def step_that_fails(rank, world, synchronize):
    """The first full window's step fails; a fifth micro-batch joins it; then usual windows."""
    model = sharded()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = AccumulatingOptimizer(sgd, window=4, synchronize=synchronize)
    share = own_share(rank, world)
    calls = []

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("the first")

    sgd.register_step_pre_hook(fail_once)
    error = error_of(lambda: train(opt, model, share[:4]))
    run(opt, model, *share[4])
    joined = outcome(model, opt)
    train(opt, model, share[4:8])
    return outcome(model, opt, error=error, joined=joined)


def step_that_fails_every_backward(rank, world):
    return step_that_fails(rank, world, "backward")


def step_that_fails_once_per_window(rank, world):
    return step_that_fails(rank, world, "window")


def interrupted_reduction(opt, model, batch, weight):
    """Ctrl-C once FSDP has reduced something: when the window is closed, or in its last backward"""

    def interrupt(*args):
        raise KeyboardInterrupt

    if not FINALIZES:
        with opt.micro_batch(model):
            hidden = model[0](batch)
            hidden.register_hook(interrupt)
            opt.backward(model[2](hidden).square().mean(), weight)
    finalize = FSDPModule.finalize_backward

    def interrupted(self, **kwargs):
        finalize(self, **kwargs)
        interrupt()

    FSDPModule.finalize_backward = interrupted
    try:
        run(opt, model, batch, weight)
    finally:
        FSDPModule.finalize_backward = finalize


def reduction_that_fails(rank, world):
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:3])
    error = error_of(lambda: interrupted_reduction(opt, model, *share[3]))
    held = opt._box.state.window.micro_batches
    left = [p.grad is not None for p in opt.param_groups[0]["params"]]
    train(opt, model, share[:8])
    return outcome(model, opt, error=error, held=held, left=left)


def exception_before_the_first_forward(rank, world):
    model = sharded()
    opt = wrapped(model)

    def empty_handed():
        with opt.micro_batch(model):
            raise KeyError("no batch")

    error = error_of(empty_handed)
    train(opt, model, own_share(rank, world)[:8])
    return outcome(model, opt, error=error)


def part_of_a_model(rank, world):
    """`micro_batch` of a layer, which FSDP gathers with the rest of the model."""
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:4])

    def of_a_layer():
        with opt.micro_batch(model[0]):
            opt.backward(loss_of(model, share[4][0]))

    error = error_of(of_a_layer)
    train(opt, model, share[4:8])
    return outcome(model, opt, error=error)


def copied_while_held(rank, world):
    """A copy would have the numbers of the window, and FSDP its gradients."""
    model = sharded()
    opt = wrapped(model)
    share = own_share(rank, world)
    train(opt, model, share[:2])
    parameter = opt.param_groups[0]["params"][0]
    calls = (
        lambda: copy.deepcopy(opt),
        lambda: pickle.dumps(opt),
        lambda: opt.main_grad(parameter),
    )
    errors = [error_of(call) for call in calls]
    train(opt, model, share[2:8])
    assert opt.main_grad(parameter) is None
    return outcome(model, opt, errors=errors)


def one_rank_discards(rank, world):
    """All flush: one has dropped its micro-batches. After that an empty flush is nothing again."""
    seen = []
    for synchronize in ("backward", "window") if FINALIZES else ("backward",):
        model = sharded()
        opt = wrapped(model, synchronize=synchronize)
        share = own_share(rank, world)
        train(opt, model, share[:3])
        if rank == 1:
            opt.discard()
        start = time.monotonic()
        error = error_of(opt.flush)
        held = opt._box.state.window.micro_batches
        opt.discard()
        opt.flush()
        train(opt, model, share[:8])
        seen.append([error, held, time.monotonic() - start])
    return outcome(model, opt, seen=seen)


def zero_weight_on_one_rank(rank, world):
    """With `on_nonfinite="raise"` all look at the gradients, whatever they weigh on one rank."""
    model = sharded()
    options = {"synchronize": "backward", "on_nonfinite": "raise"}
    opt = wrapped(model, **options)
    for i, (batch, weight) in enumerate(own_share(rank, world)[:8]):
        opt.backward(loss_of(model, batch), 0.0 if rank == 0 and i == 1 else weight)
        opt.step()
    return outcome(model, opt)


def several_roots(rank, world):
    """A plain module around `fully_shard` modules that do not know of one another."""
    model = make_model()
    fully_shard(model[0])
    fully_shard(model[2])
    opt = wrapped(model)
    train(opt, model, own_share(rank, world)[:8])
    return outcome(model, opt)


def evaluation_inside(rank, world):
    """Between the micro-batches of a window: evaluation, a checkpoint of the model, zero_grad."""
    model = sharded()
    opt = wrapped(model)
    for batch, weight in own_share(rank, world)[:8]:
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
    share = own_share(rank, world)
    model = sharded(torch.float32)
    opt = wrapped(model)

    def more(model, opt, begin, end):
        train(opt, model, [(batch.float(), weight) for batch, weight in share[begin:end]])

    more(model, opt, 0, 4)
    saved = [model.state_dict(), opt.state_dict(), opt.accumulation_state_dict()]
    saved = copy.deepcopy(saved)
    more(model, opt, 4, 8)
    more(model, opt, 0, 4)
    again = sharded(torch.float32)
    resumed = wrapped(again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.load_accumulation_state_dict(saved[2])
    more(again, resumed, 4, 8)
    more(again, resumed, 0, 4)
    return outcome(model, opt, resumed=outcome(again, resumed)["parameters"])


def reads_of_a_device(rank, world):
    """The CPU plays a device: what the host reads while micro-batches of two windows run."""
    seen = []
    for synchronize in ("backward", "window"):
        model = sharded(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        opt = wrapped(model, window=2, scaler=scaler, synchronize=synchronize)
        reads = DeviceReads()
        with cpu_as_device():
            for batch, weight in own_share(rank, world)[:4]:
                with reads, opt.micro_batch(model):
                    opt.backward(loss_of(model, batch.float()), torch.tensor(weight))
                opt.step()
        seen.append([reads.count, reads.lists, opt.stats()["weight"]])
    return {"seen": seen}


def gradients_that_fsdp_sums(rank, world):
    """`set_gradient_divide_factor(1.0)`, as where losses are divided by the tokens of all ranks."""
    seen = {}
    share = own_share(rank, world)[:8]
    for synchronize in ("backward", "window"):
        model = sharded()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        if synchronize == "window":
            seen["error"] = error_of(partial(train, wrapped(model), model, share))
        opt = wrapped(model, reduction="sum", synchronize=synchronize)
        for begin in (0, 4):
            tokens = sum(WEIGHTS[begin * world : (begin + 4) * world])
            for batch, weight in share[begin : begin + 4]:
                run(opt, model, batch, factor=weight / tokens)
        seen[synchronize] = outcome(model, opt)["parameters"]
    return seen


FAILING_STEPS = (step_that_fails_every_backward, step_that_fails_once_per_window)
AS_USUAL = (
    exception_before_the_first_forward,
    part_of_a_model,
    copied_while_held,
    one_rank_discards,
    several_roots,
    evaluation_inside,
)
SCENARIOS = (
    *FAILING_STEPS,
    *AS_USUAL,
    zero_weight_on_one_rank,
    reduction_that_fails,
    resumed_where_a_window_is_closed,
    reads_of_a_device,
    gradients_that_fsdp_sums,
)
