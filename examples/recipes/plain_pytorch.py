"""Plain PyTorch: a step every 4 batches, clipped, with a schedule, and batches of any size.

The last window of an epoch holds two batches, one of them short; each counts by its rows.
"""

import torch
from torch.nn.functional import cross_entropy

import accumext

torch.manual_seed(0)
rows = torch.randn(150, 8)
batches = list(zip(rows.split(16), rows[:, :4].argmax(1).split(16)))  # ten, the last of 6 rows

model = torch.nn.Linear(8, 4)
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.1), window=4, max_norm=1.0
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)

for _ in range(10):
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        opt.backward(loss, weight=len(y))  # the window's loss is the mean over all its rows
        opt.step()  # steps at every fourth call
        if opt.stepped:
            schedule.step()
    opt.flush()  # steps on the two batches that are left
    if opt.stepped:
        schedule.step()

print(f"loss {loss.item():.3f}, last window: {opt.stats()}")
