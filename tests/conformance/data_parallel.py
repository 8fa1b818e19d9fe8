"""What the ranks of test_data_parallel.py do: each scenario takes a rank and their number."""

from __future__ import annotations

import copy
import pickle

import ranks
import torch
import torch.distributed as dist
from support.optimizer_oracle import (
    INF,
    adam,
    loss_of,
    make_batches,
    make_model,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

WINDOW = 4
BATCHES = make_batches(24)  # whole windows for 2 processes and for 3
WEIGHTS = [float(n % 7 + 1) for n in range(24)]
MAX_NORM = 0.02  # clips every window


def in_group(model, **kwargs):
    options = {"window": WINDOW, "process_group": dist.group.WORLD, **kwargs}
    return AccumulatingOptimizer(adam(model.parameters()), **options)


def own_share(rank, world, count=24):
    """Micro-batches and weights of a rank. A window of all ranks is of consecutive ones."""
    return list(zip(BATCHES[rank:count:world], WEIGHTS[rank:count:world]))


def outcome(model, opt, **more):
    seen = {"parameters": [p.detach() for p in model.parameters()], "stats": opt.stats()}
    return {**seen, "nonfinite": opt.last.nonfinite, **more}


def grouped(rank, world, **kwargs):
    model = make_model()
    opt = in_group(model, max_norm=MAX_NORM, **kwargs)
    for batch, weight in own_share(rank, world):
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    return outcome(model, opt)


def group_mean(rank, world):
    return grouped(rank, world)


def group_sum(rank, world):
    return grouped(rank, world, reduction="sum")


def group_different_scales(rank, world):
    scaler = torch.amp.GradScaler("cpu", init_scale=[8.0, 24.0, 5.0][rank], growth_interval=1)
    return grouped(rank, world, scaler=scaler)


def group_while_backward_runs(rank, world):
    with ranks.small_buckets():
        return grouped(rank, world, reduce_in_backward=True)


def group_while_backward_runs_with_a_scaler(rank, world):
    scaler = torch.amp.GradScaler("cpu", init_scale=[8.0, 24.0, 5.0][rank], growth_interval=1)
    with ranks.small_buckets():
        return grouped(rank, world, reduce_in_backward=True, scaler=scaler)


def plain_loop_in_group(rank, world):
    """`loss.backward(); opt.step(); opt.zero_grad()`, where every weight is 1."""
    model = make_model()
    opt = in_group(model, max_norm=MAX_NORM)
    for batch, _ in own_share(rank, world):
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return outcome(model, opt)


def ddp(rank, world, parts=2, **kwargs):
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None, max_norm=MAX_NORM, **kwargs)
    for batch, weight in own_share(rank, world):
        with opt.micro_batch(model):
            for _ in range(parts):
                opt.backward(loss_of(model, batch) / parts, weight)
        opt.step()
    return outcome(model.module, opt)


def ddp_while_backward_runs(rank, world):
    with ranks.small_buckets():
        return ddp(rank, world, parts=1, reduce_in_backward=True)


def ddp_synchronising(rank, world):
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    opt = in_group(model, process_group=None, max_norm=MAX_NORM)
    for batch, _ in own_share(rank, world):
        opt.backward(loss_of(model, batch))
        opt.step()
    return outcome(model.module, opt)


def compiled(rank, world):
    """`torch.compile` of a DDP model forwards the attributes of what is inside."""
    inside = make_model()
    model = torch.compile(DistributedDataParallel(inside), backend="eager")
    opt = in_group(inside, process_group=None, max_norm=MAX_NORM)
    for batch, weight in own_share(rank, world):
        with opt.micro_batch(model):
            opt.backward(loss_of(model, batch), weight)
        opt.step()
    return outcome(inside, opt)


WEIGHTED = (
    group_mean,
    group_different_scales,
    group_while_backward_runs,
    group_while_backward_runs_with_a_scaler,
    ddp,
    ddp_while_backward_runs,
    compiled,
)


def half_precision(rank, world):
    """Sums of bfloat16 gradients that bfloat16 itself could not hold: 256 + 1."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    opt = AccumulatingOptimizer(
        torch.optim.SGD([p], lr=1.0), window=2, reduction="sum", process_group=dist.group.WORLD
    )
    for factor in (256.0 if rank == 0 else -256.0, 1.0):
        opt.backward((p * factor).sum())
        opt.step()
    return {"parameters": [p.detach()], "stats": opt.stats()}


def partial_models(rank, world):
    """One parameter per rank, one for all, one for none; weight decay shows which were stepped."""
    ones = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(world + 2)]
    model = nn.ParameterList(ones)
    decay = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    opt = AccumulatingOptimizer(decay, process_group=dist.group.WORLD)
    opt.backward(model[rank].sum() + 3 * model[world].sum())
    opt.step()
    return {"parameters": [p.detach() for p in model.parameters()]}


class Branches(nn.Module):
    """Each micro-batch goes through one of three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, batch, branch):
        return self.layers[branch](batch)


def branch_of(number):
    return (number // 3) % 3 if number < 12 else 0  # in the second window layers 1 and 2 are idle


def branches(rank, world):
    model = DistributedDataParallel(Branches())
    opt = AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), window=12 // world
    )
    for number in range(rank, 24, world):
        with opt.micro_batch(model):
            opt.backward(model(BATCHES[number], branch_of(number)).square().mean())
        opt.step()
    return outcome(model.module, opt)


def one_bucket(rank, world):
    """DDP whose bucket is one parameter, which so fills the memory that DDP writes again."""
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    opt = AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), window=2)
    seen = []
    for factor in (1.0, 10.0) * 3:
        (model(torch.ones(1, 3, dtype=torch.float64)).sum() * factor).backward()
        opt.step()
        opt.zero_grad()
        seen.append(module.weight[0, 0].item())
    return {"seen": seen}


def sparse(rank, world):
    """Rows that ranks share, and from the third rank on no gradient at all."""
    model = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    idle = nn.Parameter(torch.zeros(()))
    before = model.weight.detach().clone()
    adam = torch.optim.SparseAdam(model.parameters(), lr=1.0)  # which refuses dense gradients
    opt = AccumulatingOptimizer(adam, window=2, process_group=dist.group.WORLD)
    for rows in ([[0, 1], []], [[1], [3]], [[], []])[rank]:
        opt.backward(model(torch.tensor(rows)).sum() if rows else idle * 1.0)
        opt.step()
    return {"moved": (model.weight.detach() - before)[:, 0]}


def sparse_meets_dense(rank, world):
    """One weight gives a sparse gradient on rank 0 and a dense one on the others."""
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
    decay = torch.optim.SGD([weight], lr=1.0, weight_decay=0.5)  # which refuses sparse gradients
    opt = AccumulatingOptimizer(decay, process_group=dist.group.WORLD)
    rows = nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True)
    opt.backward(rows.sum() if rank == 0 else weight.sum())
    opt.step()
    return {"parameters": [weight.detach()]}


def frozen(rank, world):
    """A parameter that was frozen after it had got a gradient is stepped with that one."""
    model = make_model()
    opt = in_group(model, window=1, reduce_in_backward=True)
    loss_of(model, BATCHES[rank]).backward()
    model[0].requires_grad_(False)
    model[2].zero_grad()
    opt.backward(loss_of(model, BATCHES[rank]))
    opt.step()
    return {"parameters": [p.detach() for p in model.parameters()]}


def poisoned(rank, world, bad_ranks, bad=0, **kwargs):
    """An inf in the first or last micro-batch of some ranks, then a window that is good."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = in_group(model, scaler=scaler, window=2, **kwargs)
    skipped, scales, nonfinite = [], [], []
    for i, (batch, _) in enumerate(own_share(rank, world, 4 * world)):
        factor = INF if i == bad and rank in bad_ranks else 1.0
        opt.backward(loss_of(model, batch) * factor)
        opt.step()
        if opt.stepped:
            skipped.append(opt.last.skipped)
            scales.append(scaler.get_scale())
            nonfinite.append(opt.last.nonfinite)
    return {**outcome(model, opt), "skipped": skipped, "scales": scales, "names": nonfinite}


def inf_on_one_rank(rank, world):
    return poisoned(rank, world, [1])


def inf_on_all_ranks(rank, world):
    return poisoned(rank, world, range(world))


def inf_while_backward_runs(rank, world):
    with ranks.small_buckets():
        return poisoned(rank, world, [1], reduce_in_backward=True)


def inf_in_the_last_while_backward_runs(rank, world):
    with ranks.small_buckets():
        return poisoned(rank, world, [1], bad=1, reduce_in_backward=True)


def inf_with_a_fused_optimizer(rank, world):
    """Stock fused optimizers skip where found_inf is 1, and a sum over ranks may be more."""
    model = make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    group = dist.group.WORLD
    fused = adam(model.parameters(), fused=True)
    opt = AccumulatingOptimizer(fused, window=2, scaler=scaler, process_group=group)
    for _ in range(2):
        opt.backward(loss_of(model, BATCHES[rank].float()) * INF)
        opt.step()
    return {**outcome(model, opt), "skipped": [opt.last.skipped], "scales": [scaler.get_scale()]}


POISONED = (
    inf_on_one_rank,
    inf_on_all_ranks,
    inf_while_backward_runs,
    inf_in_the_last_while_backward_runs,
)


def dropping(rank, world, bad):
    """`bad` are the rank's own micro-batches, of two, that hold an inf."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = in_group(model, window=2, scaler=scaler, on_nonfinite="skip_micro_batch")
    for i, (batch, _) in enumerate(own_share(rank, world, 2 * world)):
        opt.backward(loss_of(model, batch) * (INF if i in bad else 1.0))
        opt.step()
    return outcome(model, opt, scale=scaler.get_scale())


def bad_micro_batch_on_one_rank(rank, world):
    return dropping(rank, world, [0] if rank == 1 else [])


def only_bad_micro_batches_on_one_rank(rank, world):
    return dropping(rank, world, [0, 1] if rank == 1 else [])


DROPPING = (bad_micro_batch_on_one_rank, only_bad_micro_batches_on_one_rank)


def even_flush(rank, world):
    """Every rank has three micro-batches for windows of two; a second flush finds nothing."""
    model = make_model()
    opt = in_group(model, window=2, max_norm=MAX_NORM)
    for batch, _ in own_share(rank, world, 3 * world):
        opt.backward(loss_of(model, batch))
        opt.step()
    opt.flush()
    stepped = opt.stepped
    opt.flush()
    return outcome(model, opt, stepped=[stepped, opt.stepped])


def copies(rank, world):
    """A copy of an optimizer that has seen a DDP model; its held-back window is not forgotten."""
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None)
    with opt.micro_batch(model):
        opt.backward(loss_of(model, BATCHES[rank]))
    loaded = in_group(make_model(), process_group=None)
    loaded.load_accumulation_state_dict(opt.accumulation_state_dict())
    same, errors = [], []
    for twin in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt), loaded):
        same += [torch.equal(opt.main_grad(p), twin.main_grad(q)) for p, q in pairs(opt, twin)]
        try:
            twin.flush()
        except RuntimeError as error:
            errors.append(str(error))
    return {"same": same, "errors": errors}


def copies_in_a_group(rank, world):
    """A copy of an optimizer with a process_group goes on in it."""
    model = make_model()
    opt = in_group(model, max_norm=MAX_NORM)
    share = own_share(rank, world)
    for batch, weight in share[:2]:
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    model, opt = copy.deepcopy((model, opt))
    for batch, weight in share[2:6]:
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    model, opt = pickle.loads(pickle.dumps((model, opt)))
    for batch, weight in share[6:]:
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    return outcome(model, opt)


def pairs(one, other):
    return zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)


SCENARIOS = (
    *WEIGHTED,
    *POISONED,
    group_sum,
    plain_loop_in_group,
    ddp_synchronising,
    half_precision,
    partial_models,
    branches,
    sparse,
    sparse_meets_dense,
    frozen,
    one_bucket,
    inf_with_a_fused_optimizer,
    *DROPPING,
    even_flush,
    copies,
    copies_in_a_group,
)
