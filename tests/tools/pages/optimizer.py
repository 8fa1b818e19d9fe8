"""Names that docs/optimizer.md takes for granted."""

import torch
from torch import nn

import accumext  # noqa: F401, for the page

model = nn.Linear(3, 2)
device = "cpu"
scaler = torch.amp.GradScaler(device)
batches = torch.randn(6, 4, 3)
parts = batches[0].split(2)
path = "checkpoint.pt"


def loss_of(rows):
    return model(rows).square().mean()
