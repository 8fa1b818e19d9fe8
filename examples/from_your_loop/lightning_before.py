"""Lightning accumulates and clips."""

import lightning
import torch
from torch.nn.functional import cross_entropy


class Classifier(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(model, loader, n, **options):
    trainer = lightning.Trainer(
        accumulate_grad_batches=n, gradient_clip_val=1.0, **options
    )
    trainer.fit(Classifier(model), loader)
