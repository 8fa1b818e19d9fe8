"""composer: batches of 8 samples, `device_train_microbatch_size=2`."""

from functools import partial

import _cpu_build  # noqa: F401
import torch
from _factors import (
    BATCHES,
    EPOCHS,
    MAX_NORM,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    optimizer_of,
    schedule_of,
)
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerModel

ROWS = 2  # of a micro-batch


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = Weights()

    def forward(self, batch):
        return self.model(batch)

    def loss(self, outputs, batch):
        return loss_of(outputs)


def train(seen: Seen, unequal=False, algorithms=(), **options):
    """`unequal`: batches of 4 samples in micro-batches of 3, which leaves one for the second."""
    model = Model()
    seen.watch(model)
    sizes = [3, 1] * (BATCHES // 2) if unequal else [ROWS] * BATCHES
    seen.facts["tokens"] = sizes
    numbers = [k for k, size in enumerate(sizes) for _ in range(size)]
    optimizer = optimizer_of(model)
    Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(
            numbers, batch_size=4 if unequal else ROWS * WINDOW
        ),
        optimizers=optimizer,
        schedulers=schedule_of(optimizer),
        device_train_microbatch_size=3 if unequal else ROWS,
        max_duration=f"{EPOCHS}ep",
        algorithms=list(algorithms),
        device="cpu",
        progress_bar=False,
        **options,
    ).fit()


RUNS = {
    "plain": train,
    "clip": lambda seen: train(
        seen, algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=MAX_NORM)]
    ),
    "unequal": partial(train, unequal=True),
}

if __name__ == "__main__":
    rows = {
        "composer": RUNS,
        "composer, `step_schedulers_every_batch=True`": {
            "plain": partial(train, step_schedulers_every_batch=True)
        },
    }
    main("mosaicml", rows)
