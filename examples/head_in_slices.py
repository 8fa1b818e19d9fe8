"""Question 3: the trunk once on the whole batch, the head in slices, on each GPU of a job.

Four ways to the same gradient: the whole batch; accumulation over the whole model; `chunked_loss`;
and the head in slices by hand with `retain_graph`. Then `chunked_loss` under
DistributedDataParallel with 2 processes and a window of 2 equals one process on the joined batch.

Run it as it is (it starts 2 processes itself), or under `torchrun --nproc-per-node 2`.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its default arguments would keep
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accumext

ROWS, SLICES, WINDOW = 40, 10, 2


class Model(nn.Module):
    """A small trunk and a memory-hungry head; `forward` returns the loss, so that DDP sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 5))

    def head_loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(features), targets)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return accumext.chunked_loss(self.head_loss, self.trunk(x), y, chunks=SLICES)


def make() -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.randn(ROWS, 8, dtype=torch.float64), torch.randint(5, (ROWS,))


def four_ways() -> None:
    model, x, y = make()
    size = ROWS // SLICES

    def whole_batch() -> None:
        model.head_loss(model.trunk(x), y).backward()

    def accumulation_over_the_model() -> None:
        for i in range(0, ROWS, size):
            part = model.head_loss(model.trunk(x[i : i + size]), y[i : i + size])
            (part / SLICES).backward()

    def retain_graph() -> None:
        features = model.trunk(x)
        for i in range(0, ROWS, size):
            part = model.head_loss(features[i : i + size], y[i : i + size]) / SLICES
            part.backward(retain_graph=True)

    def chunked() -> None:
        model(x, y).backward()

    expected: Tensor | None = None
    for way in (whole_batch, accumulation_over_the_model, retain_graph, chunked):
        model.zero_grad()
        way()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        expected = flat if expected is None else expected
        distance = float((flat - expected).norm() / expected.norm())
        print(f"{way.__name__}: relative distance {distance:.1e}")
        assert distance < 1e-12


def train(model: nn.Module, module: Model, x: Tensor, y: Tensor, steps: int) -> Tensor:
    """Every step is a window of WINDOW micro-batches."""
    opt = accumext.AccumulatingOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), window=WINDOW, max_norm=1.0
    )
    for _ in range(steps):
        for part_x, part_y in zip(x.chunk(WINDOW), y.chunk(WINDOW), strict=True):
            with opt.micro_batch(model):
                opt.backward(model(part_x, part_y))
            opt.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def worker(rank: int, world: int, steps: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=world)
    module, x, y = make()
    # rows of a micro-batch are spread over the ranks: the joined batch is that of one process
    mine = torch.arange(ROWS).view(WINDOW, world, -1)[:, rank].flatten()
    parameters = train(DistributedDataParallel(module), module, x[mine], y[mine], steps)
    if rank == 0:
        alone, x, y = make()
        expected = train(alone, alone, x, y, steps)
        distance = float((parameters - expected).norm() / expected.norm())
        print(f"DDP on {world} processes: relative distance to one process {distance:.1e}")
        assert distance < 1e-12
    dist.destroy_process_group()  # which ends its threads, since nothing else holds the group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if "RANK" in os.environ:  # under torchrun
        worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args.steps, "env://")
        return
    four_ways()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (2, args.steps, f"file://{folder}/rendezvous")
        torch.multiprocessing.spawn(worker, arguments, nprocs=2)


if __name__ == "__main__":
    main()
