"""What docs/optimizer.md takes for granted."""

import torch
from torch import nn

import accumext

model = nn.Linear(3, 2)
opt = accumext.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
scaler = torch.amp.GradScaler("cpu")
batch = torch.randn(4, 3)
parts = batch.split(2)
path = "checkpoint.pt"


def loss_of(rows):
    return model(rows).square().mean()
