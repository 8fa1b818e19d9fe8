"""fastai: `GradientAccumulation(n_acc)`, which counts samples."""

from functools import partial

import _cpu_build  # noqa: F401
import torch
from _factors import (
    BATCHES,
    EPOCHS,
    LR,
    MAX_NORM,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    numbers,
    runs,
    wrapped,
)
from fastai.callback.schedule import ParamScheduler
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Callback, Learner
from fastai.optimizer import OptimWrapper

ROWS = 3  # of a micro-batch


def rate(part):
    """Of the training that is over, counted in batches."""
    return LR * (1.0 + part * EPOCHS * BATCHES)


class Flush(Callback):
    def after_train(self):
        self.opt.opt.flush()


def train(seen: Seen, samples=WINDOW * ROWS, fits=1, optimizer=torch.optim.SGD, callbacks=()):
    accumulation = [GradientAccumulation(samples)] if samples else []
    batches = DataLoader([(k, k) for k in numbers(ROWS)], bs=ROWS, shuffle=False)
    learner = Learner(
        DataLoaders(batches, batches),
        seen.watch(Weights()),
        loss_func=lambda outputs, targets: loss_of(outputs),
        opt_func=partial(OptimWrapper, opt=optimizer),
        lr=LR,
        cbs=[*accumulation, ParamScheduler({"lr": rate}), *callbacks],
    )
    with learner.no_bar(), learner.no_logging():
        for _ in range(fits):
            learner.fit(EPOCHS // fits)


def wrapper(seen: Seen):
    """Instead of GradientAccumulation; fastai steps for each batch."""

    def make(params, **options):
        return wrapped(torch.optim.SGD(params, **options))

    train(seen, samples=None, fits=2, optimizer=make, callbacks=[Flush()])


if __name__ == "__main__":
    clip = {"clip": partial(train, callbacks=[GradientClip(MAX_NORM)])}
    cure = "cure: `AccumulatingOptimizer` in OptimWrapper, `flush` after each epoch"
    rows = {
        "fastai, n_acc of 4 batches": runs(train) | clip,
        "fastai, the same, `fit` twice": runs(train, fits=2) | {cure: wrapper},
        "fastai, n_acc=4 and batches of 3": runs(train, samples=WINDOW),
        "fastai, n_acc=10 and batches of 3": runs(train, samples=10),
    }
    main("fastai", rows)
