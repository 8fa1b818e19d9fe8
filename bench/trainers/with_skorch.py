"""skorch: the FAQ's recipe for accumulation, and AccelerateMixin with a step every fourth batch."""

import numpy
import torch
from _factors import (
    EPOCHS,
    LR,
    ROWS,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    numbers,
    runs,
    wrapped,
)
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from skorch import NeuralNet
from skorch.callbacks import Callback, GradientNormClipping, LRScheduler
from skorch.hf import AccelerateMixin


class Mean(torch.nn.Module):
    def forward(self, outputs, targets):
        return loss_of(outputs)


class Recipe(NeuralNet):
    """As the FAQ says: the loss is divided, and only every fourth batch steps."""

    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / WINDOW

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        if len(self.history[-1, "batches"]) % WINDOW == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


class Accelerated(AccelerateMixin, NeuralNet):
    pass


class Watch(Callback):
    def __init__(self, seen):
        self.seen = seen

    def on_train_begin(self, net, **_):
        self.seen.watch(net.module_)


def train(seen: Seen, kind=Recipe, max_norm=None, accelerated=False, optimizer=torch.optim.SGD):
    options = {}
    if accelerated:
        AcceleratorState._reset_state(reset_partial_state=True)
        options["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    schedule = LRScheduler(
        torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda n: 1.0 + n, step_every="batch"
    )
    callbacks = [("watch", Watch(seen)), ("schedule", schedule)]
    if kind is NeuralNet:
        callbacks.append(("flush", Flush()))
    if max_norm:
        callbacks.append(("clip", GradientNormClipping(max_norm)))
    net = kind(
        Weights,
        criterion=Mean,
        optimizer=optimizer,
        lr=LR,
        max_epochs=EPOCHS,
        batch_size=ROWS,
        train_split=None,
        callbacks=callbacks,
        verbose=0,
        **options,
    )
    samples = numpy.array(numbers())
    net.fit(samples, samples)


class Flush(Callback):
    def on_epoch_end(self, net, **_):
        net.optimizer_.flush()


def wrapper(seen: Seen):
    """The stock `train_step`: it clears, passes and steps for each batch."""
    train(seen, NeuralNet, optimizer=lambda params, lr: wrapped(torch.optim.SGD(params, lr=lr)))


if __name__ == "__main__":
    rows = {
        "skorch, the recipe of its FAQ": runs(train, "clip")
        | {"cure: `AccumulatingOptimizer`, stock `train_step`": wrapper},
        "skorch, AccelerateMixin": runs(train, "clip", kind=Accelerated, accelerated=True),
    }
    main("skorch", rows)
