"""A window summed over two processes, which are threads here: buckets, what they hold, errors."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.optimizer_oracle import says, scalar, sgd
from torch import nn

from accumext.optimizer import _window_all_reduce
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer
from accumext.optimizer._window import Window
from accumext.optimizer._window_all_reduce import Bucket, WindowAllReduce, _plan

RANKS = range(2)


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
    monkeypatch.setattr(_window_all_reduce, "BUCKET_BYTES", 64)
    kinds = [(8, torch.float32), (8, torch.bfloat16), (4, torch.float64), (8, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in kinds]
    index = {p: i for i, p in enumerate(parameters)}
    planned = [[index[p] for p in bucket.parameters] for bucket in _plan(parameters)]
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
        bucket, mine = Bucket(parameters), dict(zip(parameters, mains[rank]))
        bucket.send(mine, 0.5, groups[rank])
        assert mine == {}
        assert not bucket._flat.isnan().any()
        return bucket.receive()

    for sums in on_both(summed):
        assert torch.equal(sums[parameters[0]], torch.ones(3))
        got = sums[parameters[1]]
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
    parameter, other = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2))

    def summed(rank):
        bucket, mine = Bucket([parameter, other]), {other: torch.ones(2)}
        if mains[rank] is not None:
            mine[parameter] = mains[rank]
        bucket.send(mine, 1.0, groups[rank])
        return bucket.receive()

    dense = [torch.zeros(4, 2) if main is None else main.to_dense() for main in mains]
    for sums in on_both(summed):
        assert torch.equal(sums[other], torch.full((2,), 2.0))
        assert (parameter in sums) == (layout is not None)
        if layout is not None:
            assert sums[parameter].layout == layout
            assert torch.equal(sums[parameter].to_dense(), dense[0] + dense[1])


def window_of(parameter, grad, weight=1.0):
    """A window of one micro-batch, as the optimizer makes it."""
    opt = AccumulatingOptimizer(sgd([parameter]), window=2)
    opt.backward((parameter * grad).sum(), weight)
    window = opt._accumulator.window
    opt._accumulator.window = Window()
    return window


def test_two_windows_become_one(groups):
    parameters = [scalar() for _ in RANKS]

    def closed(rank):
        window = window_of(parameters[rank], [2.0, 5.0][rank], weight=[1.0, 3.0][rank])
        both = WindowAllReduce([parameters[rank]], window, groups[rank])
        assert both.agree("op", window, window.weight, 1, flushing=True)
        both.finish(window)
        return window

    for parameter, window in zip(parameters, on_both(closed), strict=True):
        assert window.by_parameter[parameter].item() == 1.0 * 2.0 + 3.0 * 5.0
        assert (window.weight, window.world_micro_batches) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("counts", "flushing", "sizes", "text"),
    [
        ((2, 3), (True, True), (1, 1), "number of micro-batches on every process, got 2, 3 by"),
        ((2, 2), (True, False), (1, 1), "got 2, full by rank. Give every process the same"),
        ((2, 2), (True, True), (1, 4), "be of the same trainable parameters on every process, got"),
    ],
)
def test_windows_that_differ_are_refused_on_every_process(groups, counts, flushing, sizes, text):
    def refused(rank):
        parameter = nn.Parameter(torch.zeros(sizes[rank]))
        both = WindowAllReduce([parameter], Window(), groups[rank])
        with pytest.raises(RuntimeError, match="op: the window must ") as raised:
            both.agree("op", Window(), 0.0, counts[rank], flushing[rank])
        return str(raised.value)

    assert all(text in said for said in on_both(refused))


def test_a_flush_of_nothing_says_so(groups):
    def anything(rank):
        both = WindowAllReduce([scalar()], Window(), groups[rank])
        return both.agree("op", Window(), 0.0, 0, flushing=True)

    assert on_both(anything) == [False, False]


def test_a_process_that_gives_up_has_the_others_skip(groups):
    parameters = [scalar() for _ in RANKS]

    def closed(rank):
        window = window_of(parameters[rank], 1.0)
        both = WindowAllReduce([parameters[rank]], window, groups[rank])
        both.agree("op", window, 1.0, 1, flushing=True)
        (both.abandon if rank == 0 else both.finish)(window)
        return window.by_parameter[parameters[rank]]

    assert on_both(closed)[1].isnan()


def test_a_gradient_in_several_parts_is_refused(groups):
    parameter = scalar()
    both = WindowAllReduce([parameter], Window(), groups[0])
    both.send_complete("op", Window(), [parameter])
    with pytest.raises(RuntimeError, match=says("op: .grad must be complete when autograd has")):
        both.send_complete("op", Window(), [parameter])
