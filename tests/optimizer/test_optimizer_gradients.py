"""Gradients of every kind in a window: half, sparse, missing, complex, views; where they lie."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
)
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(8)
HALF_DTYPES = [torch.bfloat16, torch.float16]


def sgd(parameters, **kwargs):
    return torch.optim.SGD(parameters, lr=0.1, **kwargs)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
def test_half_parameters_add_up_in_float32(dtype, on_nonfinite, scaled):
    """256 + 1 is 256 in bfloat16, 2048 + 1 is 2048 in float16: only a float32 sum sees the ones."""
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    big = 256.0 if dtype == torch.bfloat16 else 2048.0
    grads = [big] + [1.0] * 15
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    opt = AccumulatingOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        window=16,
        reduction="sum",
        scaler=scaler,
        on_nonfinite=on_nonfinite,
    )
    for grad in grads:
        opt.backward((parameter.float() * grad).sum())
    assert opt.main_grad(parameter).tolist() == [sum(grads)] * 3
    opt.step()
    assert_equal([parameter.detach()], [torch.full((3,), -sum(grads)).to(dtype)])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=["bfloat16", "float16"])
def test_half_parameters_add_up_in_float32_inside_a_micro_batch(dtype):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0))
    with opt.micro_batch():
        for grad in [2048.0] + [1.0] * 15:
            opt.backward((parameter.float() * grad).sum())
    opt.step()
    assert_equal([parameter.detach()], [torch.full((3,), -2063.0).to(dtype)])


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=["bfloat16", "float16"])
def test_half_model_against_float32_sums(dtype, window, fused, max_norm):
    """By hand: float32 sums of the half gradients, divided, clipped, rounded once into `.grad`."""
    rounding = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    reference, model = make_model(dtype), make_model(dtype)
    parameters = list(reference.parameters())
    optimizer = sgd(parameters)
    opt = AccumulatingOptimizer(
        sgd(model.parameters(), fused=fused), window=window, max_norm=max_norm
    )
    for start in range(0, 8, window):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for batch in BATCHES[start : start + window]:
            grads = torch.autograd.grad(loss_of(reference, batch.to(dtype)), parameters)
            sums = [s + grad.float() for s, grad in zip(sums, grads)]
            opt.backward(loss_of(model, batch.to(dtype)))
            opt.step()
        means = [s / window for s in sums]
        norm = torch.cat([mean.flatten() for mean in means]).norm()
        coef = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
        for parameter, mean in zip(parameters, means):
            parameter.grad = (mean * coef).to(dtype)
        optimizer.step()
    # A float32 bit in the sum may round one step of the parameter the other way.
    assert_close(list(model.parameters()), parameters, tolerance=2 * rounding)


def test_an_overflow_in_the_cast_to_float16_skips():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    opt = AccumulatingOptimizer(sgd([parameter]), window=2, reduction="sum")
    for _ in range(2):
        opt.backward((parameter.float() * 60000.0).sum())
    opt.step()
    assert opt.last.skipped
    assert parameter.tolist() == [0.0, 0.0]


def test_the_norm_covers_parameters_that_the_last_micro_batch_left_out():
    """The last pass may know the norm already, but only of the gradients that it went over."""
    a, b = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    opt = AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), window=2, reduction="sum")
    for loss in (3 * a + 2 * b, 2 * b):
        loss.sum().backward()
        opt.accumulate()
    opt.step()
    assert opt.last.total_norm.item() == 5.0


@pytest.mark.parametrize("first", [False, True], ids=["dense-first", "sparse-first"])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
def test_sparse_gradients_of_unequal_weight(on_nonfinite, first):
    table = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    rows = [torch.tensor(row) for row in ([0, 1, 1], [1, 2], [3], [0])]
    weights, kinds = [2.0, 3.0, 0.0, 0.5], [first, True, True, not first]
    opt = AccumulatingOptimizer(
        torch.optim.SGD([table], lr=1.0), window=4, on_nonfinite=on_nonfinite
    )
    expected = torch.zeros(4, 2, dtype=torch.float64)
    for row, weight, sparse in zip(rows, weights, kinds):
        expected.index_add_(0, row, torch.full((len(row), 2), weight, dtype=torch.float64))
        opt.backward(nn.functional.embedding(row, table, sparse=sparse).sum(), weight)
    assert_close([opt.main_grad(table).to_dense()], [expected])
    opt.step()
    assert_close([table.detach()], [-expected / sum(weights)])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
def test_the_norm_adds_up_in_the_order_of_the_optimizer(on_nonfinite, window):
    """Not in that in which gradients came: the last bit of the norm would depend on it."""
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    opt = AccumulatingOptimizer(
        torch.optim.SGD([a, b], lr=1.0), window=window, on_nonfinite=on_nonfinite
    )
    orders = []
    opt.optimizer.register_step_pre_hook(
        lambda *_: orders.append([*opt._accumulator.window.by_parameter])
    )
    for loss in (b, b, a + b):
        opt.backward(loss.sum())
    opt.flush()
    assert len(orders) == 1
    assert all(p is q for p, q in zip(orders[0], [a, b], strict=True))


def test_a_view_of_a_bucket_is_copied():
    """DDP keeps gradients as views of a bucket that it writes again in the next backward pass."""
    parameter = nn.Parameter(torch.zeros(2))
    bucket = torch.zeros(4)
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=2, reduction="sum")
    for value in (1.0, 10.0):
        bucket.fill_(value)
        parameter.grad = bucket[:2]
        opt.accumulate()
    opt.step()
    assert parameter.tolist() == [-11.0, -11.0]


def test_the_first_gradient_is_taken_without_a_copy():
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]), window=2)
    parameter.sum().backward()
    address = parameter.grad.data_ptr()
    opt.accumulate()
    assert parameter.grad is None
    assert opt._accumulator.window.by_parameter[parameter].data_ptr() == address


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_second_gradient_is_added_to_the_first(in_backward):
    """By autograd where no second set of gradients is to be held, else by one fused pass."""
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]), window=3, accumulate_in_backward=in_backward)
    opt.backward(parameter.sum())
    address = opt._accumulator.window.by_parameter[parameter].data_ptr()
    seen = []
    handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    opt.backward(parameter.sum())
    handle.remove()
    assert (seen == [address]) == in_backward
    assert parameter.grad is None
    assert opt._accumulator.window.by_parameter[parameter].data_ptr() == address
    assert opt.main_grad(parameter).tolist() == [2.0] * 2


def test_window_of_one_keeps_gradients_visible():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()))
    opt.backward(loss_of(model, BATCHES[0]))
    grads = [p.grad for p in model.parameters()]
    assert_equal(grads, torch.autograd.grad(loss_of(model, BATCHES[0]), list(model.parameters())))
    opt.step()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads))
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_may_be_changed_between_backward_and_step(reduction):
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), reduction=reduction)
    opt.backward(parameter.sum())
    parameter.grad = torch.tensor([5.0, 6.0])
    opt.step()
    assert parameter.tolist() == [-5.0, -6.0]


def test_complex_parameters():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=2, max_norm=1.0)
    for factor in (3.0, 3.0):
        opt.backward((parameter * factor).real.sum())
        opt.step()
    assert opt.last.total_norm.item() == pytest.approx(3 * 2**0.5)
    torch.testing.assert_close(parameter.real, torch.full((2,), -(0.5**0.5), dtype=torch.float64))


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
