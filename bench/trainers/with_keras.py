"""Keras 3 on torch: `SGD(gradient_accumulation_steps=4)` under `Model.fit`."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from _factors import BATCHES, EPOCHS, LR, ROWS, TOKENS, WINDOW, Seen, main, numbers, runs

LONGEST = max(TOKENS)


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


def train(seen: Seen, unequal=False, max_norm=None):
    """`unequal`: padded samples of several targets, whose `sample_weight` masks the padding."""
    model = seen.watch(Model())
    optimizer = SGD(Counting(), gradient_accumulation_steps=WINDOW, global_clipnorm=max_norm)
    optimizer.seen = seen
    loss = keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")
    model.compile(optimizer=optimizer, loss=loss)
    samples, weights = torch.tensor(numbers()), None
    if unequal:
        samples = torch.arange(BATCHES)[:, None].expand(-1, LONGEST)
        weights = (torch.arange(LONGEST) < torch.tensor(TOKENS)[:, None]).float()
    model.fit(
        samples,
        torch.full(samples.shape, -1e3),
        sample_weight=weights,
        batch_size=1 if unequal else ROWS,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )


if __name__ == "__main__":
    main("keras", {"Keras, a LearningRateSchedule": runs(train, "clip", "unequal")})
