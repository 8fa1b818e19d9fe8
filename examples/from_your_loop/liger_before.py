"""A language model with Liger's head: the mean over all labels of n batches."""

import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss


def train(model, loader, n):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    head_loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    head = model.head
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) < n:
            continue
        num_items = sum((y != -100).sum() for _, y in batches)
        for x, y in batches:
            hidden = model.trunk(x).flatten(0, 1)
            loss = head_loss(head.weight, hidden, y.flatten(), head.bias)
            loss = loss / num_items
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        batches = []
