"""ultralytics: the loop of its BaseTrainer, nominal batch of 8 and batches of 2.

Model, data and validation are replaced; `_do_train` is ultralytics' own.
"""

from tempfile import TemporaryDirectory
from types import SimpleNamespace

import _cpu_build  # noqa: F401
import torch
from _factors import (
    BATCHES,
    LR,
    ROWS,
    WINDOW,
    Seen,
    Weights,
    loss_of,
    main,
    micro_batches,
    runs,
)
from ultralytics.engine.trainer import BaseTrainer


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.criterion = Weights(), None

    def forward(self, batch):
        loss = loss_of(self.model(batch["numbers"]))
        return loss, {"loss": loss.detach()}


class Loader(list):
    """What ultralytics asks a loader for."""

    batch_size, drop_last, num_workers = ROWS, True, 0
    dataset = sampler = range(BATCHES * ROWS)

    def reset(self):
        pass


class Trainer(BaseTrainer):
    def get_dataset(self):
        return {"train": None, "val": None, "names": {0: "thing"}}

    def setup_model(self):
        self.model = self.seen.watch(Model())

    def get_dataloader(self, *args, **kwargs):
        return Loader({"numbers": batch, "img": batch} for batch in micro_batches())

    def build_optimizer(self, model, **kwargs):
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0)

    def get_validator(self):
        return SimpleNamespace(metrics=SimpleNamespace(keys=[]))

    def preprocess_batch(self, batch):
        return batch

    def label_loss_items(self, loss_items=None, prefix="train"):
        return [] if loss_items is None else {}

    def plot_training_samples(self, *args):
        pass

    def validate(self):
        return {}, 0.0

    def final_eval(self):
        pass

    def save_model(self):
        pass


def train(seen: Seen, epochs=2, warmup=0.0):
    Trainer.seen = seen
    with TemporaryDirectory() as folder:
        Trainer(
            overrides={
                "model": "none",
                "device": "cpu",
                "project": folder,
                "epochs": epochs,
                "batch": ROWS,
                "nbs": WINDOW * ROWS,
                "warmup_epochs": warmup,
                "val": False,
                "save": False,
                "plots": False,
                "amp": False,
            }
        ).train()
    if warmup:
        sizes = [len(step["passes"]) for step in seen.steps]
        firsts = ", ".join(f"{size} from step {sizes.index(size) + 1}" for size in sorted({*sizes}))
        seen.facts["notes"] = [f"micro-batches in a step: {firsts} of {len(sizes)}; each times 1"]


if __name__ == "__main__":
    rows = {
        "ultralytics, no warm-up": runs(train),
        "ultralytics, warm-up of 3 of 12 epochs": runs(train, epochs=12, warmup=3.0),
    }
    main("ultralytics", rows)
