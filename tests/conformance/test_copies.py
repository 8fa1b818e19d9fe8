"""Copies and processes."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from support.optimizer_oracle import (
    adam,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    run,
    through_a_file,
    train_by_hand,
)
from support.optimizer_oracle import wrapped as wrapping
from torch.optim import lr_scheduler

BATCHES = make_batches(9)


wrapped = partial(wrapping, make=adam, window=3)
CLONES = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": partial(through_a_file, weights_only=False),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_copies_go_on_from_the_middle_of_a_window(clone, on_nonfinite, scaled):
    """`copy.deepcopy`, `pickle` and `torch.save` of model and optimizer inside a window"""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
    opt = wrapped(model, on_nonfinite=on_nonfinite, max_norm=0.1, scaler=scaler)
    lr_scheduler.LambdaLR(opt, lambda step: 1.0)  # patches opt.step, which must not travel
    run(opt, model, BATCHES[:5])
    twin_model, twin = clone((model, opt))
    assert "step" not in vars(twin)
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    run(opt, model, BATCHES[5:])
    expected = parameters_of(model)
    run(twin, twin_model, BATCHES[5:])
    assert_equal(parameters_of(twin_model), expected)
    assert twin.stats() == opt.stats()
    assert_close(expected, train_by_hand(adam, BATCHES, 3, max_norm=0.1))


@pytest.mark.parametrize("loop", ["backward", "accumulate"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_copies_between_backward_and_step(clone, on_nonfinite, scaled, loop):
    """Copies between `backward` and `step`, with `window=1`, keep the gradient"""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    opt = wrapped(model, window=1, on_nonfinite=on_nonfinite, scaler=scaler)
    run(opt, model, BATCHES[:1])
    loss = loss_of(model, BATCHES[1])
    if loop == "backward":
        opt.backward(loss)
    else:
        opt.zero_grad()
        (scaler.scale(loss) if scaled else loss).backward()
        opt.accumulate()
    twin_model, twin = clone((model, opt))
    for some, its in ((twin, twin_model), (opt, model)):
        some.step()
        run(some, its, BATCHES[2:4])
        assert_close(parameters_of(its), train_by_hand(adam, BATCHES[:4], 1))


def finish_elsewhere(model, opt, batches, queue):
    run(opt, model, batches)
    queue.put(([p.tolist() for p in model.parameters()], opt.stats()))


@pytest.mark.process
def test_a_spawned_process_goes_on():
    """`multiprocessing` with spawn: model and optimizer go to another process inside a window"""
    model = make_model()
    opt = wrapped(model)
    run(opt, model, BATCHES[:5])
    twin_model, twin = copy.deepcopy((model, opt))  # what is sent lies in shared memory afterwards
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (twin_model, twin, BATCHES[5:], queue)
    process = context.Process(target=finish_elsewhere, args=arguments)
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    run(opt, model, BATCHES[5:])
    assert queue.get() == ([p.tolist() for p in model.parameters()], opt.stats())


def test_a_cloned_class_shares_the_window():
    """A subclass made at run time around a copied `__dict__`, as in Lightning, shares a window"""

    class Strategy:
        def step(self, closure=None):
            return self._optimizer.step(closure)

    model = make_model()
    opt = wrapped(model)
    clone = Strategy()
    clone.__dict__ = {k: v for k, v in vars(opt).items() if k != "step"}
    clone.__class__ = type("StrategyOptimizer", (Strategy, type(opt)), {})
    clone._optimizer = opt
    assert isinstance(clone, torch.optim.Optimizer)
    clone.backward(loss_of(model, BATCHES[0]))
    opt.backward(loss_of(model, BATCHES[1]))
    clone.step()
    assert not opt.stepped
    assert not clone.stepped
    opt.backward(loss_of(model, BATCHES[2]))
    clone.step()
    assert opt.stepped
    assert clone.stepped
    assert clone.last is opt.last
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES[:3], 3))
