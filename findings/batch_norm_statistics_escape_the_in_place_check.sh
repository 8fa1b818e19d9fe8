#!/usr/bin/env bash
# Expected: autograd refuses a saved tensor that was written in place ("one of the variables needed
# for gradient computation has been modified"), whoever wrote it, or the gradient is that of the
# forward pass.
# What happens: batch norm in training writes its running statistics without counting the write; in
# eval mode the backward pass reads them. With a training forward between forward and backward of a
# frozen norm, as of a shared feature extractor, the gradient is another one, without an error. By
# hand the same write is counted, and refused. Who watches `_version` to see what a step has changed
# misses it; `num_batches_tracked` counts.
# Version: torch 2.13.0 (an issue of PyTorch of 2018 is open). Schema of aten::batch_norm: no write.
# Seen:
#   gradient of a forward pass in eval mode: 0.9999950000374997
#   the same, backward after a training forward: 0.012246622085638216
#   counted writes of reset and training: running_var 1 num_batches_tracked 2
#   the same, after running_var.mul_(2): one of the variables needed for gradient computation has been modified by a ...
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch

norm = torch.nn.BatchNorm1d(2).double()
inputs = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)


def gradient(between):
    norm.reset_running_stats()
    norm.eval()
    out = norm(inputs)
    between()
    return torch.autograd.grad(out.sum(), inputs)[0][0, 0].item()


def training_forward():
    norm.train()
    with torch.no_grad():
        norm(100 * torch.arange(8.0, dtype=torch.float64).reshape(4, 2))


before = gradient(lambda: None)
versions = norm.running_var._version, norm.num_batches_tracked._version
after = gradient(training_forward)
versions = [norm.running_var._version - versions[0], norm.num_batches_tracked._version - versions[1]]
print("gradient of a forward pass in eval mode:", before)
print("the same, backward after a training forward:", after)
print("counted writes of reset and training: running_var", versions[0], "num_batches_tracked", versions[1])
try:
    gradient(lambda: norm.running_var.mul_(2))
    refused = ""
except RuntimeError as error:
    refused = str(error)
print("the same, after running_var.mul_(2):", refused[:75], "...")

assert "modified by an inplace operation" in refused, "running_var is no longer watched"
assert versions == [1, 2], "training counts its write now"
assert abs(before - 1) < 1e-4 and after < 0.05, "the backward pass is right now"
PYTHON
venv/bin/python finding.py
