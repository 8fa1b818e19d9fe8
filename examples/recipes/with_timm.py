"""timm: `NativeScaler` around the wrapper, as in its training script, and an update is a window."""

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import NativeScaler
from torch.nn.functional import cross_entropy

import accumext

torch.manual_seed(0)
rows = torch.randn(160, 8)
model = torch.nn.Linear(8, 4)

momentum = create_optimizer_v2(model, opt="momentum", lr=0.5)
opt = accumext.AccumulatingOptimizer(momentum, window=4, max_norm=0.5)
schedule = CosineLRScheduler(opt, t_initial=9, t_in_epochs=False)
loss_scaler = NativeScaler(device="cpu")
updates = 0
for _ in range(3):
    for x in rows.split(16):
        loss = cross_entropy(model(x), x[:, :4].argmax(1))
        loss_scaler(loss, opt)  # no clip_grad; need_update stays True
        opt.zero_grad()
        if opt.stepped:
            updates += 1
            schedule.step_update(updates)
    opt.flush()
    if opt.stepped:
        updates += 1
        schedule.step_update(updates)

print(f"last window: {opt.stats()}")
