"""torchrun elastic: shards that communicate once per window, and resume on another number of ranks.

`torchrun --nproc-per-node 2 with_torchrun_elastic.py --checkpoint FOLDER --windows 4`, then again
with 3 processes and more windows. Run as it is, there is one process, and nothing is saved.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import accumext

MICRO_BATCHES, ROWS = 12, 8  # of a window on all ranks together, whatever their number; of each

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--windows", type=int, default=10)
arguments = parser.parse_args()

alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ |= {name: value for name, value in alone.items() if name not in os.environ}
dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.01),
    window=MICRO_BATCHES // world,  # so that a step means the same with any number of ranks
    max_norm=1.0,
    synchronize="window",
)
done = 0
if arguments.checkpoint is not None and (arguments.checkpoint / ".metadata").exists():
    model_state, optimizer_state = get_state_dict(model, opt)
    state = {"model": model_state, "optimizer": optimizer_state, "windows": done}
    dcp.load(state, checkpoint_id=arguments.checkpoint)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    done = state["windows"]

for window in range(done, arguments.windows):
    rows = torch.randn(MICRO_BATCHES, ROWS, 8, generator=torch.Generator().manual_seed(window))
    for x in rows[rank::world]:
        with opt.micro_batch(model):
            loss = cross_entropy(model(x), x[:, :4].argmax(1))
            opt.backward(loss, weight=len(x))
        opt.step()
    if arguments.checkpoint is not None:  # here every window is closed, so nothing is held
        model_state, optimizer_state = get_state_dict(model, opt)
        state = {"model": model_state, "optimizer": optimizer_state, "windows": window + 1}
        dcp.save(state, checkpoint_id=arguments.checkpoint)
if rank == 0:
    print(f"windows {done} to {arguments.windows}, the last: {opt.stats()}", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # for gloo: its threads abort the process if they drop a tensor while Python shuts down
