"""An optimizer in the middle of a window, and process groups: of one, and of two threads."""

from threading import Barrier
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support import optimizer_oracle as oracle


@pytest.fixture
def halfway():
    """An optimizer with one of two micro-batches in; the test may break nothing of it."""
    model, batches = oracle.make_model(), oracle.make_batches(2)
    opt = oracle.wrapped(model, window=2)
    opt.backward(oracle.loss_of(model, batches[0]))
    yield model, opt
    assert all(p.grad is None for p in model.parameters())
    opt.backward(oracle.loss_of(model, batches[1]))
    opt.step()
    assert opt.stepped
    oracle.assert_close(
        [p.detach() for p in model.parameters()], oracle.train_by_hand(oracle.sgd, batches, 2)
    )


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
