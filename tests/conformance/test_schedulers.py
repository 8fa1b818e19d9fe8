"""Schedulers.

Each beside the bare optimizer on the joined batches. Warnings are errors, so torch must also see
that the optimizer stepped first.
"""

import inspect

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import INF, loss_of, make_batches, make_model, one_call, parameters_of
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 2
BATCHES = make_batches(16)
# Validation losses as they might be after each window: they fall, then stay.
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
    "a warm-up from zero": lambda o: lr_scheduler.LambdaLR(o, lambda n: n / 4),
}
EXPORTED = [
    name
    for name, value in vars(lr_scheduler).items()
    if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
]
CLASSES = sorted({*EXPORTED, "SWALR", "a warm-up from zero"} - {"LRScheduler", "_LRScheduler"})

RELOADS = ["never", "in-place", "into-new-objects"]
OPTIMIZERS = {
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.05),
    "tensor-lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05)),
}


def groups_of(model):
    """Return two groups, since every scheduler keeps a list of learning rates."""
    return [{"params": list(layer.parameters())} for layer in (model[0], model[2])]


def rates(opt):
    """Return the options that a scheduler may set, by group."""
    return [
        (float(group["lr"]), group.get("momentum"), group.get("betas"))
        for group in opt.param_groups
    ]


def train(make_optimizer, make_scheduler, window=WINDOW, reload="never"):
    """Return parameters, and rates after every window; without a window the bare optimizer's."""

    def build():
        model = make_model()
        optimizer = make_optimizer(groups_of(model))
        opt = AccumulatingOptimizer(optimizer, window=window) if window else optimizer
        return model, opt, make_scheduler(opt)

    model, opt, scheduler = things = build()
    history = [rates(opt)]
    for number, some in enumerate(oracle.windows_of(BATCHES, WINDOW)):
        if number in (3, 5) and reload != "never":
            states = oracle.through_a_file([thing.state_dict() for thing in things])
            things = build() if reload == "into-new-objects" else things
            for thing, state in zip(things, states):
                thing.load_state_dict(state)
            model, opt, scheduler = things
        for batch in some if window else [torch.cat(some)]:
            oracle.own_backward(opt, loss_of(model, batch))
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*[METRICS[number]] * plateau)
        history.append(rates(getattr(opt, "optimizer", opt)))
    return parameters_of(model), history


def assert_as_bare(make_optimizer, make_scheduler, **options):
    parameters, history = train(make_optimizer, make_scheduler, **options)
    expected, rates_of_bare = train(make_optimizer, make_scheduler, window=None)
    assert history == rates_of_bare
    assert len({tuple(rates[0] for rates in row) for row in history}) > 1
    oracle.assert_close(parameters, expected)


# Every class with every reload, and with every optimizer.
CASES = [
    (name, list(OPTIMIZERS)[(number + i) % len(OPTIMIZERS)], reload)
    for number, name in enumerate(CLASSES)
    for i, reload in enumerate(RELOADS)
]


@pytest.mark.parametrize(("name", "kind", "reload"), CASES)
def test_every_scheduler_reaches_the_wrapped_optimizer(name, kind, reload):
    """Every `lr_scheduler` class and SWALR, momentum too, before and after `load_state_dict`"""
    assert_as_bare(OPTIMIZERS[kind], SCHEDULERS[name], reload=reload)


@pytest.mark.parametrize("scheduled", ["before-wrapping", "after-wrapping"])
def test_a_scheduler_of_the_bare_optimizer_goes_on(scheduled):
    """A scheduler made of the optimizer itself, before or after it is wrapped"""

    def make(groups):
        bare = OPTIMIZERS["sgd-momentum"](groups)
        if scheduled == "before-wrapping":
            bare.scheduler = SCHEDULERS["OneCycleLR"](bare)
        return bare

    def schedule(opt):
        bare = getattr(opt, "optimizer", opt)
        return getattr(bare, "scheduler", None) or SCHEDULERS["OneCycleLR"](bare)

    assert_as_bare(make, schedule)


@pytest.mark.parametrize("reload", [False, True], ids=["fresh", "after-load-state-dict"])
def test_learning_rates_set_by_hand(reload):
    """A learning rate written into `opt.param_groups` by hand"""
    model = make_model()
    opt = AccumulatingOptimizer(OPTIMIZERS["sgd-momentum"](groups_of(model)))
    if reload:
        opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["lr"] = 0.0
    one_call(opt, loss_of(model, BATCHES[0]))
    moved = map(torch.equal, parameters_of(make_model()), parameters_of(model))
    assert list(moved) == [True, True, False, False]


@pytest.mark.parametrize("first", ["skipped", "flushed"])
def test_no_warning_about_the_order_of_steps(first):
    """No warning from a scheduler where the first window was skipped, or closed by `flush`"""
    model = make_model()
    opt = AccumulatingOptimizer(OPTIMIZERS["adam"](groups_of(model)), window=WINDOW)
    scheduler = gamma(opt)
    if first == "skipped":
        for batch in BATCHES[:WINDOW]:
            one_call(opt, loss_of(model, batch) * INF)
    else:
        opt.backward(loss_of(model, BATCHES[0]))
        opt.flush()
    assert opt.stepped
    assert opt.last.skipped == (first == "skipped")
    scheduler.step()
    assert opt.optimizer.param_groups[0]["lr"] == 0.05 * 0.9
