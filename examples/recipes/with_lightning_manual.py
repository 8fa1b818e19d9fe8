"""Lightning, manual optimization: batches count by their rows, as does the last window.

`manual_backward` keeps Lightning's precision and strategy; `accumulate` takes the gradients in.
"""

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accumext


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.head = torch.nn.Linear(8, 4)

    def configure_optimizers(self):
        adam = torch.optim.AdamW(self.parameters(), lr=0.1)
        opt = accumext.AccumulatingOptimizer(adam, window=4, max_norm=1.0)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()
        self.manual_backward(cross_entropy(self.head(x), y))
        opt.accumulate(weight=len(y))  # leave the line out where all batches count alike
        opt.step()
        self.after_step(opt)

    def on_train_epoch_end(self):
        self.optimizers().flush()
        self.after_step(self.optimizers())

    def after_step(self, opt):
        if opt.stepped:
            self.lr_schedulers().step()
            self.log_dict(opt.stats())


lightning.seed_everything(0, verbose=False)
rows = torch.randn(150, 8)
loader = DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16)  # the last of 6 rows
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
