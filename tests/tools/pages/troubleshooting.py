"""Names that docs/troubleshooting.md takes for granted."""

import math  # noqa: F401, for the page

import torch
import torch.nn.functional as F  # noqa: F401, for the page
from torch import nn

import accumext  # noqa: F401, for the page

device = "cpu"
embedding, cell, head = nn.Embedding(11, 6), nn.GRUCell(6, 8), nn.Linear(8, 11)
targets, hidden = torch.randint(11, (7, 3)), torch.zeros(3, 8)
sentences = [(torch.randint(11, (t, 2)), [t, n]) for t, n in ((9, 2), (3, 3), (5, 1))]

model = nn.Linear(5, 4)
rows = (2, 2, 2, 2, 2, 1)  # of the batches: neither a multiple of 4 of them, nor all of one size
loader = [(torch.randn(n, 5), torch.randint(4, (n,))) for n in rows]
decoder = nn.ModuleList([embedding, cell, head])
optimizer = torch.optim.SGD([*model.parameters(), *decoder.parameters()], lr=0.1)
