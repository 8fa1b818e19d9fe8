"""gluonts: DeepAREstimator with `trainer_kwargs={"accumulate_grad_batches": 4}`."""

from functools import partial

import numpy
from _factors import BATCHES, EPOCHS, LR, MAX_NORM, ROWS, Seen, main, runs
from _lightning import SETTINGS, watched
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
        batch_size=ROWS,
        num_batches_per_epoch=BATCHES,
        trainer_kwargs=SETTINGS | {"max_epochs": EPOCHS, **options},
    )
    with watched(seen, DeepARLightningModule):
        estimator.train(ListDataset(series, freq="D"))


if __name__ == "__main__":
    found = runs(train) | {"clip": partial(train, gradient_clip_val=MAX_NORM)}
    main("gluonts", {"gluonts DeepAR": found})
