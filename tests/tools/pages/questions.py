"""Names that docs/questions.md takes for granted."""

import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel  # noqa: F401, for the page

import accumext

n, SOS, PAD, running_loss, device = 2, 1, 0, 0.0, "cpu"
wandb = types.SimpleNamespace(log=dict)
model = nn.Module()
model.embedding, model.cell, model.head = nn.Embedding(50, 8), nn.GRUCell(8, 12), nn.Linear(12, 50)
loader = [(torch.randint(50, (5, 3)), torch.zeros(3, 12))] * 3


class Decoder(nn.Module):
    """As in PyTorch's seq2seq tutorial."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, token, hidden):
        output, hidden = self.gru(F.relu(self.embedding(token)), hidden)
        return self.out(output), hidden


decoder = model.decoder = Decoder()
words, encoder_hidden = torch.randint(2, 50, (3, 5)), torch.zeros(1, 3, 8)

trunk, head = nn.Linear(4, 6), nn.Linear(6, 9)
x, y = torch.randn(20, 4), torch.randint(9, (20,))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def head_loss(rows, labels):
    return F.cross_entropy(head(rows), labels)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, x, y):
        return accumext.chunked_loss(head_loss, self.trunk(x), y, chunks=10)


def close():
    dist.destroy_process_group()
