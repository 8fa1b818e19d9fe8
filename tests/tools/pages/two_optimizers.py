"""Names that docs/two_optimizers.md takes for granted."""

import torch
from torch import nn

import accumext  # noqa: F401, for the page

generator = nn.Linear(2, 3)
discriminator = nn.Linear(3, 1)
batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)]
model = nn.Linear(3, 2)
loader = torch.randn(4, 5, 3)


def verdict(rows, truth):
    said = discriminator(rows)
    return nn.functional.binary_cross_entropy_with_logits(said, torch.full_like(said, truth))


def loss_of(rows):
    return model(rows).square().mean()
