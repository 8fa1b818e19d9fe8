"""Accelerate: it places and scales, the optimizer accumulates, clips and counts.

`prepare` wraps `opt` once more. Step through what it returns, ask `opt` what happened.
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accumext

torch.manual_seed(0)
rows = torch.randn(192, 8)
loader = DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16, shuffle=True)

model = torch.nn.Linear(8, 4)
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.1), window=4, max_norm=1.0
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)

accelerator = Accelerator()  # gradient_accumulation_steps stays 1
model, optimizer, loader, schedule = accelerator.prepare(model, opt, loader, schedule)

for epoch in range(10):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if opt.stepped:  # once per window
            schedule.step()
    accelerator.log(opt.stats(), step=epoch)
opt.flush()  # what the last, partial window holds; here nothing

accelerator.print(f"loss {loss.item():.3f}, last window: {opt.stats()}")
