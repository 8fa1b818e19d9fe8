"""Composer: a batch of the loader is a micro-batch, and a callback flushes after each epoch."""

import torch
from composer import Callback, ComposerModel, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accumext


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, batch):
        return self.head(batch[0])

    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch[1])


torch.manual_seed(0)
rows = torch.randn(160, 8)
model = Model()


class Flush(Callback):
    def batch_end(self, state, logger):  # an epoch's schedule steps before `epoch_end`
        if state.timestamp.batch_in_epoch == state.dataloader_len:
            opt.flush()

    def fit_end(self, state, logger):
        opt.flush()


sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
opt = accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.5)
trainer = Trainer(  # device_train_microbatch_size stays None
    model=model,
    train_dataloader=DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16),
    optimizers=opt,
    max_duration="3ep",
    callbacks=[Flush()],
    device="cpu",
    progress_bar=False,
)
trainer.fit()

print(f"last window: {opt.stats()}")
