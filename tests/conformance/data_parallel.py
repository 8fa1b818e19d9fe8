"""The scenarios of test_data_parallel.py: each takes a rank and the number of ranks."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import ranks
import shares
import torch
from shares import (
    BATCHES,
    MAX_NORM,
    called,
    error_of,
    in_group,
    inside,
    made,
    of_the_user,
    outcome,
    own_share,
    train,
)
from support.optimizer_oracle import INF, adam, loss_of, make_model, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HALVES = partial(inside, parts=(0.5, 0.5))


def scaler_of(rank):
    """Ranks begin with scales of their own."""
    return torch.amp.GradScaler("cpu", init_scale=[8.0, 24.0, 5.0][rank], growth_interval=1)


def buckets(meanwhile):
    """So small that every parameter is sent by itself, if that is done in the backward pass."""
    return ranks.small_buckets() if meanwhile else nullcontext()


def grouped(rank, world, meanwhile=False, scaled=False, **options):
    options |= {"max_norm": MAX_NORM, "reduce_in_backward": meanwhile}
    with buckets(meanwhile):
        scaler = scaler_of(rank) if scaled else None
        return shares.trained(rank, world, made, scaler=scaler, **options)


def ddp(rank, world, loop=HALVES, meanwhile=False, compiled=False, weighted=True, **options):
    """`torch.compile` of a DDP model forwards the attributes of what is inside."""
    module = make_model()
    model = DistributedDataParallel(module, **options)
    model = torch.compile(model, backend="eager") if compiled else model
    opt = in_group(module, process_group=None, max_norm=MAX_NORM, reduce_in_backward=meanwhile)
    with buckets(meanwhile):
        train(opt, model, own_share(rank, world, weighted=weighted), loop)
    return outcome(module, opt)


WEIGHTED = {
    "group_mean": grouped,
    "group_different_scales": partial(grouped, scaled=True),
    "group_while_backward_runs": partial(grouped, meanwhile=True),
    "group_while_backward_runs_with_a_scaler": partial(grouped, meanwhile=True, scaled=True),
    "ddp": ddp,
    "ddp_while_backward_runs": partial(ddp, loop=inside, meanwhile=True),
    "compiled": partial(ddp, loop=inside, compiled=True),
}
UNWEIGHTED = {
    "plain_loop_in_group": partial(grouped, loop=of_the_user),
    "ddp_synchronising": partial(ddp, loop=called, weighted=False, gradient_as_bucket_view=True),
}


def half_precision(rank, world):
    """Sums of bfloat16 gradients that bfloat16 itself could not hold: 256 + 1."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    opt = in_group(model, sgd, window=2, reduction="sum")
    for factor in (256.0 if rank == 0 else -256.0, 1.0):
        opt.backward((weight * factor).sum())
        opt.step()
    return outcome(model, opt)


def decaying(parameters):
    """Weight decay shows which parameters were stepped; it refuses sparse gradients."""
    return sgd(parameters, weight_decay=0.5)


def partial_models(rank, world):
    """One parameter per rank, one for all, one for none."""
    ones = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(world + 2)]
    model = nn.ParameterList(ones)
    opt = in_group(model, decaying, window=1)
    opt.backward(model[rank].sum() + 3 * model[world].sum())
    opt.step()
    return outcome(model, opt)


class Branches(nn.Module):
    """Each micro-batch goes through one of three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, number):
        """The loss of a micro-batch; in the second window layers 1 and 2 are idle."""
        branch = (number // 3) % 3 if number < 12 else 0
        return self.layers[branch](BATCHES[number]).square().mean()


def momentum(parameters):
    return sgd(parameters, lr=0.1, momentum=0.9)


def branches(rank, world):
    module = Branches()
    model = DistributedDataParallel(module)
    opt = in_group(module, momentum, window=12 // world, process_group=None)
    for number in range(rank, 24, world):
        with opt.micro_batch(model):
            opt.backward(model(number))
        opt.step()
    return outcome(module, opt)


def one_bucket(rank, world):
    """DDP whose bucket is one parameter, which so fills the memory that DDP writes again."""
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    opt = in_group(module, sgd, window=2, process_group=None)
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
    # SparseAdam refuses dense gradients.
    opt = in_group(model, lambda parameters: torch.optim.SparseAdam(parameters, lr=1.0), window=2)
    for rows in ([[0, 1], []], [[1], [3]], [[], []])[rank]:
        opt.backward(model(torch.tensor(rows)).sum() if rows else idle * 1.0)
        opt.step()
    return {"moved": (model.weight.detach() - before)[:, 0]}


def sparse_meets_dense(rank, world):
    """One weight gives a sparse gradient on rank 0 and a dense one on the others."""
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
    model = nn.ParameterList([weight])
    opt = in_group(model, decaying, window=1)
    rows = nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True)
    opt.backward(rows.sum() if rank == 0 else weight.sum())
    opt.step()
    return outcome(model, opt)


def frozen(rank, world):
    """A parameter that was frozen after it had got a gradient is stepped with that one."""
    model, opt = made(window=1, reduce_in_backward=True)
    loss_of(model, BATCHES[rank]).backward()
    model[0].requires_grad_(False)
    model[2].zero_grad()
    called(opt, model, BATCHES[rank])
    return outcome(model, opt)


def poisoned(rank, world, meanwhile=False, **where):
    with buckets(meanwhile):
        return shares.poisoned(rank, world, made, reduce_in_backward=meanwhile, **where)


POISONED = {
    "inf_on_one_rank": poisoned,
    "inf_on_all_ranks": partial(poisoned, bad_ranks=range(3)),
    "inf_while_backward_runs": partial(poisoned, meanwhile=True),
    "inf_in_the_last_while_backward_runs": partial(poisoned, bad=1, meanwhile=True),
}


def inf_with_a_fused_optimizer(rank, world):
    """Stock fused optimizers skip where found_inf is 1, and a sum over ranks may be more."""
    model = make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = in_group(model, partial(adam, fused=True), window=2, scaler=scaler)
    for _ in range(2):
        called(opt, model, BATCHES[rank].float(), factor=INF)
    return outcome(model, opt, skipped=opt.last.skipped, scale=scaler.get_scale())


def dropping(rank, world, bad):
    """`bad` are the micro-batches of rank 1, of two, that hold an inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, opt = made(window=2, scaler=scaler, on_nonfinite="skip_micro_batch")
    train(opt, model, own_share(rank, world, 2), bad=bad if rank == 1 else ())
    return outcome(model, opt, scale=scaler.get_scale())


DROPPING = {
    "bad_micro_batch_on_one_rank": partial(dropping, bad=[0]),
    "only_bad_micro_batches_on_one_rank": partial(dropping, bad=[0, 1]),
}


def even_flush(rank, world):
    """Every rank has three micro-batches for windows of two; a second flush finds nothing."""
    model, opt = made(window=2, max_norm=MAX_NORM)
    train(opt, model, own_share(rank, world, 3))
    opt.flush()
    stepped = opt.stepped
    opt.flush()
    return outcome(model, opt, flushed=[stepped, opt.stepped])


def copies(rank, world):
    """A copy of an optimizer that has seen a DDP model; its held-back window is not forgotten."""
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None)
    inside(opt, model, BATCHES[rank])
    loaded = in_group(make_model(), process_group=None)
    loaded.load_accumulation_state_dict(opt.accumulation_state_dict())
    same, errors = [], []
    for twin in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt), loaded):
        pairs = zip(model.parameters(), twin.param_groups[0]["params"], strict=True)
        same += [torch.equal(opt.main_grad(p), twin.main_grad(q)) for p, q in pairs]
        errors.append(error_of(twin.flush))
    return {"same": same, "errors": errors}


def copies_in_a_group(rank, world):
    """A copy of an optimizer with a process_group goes on in it."""
    model, opt = made(max_norm=MAX_NORM)
    share = own_share(rank, world)
    train(opt, model, share[:2])
    model, opt = copy.deepcopy((model, opt))
    train(opt, model, share[2:6])
    model, opt = pickle.loads(pickle.dumps((model, opt)))
    train(opt, model, share[6:])
    return outcome(model, opt)


SCENARIOS = {
    **WEIGHTED,
    **UNWEIGHTED,
    **POISONED,
    **DROPPING,
    "group_sum": partial(grouped, reduction="sum"),
    **ranks.named(half_precision, partial_models, branches, sparse, sparse_meets_dense, frozen),
    **ranks.named(one_bucket, inf_with_a_fused_optimizer, even_flush, copies, copies_in_a_group),
}
