"""Mixed precision: autocast, GradScaler, clipping and a schedule."""

import torch
from torch.nn.functional import cross_entropy


def train(model, loader, n, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for i, (x, y) in enumerate(loader):
        with torch.autocast(device, torch.float16):
            loss = cross_entropy(model(x), y)
            loss = loss / n
        scaler.scale(loss).backward()
        if (i + 1) % n == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
