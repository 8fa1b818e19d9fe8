"""Question 1: a decoder fed its argmax, step losses summed, one backward pass."""

import torch
from torch.nn.functional import cross_entropy


def train(model, loader, n, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    for i, (targets, hidden) in enumerate(loader):
        with torch.autocast(device, torch.float16):
            loss = 0
            token = torch.zeros_like(targets[0])
            for target in targets:
                logits, hidden = model(token, hidden)
                loss += cross_entropy(logits, target)
                token = logits.argmax(1)
            loss = loss / (n * len(targets))
        scaler.scale(loss).backward()
        if (i + 1) % n == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
