#!/usr/bin/env bash
# Expected: `SGD(fused=True)` is SGD. If it did not take bfloat16 or float16 on a CPU it would say
# so, as it does for other dtypes.
# What happens: the kernel computes the new values of whole vectors and does not store them. Only
# what is left over behind the last vector moves: nothing at all where the number of elements is a
# multiple of 32. The momentum is read as another dtype. float32, and Adam, AdamW and Adagrad, are
# right. Any test with a small layer passes.
# Version: torch 2.13.0. An issue of PyTorch describes it (July 2026), so later releases differ.
# Seen:
#   torch.float32, 7 elements: 7 moved, fused 7 moved
#   torch.float32, 1024 elements: 1024 moved, fused 1024 moved
#   torch.bfloat16, 7 elements: 7 moved, fused 7 moved
#   torch.bfloat16, 1024 elements: 1024 moved, fused 0 moved
#   torch.float16, 7 elements: 7 moved, fused 7 moved
#   torch.float16, 1024 elements: 1024 moved, fused 0 moved
#   float16, momentum of 0.9 after gradients 1, 1: 1.900390625 fused 1.0068359375
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch


def moved(dtype, size, fused, **options):
    weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused, **options)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    buffer = optimizer.state[weight].get("momentum_buffer")
    return int((weight != 1).sum()), None if buffer is None else buffer[0].item()


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (7, 1024):
        count = {fused: moved(dtype, size, fused)[0] for fused in (False, True)}
        print(f"{dtype}, {size} elements: {count[False]} moved, fused {count[True]} moved")
        assert count[False] == size, "SGD has changed"
        skipped = dtype != torch.float32 and size == 1024
        assert count[True] == (0 if skipped else size), "fused SGD has changed"
buffers = [moved(torch.float16, 1024, fused, momentum=0.9)[1] for fused in (False, True)]
print("float16, momentum of 0.9 after gradients 1, 1:", buffers[0], "fused", buffers[1])
assert abs(buffers[0] - 1.9) < 2e-3 < abs(buffers[1] - 1.9), "fused momentum has changed"
PYTHON
venv/bin/python finding.py
