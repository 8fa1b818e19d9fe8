"""A recurrent decoder, teacher-forced, with the head of cut_cross_entropy."""

import torch
from cut_cross_entropy import linear_cross_entropy


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    head = model.head
    for i, (targets, hidden) in enumerate(loader):
        inputs = torch.cat([torch.zeros_like(targets[:1]), targets[:-1]])
        outputs, _ = model.rnn(model.embedding(inputs), hidden)
        loss = linear_cross_entropy(outputs, head.weight, targets, bias=head.bias)
        loss = loss / n
        loss.backward()
        if (i + 1) % n == 0:
            optimizer.step()
            optimizer.zero_grad()
