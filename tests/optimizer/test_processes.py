"""Several processes: what is held back, and windows summed over two, which are threads here."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.optimizer_oracle import OP, make_model, says, scalar, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumext.optimizer import _processes
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from accumext.optimizer._processes import Bucket, WindowAllReduce, _plan, hold_back

RANKS = range(2)


@pytest.mark.usefixtures("alone")
def test_the_default_group_is_copied_by_name_and_no_other_can_be():
    def optimizer(group):
        return AccumulatingOptimizer(sgd([scalar()]), process_group=group)

    for group in (None, dist.group.WORLD):
        for clone in (copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))):
            assert clone(optimizer(group)).process_group is group
    text = f"{OP}: process_group must be the default group to be copied or pickled, got another"
    with pytest.raises(RuntimeError, match=says(text)):
        copy.deepcopy(optimizer(dist.new_group([0])))


@pytest.mark.usefixtures("alone")
def test_a_plain_model_holds_nothing_back():
    for model in (None, make_model()):
        for group in (None, dist.group.WORLD):
            context, needed = hold_back("op", model, group)
            assert needed is group
            with context:
                pass


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("given", [False, True])
def test_every_replica_in_a_model_is_held_back_inside_alone(given):
    own, other = dist.new_group([0]), dist.new_group([0])
    parts = [DistributedDataParallel(make_model(), process_group=own) for _ in range(2)]
    context, needed = hold_back("op", nn.Sequential(*parts), other if given else None)
    assert needed is (other if given else own)
    assert [part.require_backward_grad_sync for part in parts] == [True, True]
    with context:
        assert [part.require_backward_grad_sync for part in parts] == [False, False]
    assert [part.require_backward_grad_sync for part in parts] == [True, True]


@pytest.mark.usefixtures("alone")
def test_replicas_of_two_groups_need_one_that_is_given():
    groups = [dist.new_group([0]), dist.new_group([0])]
    model = nn.Sequential(*(DistributedDataParallel(make_model(), process_group=g) for g in groups))
    text = "op: model must have DistributedDataParallel parts of one process group, got several"
    with pytest.raises(ValueError, match=says(text)):
        hold_back("op", model, None)
    assert hold_back("op", model, groups[1])[1] is groups[1]


@pytest.fixture
def groups(monkeypatch):
    """A process group for each of two threads, whose all_reduce adds what both have sent."""
    barrier, sent = Barrier(2, timeout=60), [None, None]

    def all_reduce(tensor, group, async_op=False):
        sent[group.rank()] = tensor.clone()
        barrier.wait()
        tensor.copy_(sent[0] + sent[1])
        barrier.wait()
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return [SimpleNamespace(rank=lambda r=rank: r, size=lambda: 2) for rank in RANKS]


def on_both(call):
    with ThreadPoolExecutor(2) as threads:
        return [done.result() for done in [threads.submit(call, rank) for rank in RANKS]]


def sparse(shape, *rows):
    """Ones in some rows."""
    values = torch.ones(len(rows), *shape[1:])
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


def test_buckets_are_of_one_dtype_and_the_last_parameters_come_first(monkeypatch):
    monkeypatch.setattr(_processes, "BUCKET_BYTES", 64)
    kinds = [(8, torch.float32), (8, torch.bfloat16), (4, torch.float64), (8, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in kinds]
    planned = [bucket.indices for bucket in _plan(parameters, range(4))]
    assert planned == [[3, 1], [2], [0]]  # halves are summed in float32, so two make 64 bytes


KINDS = {
    "dense": lambda: torch.arange(6.0).view(2, 3),
    "transposed": lambda: torch.arange(6.0).view(3, 2).t(),
    "cut out": lambda: torch.arange(24.0).view(4, 6)[1:3, ::2],
    "complex": lambda: torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3),
    "empty": lambda: torch.zeros(0, 3),
    "number": lambda: torch.tensor(2.5),
    "half": lambda: torch.arange(5.0).bfloat16(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_gives_the_sum_as_the_parameter_lies(groups, monkeypatch, kind):
    """Also where memory that nobody has written is NaN: what lies between gradients is sent too."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(math.nan))
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(KINDS[kind]())]
    wide = torch.float32 if kind == "half" else parameters[1].dtype
    mains = [[torch.ones(3), KINDS[kind]().to(wide) * (1 + rank)] for rank in RANKS]

    def summed(rank):
        bucket, mine = Bucket([0, 1], parameters), list(mains[rank])
        bucket.send(mine, 0.5, groups[rank])
        assert mine == [None, None]
        assert not bucket._flat.isnan().any()
        bucket.receive(mine)
        return mine

    for first, got in on_both(summed):
        assert torch.equal(first, torch.ones(3))
        assert got.dtype == wide
        assert torch.equal(got, 0.5 * (mains[0][1] + mains[1][1]))
        like = torch.empty_like(parameters[1])  # without the gaps of what was cut out
        assert got.stride() == like.stride()


DENSE, SPARSE, MISSING = torch.full((4, 2), 3.0), sparse((4, 2), 1, 3), None
PAIRS = {
    "missing and missing": (MISSING, MISSING, None),
    "missing and dense": (MISSING, DENSE, torch.strided),
    "missing and sparse": (MISSING, SPARSE, torch.sparse_coo),
    "sparse and dense": (SPARSE, DENSE, torch.strided),
    "sparse and sparse": (SPARSE, sparse((4, 2), 0, 1), torch.sparse_coo),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_some_processes_lack_or_have_sparse(groups, pair):
    *mains, layout = PAIRS[pair]
    parameters = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2))]

    def summed(rank):
        bucket, mine = Bucket([0, 1], parameters), [mains[rank], torch.ones(2)]
        bucket.send(mine, 1.0, groups[rank])
        bucket.receive(mine)
        return mine

    dense = [torch.zeros(4, 2) if main is None else main.to_dense() for main in mains]
    for got, other in on_both(summed):
        assert torch.equal(other, torch.full((2,), 2.0))
        assert (got is None) == (layout is None)
        if layout is not None:
            assert got.layout == layout
            assert torch.equal(got.to_dense(), dense[0] + dense[1])


def in_group(group, parameter, **options):
    """An optimizer of one of the processes."""
    opt = AccumulatingOptimizer(sgd([parameter]), **options)
    opt._box.settings = opt._box.settings._replace(process_group=group)
    return opt


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in-backward"])
def test_two_windows_become_one(groups, in_backward, reduction, max_norm):
    """With weights 1, 2 on one process and 3, 2 on the other."""

    def closed(rank):
        parameter = scalar()
        options = {"reduce_in_backward": in_backward, "reduction": reduction, "max_norm": max_norm}
        opt = in_group(groups[rank], parameter, window=2, **options)
        for grad, weight in ([(2.0, 1.0), (4.0, 2.0)], [(5.0, 3.0), (1.0, 2.0)])[rank]:
            opt.backward(parameter * grad, weight)
            opt.step()
        return parameter.item(), opt.stats()

    total = 2.0 * 1 + 4.0 * 2 + 5.0 * 3 + 1.0 * 2
    norm = total / 8 if reduction == "mean" else total
    for moved, stats in on_both(closed):
        assert (stats["weight"], stats["micro_batches"]) == (8.0, 4.0)
        assert stats["total_norm"] == pytest.approx(norm, rel=1e-6)
        assert moved == pytest.approx(-min(norm, max_norm or norm), rel=1e-5)


@pytest.mark.parametrize(
    ("counts", "windows", "sizes", "text"),
    [
        ((2, 3), (9, 9), (1, 1), "number of micro-batches on every process, got 2, 3 by"),
        ((2, 2), (9, 2), (1, 1), "got 2, full with 2 by rank. Give every process the same"),
        ((3, 2), (3, 2), (1, 1), "got full with 3, full with 2 by rank. Give every process"),
        ((2, 2), (2, 2), (1, 4), "be of the same trainable parameters on every process, got"),
    ],
)
def test_windows_that_differ_are_refused_on_every_process(groups, counts, windows, sizes, text):
    def refused(rank):
        parameter = nn.Parameter(torch.zeros(sizes[rank]))
        opt = in_group(groups[rank], parameter, window=windows[rank])
        for _ in range(counts[rank]):
            opt.backward(parameter.sum())
        full = counts[rank] == windows[rank]
        with pytest.raises(RuntimeError, match=f"{OP}.*: the window must ") as raised:
            (opt.step if full else opt.flush)()
        assert opt.main_grad(parameter).tolist() == [counts[rank]] * sizes[rank]
        opt.discard()
        return str(raised.value)

    assert all(text in said for said in on_both(refused))


def test_a_flush_of_nothing_steps_nowhere(groups):
    def flushed(rank):
        opt = in_group(groups[rank], scalar())
        opt.flush()
        return opt.stepped

    assert on_both(flushed) == [False, False]


def test_a_process_that_gives_up_has_the_others_skip(groups):
    def closed(rank):
        parameter = scalar()
        opt = in_group(groups[rank], parameter, reduce_in_backward=True)
        if rank == 0:
            parameter.register_hook(lambda grad: 1 / 0)
            with pytest.raises((ZeroDivisionError, RuntimeError)):
                opt.backward(parameter * 1)
            return opt.main_grad(parameter) is None
        opt.backward(parameter * 1)
        opt.step()
        return opt.last.skipped and parameter.item() == 0.0

    assert on_both(closed) == [True, True]


def test_a_gradient_in_several_parts_is_refused(groups):
    opt = in_group(groups[0], scalar())
    both = WindowAllReduce(opt._box, opt._box.state.window, groups[0])
    both.send_complete("op", [None], 1.0, [0])
    with pytest.raises(RuntimeError, match=says("op: .grad must be complete when autograd has")):
        both.send_complete("op", [None], 1.0, [0])
