#!/usr/bin/env bash
# Expected: a step that raises (a hook, an interrupt, no memory) has not happened. A loop that catches
# the error, drops the batch by zero_grad and goes on trains as if the batch had not been there.
# What happens: GradScaler notes what it has done to the gradients before it calls the optimizer, and
# forgets it only where that returns. So in the next step
# - it takes the gradients of the next batch for unscaled ones: a step as many times too long as the
#   scale, here 1,024, by default 65,536;
# - with a fused optimizer, to which it hands its scale in `optimizer.grad_scale`, it multiplies the
#   scale by the one that is still there: a step as many times too short. The same where the step
#   itself is tried again; and `update()`, which cures the first, does not cure this one.
# No error, no warning, and the step after it is right again.
# Version: torch 2.13.0. Read in torch/amp/grad_scaler.py: GradScaler.step.
# Seen:
#   fused=False, batch dropped by zero_grad alone: the next steps are -1024.0 -1.0
#   fused=False, batch dropped with update(): the next steps are -1.0 -1.0
#   fused=True, batch dropped by zero_grad alone: the next steps are -0.0009765625 -1.0
#   fused=True, batch dropped with update(): the next steps are -0.0009765625 -1.0
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch


def train(fused, update):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    calls = []

    def fails_once(*_):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a hook that fails once")

    optimizer.register_step_pre_hook(fails_once)
    moved = []
    for _ in range(3):  # the gradient is 1, so a step is -1
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        try:
            scaler.step(optimizer)
            scaler.update()
        except RuntimeError:
            if update:
                scaler.update()
            continue
        moved.append((weight - before)[0].item())
    return moved


steps = {}
for fused in (False, True):
    for update in (False, True):
        steps[fused, update] = train(fused, update)
        told = "with update()" if update else "by zero_grad alone"
        print(f"fused={fused}, batch dropped {told}: the next steps are", *steps[fused, update])

assert steps[False, True] == [-1, -1], "a step that is not fused has changed"
assert steps[False, False] == [-1024, -1], "gradients are unscaled after a failed step now"
for update in (False, True):
    first, second = steps[True, update]
    assert abs(first * 1024 + 1) < 1e-3, "the scale of a failed fused step is gone now"
    assert abs(second + 1) < 1e-3, "the scale of a failed fused step now stays for longer"
PYTHON
venv/bin/python finding.py
