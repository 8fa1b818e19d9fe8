"""gluonts: DeepAREstimator with `trainer_kwargs={"accumulate_grad_batches": 4}`."""

from functools import partial

import numpy
from _factors import BATCHES, EPOCHS, LR, MAX_NORM, WINDOW, Seen, main
from _lightning_steps import watched
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.deepar import DeepAREstimator
from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule


def train(seen: Seen, **options):
    numpy.random.seed(0)  # gluonts samples with it
    values = numpy.random.default_rng(0).standard_normal((4, 60))
    series = [{"start": "2020-01-01", "target": row} for row in values]
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=8,
        hidden_size=4,
        lr=LR,
        batch_size=2,
        num_batches_per_epoch=BATCHES,
        trainer_kwargs={
            "accelerator": "cpu",
            "max_epochs": EPOCHS,
            "accumulate_grad_batches": WINDOW,
            "enable_progress_bar": False,
            "logger": False,
            **options,
        },
    )
    with watched(seen, DeepARLightningModule):
        estimator.train(ListDataset(series, freq="D"))


RUNS = {"plain": train, "clip": partial(train, gradient_clip_val=MAX_NORM)}

if __name__ == "__main__":
    main("gluonts", {"gluonts DeepAR": RUNS})
