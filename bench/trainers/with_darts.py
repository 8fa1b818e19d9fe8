"""darts: RNNModel with `pl_trainer_kwargs={"accumulate_grad_batches": 4}`."""

from functools import partial

import darts
import numpy
import torch
from _factors import BATCHES, EPOCHS, LR, MAX_NORM, Seen, main, runs
from _lightning import SETTINGS, watched
from darts.models import RNNModel
from darts.models.forecasting.pl_forecasting_module import PLForecastingModule


def train(seen: Seen, batches=BATCHES, **options):
    values = numpy.random.default_rng(0).standard_normal(60)
    model = RNNModel(
        input_chunk_length=4,
        training_length=8,
        model="GRU",
        hidden_dim=4,
        random_state=0,
        batch_size=1,
        n_epochs=EPOCHS if batches == BATCHES else EPOCHS * BATCHES,
        optimizer_cls=torch.optim.SGD,
        optimizer_kwargs={"lr": LR},
        pl_trainer_kwargs=SETTINGS | options,
    )
    seen.facts["epoch"] = batches
    with watched(seen, PLForecastingModule):
        model.fit(darts.TimeSeries.from_values(values), max_samples_per_ts=batches)


if __name__ == "__main__":
    rows = {
        "darts RNNModel": runs(train) | {"clip": partial(train, gradient_clip_val=MAX_NORM)},
        "darts RNNModel, epochs of one batch": runs(train, batches=1),
    }
    main("darts", rows)
