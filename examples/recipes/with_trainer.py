"""Hugging Face Trainer: it accumulates, the optimizer clips, skips what is not finite, and reports.

The Trainer divides by `num_items_in_batch`, the labels in all batches of a step, so only its own
accumulation makes a mean over labels. `window` stays 1; `max_grad_norm=0.0` leaves clipping to the
wrapper.
"""

import tempfile

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

import accumext


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, labels, **kwargs):  # kwargs: num_items_in_batch in training
        items = kwargs.get("num_items_in_batch", labels.ne(-100).sum())
        return {"loss": cross_entropy(self.head(x), labels, reduction="sum") / items}


class ReportingTrainer(Trainer):
    def log(self, logs, start_time=None):
        super().log({**logs, **opt.stats()}, start_time)


torch.manual_seed(0)
data = [{"x": x, "labels": x[:4].argmax()} for x in torch.randn(192, 8)]
model = Model()
opt = accumext.AccumulatingOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), max_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        max_grad_norm=0.0,
        max_steps=30,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    ReportingTrainer(model, args, train_dataset=data, optimizers=(opt, schedule)).train()

print(f"last window: {opt.stats()}")
