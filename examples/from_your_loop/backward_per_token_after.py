"""Question 2, with accumext: backward at every token, in one micro-batch."""

import torch
from torch.nn.functional import cross_entropy

import accumext


def train(model, loader, n, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    optimizer = accumext.AccumulatingOptimizer(
        optimizer, window=n, max_norm=2.0, scaler=scaler
    )
    running_loss = 0
    for targets, hidden in loader:
        with optimizer.micro_batch(), torch.autocast(device, torch.float16):
            result = accumext.tbptt(
                model,
                targets,
                hidden,
                criterion=cross_entropy,
                feedback="greedy",
                k1=1,
                backward=optimizer.backward,
            )
        running_loss += result.loss
        optimizer.step()
    optimizer.flush()
    return running_loss / len(loader)
