"""Loops of several processes, as in wrong_loops.py: each takes what stands around it."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import audited
import torch
import torch.distributed as dist
from audited import Batch, N, Watch, network, of_labels, of_rows, sgd, stepping, train
from by_definition import Plain
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import accumext
from accumext.auditing._audit import Audit
from accumext.auditing._observe import Observer
from accumext.auditing._steps import Done

WINDOWS = 3
COUNTS = (12, 3)  # labels of every micro-batch of a rank


def share(rank: int, world: int) -> list[Batch]:
    """A rank's micro-batches."""
    return audited.rows(WINDOWS * N * world)[rank::world]


def tagged_share(rank: int) -> list[Batch]:
    """Of which each rank has another number of labels."""
    return audited.tagged(WINDOWS * N, [COUNTS[rank]], seed=5 + rank)


def synchronised(
    watch: Watch,
    held_back: Callable[[int], bool],
    batches: list[Batch],
    loss_of: Callable[..., Tensor] = of_rows,
    around_forward: bool = True,
) -> None:
    """A loop of DistributedDataParallel; `held_back(i)`: no_sync() for the i-th micro-batch, around
    its backward pass and, as it has to be, around its forward pass."""
    ddp = DistributedDataParallel(network())
    for i, (x, y) in enumerate(stepping(watch, ddp, sgd(ddp), batches, every=N)):
        quiet = ddp.no_sync if held_back(i) else contextlib.nullcontext
        with quiet() if around_forward else contextlib.nullcontext():
            loss = loss_of(ddp, x, y) / N
        with quiet():
            loss.backward()


def but_the_last(i: int) -> bool:
    return (i + 1) % N != 0


def right(rank: int, world: int, watch: Watch) -> None:
    """no_sync() around all but the last micro-batch of a window."""
    synchronised(watch, but_the_last, share(rank, world))


def every_time(rank: int, world: int, watch: Watch) -> None:
    """No no_sync() at all."""
    synchronised(watch, lambda i: False, share(rank, world))


def backward_alone(rank: int, world: int, watch: Watch) -> None:
    """no_sync() around backward alone, when the forward pass has prepared the reduction."""
    synchronised(watch, but_the_last, share(rank, world), around_forward=False)


def never(rank: int, world: int, watch: Watch) -> None:
    """no_sync() around everything."""
    synchronised(watch, lambda i: True, share(rank, world))


def mean_of_each_rank(rank: int, world: int, watch: Watch) -> None:
    """The mean over the labels of a rank, whose numbers differ, and the mean over the ranks."""
    synchronised(watch, but_the_last, tagged_share(rank), of_labels)


def mean_of_all_labels(rank: int, world: int, watch: Watch) -> None:
    """Sums over labels, divided by those of all ranks; the factor undoes what DDP divides by."""
    counts = torch.tensor(float(N * COUNTS[rank]))  # of a window
    dist.all_reduce(counts)
    factor = N * world / counts  # N: the loop divides by it
    synchronised(
        watch, but_the_last, tagged_share(rank), lambda *of: of_labels(*of, "sum") * factor
    )


def reduced_by_hand(rank: int, world: int, watch: Watch) -> None:
    """No DistributedDataParallel: gradients are all-reduced before the step."""
    model = network()

    def reduce():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world

    train(watch, model, sgd(model), share(rank, world), before=reduce)


def wrapper(rank: int, world: int, watch: Watch) -> None:
    """AccumulatingOptimizer and its micro_batch, weighted by labels."""
    ddp = DistributedDataParallel(network())
    optimizer = accumext.AccumulatingOptimizer(sgd(ddp), window=N, max_norm=0.1)
    with watch(ddp, optimizer):
        for x, y in tagged_share(rank):
            with optimizer.micro_batch(ddp):
                optimizer.backward(of_labels(ddp, x, y), weight=(y != audited.IGNORED).sum())
            optimizer.step()


def in_parts(rank: int, world: int, watch: Watch) -> None:
    """A trunk and a head in DistributedDataParallel of their own, the head in slices: each of its
    passes reduces its gradients, that of the trunk once."""
    model = network()
    whole = nn.Sequential(model)  # has both, so that no replica has all
    trunk, head = DistributedDataParallel(model[:1]), DistributedDataParallel(model[1:])
    optimizer = sgd(whole)
    with watch(whole, optimizer):
        for batches in audited.windows_of(share(rank, world)):
            x, y = (torch.cat(some) for some in zip(*batches, strict=True))
            features = trunk(x)
            leaf = features.detach().requires_grad_()
            for part, target in zip(leaf.chunk(N), y.chunk(N), strict=True):
                (cross_entropy(head(part), target) / N).backward()
            features.backward(leaf.grad)
            optimizer.step()
            optimizer.zero_grad()


def seen(audit: Audit, watched: nn.Module, plain: nn.Module, **more: Any) -> dict[str, Any]:
    """What is said, and the parameters with the audit and without."""

    def parameters(model):
        return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]

    said = {
        kind: [(f.id, float(f.value), f.where) for f in found]
        for kind, found in (("findings", audit.findings), ("questions", audit.questions))
    }
    ends = {"watched": parameters(watched), "plain": parameters(plain)}
    return {**said, **ends, "windows": audit.record.windows, **more}


def scenario(rank: int, world: int, loop: Any, given: str) -> dict[str, Any]:
    """`given`: what the audit is told, which is the DDP module, what is in it, or nothing."""

    def watch(model, optimizer):
        told = {"ddp": model, "inside": getattr(model, "module", model), "none": None}
        return accumext.audit(told[given], optimizer)

    own = partial(loop, rank, world)
    (audit, watched, _), (plain, alone, _) = audited.run(own, watch), audited.run(own, Plain)
    return seen(audit, watched, alone, gradient=plain.steps[0].gradient)


def sharded(rank: int, world: int, divisor: int) -> dict[str, Any]:
    """fully_shard, every pass reduced, each loss divided; with the audit and without."""
    results = []
    for watch in (accumext.audit, audited.unwatched):
        model = network()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        clip = audited.clipping(model, 0.1)
        audit = train(watch, model, sgd(model), share(rank, world), divisor=divisor, before=clip)
        results.append((audit, model))
    return seen(results[0][0], results[0][1], results[1][1])


def stopped(rank: int, world: int) -> list[tuple[str, float]]:
    """As the command does it: the loop is ended when two windows are complete; without NumPy."""
    audits = []
    missing = mock.patch.object(Tensor, "numpy", side_effect=RuntimeError("Numpy is not available"))

    def watch(model, optimizer):
        audits.append(Audit(Observer(model, optimizer, 2, stops=True), None))
        return audits[0]

    with contextlib.suppress(Done), missing:
        never(rank, world, watch)
    return [(f.id, float(f.value)) for f in audits[0].findings]


# What the audit is told decides whether it finds DDP; what it makes of that, does not.
GIVEN = ("ddp", "inside", "none")
RIGHT = ("right", "mean_of_all_labels", "reduced_by_hand", "wrapper", "sharded")
SCENARIOS = {
    "right": partial(scenario, loop=right, given="none"),
    "mean_of_all_labels": partial(scenario, loop=mean_of_all_labels, given="inside"),
    "reduced_by_hand": partial(scenario, loop=reduced_by_hand, given="none"),
    "wrapper": partial(scenario, loop=wrapper, given="ddp"),
    "sharded": partial(sharded, divisor=N),
    "sharded, undivided": partial(sharded, divisor=1),
    "mean_of_each_rank": partial(scenario, loop=mean_of_each_rank, given="ddp"),
    "backward_alone": partial(scenario, loop=backward_alone, given="ddp"),
    "in_parts": partial(scenario, loop=in_parts, given="none"),
    **{f"every_time-{given}": partial(scenario, loop=every_time, given=given) for given in GIVEN},
    **{f"never-{given}": partial(scenario, loop=never, given=given) for given in GIVEN},
}
ALL = {**SCENARIOS, "stopped": stopped}

# Of one process, in float32: as many bytes as its gradients have, for all passes but the last.
IN_VAIN = (N - 1) * 4 * sum(parameter.numel() for parameter in network().parameters())
IN_VAIN_OF_HEAD = (N - 1) * 4 * sum(p.numel() for p in network()[1:].parameters())
# Scenario -> the id of its mistake, how large that is, and whether it is a question.
WRONG_PROCESSES = {
    "backward_alone": ("processes.reduced_each", IN_VAIN, False),
    "in_parts": ("processes.reduced_each", IN_VAIN_OF_HEAD, True),
    "mean_of_each_rank": ("processes.unequal_counts", COUNTS[0] / COUNTS[1], True),
    "sharded, undivided": ("accumulation.divisor_missing", N, True),
    **{f"every_time-{given}": ("processes.reduced_each", IN_VAIN, True) for given in GIVEN},
    **{f"never-{given}": ("processes.not_reduced", 4, False) for given in GIVEN},
}
