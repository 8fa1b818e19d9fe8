"""Hugging Face Trainer under the auditor: a callback, and what it says of a model that takes the
Trainer's `num_items_in_batch` among its keywords, and divides by a number of its own all the same.
"""

import tempfile

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

import accumext


class Audit(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others):
        self.audit = accumext.audit(model, optimizer)
        self.audit.__enter__()

    def on_train_end(self, args, state, control, **others):
        self.audit.__exit__(None, None, None)
        print(self.audit)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, labels, **kwargs):
        return {"loss": cross_entropy(self.head(x), labels)}


torch.manual_seed(0)
data = [{"x": x, "labels": x[:4].argmax()} for x in torch.randn(192, 8)]
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        max_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(Model(), args, train_dataset=data, callbacks=[Audit()]).train()
