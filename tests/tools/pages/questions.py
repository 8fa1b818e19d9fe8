"""Names that docs/questions.md takes for granted."""

import torch
import torch.nn.functional as F
from torch import nn

import accumext

n = 2
model = nn.Module()
model.embedding, model.cell, model.head = nn.Embedding(50, 8), nn.GRUCell(8, 12), nn.Linear(12, 50)
targets, hidden = torch.randint(50, (5, 3)), torch.zeros(3, 12)
opt = accumext.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()))

trunk, top = nn.Linear(4, 6), nn.Linear(6, 9)
x, y = torch.randn(20, 4), torch.randint(9, (20,))


def head_loss(rows, labels):
    return F.cross_entropy(top(rows), labels)
