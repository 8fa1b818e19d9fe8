"""A language model that keeps Liger's head, with accumext around the optimizer."""

import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

import accumext


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = accumext.AccumulatingOptimizer(optimizer, window=n, max_norm=1.0)
    head_loss = LigerFusedLinearCrossEntropyLoss()
    head = model.head
    for x, y in loader:
        hidden = model.trunk(x).flatten(0, 1)
        loss = head_loss(head.weight, hidden, y.flatten(), head.bias)
        optimizer.backward(loss, weight=(y != -100).sum())
        optimizer.step()
    optimizer.flush()
