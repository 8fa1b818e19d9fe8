"""Logging: norm before clipping, clip factor, loss scale and skips, in TensorBoard and in a file.

`stats()` is a flat dict of floats and the only place where the host waits for the device, here in
every fifth window. Any logger takes it: `wandb.log(stats)`, `progress_bar.set_postfix(stats)`.
"""

import json
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

import accumext

torch.manual_seed(0)
rows = torch.randn(160, 8)
model = torch.nn.Linear(8, 4)
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.1), window=2, max_norm=0.5
)

with tempfile.TemporaryDirectory() as folder:
    lines = Path(folder) / "stats.jsonl"
    with SummaryWriter(folder) as writer, lines.open("w") as file:
        windows = 0
        for x in rows.split(16) * 6:
            opt.backward(cross_entropy(model(x), x[:, :4].argmax(1)))
            opt.step()
            windows += opt.stepped
            if opt.stepped and windows % 5 == 0:
                stats = opt.stats()
                for name, value in stats.items():
                    writer.add_scalar(f"window/{name}", value, windows)
                file.write(json.dumps({"step": windows, **stats}) + "\n")
    print(lines.read_text())
