"""Loops of several processes, as in wrong_loops.py: each takes what stands around it."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from by_definition import Plain
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wrong_loops import IGNORED, Batch, N, Watch, network, of_labels, of_rows, rows, sgd

import accumext
from accumext.audit._audit import Audit
from accumext.audit._observe import Done, Observer

WINDOWS = 3
COUNTS = (12, 3)  # labels of every micro-batch of a rank


def share(rank: int, world: int) -> list[Batch]:
    """A rank's micro-batches."""
    return rows(WINDOWS * N * world)[rank::world]


def tagged_share(rank: int) -> list[Batch]:
    """Inputs [2, 6, 16] and labels, of which each rank has another number."""
    g = torch.Generator().manual_seed(5 + rank)
    batches = []
    for _ in range(WINDOWS * N):
        y = torch.randint(8, (12,), generator=g)
        y[COUNTS[rank] :] = IGNORED
        batches.append((torch.randn(2, 6, 16, generator=g), y.view(2, 6)))
    return batches


def synchronised(watch: Watch, held_back: Any, batches: list[Batch], loss_of: Any = of_rows) -> Any:
    """A loop of DistributedDataParallel; `held_back(i)`: no_sync() for the i-th micro-batch."""
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model)
    with watch(ddp, optimizer) as audit:
        for i, (x, y) in enumerate(batches):
            with ddp.no_sync() if held_back(i) else contextlib.nullcontext():
                (loss_of(ddp, x, y) / N).backward()
            if (i + 1) % N == 0:
                optimizer.step()
                optimizer.zero_grad()
    return audit


def but_the_last(i: int) -> bool:
    return (i + 1) % N != 0


def right(rank: int, world: int, watch: Watch) -> Any:
    """no_sync() around all but the last micro-batch of a window."""
    return synchronised(watch, but_the_last, share(rank, world))


def every_time(rank: int, world: int, watch: Watch) -> Any:
    """No no_sync() at all."""
    return synchronised(watch, lambda i: False, share(rank, world))


def never(rank: int, world: int, watch: Watch) -> Any:
    """no_sync() around everything."""
    return synchronised(watch, lambda i: True, share(rank, world))


def mean_of_each_rank(rank: int, world: int, watch: Watch) -> Any:
    """The mean over the labels of a rank, whose numbers differ, and the mean over the ranks."""
    return synchronised(watch, but_the_last, tagged_share(rank), of_labels)


def mean_of_all_labels(rank: int, world: int, watch: Watch) -> Any:
    """Sums over labels, divided by those of all ranks; the factor undoes what DDP divides by."""
    batches = tagged_share(rank)
    counts = torch.tensor(float(N * COUNTS[rank]))  # of a window
    dist.all_reduce(counts)
    factor = N * world / counts  # N: the loop divides by it

    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return of_labels(model, x, y, "sum") * factor

    return synchronised(watch, but_the_last, batches, loss_of)


def reduced_by_hand(rank: int, world: int, watch: Watch) -> Any:
    """No DistributedDataParallel: gradients are all-reduced before the step."""
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer) as audit:
        for i, (x, y) in enumerate(share(rank, world)):
            (of_rows(model, x, y) / N).backward()
            if (i + 1) % N == 0:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                optimizer.step()
                optimizer.zero_grad()
    return audit


def wrapper(rank: int, world: int, watch: Watch) -> Any:
    """AccumulatingOptimizer and its micro_batch, weighted by labels."""
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = accumext.AccumulatingOptimizer(sgd(model), window=N, max_norm=0.1)
    with watch(ddp, optimizer) as audit:
        for x, y in tagged_share(rank):
            with optimizer.micro_batch(ddp):
                optimizer.backward(of_labels(ddp, x, y), weight=(y != IGNORED).sum())
            optimizer.step()
    return audit


LOOPS = (right, every_time, never, mean_of_each_rank, mean_of_all_labels, reduced_by_hand, wrapper)
GIVEN = ("ddp", "inside", "none")  # what the audit is told: the DDP module, what is in it, nothing


def scenario(rank: int, world: int, loop: Any, given: str) -> dict[str, Any]:
    """The findings, the steps without the audit, and the parameters with it and without."""
    models = []

    def watch(model: Any, optimizer: Any) -> accumext.Audit:
        models.append(model)
        told = {"ddp": model, "inside": getattr(model, "module", model), "none": None}
        return accumext.audit(told[given], optimizer)

    audit, plain = loop(rank, world, watch), loop(rank, world, Plain)
    return {
        "findings": [(f.name, float(f.value), f.where) for f in audit.findings],
        "windows": len(audit.to_json()["windows"]),
        "lines": len(str(audit).splitlines()),
        "before": plain.steps[0].before,
        "gradient": plain.steps[0].gradient,
        "watched": [p.detach() for p in models[0].parameters()],
        "plain": [p.detach() for p in plain.model.parameters()],
    }


def sharded(rank: int, world: int, divisor: int) -> dict[str, Any]:
    """fully_shard, every pass reduced, each loss divided; with the audit and without."""

    def train(audited: bool) -> tuple[Any, Any]:
        model = network()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        optimizer = sgd(model)
        with accumext.audit(model, optimizer) if audited else contextlib.nullcontext() as audit:
            for i, (x, y) in enumerate(share(rank, world)):
                (of_rows(model, x, y) / divisor).backward()
                if (i + 1) % N == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().full_tensor() for p in model.parameters()], audit

    watched, audit = train(True)
    return {
        "findings": [(f.name, float(f.value), f.where) for f in audit.findings],
        "windows": audit.record.windows,
        "lines": len(str(audit).splitlines()),
        "watched": watched,
        "plain": train(False)[0],
    }


def stopped(rank: int, world: int) -> list[tuple[str, float]]:
    """As the command does it: the loop is ended when two windows are complete."""
    audits = []

    def watch(model: Any, optimizer: Any) -> Audit:
        audits.append(Audit(Observer(model, optimizer, 2, stops=True), None))
        return audits[0]

    with contextlib.suppress(Done):
        synchronised(watch, lambda i: True, share(rank, world))
    return [(f.name, float(f.value)) for f in audits[0].findings]


SCENARIOS = {
    f"{loop.__name__}-{given}": partial(scenario, loop=loop, given=given)
    for loop in LOOPS
    for given in GIVEN
} | {f"sharded-{divisor}": partial(sharded, divisor=divisor) for divisor in (1, N)}
ALL = SCENARIOS | {"stopped": stopped}
