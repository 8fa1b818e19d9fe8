"""Accelerate, with accumext."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import accumext


def train(model, loader, n):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = optimizer = accumext.AccumulatingOptimizer(
        optimizer, window=n, max_norm=1.0
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if opt.stepped:
            scheduler.step()
    opt.flush()
