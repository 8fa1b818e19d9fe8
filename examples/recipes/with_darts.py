"""Darts: `optimizer_cls` is a function that wraps an optimizer."""

import numpy as np
import torch
from darts import TimeSeries
from darts.models import RNNModel
from pytorch_lightning import Callback

import accumext


def optimizer(params, **kwargs):
    adam = torch.optim.Adam(params, **kwargs)
    return accumext.AccumulatingOptimizer(adam, window=4, max_norm=0.5)


class Flush(Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.optimizers[0].flush()


trainer = {"accelerator": "cpu", "callbacks": [Flush()], "logger": False}
quiet = {"enable_progress_bar": False, "enable_model_summary": False}
forecaster = RNNModel(
    input_chunk_length=8,
    training_length=12,
    model="GRU",
    hidden_dim=8,
    batch_size=16,
    n_epochs=3,
    optimizer_cls=optimizer,
    optimizer_kwargs={"lr": 0.01},
    pl_trainer_kwargs={**trainer, **quiet},
    random_state=0,
)
series = TimeSeries.from_values(np.sin(np.arange(171) / 5.0))
forecaster.fit(series)  # 10 batches in an epoch

model = forecaster.model
print(f"last window: {forecaster.trainer.optimizers[0].stats()}")
