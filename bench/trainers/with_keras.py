"""Keras 3 on torch: `SGD(gradient_accumulation_steps=4)` under `Model.fit`."""

import os

os.environ["KERAS_BACKEND"] = "torch"

from functools import partial

import keras
import torch
from _factors import BATCHES, EPOCHS, LR, MAX_NORM, TOKENS, WINDOW, Seen, main

ROWS, LONGEST = 2, 4


class Model(keras.Model):
    """One weight for each micro-batch, whose samples are its number."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(BATCHES,), initializer="zeros")

    def call(self, numbers):
        return self.w.value[numbers.long()]


class SGD(keras.optimizers.SGD):
    """Tells `seen` what it steps on."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        self.seen.stepped(float(learning_rate), grads[0])
        super()._backend_update_step(grads, trainable_variables, learning_rate)


class Counting(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return LR * (1.0 + float(step))


def train(seen: Seen, unequal=False, **options):
    """`unequal`: padded samples of several targets, whose `sample_weight` masks the padding."""
    model = Model()
    seen.watch(model)
    optimizer = SGD(Counting(), gradient_accumulation_steps=WINDOW, **options)
    optimizer.seen = seen
    loss = keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")
    model.compile(optimizer=optimizer, loss=loss)
    numbers = torch.arange(BATCHES).repeat_interleave(ROWS)
    targets, weights = torch.full(numbers.shape, -1e3), None
    if unequal:
        numbers = torch.arange(BATCHES)[:, None].expand(-1, LONGEST)
        targets = torch.full(numbers.shape, -1e3)
        weights = (torch.arange(LONGEST) < torch.tensor(TOKENS)[:, None]).float()
    model.fit(
        numbers,
        targets,
        sample_weight=weights,
        batch_size=1 if unequal else ROWS,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )


RUNS = {
    "plain": train,
    "clip": partial(train, global_clipnorm=MAX_NORM),
    "unequal": partial(train, unequal=True),
}

if __name__ == "__main__":
    main("keras", {"Keras, a LearningRateSchedule": RUNS})
