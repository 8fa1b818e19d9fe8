#!/usr/bin/env bash
# Expected: a forward pass of a `fully_shard` model gathers its shards, so it computes with what the
# optimizer has made of them.
# What happens: by default the root module keeps its gathered weights after a forward pass, for
# the backward pass that is to come (documented), which frees them. After an evaluation none comes (not
# documented): a step that follows moves the shards, and every forward pass from there on computes with the
# weights of before the step, the next training step's as well, until a backward pass or a
# state_dict(), which also frees them. The case of a loop: backward, evaluate (or log a sample), step.
# The gradient that follows is one of old weights. `reshard_after_forward=True`, or `model.reshard()`
# after the evaluation, cures it.
# Version: torch 2.13.0. Read in torch/distributed/fsdp: fully_shard's reshard_after_forward=None, and
# FSDPParamGroup.unshard, which does nothing where weights are gathered. One process, gloo.
# Seen:
#   default, before the step, after it, again, next training forward, after its backward: 1.0 1.0 1.0 1.0 0.75
#   the weight after the step: 0.75
#   reshard_after_forward=True: 1.0 0.75 0.75 0.75 0.75
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = torch.ones(1, 1)


@torch.no_grad()
def evaluate(model):
    return model(x).item()


def run(**options):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh, **options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    model(x).sum().backward()
    seen = [evaluate(model)]
    sgd.step()
    sgd.zero_grad()
    seen += [evaluate(model), evaluate(model)]
    shard = sgd.param_groups[0]["params"][0].item()
    loss = model(x).sum()
    loss.backward()  # frees the gathered weights
    return [*seen, loss.item(), evaluate(model)], shard


names = "before the step, after it, again, next training forward, after its backward:"
default, shard = run()
print("default,", names, *default)
print("the weight after the step:", shard)
resharded, _ = run(reshard_after_forward=True)
print("reshard_after_forward=True:", *resharded)
dist.destroy_process_group()

assert shard == 0.75, "SGD has changed"
assert resharded == [1, 0.75, 0.75, 0.75, 0.75], "reshard_after_forward=True has changed"
assert default == [1, 1, 1, 1, 0.75], "the default gathers new weights now"
PYTHON
venv/bin/python finding.py
