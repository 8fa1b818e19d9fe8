"""Ignite: `create_supervised_trainer` as ever, with a handler for each closed window."""

import torch
from ignite.engine import Events, create_supervised_trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accumext

torch.manual_seed(0)
rows = torch.randn(192, 8)
loader = DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16)

model = torch.nn.Linear(8, 4)
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.1), window=4, max_norm=1.0
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)
trainer = create_supervised_trainer(  # gradient_accumulation_steps stays 1
    model, opt, cross_entropy, output_transform=lambda x, y, y_pred, loss: loss.detach()
)


@trainer.on(Events.ITERATION_COMPLETED(event_filter=lambda engine, event: opt.stepped))
def after_window():
    schedule.step()


@trainer.on(Events.EPOCH_COMPLETED)
def after_epoch():
    opt.flush()  # what a partial window holds; here nothing
    if opt.stepped:
        schedule.step()
    trainer.state.metrics.update(opt.stats())


state = trainer.run(loader, max_epochs=10)
print(f"loss {state.output:.3f}, last window: {state.metrics}")
