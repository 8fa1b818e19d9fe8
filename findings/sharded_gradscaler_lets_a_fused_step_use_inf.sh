#!/usr/bin/env bash
# Expected: ShardedGradScaler exists so that all ranks skip a step if any rank has an inf.
# What happens with a fused optimizer (which GradScaler lets skip by itself):
# - `unscale_` adds the flags of the ranks up. Fused kernels skip where the flag is 1, so with an inf
#   on one rank all skip, and with an inf on two ranks, flag 2, all step on it.
# - Without a call of `unscale_` the flags are not exchanged at all: the rank with the inf skips, the
#   other steps, and from then on weights and loss scales of the ranks differ.
# Version: torch 2.13.0. Read in torch/distributed/fsdp/sharded_grad_scaler.py (unscale_), and
# torch/amp/grad_scaler.py (step). Two processes, gloo.
# Seen:
#   fused=False, unscale_ called, inf on 1: weight 1.0, 1.0; scale 2.0, 2.0
#   fused=False, unscale_ called, inf on 2: weight 1.0, 1.0; scale 2.0, 2.0
#   fused=False, unscale_ left out, inf on 1: weight 1.0, 1.0; scale 2.0, 2.0
#   fused=False, unscale_ left out, inf on 2: weight 1.0, 1.0; scale 2.0, 2.0
#   fused=True, unscale_ called, inf on 1: weight 1.0, 1.0; scale 2.0, 2.0
#   fused=True, unscale_ called, inf on 2: weight -inf, -inf; scale 2.0, 2.0
#   fused=True, unscale_ left out, inf on 1: weight 1.0, 0.5; scale 2.0, 4.0
#   fused=True, unscale_ left out, inf on 2: weight 1.0, 1.0; scale 2.0, 2.0
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet "torch==2.13.0"
cat >finding.py <<'PYTHON'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def step(rank, bad_ranks, fused, unscale):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    (scaler.scale(weight.sum()) * (float("inf") if rank in bad_ranks else 1)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return weight[0].item(), scaler.get_scale()


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for fused in (False, True):
        for unscale in (True, False):
            for bad in ((0,), (0, 1)):
                both = torch.zeros(2, 2).unbind()
                dist.all_gather(list(both), torch.tensor(step(rank, bad, fused, unscale)))
                results[fused, unscale, len(bad)] = [tuple(of_rank.tolist()) for of_rank in both]
    if rank == 0:
        for (fused, unscale, bad), both in results.items():
            print(f"fused={fused}, unscale_ {'called' if unscale else 'left out'}, inf on {bad}:"
                  f" weight {both[0][0]}, {both[1][0]}; scale {both[0][1]}, {both[1][1]}")
        skipped = [(1.0, 2.0), (1.0, 2.0)]
        for key, both in results.items():
            if not key[0]:
                assert both == skipped, "the optimizer that is not fused has changed"
        assert results[True, True, 1] == skipped, "one inf has changed"
        poisoned = results[True, True, 2]
        assert poisoned[0][0] == poisoned[1][0] == float("-inf"), "two infs are skipped now"
        assert results[True, False, 1] == [(1.0, 2.0), (0.5, 4.0)], "ranks agree now"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (os.path.abspath("store"),), nprocs=2)
PYTHON
venv/bin/python finding.py
