"""DistributedDataParallel: each window travels once, while its last backward pass still runs.

`torchrun --nproc-per-node 2 with_ddp.py`. Run as it is, there is one process.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its default arguments would keep
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import accumext

alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ |= {name: value for name, value in alone.items() if name not in os.environ}
dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
rows = torch.randn(192, 8)
micro_batches = rows.tensor_split(world)[rank].tensor_split(12)  # as many on every rank

model = DistributedDataParallel(torch.nn.Linear(8, 4))
opt = accumext.AccumulatingOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.1), window=4, max_norm=1.0, reduce_in_backward=True
)
for _ in range(10):
    for x in micro_batches:
        with opt.micro_batch(model):  # holds back DDP's own synchronisation
            loss = cross_entropy(model(x), x[:, :4].argmax(1))
            opt.backward(loss, weight=len(x))  # a mean over the rows of all ranks
        opt.step()
if rank == 0:
    print(f"loss {loss.item():.3f}, last window: {opt.stats()}")
del model, opt, loss  # they hold the group, whose threads must end before the interpreter does
dist.destroy_process_group()
