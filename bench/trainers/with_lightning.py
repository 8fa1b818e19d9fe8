"""Lightning: `Trainer(accumulate_grad_batches=4)`, automatic optimization."""

import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning
import torch
from _factors import (
    EPOCHS,
    INF,
    MAX_NORM,
    STOP,
    WINDOW,
    Seen,
    Weights,
    loader,
    loss_of,
    main,
    optimizer_of,
    schedule_of,
    wrapped,
)
from _lightning import SETTINGS

warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    def __init__(self, infinite=False):
        super().__init__()
        self.model, self.infinite = Weights(), infinite

    def training_step(self, batch, index):
        loss = loss_of(self.model(batch))
        return loss * float("inf") if self.infinite and index == INF else loss

    def configure_optimizers(self):
        optimizer = optimizer_of(self)
        schedule = {"scheduler": schedule_of(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Wrapped(Module):
    """accumext's recipe."""

    def configure_optimizers(self):
        optimizer = wrapped(self)
        return {"optimizer": optimizer, "lr_scheduler": schedule_of(optimizer)}

    def on_train_epoch_end(self):
        self.optimizers().flush()


class Stop(lightning.Callback):
    """Ends the training inside a window; saves first, if asked."""

    def __init__(self, path=None):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index + 1 == STOP:
            if self.path:
                trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def train(seen: Seen, unequal=False, module=None, checkpoint=None, **options):
    module = seen.watch(module or Module())
    defaults = {
        **SETTINGS,
        "max_epochs": EPOCHS,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(**defaults | options)
    trainer.fit(module, loader(unequal), ckpt_path=checkpoint)


def skipped(seen: Seen):
    """A window with an inf, under the scaler of mixed precision."""
    precision = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu")
    precision.scaler = torch.amp.GradScaler("cpu")
    precision.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
    train(seen, module=Module(infinite=True), plugins=[precision])


def resumed(seen: Seen):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "inside.ckpt"
        train(seen, callbacks=[Stop(path)])
        seen.resume()
        train(seen, checkpoint=path)


def wrapper(seen: Seen):
    train(seen, module=Wrapped(), accumulate_grad_batches=1)


RUNS = {
    "plain": train,
    "clip": partial(train, gradient_clip_val=MAX_NORM),
    "skipped": skipped,
    "unequal": partial(train, unequal=True),
    "stopped": partial(train, callbacks=[Stop()]),
    "resumed": resumed,
    "cure: `limit_train_batches=8`, a multiple": partial(train, limit_train_batches=2 * WINDOW),
    "cure: `AccumulatingOptimizer`, `accumulate_grad_batches=1`": wrapper,
}

if __name__ == "__main__":
    main("lightning", {"Lightning": RUNS})
