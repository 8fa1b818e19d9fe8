"""The Trainer of transformers accumulates; accumext clips, checks and reports."""

import torch
from transformers import Trainer, TrainingArguments

import accumext


def train(model, dataset, n, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accumext.AccumulatingOptimizer(optimizer, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    args = TrainingArguments(
        gradient_accumulation_steps=n,
        max_grad_norm=0.0,
        **options,
    )
    Trainer(
        model, args, train_dataset=dataset, optimizers=(optimizer, scheduler)
    ).train()
