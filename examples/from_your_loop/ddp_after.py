"""DistributedDataParallel, with accumext."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import accumext


def train(model, loader, n):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=n, max_norm=1.0)
    for x, y in loader:
        with optimizer.micro_batch(model):
            loss = cross_entropy(model(x), y)
            optimizer.backward(loss)
        optimizer.step()
    optimizer.flush()
