"""Mixed precision, with accumext."""

import torch
from torch.nn.functional import cross_entropy

import accumext


def train(model, loader, n, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    optimizer = accumext.AccumulatingOptimizer(
        optimizer, window=n, max_norm=1.0, scaler=scaler
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for x, y in loader:
        with torch.autocast(device, torch.float16):
            loss = cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        if optimizer.stepped:
            scheduler.step()
    optimizer.flush()
