"""Data-parallel training (DDP, or a process group), 2 and 3 processes."""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import ranks
import shares
import torch
import torch.distributed as dist
from ranks import across
from shares import BATCHES, MAX_NORM, WINDOW, as_expected, by_hand, in_group, made, own_share
from support import optimizer_oracle as oracle
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import adam, assert_close, loss_of, make_model, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DOUBLE = torch.float64


def buckets(meanwhile):
    """Have every parameter sent by itself, if that is done in the backward pass."""
    return ranks.small_buckets() if meanwhile else nullcontext()


def group(rank, meanwhile, scaled=False, **options):
    """Give each rank a scale of its own to begin with."""
    scale = {"init_scale": [8.0, 24.0, 5.0][rank], "growth_interval": 1}
    scaler = torch.amp.GradScaler("cpu", **scale) if scaled else None
    model, opt = made(max_norm=MAX_NORM, reduce_in_backward=meanwhile, scaler=scaler, **options)
    return model, model, opt


def ddp(rank, meanwhile, compiled=False, **options):
    """Wrap in DDP, perhaps compiled, which forwards the attributes of what is inside."""
    module = make_model()
    model = DistributedDataParallel(module, **options)
    model = torch.compile(model, backend="eager") if compiled else model
    options = {"process_group": None, "max_norm": MAX_NORM, "reduce_in_backward": meanwhile}
    return module, model, in_group(module, **options)


def fused(**options):
    """Wrap a fused optimizer: it skips if found_inf is 1, and a sum over ranks may be more."""
    model = make_model(torch.float32)
    return model, in_group(model, partial(adam, fused=True), **options)


def way(make, loop=shares.called, weighted=True, meanwhile=False, **options):
    return {"make": make, "loop": loop, "weighted": weighted, "meanwhile": meanwhile, **options}


WAYS = {
    "group": way(group),
    "group_sum": way(group, reduction="sum"),
    "group_different_scales": way(group, scaled=True),
    "group_while_backward_runs": way(group, scaled=True, meanwhile=True),
    "ddp": way(ddp, partial(shares.inside, parts=(0.5, 0.5))),
    "ddp_while_backward_runs": way(ddp, shares.inside, meanwhile=True),
    "ddp_forward_outside": way(ddp, shares.outside),
    "ddp_compiled_forward_outside": way(ddp, shares.outside, compiled=True),
    "ddp_compiled": way(ddp, shares.inside, compiled=True),
    "plain_loop_in_group": way(group, shares.of_the_user, weighted=False),
    "ddp_synchronising": way(ddp, weighted=False, gradient_as_bucket_view=True),
}


@across(1, 2, 3, cases=WAYS)
def test_a_window_of_four_on_every_rank(rank, world, make, loop, weighted, meanwhile, **options):
    """Window 4 on 1 to 3 ranks, weighted by tokens or in a plain loop: one process, joined batch"""
    module, model, opt = make(rank, meanwhile, **options)
    with buckets(meanwhile):
        shares.train(opt, model, own_share(rank, world, weighted=weighted), loop)
    assert opt.last.clip_coef < 1.0
    if weighted:
        assert opt.last.weight == sum(shares.WEIGHTS[-WINDOW * world :])
        assert opt.last.micro_batches == WINDOW * world
    weights, reduction = shares.WEIGHTS if weighted else None, opt.reduction
    return as_expected(module, opt, by_hand(world, weights=weights, reduction=reduction))


@across(2, 3, cases={"afterwards": {"meanwhile": False}, "meanwhile": {"meanwhile": True}})
def test_main_grads_travel_once_per_window(rank, world, meanwhile):
    """One all-reduce per window, in buckets, or while the last backward pass still runs"""
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=DOUBLE) for _ in range(4)))
    log, all_reduce = [], dist.all_reduce

    def counting(tensor, *args, **kw):
        log.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kw)

    for number, layer in enumerate(model):
        layer.weight.register_hook(lambda grad, number=number: log.append(f"gradient {number}"))
    opt = in_group(model, window=2, reduce_in_backward=meanwhile)
    with pytest.MonkeyPatch.context() as patch, ranks.small_buckets((64 + 8) * 8):  # a layer
        patch.setattr(dist, "all_reduce", counting)
        for _ in range(4):
            opt.backward(model(torch.ones(1, 8, dtype=DOUBLE)).sum())
            opt.step()
    # Weight, micro-batches, found_inf; of each process how it closes, what, and eight settings.
    numbers = (3 + 10 * world) * 8
    bucket = (64 + 16 + 3 * 2) * 8  # a layer, its bias padded; three words per parameter
    backward = [f"gradient {number}" for number in (3, 2, 1, 0)]
    first, last = log[:4], log[4 : len(log) // 2]
    assert log == 2 * (first + last)
    assert first == backward
    if meanwhile:
        assert last[0] == numbers
        assert sorted(last[1:], key=str) == sorted(backward + [bucket] * 4, key=str)
        assert last.index(bucket) < last.index("gradient 1")
    else:
        assert last == [*backward, numbers, *[bucket] * 4]


@across(2, 3, cases={"at_the_step": {}, "while_backward_runs": {"reduce_in_backward": True}})
def test_ranks_read_no_device(rank, world, **options):
    """Windows of several ranks, fused optimizer: after the first nothing is read from the device"""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, opt = fused(window=2, max_norm=MAX_NORM, scaler=scaler, **options)
    with cpu_as_device(), DeviceReads() as reads:
        for batch, weight in own_share(rank, world, 4):
            opt.backward(loss_of(model, batch.float()), torch.tensor(weight))
            opt.step()
    assert (reads.count, reads.lists) == (0, 1)  # settings are compared
    # Sums and the clip are in float32, and Adam divides by the size of each element.
    return as_expected(model, opt, by_hand(world, 0, 4, 2), 1e-5)


@across(2, 3)
def test_parameters_of_every_layout(rank, world):
    """Channels-last, transposed, strided, 0-dim, empty and complex parameters on several ranks"""

    def numbers(*shape, dtype=DOUBLE):
        return torch.arange(math.prod(shape)).view(shape).to(dtype)

    parameters = [
        nn.Parameter(start)
        for start in (
            numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            numbers(3, 4).T,
            numbers(6, 4)[::2, ::2],  # has gaps, which its gradient has not
            numbers(),
            numbers(0, 3),
            numbers(2, 3, dtype=torch.complex128).T,
        )
    ]
    starts = [p.detach().clone() for p in parameters]
    opt = in_group(nn.ParameterList(parameters), sgd, window=2)
    strides = []
    opt.register_step_pre_hook(lambda *args: strides.extend(p.grad.stride() for p in parameters))
    for factor in (rank + 1.0, 2.0):
        reals = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
        opt.backward(sum(real.square().sum() / 2 for real in reals) * factor)
        opt.step()
    assert strides == [torch.empty_like(p).stride() for p in parameters]
    mean = (sum(range(1, world + 1)) / world + 2.0) / 2
    assert_close([p.detach() for p in parameters], [start * (1 - mean) for start in starts])


def decaying(parameters):
    """Make SGD whose weight decay shows what was stepped; it refuses sparse gradients."""
    return sgd(parameters, weight_decay=0.5)


@across(2, 3)
def test_parameters_used_on_some_ranks_only(rank, world):
    """A parameter without a gradient on some ranks is stepped, one without any is left alone"""
    # One parameter per rank, one for all, one for none.
    model = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=DOUBLE)) for _ in range(world + 2))
    opt = in_group(model, decaying, window=1)
    opt.backward(model[rank].sum() + 3 * model[world].sum())
    opt.step()
    stepped = [1.0 - 0.5 - grad for grad in [1.0 / world] * world + [3.0]]
    return as_expected(model, opt, [torch.full((2,), s, dtype=DOUBLE) for s in [*stepped, 1.0]])


@across(2, 3)
def test_ddp_with_one_parameter_in_a_bucket(rank, world):
    """DDP with `gradient_as_bucket_view`, also where a bucket is one parameter"""
    # It fills the memory that DDP writes again.
    module = nn.Linear(3, 1, bias=False, dtype=DOUBLE)
    nn.init.zeros_(module.weight)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    opt = in_group(module, sgd, window=2, process_group=None)
    seen = []
    for factor in (1.0, 10.0) * 3:
        (model(torch.ones(1, 3, dtype=DOUBLE)).sum() * factor).backward()
        opt.step()
        opt.zero_grad()
        seen.append(module.weight[0, 0].item())
    assert seen == [0.0, -5.5, -5.5, -11.0, -11.0, -16.5]


class Branches(nn.Module):
    """Each micro-batch goes through one of three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, dtype=DOUBLE) for _ in range(3))

    def forward(self, number):
        """Return the loss of a micro-batch; in the second window layers 1 and 2 are idle."""
        branch = (number // 3) % 3 if number < 12 else 0
        return self.layers[branch](BATCHES[number]).square().mean()


@across(2, 3)
def test_branches_used_in_some_micro_batches_only(rank, world):
    """DDP parameters used in some micro-batches only need no `find_unused_parameters`"""
    module = Branches()
    plain, momentum = copy.deepcopy(module), partial(sgd, lr=0.1, momentum=0.9)
    model = DistributedDataParallel(module)
    opt = in_group(module, momentum, window=12 // world, process_group=None)
    for number in range(rank, 24, world):
        with opt.micro_batch(model):
            opt.backward(model(number))
        opt.step()
    by_hand = oracle.ByHand(plain.parameters(), momentum)
    for number in range(24):
        by_hand.add(plain(number))
        if number in (11, 23):
            by_hand.step()
    return as_expected(module, opt, oracle.parameters_of(plain))


@across(2, 3)
def test_sparse_gradients_stay_sparse(rank, world):
    """Sparse gradients stay sparse, on ranks without any as well"""
    model = nn.Embedding(5, 2, sparse=True, dtype=DOUBLE)
    idle = nn.Parameter(torch.zeros(()))
    before = model.weight.detach().clone()
    # SparseAdam refuses dense gradients.
    opt = in_group(model, lambda parameters: torch.optim.SparseAdam(parameters, lr=1.0), window=2)
    for rows in ([[0, 1], []], [[1], [3]], [[], []])[rank]:
        opt.backward(model(torch.tensor(rows)).sum() if rows else idle * 1.0)
        opt.step()
    moved = torch.tensor([-1.0, -1.0, 0.0, -1.0, 0.0], dtype=DOUBLE)[:, None].expand(5, 2)
    return as_expected(model, opt, [before + moved], 1e-5)  # Adam's eps takes 2e-6


@across(2, 3)
def test_a_sparse_gradient_meets_a_dense_one(rank, world):
    """A parameter with a sparse gradient on one rank and a dense one on others"""
    weight = nn.Parameter(torch.ones(4, 2, dtype=DOUBLE))
    model = nn.ParameterList([weight])
    opt = in_group(model, decaying, window=1)
    rows = nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True)
    opt.backward(rows.sum() if rank == 0 else weight.sum())
    opt.step()
    grad = torch.full((4, 2), (world - 1) / world, dtype=DOUBLE)
    grad[1] += 2.0 / world
    return as_expected(model, opt, [1.0 - 0.5 - grad])


@across(2, 3)
def test_a_parameter_frozen_on_all_ranks(rank, world):
    """A parameter frozen after it got a gradient is stepped with that, as on one process"""
    model, opt = made(window=1, reduce_in_backward=True)
    loss_of(model, BATCHES[rank]).backward()
    model[0].requires_grad_(False)
    model[2].zero_grad()
    shares.called(opt, model, BATCHES[rank])
    return as_expected(model, opt, oracle.train_by_hand(adam, BATCHES[:world], world))


POISONED = {
    "one_rank": {},
    "all_ranks": {"bad_ranks": range(3)},
    "all_ranks_fused": {"bad_ranks": range(3), "make": fused},
    "one_rank_while_backward_runs": {"reduce_in_backward": True},
    "in_the_last_while_backward_runs": {"bad": 1, "reduce_in_backward": True},
}


@across(2, 3, cases=POISONED)
def test_inf_skips_on_all_ranks(rank, world, **options):
    """An inf on one rank or on all skips the window everywhere, and loss scales stay equal"""
    make = options.pop("make", made)
    with buckets("reduce_in_backward" in options):
        seen = shares.poisoned(rank, world, make, **options)
    # In float32 Adam divides by the size of each element.
    return as_expected(*seen, 1e-5 if make is fused else oracle.EXACT)


@across(2, 3, cases={"one": {"bad": [0]}, "all": {"bad": [0, 1]}})
def test_bad_micro_batches_of_one_rank_are_dropped_alone(rank, world, bad):
    """`"skip_micro_batch"` drops bad micro-batches of one rank and renormalises on all"""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, opt = made(window=2, scaler=scaler, on_nonfinite="skip_micro_batch")
    shares.train(opt, model, own_share(rank, world, 2), bad=bad if rank == 1 else ())
    good = [n for n in range(2 * world) if n not in [1 + world * i for i in bad]]
    batches, weights = zip(*((BATCHES[number], shares.WEIGHTS[number]) for number in good))
    assert (opt.last.micro_batches, scaler.get_scale()) == (len(good), 4.0)
    return as_expected(model, opt, oracle.train_by_hand(adam, batches, len(good), weights=weights))


@across(2, 3)
def test_flush_steps_on_a_partial_window_of_all_ranks(rank, world):
    """`flush()` steps on what all ranks hold, and does nothing on an empty window"""
    model, opt = made(window=2, max_norm=MAX_NORM)
    shares.train(opt, model, own_share(rank, world, 3))
    opt.flush()
    assert (opt.stepped, opt.last.micro_batches) == (True, world)
    opt.flush()
    assert not opt.stepped
    return as_expected(model, opt, by_hand(world, 0, 3, 2))


@across(2, cases={"ddp": {"grouped": False}, "group": {"grouped": True}})
def test_one_loss_of_two_optimizers(rank, world, grouped):
    """One loss of two wrappers: what `accumulate` takes for the second is summed over ranks, too"""
    module = make_model()
    model = module if grouped else DistributedDataParallel(module)
    options = {"max_norm": None} | ({} if grouped else {"process_group": None})
    opts = [in_group(layer, **options) for layer in (module[0], module[2])]
    for batch, weight in own_share(rank, world):
        with opts[0].micro_batch(model):
            opts[0].backward(loss_of(model, batch), weight)
        opts[1].accumulate()
        for opt in opts:
            opt.step()
    return as_expected(module, opts[1], by_hand(world, max_norm=None))


@across(2)
def test_copies_do_not_forget_that_a_window_is_to_be_summed(rank, world):
    """A copy, pickle or saved window of `micro_batch(ddp)` refuses to step on its own share"""
    model = DistributedDataParallel(make_model())
    opt = in_group(model, process_group=None)
    shares.inside(opt, model, BATCHES[rank])
    loaded = in_group(make_model(), process_group=None)
    loaded.load_accumulation_state_dict(opt.accumulation_state_dict())
    for twin in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt), loaded):
        for p, q in zip(model.parameters(), twin.param_groups[0]["params"], strict=True):
            assert torch.equal(opt.main_grad(p), twin.main_grad(q))
        assert "the group must be known" in shares.error_of(twin.flush)


@across(2)
def test_copies_go_on_in_their_process_group(rank, world):
    """`copy.deepcopy` and `pickle` in the middle of a window keep the default process group"""
    model, opt = made(max_norm=MAX_NORM)
    share = own_share(rank, world)
    shares.train(opt, model, share[:2])
    model, opt = copy.deepcopy((model, opt))
    shares.train(opt, model, share[2:6])
    model, opt = pickle.loads(pickle.dumps((model, opt)))
    shares.train(opt, model, share[6:])
    return as_expected(model, opt, by_hand(world))
