"""apex.amp replaced by torch's autocast and accumext."""

import torch
from torch.nn.functional import cross_entropy

import accumext


def train(model, loader, n, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    optimizer = accumext.AccumulatingOptimizer(
        optimizer, window=n, max_norm=1.0, scaler=scaler
    )
    for x, y in loader:
        with torch.autocast(device, torch.float16):
            loss = cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
    optimizer.flush()
