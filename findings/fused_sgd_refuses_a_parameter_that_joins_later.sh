#!/usr/bin/env bash
# Expected: a parameter whose gradient is None is left out of a step, and taken in when it has one: a
# layer that is unfrozen later, an expert or a task head that the first batch did not use.
# What happens: with momentum fused SGD tells its kernel by one flag whether momenta exist, for all
# parameters of a group together. In the first step that has old ones and a new one the new one's
# momentum is None in a list of tensors: a TypeError that names neither the parameter nor the cause.
# Without momentum, or without fused, it works; so does a parameter in a group that was added later.
# Version: torch 2.13.0. Read in torch/optim/sgd.py: _fused_sgd.
# Seen:
#   head after its first step, SGD(momentum=0.5): 0.875
#   SGD(momentum=0.5, fused=True): expected Tensor as element 1 in argument 2, but got NoneType
#   fused without momentum: 0.875 - fused, head in a group added later: 0.875
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch


def train(in_a_group_of_its_own=False, **options):
    trunk, head = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    sgd = torch.optim.SGD([trunk] if in_a_group_of_its_own else [trunk, head], lr=0.125, **options)
    trunk.sum().backward()  # head is not used, or frozen
    sgd.step()
    if in_a_group_of_its_own:
        sgd.add_param_group({"params": [head]})
    sgd.zero_grad()
    (trunk.sum() + head.sum()).backward()
    try:
        sgd.step()
    except TypeError as error:
        return str(error)
    return head[0].item()


plain = train(momentum=0.5)
fused = train(momentum=0.5, fused=True)
print("head after its first step, SGD(momentum=0.5):", plain)
print("SGD(momentum=0.5, fused=True):", fused)
others = [train(fused=True), train(momentum=0.5, fused=True, in_a_group_of_its_own=True)]
print("fused without momentum:", others[0], "- fused, head in a group added later:", others[1])
assert plain == others[0] == others[1] == 0.875, "SGD has changed"
assert "got NoneType" in str(fused), "fused SGD takes it now"
PYTHON
venv/bin/python finding.py
