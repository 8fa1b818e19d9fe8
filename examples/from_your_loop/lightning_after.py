"""Lightning, with accumext."""

import lightning
import torch
from torch.nn.functional import cross_entropy

import accumext


class Classifier(lightning.LightningModule):
    def __init__(self, model, n):
        super().__init__()
        self.model = model
        self.n = n

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return accumext.AccumulatingOptimizer(
            optimizer, window=self.n, max_norm=1.0
        )

    def on_train_epoch_end(self):
        self.optimizers().flush()


def train(model, loader, n, **options):
    trainer = lightning.Trainer(**options)
    trainer.fit(Classifier(model, n), loader)
