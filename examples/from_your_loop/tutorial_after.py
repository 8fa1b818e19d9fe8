"""The tutorial loop, with accumext."""

import torch
from torch.nn.functional import cross_entropy

import accumext


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=n)
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
    optimizer.flush()
