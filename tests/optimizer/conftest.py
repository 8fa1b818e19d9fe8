"""An optimizer in the middle of a window, and process groups: of one, and of two threads."""

from __future__ import annotations

from threading import Barrier
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.optimizer_oracle import (
    assert_close,
    loss_of,
    make_batches,
    make_model,
    sgd,
    train_by_hand,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


@pytest.fixture
def halfway():
    """An optimizer with one of two micro-batches in; the test may break nothing of it."""
    model, batches = make_model(), make_batches(2)
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2)
    opt.backward(loss_of(model, batches[0]))
    yield model, opt
    assert all(p.grad is None for p in model.parameters())
    opt.backward(loss_of(model, batches[1]))
    opt.step()
    assert opt.stepped
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, batches, 2))


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    return [dist.ProcessGroup(rank, 2) for rank in range(2)]
