"""Lightning under the auditor: a callback, and what it says of a Trainer whose last window of an
epoch holds two micro-batches."""

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accumext


class Audit(lightning.Callback):
    def on_fit_start(self, trainer, model):
        self.audit = accumext.audit(model, trainer.optimizers[0], windows=3)
        self.audit.__enter__()

    def on_fit_end(self, trainer, model):
        self.audit.__exit__(None, None, None)
        print(self.audit)

    def on_exception(self, trainer, model, error):
        self.audit.__exit__(type(error), error, error.__traceback__)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.head(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


rows = torch.randn(160, 8)
loader = DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16)
trainer = lightning.Trainer(
    max_epochs=2,
    accumulate_grad_batches=4,
    callbacks=[Audit()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), loader)
