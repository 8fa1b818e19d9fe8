"""Schedulers.

Each beside the bare optimizer on the joined batches. Warnings are errors, so torch must also see
that the optimizer stepped first.
"""

from __future__ import annotations

import inspect
import io

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    assert_close,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 2
BATCHES = make_batches(16)
# What a validation loss might be after each window: it falls, then stays.
METRICS = [1.0, 0.9, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8]


def gamma(opt):
    return lr_scheduler.ExponentialLR(opt, 0.9)


# By class, a scheduler that changes the learning rate within eight windows.
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.9**n]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=6),
    "ExponentialLR": gamma,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=7, power=2.0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, start_factor=0.5, total_iters=3), gamma(o)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.5, total_iters=3), gamma(o)]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=3),
}
EXPORTED = [
    name
    for name, value in vars(lr_scheduler).items()
    if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
]
CLASSES = sorted({*EXPORTED, "SWALR"} - {"LRScheduler", "_LRScheduler"})

OPTIMIZERS = {
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.05),
    "tensor-lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05)),
}


def groups_of(model):
    """Two groups, as every scheduler keeps a list of learning rates."""
    return [{"params": list(layer.parameters())} for layer in (model[0], model[2])]


def rates(opt):
    """What a scheduler may set, by group."""
    return [
        (float(group["lr"]), group.get("momentum"), group.get("betas"))
        for group in opt.param_groups
    ]


def advance(scheduler, window):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(METRICS[window])
    else:
        scheduler.step()


def train_bare(make_optimizer, make_scheduler):
    """Parameters and the rates after every window, on the joined batches."""
    model = make_model()
    opt = make_optimizer(groups_of(model))
    scheduler = make_scheduler(opt)
    history = [rates(opt)]
    for window, start in enumerate(range(0, len(BATCHES), WINDOW)):
        opt.zero_grad()
        loss_of(model, torch.cat(BATCHES[start : start + WINDOW])).backward()
        opt.step()
        advance(scheduler, window)
        history.append(rates(opt))
    return parameters_of(model), history


def saved(*objects):
    """Their state, as a file holds it."""
    buffer = io.BytesIO()
    torch.save([thing.state_dict() for thing in objects], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("reload", ["never", "in-place", "into-new-objects"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_scheduler_reaches_the_wrapped_optimizer(name, kind, reload):
    """Every `lr_scheduler` class and SWALR, momentum too, before and after `load_state_dict`"""
    expected, expected_history = train_bare(OPTIMIZERS[kind], SCHEDULERS[name])
    assert len({tuple(rates[0] for rates in row) for row in expected_history}) > 1

    def build():
        model = make_model()
        opt = AccumulatingOptimizer(OPTIMIZERS[kind](groups_of(model)), window=WINDOW)
        return model, opt, SCHEDULERS[name](opt)

    model, opt, scheduler = build()
    history = [rates(opt.optimizer)]
    for i, batch in enumerate(BATCHES):
        if i in (6, 10) and reload != "never":
            states = saved(model, opt, scheduler)
            if reload == "into-new-objects":
                model, opt, scheduler = build()
            for thing, state in zip((model, opt, scheduler), states):
                thing.load_state_dict(state)
        opt.backward(loss_of(model, batch))
        opt.step()
        if opt.stepped:
            advance(scheduler, i // WINDOW)
            history.append(rates(opt.optimizer))
    assert history == expected_history
    assert_close(parameters_of(model), expected)


@pytest.mark.parametrize("scheduled", ["before-wrapping", "after-wrapping"])
def test_a_scheduler_of_the_bare_optimizer_goes_on(scheduled):
    """A scheduler made of the optimizer itself, before or after it is wrapped"""
    kind, make = OPTIMIZERS["sgd-momentum"], SCHEDULERS["OneCycleLR"]
    expected, expected_history = train_bare(kind, make)
    model = make_model()
    bare = kind(groups_of(model))
    scheduler = make(bare) if scheduled == "before-wrapping" else None
    opt = AccumulatingOptimizer(bare, window=WINDOW)
    scheduler = scheduler or make(bare)
    history = [rates(opt)]
    for batch in BATCHES:
        opt.backward(loss_of(model, batch))
        opt.step()
        if opt.stepped:
            scheduler.step()
            history.append(rates(opt))
    assert history == expected_history
    assert_close(parameters_of(model), expected)


@pytest.mark.parametrize("reload", [False, True], ids=["fresh", "after-load-state-dict"])
def test_learning_rates_set_by_hand(reload):
    """A learning rate written into `opt.param_groups` by hand"""
    model = make_model()
    opt = AccumulatingOptimizer(OPTIMIZERS["sgd-momentum"](groups_of(model)))
    groups = opt.param_groups
    if reload:
        opt.load_state_dict(opt.state_dict())
        groups = opt.param_groups
    groups[0]["lr"] = 0.0
    before = [p.clone() for p in parameters_of(model)]
    opt.backward(loss_of(model, BATCHES[0]))
    opt.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, parameters_of(model))]
    assert moved == [False, False, True, True]


@pytest.mark.parametrize("first", ["skipped", "flushed"])
def test_no_warning_about_the_order_of_steps(first):
    """No warning from a scheduler where the first window was skipped, or closed by `flush`"""
    model = make_model()
    opt = AccumulatingOptimizer(OPTIMIZERS["adam"](groups_of(model)), window=WINDOW)
    scheduler = gamma(opt)
    if first == "skipped":
        for batch in BATCHES[:WINDOW]:
            opt.backward(loss_of(model, batch) * INF)
            opt.step()
    else:
        opt.backward(loss_of(model, BATCHES[0]))
        opt.flush()
    assert opt.stepped
    assert opt.last.skipped == (first == "skipped")
    scheduler.step()
    assert opt.optimizer.param_groups[0]["lr"] == 0.05 * 0.9


def test_a_warmup_from_zero_counts_every_window():
    """A warm-up that starts from a learning rate of zero"""

    def warmup(opt):
        return lr_scheduler.LambdaLR(opt, lambda n: n / 4)

    expected, _ = train_bare(OPTIMIZERS["adam"], warmup)
    model = make_model()
    opt = AccumulatingOptimizer(OPTIMIZERS["adam"](groups_of(model)), window=WINDOW)
    scheduler = warmup(opt)
    for batch in BATCHES:
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
        if opt.stepped:
            scheduler.step()
    assert_close(parameters_of(model), expected)
