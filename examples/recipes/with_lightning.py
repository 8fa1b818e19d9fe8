"""Lightning, automatic optimization: return the wrapper from `configure_optimizers`.

Lightning steps after every batch; the wrapper makes every fourth one a step of the optimizer.
"""

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accumext


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.head(x), y)

    def configure_optimizers(self):
        adam = torch.optim.AdamW(self.parameters(), lr=0.1)
        opt = accumext.AccumulatingOptimizer(adam, window=4, max_norm=1.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)
        return [opt], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):  # Lightning calls it after every batch
        if self.optimizers().stepped:
            scheduler.step()

    def on_train_batch_end(self, *args):
        opt = self.optimizers()
        if opt.stepped:  # a tensor, which nothing reads before Lightning logs it
            self.log("total_norm", opt.last.total_norm)

    def on_train_epoch_end(self):  # before the epoch's checkpoint
        self.optimizers().flush()
        self.lr_scheduler_step(self.lr_schedulers(), None)


lightning.seed_everything(0, verbose=False)
rows = torch.randn(192, 8)
loader = DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16)
model = Model()
trainer = lightning.Trainer(
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print({name: value.item() for name, value in trainer.logged_metrics.items()})
