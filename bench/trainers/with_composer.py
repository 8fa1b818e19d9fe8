"""composer: batches of 8 samples, `device_train_microbatch_size=2`."""

import _cpu_build  # noqa: F401
from _factors import (
    BATCHES,
    EPOCHS,
    ROWS,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    optimizer_of,
    runs,
    schedule_of,
)
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerModel
from torch.utils.data import DataLoader


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = Weights()

    def forward(self, batch):
        return self.model(batch)

    def loss(self, outputs, batch):
        return loss_of(outputs)


def train(seen: Seen, unequal=False, max_norm=None, **options):
    """`unequal`: batches of 4 samples in micro-batches of 3, which leaves one for the second."""
    model = seen.watch(Model())
    sizes = [3, 1] * (BATCHES // 2) if unequal else [ROWS] * BATCHES
    seen.facts["tokens"] = sizes
    numbers = [k for k, size in enumerate(sizes) for _ in range(size)]
    optimizer = optimizer_of(model)
    clip = GradientClipping(clipping_type="norm", clipping_threshold=max_norm) if max_norm else None
    Trainer(
        model=model,
        train_dataloader=DataLoader(numbers, batch_size=4 if unequal else ROWS * WINDOW),
        optimizers=optimizer,
        schedulers=schedule_of(optimizer),
        device_train_microbatch_size=3 if unequal else ROWS,
        max_duration=f"{EPOCHS}ep",
        algorithms=[clip] if clip else [],
        device="cpu",
        progress_bar=False,
        **options,
    ).fit()


if __name__ == "__main__":
    rows = {
        "composer": runs(train, "clip", "unequal"),
        "composer, `step_schedulers_every_batch=True`": runs(
            train, step_schedulers_every_batch=True
        ),
    }
    main("mosaicml", rows)
