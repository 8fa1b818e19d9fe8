"""Several processes: what is held back, and windows summed over two, which are threads here."""

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support import optimizer_oracle as oracle
from support.optimizer_oracle import OP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumext.distributed import _all_reduce
from accumext.distributed._all_reduce import Bucket, no_sync, plan_buckets
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


@pytest.mark.usefixtures("alone")
def test_the_default_group_is_copied_by_name_and_no_other_can_be():
    def optimizer(group):
        return AccumulatingOptimizer(oracle.sgd([oracle.scalar()]), process_group=group)

    for group in (None, dist.group.WORLD):
        for clone in (copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))):
            assert clone(optimizer(group)).process_group is group
    text = f"{OP}: process_group must be the default group to be copied or pickled, got another"
    with pytest.raises(RuntimeError, match=oracle.says(text)):
        copy.deepcopy(optimizer(dist.new_group([0])))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("replicas", [0, 1, 2], ids=["plain", "replica", "two-replicas"])
def test_every_replica_in_a_model_is_held_back_inside_alone(replicas, given):
    own, other = dist.new_group([0]), dist.new_group([0]) if given else None
    parts = [
        DistributedDataParallel(oracle.make_model(), process_group=own) for _ in range(replicas)
    ]
    context, needed = no_sync("op", nn.Sequential(oracle.make_model(), *parts), other)
    assert needed is (other or (own if replicas else None))
    assert all(part.require_backward_grad_sync for part in parts)
    with context:
        assert not any(part.require_backward_grad_sync for part in parts)
    assert all(part.require_backward_grad_sync for part in parts)


@pytest.mark.usefixtures("alone")
def test_replicas_of_several_groups_need_process_group():
    groups = [dist.new_group([0]) for _ in range(2)]
    replicas = [
        DistributedDataParallel(oracle.make_model(), process_group=group) for group in groups
    ]
    text = "op: model must have DistributedDataParallel parts of one process group, got several"
    with pytest.raises(ValueError, match=oracle.says(text)):
        no_sync("op", nn.ModuleList(replicas), None)
    _, needed = no_sync("op", nn.ModuleList(replicas), groups[1])
    assert needed is groups[1]


def counting(module, **options):
    """A replica, and a list of the buckets that it has reduced."""
    replica, reduced = DistributedDataParallel(module, **options), []

    def hook(state, bucket):
        reduced.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(2 * bucket.buffer())  # what others would add
        return done

    replica.register_comm_hook(None, hook)
    return replica, reduced


def forward_outside(opt, model, held, x):
    loss = model(x).square().mean()
    with opt.micro_batch(held):
        opt.backward(loss)


def another_forward_outside(opt, model, held, x):
    """Not under no_grad, and never followed by a backward pass."""
    model(x)
    with opt.micro_batch(held):
        opt.backward(model(x).square().mean())


def evaluated_inside(opt, model, held, x):
    loss = model(x).square().mean()
    with opt.micro_batch(held):
        with torch.no_grad():
            model(x)
        opt.backward(loss)


def of_ones_own(opt, model, held, x):
    loss = model(x).square().mean()
    with opt.micro_batch(held):
        loss.backward()


def in_two_halves(opt, model, held, x):
    first = model(x).square().mean() / 2
    with opt.micro_batch(held):
        opt.backward(first)
        opt.backward(model(x).square().mean() / 2)


LOOPS = [
    forward_outside,
    another_forward_outside,
    evaluated_inside,
    of_ones_own,
    in_two_halves,
]
REPLICAS = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("options", REPLICAS, ids=str)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_forward_pass_outside_synchronises_nothing_inside(loop, options, nested):
    """DDP decides in its forward pass whether the next backward pass synchronises."""
    module = oracle.make_model()
    model, reduced = counting(module, **options)
    opt, batches = oracle.wrapped(module, window=2), oracle.make_batches(6)
    held = nn.ModuleList([nn.Linear(1, 1), model]) if nested else model
    for batch in batches:
        loop(opt, model, held, batch)
        opt.step()
    assert reduced == []
    by_hand = oracle.train_by_hand(oracle.sgd, batches, 2)
    oracle.assert_close(oracle.parameters_of(module), by_hand)
    for _ in range(3):  # and DDP goes on as before, with buckets that it makes anew
        model(batches[0]).sum().backward()
    assert len(reduced) == 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("factor", [2.0, math.nan, math.inf])
def test_a_gradient_that_ddp_copies_into_another_bucket_is_used_once(factor):
    """It does so, and sets `.grad` to the copy, in the forward pass after its first backward."""
    module = nn.Linear(2, 1)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    opt = oracle.wrapped(module)
    with nullcontext() if math.isfinite(factor) else pytest.warns(match="skipped"):
        opt.backward(model(torch.ones(1, 2)).sum() * factor)
        opt.step()
    used, before = module.weight.grad, module.weight.detach().clone()
    loss = model(torch.ones(1, 2)).sum()
    assert module.weight.grad is not used
    opt.flush()
    assert not opt.stepped
    opt.backward(loss)
    opt.step()
    oracle.assert_equal([module.weight.detach()], [before - 1.0])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["step-each", "steps-behind"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_gradients_in_buckets_of_ddp_beside_another_wrapper(order, late, window):
    """Of which a backward pass of that one, which finds `.grad` empty, fills the same buckets."""
    nets = [nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)]
    plain = copy.deepcopy(nets)
    replicas = [DistributedDataParallel(n, gradient_as_bucket_view=True) for n in nets]
    opts = [oracle.wrapped(net, window=window) for net in nets]
    hands = [oracle.ByHand(net.parameters(), oracle.sgd) for net in plain]

    def loss_of(i, first, second, batch):
        return second(first(batch) if i == 0 else batch).square().mean()

    for number in range(8):
        batch = torch.full((2, 3), 0.1 * number, dtype=torch.float64)
        steps = []
        for i in order:
            opts[i].backward(loss_of(i, *replicas, batch))
            hands[i].add(loss_of(i, *plain, batch))
            steps += [opts[i].step, *([hands[i].step] if (number + 1) % window == 0 else [])]
            while steps and (i == order[-1] or not late):
                steps.pop(0)()
    made, expected = (
        [p for n in several for p in oracle.parameters_of(n)] for several in (nets, plain)
    )
    oracle.assert_close(made, expected)


@pytest.mark.usefixtures("alone")
def test_a_static_graph_is_refused_until_it_is_known():
    """Torch's assertion fails in its first backward pass if that is not to synchronise."""
    module = oracle.make_model()
    model, reduced = counting(module, static_graph=True)
    opt, batch = oracle.wrapped(module, window=2), oracle.make_batches(1)[0]
    text = f"{OP}.micro_batch: model must be DistributedDataParallel without static_graph=True"
    with pytest.raises(ValueError, match=oracle.says(text)), opt.micro_batch(model):
        pass
    model(batch).sum().backward()
    opt.zero_grad()
    for loop in LOOPS:
        loop(opt, model, model, batch)
        opt.step()
    assert reduced == [0]


def sparse(*rows):
    """Ones in some rows."""
    return torch.sparse_coo_tensor([rows], torch.ones(2, 2), (4, 2), check_invariants=True)


def test_buckets_are_of_one_dtype_and_the_last_parameters_come_first(monkeypatch):
    monkeypatch.setattr(_all_reduce, "BUCKET_BYTES", 64)
    kinds = [(8, torch.float32), (8, torch.bfloat16), (4, torch.float64), (8, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in kinds]
    planned = [bucket.indices for bucket in plan_buckets(parameters, range(4))]
    assert planned == [[3, 1], [2], [0]]  # halves are summed in float32, so two make 64 bytes


LAYOUTS = {  # of a parameter that has a gradient on both processes
    "dense": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6.0).view(3, 2).t(),
    "cut out": torch.arange(24.0).view(4, 6)[1:3, ::2],
    "complex": torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3),
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(2.5),
    "half": torch.arange(5.0).bfloat16(),
}
DENSE, SPARSE, MISSING = torch.full((4, 2), 3.0), sparse(1, 3), None
CASES = {name: (value, value, 2 * value) for name, value in LAYOUTS.items()} | {
    "missing and missing": (DENSE, MISSING, MISSING),
    "missing and dense": (DENSE, MISSING, DENSE),
    "missing and sparse": (DENSE, MISSING, SPARSE),
    "sparse and dense": (DENSE, SPARSE, DENSE),
    "sparse and sparse": (DENSE, SPARSE, sparse(0, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bucket_gives_the_sum_as_the_parameter_lies(groups, monkeypatch, case):
    """Also where memory that nobody has written is NaN: what lies between gradients is sent too."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(math.nan))
    value, *mains = CASES[case]
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(value)]
    wide = torch.float32 if case == "half" else value.dtype
    mains = [None if main is None else main.to(wide) for main in mains]

    def summed(rank):
        bucket, mine = Bucket([0, 1], parameters), [torch.ones(3), mains[rank]]
        bucket.send(mine, 0.5, groups[rank])
        assert mine == [None, None]
        assert not bucket._flat.isnan().any()
        bucket.receive(mine)
        return mine

    there = [main for main in mains if main is not None]
    for first, got in oracle.on_both(summed):
        assert torch.equal(first, torch.ones(3))
        assert (got is None) == (not there)
        if got is None:
            continue
        assert got.dtype == wide
        assert torch.equal(got.to_dense(), 0.5 * sum(main.to_dense() for main in there))
        assert got.is_sparse == all(main.is_sparse for main in there)
        if not got.is_sparse:  # without the gaps of what was cut out
            assert got.stride() == torch.empty_like(parameters[1]).stride()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["step", "discard"])
def test_an_error_while_a_window_is_sent_stays_what_it_is(groups, monkeypatch, call, error):
    """Others wait for this process then: that it had no memory is not that they are gone."""

    def fail(*args):
        raise error("full")

    def sending(rank):
        parameter, opt = oracle.wrapped_zeros(reduce_in_backward=True, process_group=groups[rank])
        opt.backward(parameter * 1)
        return parameter, opt

    parameter, opt = oracle.on_both(sending)[0]
    monkeypatch.setattr(Bucket, "send", fail)
    with pytest.raises((error, RuntimeError)) as raised:  # Python 3.10 has no notes
        getattr(opt, call)()
    if call == "step":
        assert "the open window was dropped: it was being summed" in oracle.said_by(raised.value)
    assert opt.main_grad(parameter) is None
