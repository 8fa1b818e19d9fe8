"""Names that docs/audit.md takes for granted."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accumext  # noqa: F401, for the page

model = nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())


def train(steps):
    for _ in range(steps):
        cross_entropy(model(torch.randn(4, 3)), torch.randint(2, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()
