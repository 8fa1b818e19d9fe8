"""Lightning Fabric: `setup` takes the wrapper, and the loop is the one of plain PyTorch."""

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

import accumext

torch.manual_seed(0)
rows = torch.randn(160, 8)
fabric = Fabric(accelerator="cpu", devices=1)
model = torch.nn.Linear(8, 4)

sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
opt = accumext.AccumulatingOptimizer(sgd, window=4, max_norm=0.5)
model, optimizer = fabric.setup(model, opt)
for _ in range(3):
    for x in rows.split(16):
        loss = cross_entropy(model(x), x[:, :4].argmax(1))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    opt.flush()

print(f"last window: {opt.stats()}")
