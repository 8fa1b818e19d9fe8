"""NeuralForecast: `optimizer` is a subclass whose constructor makes the optimizer that it wraps."""

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import GRU
from pytorch_lightning import Callback

import accumext


class Optimizer(accumext.AccumulatingOptimizer):
    def __init__(self, params, **kwargs):
        super().__init__(torch.optim.Adam(params, **kwargs), window=4, max_norm=0.5)


class Flush(Callback):
    def on_train_end(self, trainer, module):  # an epoch may be a single batch here
        opt = trainer.optimizers[0]
        opt.flush()
        print(f"last window: {opt.stats()}")


days = pd.date_range("2020-01-01", periods=60, freq="D")
series = [np.sin(np.arange(60) / 5.0 + phase) for phase in range(8)]
frames = [pd.DataFrame({"unique_id": i, "ds": days, "y": y}) for i, y in enumerate(series)]
forecaster = NeuralForecast(
    [
        GRU(
            h=4,
            input_size=8,
            encoder_hidden_size=8,
            decoder_hidden_size=8,
            max_steps=10,  # batches
            batch_size=4,
            optimizer=Optimizer,
            callbacks=[Flush()],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    ],
    freq="D",
)
forecaster.fit(pd.concat(frames))
model = forecaster.models[0]
