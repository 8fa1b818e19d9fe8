"""The tutorial loop: accumulation by hand."""

import torch
from torch.nn.functional import cross_entropy


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i, (x, y) in enumerate(loader):
        loss = cross_entropy(model(x), y)
        loss = loss / n
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
