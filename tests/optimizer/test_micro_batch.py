"""`micro_batch()`: several backward passes are one micro-batch or none; what it refuses."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    OP,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    says,
    sgd,
    train_by_hand,
)
from support.tensors import HALF_DTYPES, dtype_id
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(8)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
def test_half_parameters_add_up_in_float32_inside_a_micro_batch(dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0))
    with opt.micro_batch():
        for grad in [2048.0] + [1.0] * 15:
            opt.backward((parameter.float() * grad).sum())
    opt.step()
    assert_equal([parameter.detach()], [torch.full((3,), -2063.0).to(dtype)])


def test_micro_batches_of_several_raw_backwards():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2)
    for batch in BATCHES[:2]:
        with opt.micro_batch(model):
            (0.5 * loss_of(model, batch)).backward()
            (0.5 * loss_of(model, batch)).backward()
        opt.step()
    expected = train_by_hand(sgd, BATCHES[:2], 2)
    assert_close([p.detach() for p in model.parameters()], expected)


def test_an_exception_in_a_micro_batch_drops_that_one_alone():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=2)
    opt.backward(loss_of(model, BATCHES[0]))

    def interrupted():
        with opt.micro_batch():
            opt.backward(loss_of(model, BATCHES[1]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()

    assert all(p.grad is None for p in model.parameters())
    opt.backward(loss_of(model, BATCHES[2]))
    opt.step()
    expected = train_by_hand(sgd, [BATCHES[0], BATCHES[2]], 2)
    assert_close([p.detach() for p in model.parameters()], expected)


def test_an_empty_micro_batch_does_not_count():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=1)
    with opt.micro_batch():
        pass
    opt.step()
    assert not opt.stepped


def test_calls_that_a_micro_batch_cannot_contain(halfway):
    _, opt = halfway
    calls = (
        opt.accumulate,
        opt.step,
        opt.flush,
        opt.discard,
        opt.micro_batch().__enter__,
        lambda: opt.load_accumulation_state_dict({}),
    )
    for call in calls:
        with opt.micro_batch(), pytest.raises(RuntimeError, match=r"be outside micro_batch\(\)"):
            call()


@pytest.mark.parametrize("second", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_a_micro_batch_has_one_weight(halfway, second):
    model, opt = halfway

    def two_weights():
        with opt.micro_batch():
            opt.backward(loss_of(model, BATCHES[1]), 1.0)
            opt.backward(loss_of(model, BATCHES[1]), second)

    text = f"{OP}.backward: weight must be that of the whole micro-batch, 1, got 2.0"
    with pytest.raises(ValueError, match=says(text)):
        two_weights()


@pytest.mark.parametrize("wrong", [3, lambda x: x], ids=["int", "function"])
def test_micro_batch_wants_a_module(halfway, wrong):
    text = f"{OP}.micro_batch: model must be a torch.nn.Module or None"
    with pytest.raises(TypeError, match=says(text)):
        halfway[1].micro_batch(wrong).__enter__()


def test_micro_batch_refuses_wrappers_it_does_not_know(halfway):
    class Sharded(nn.Module):
        def no_sync(self):
            raise AssertionError

    text = f"{OP}.micro_batch: model must be a DistributedDataParallel or fully_shard model"
    with pytest.raises(TypeError, match=says(text)):
        halfway[1].micro_batch(Sharded()).__enter__()


def test_a_micro_batch_without_gradients_counts():
    """Nothing of it reaches the parameters, as where a branch of the model is used in turn."""
    used, unused = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    opt = AccumulatingOptimizer(sgd([used]), window=2)
    for leaf in (unused, used):
        with opt.micro_batch():
            opt.backward(leaf.sum())
        opt.step()
    assert opt.last.micro_batches == 2
    assert used.tolist() == [0.5, 0.5]
