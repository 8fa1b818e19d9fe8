"""neuralforecast: LSTM with `accumulate_grad_batches=4`, and few series."""

from functools import partial

import numpy
import pandas
import torch
from _factors import BATCHES, LR, MAX_NORM, Seen, main, runs
from _lightning import SETTINGS, watched
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM


def train(seen: Seen, series=BATCHES, **options):
    """A batch holds 2 series; with no more than that, an epoch is one batch."""
    values = numpy.random.default_rng(0).standard_normal((series, 60))
    frame = pandas.concat(
        pandas.DataFrame(
            {"unique_id": str(k), "ds": pandas.date_range("2020-01-01", periods=60), "y": row}
        )
        for k, row in enumerate(values)
    )
    model = LSTM(
        h=4,
        input_size=8,
        encoder_hidden_size=4,
        decoder_hidden_size=4,
        max_steps=5,
        batch_size=1 if series == BATCHES else 2,
        optimizer=torch.optim.SGD,
        learning_rate=LR,
        num_lr_decays=-1,
        scaler_type="identity",
        **SETTINGS,
        **options,
    )
    seen.facts["max_norm"] = options.get("gradient_clip_val")
    seen.facts["epoch"] = 1 if series == 2 else BATCHES
    with watched(seen, LSTM):
        NeuralForecast(models=[model], freq="D").fit(frame)


if __name__ == "__main__":
    clip = {"clip": partial(train, gradient_clip_val=MAX_NORM / 10)}
    rows = {
        "neuralforecast LSTM": runs(train) | clip,
        "neuralforecast LSTM, epochs of one batch": runs(train, series=2),
    }
    main("neuralforecast", rows)
