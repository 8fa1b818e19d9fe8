#!/usr/bin/env bash
# Expected: a step that GradScaler skips for an inf leaves no trace, and the very first steps are
# those that are skipped, while the scale comes down from 65,536. Adam and AdamW keep zeros then.
# What happens: fused SGD makes its momentum with `empty_like` in the first call and tells the kernel
# that this is the first step; the kernel sees the inf and returns. In the second call a momentum
# exists, so it counts as a real one: whatever the memory held is multiplied by 0.9 and stepped on.
# `use_deterministic_algorithms` fills such memory with NaN, which makes it visible.
# Version: torch 2.13.0. Read in torch/optim/sgd.py: _fused_sgd.
# Seen:
#   weight after a skipped step and a step of -0.1, fused=False: 0.8999999761581421
#   weight after a skipped step and a step of -0.1, fused=True:  nan
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch

torch.use_deterministic_algorithms(True)  # new memory is NaN instead of whatever it held


def train(fused):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (float("inf"), 1.0):  # an overflow, and a batch like any other
        optimizer.zero_grad()
        (scaler.scale(weight.sum()) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight[0].item()


plain, fused = train(False), train(True)
print("weight after a skipped step and a step of -0.1, fused=False:", plain)
print("weight after a skipped step and a step of -0.1, fused=True: ", fused)
assert abs(plain - 0.9) < 1e-6, "the optimizer that is not fused has changed"
assert fused != fused, "the momentum is initialised now"
PYTHON
venv/bin/python finding.py
