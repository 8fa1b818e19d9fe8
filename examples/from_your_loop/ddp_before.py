"""DistributedDataParallel that synchronises in the last backward pass of n."""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def train(model, loader, n):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % n == 0
        with nullcontext() if last else model.no_sync():
            loss = cross_entropy(model(x), y)
            loss = loss / n
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
