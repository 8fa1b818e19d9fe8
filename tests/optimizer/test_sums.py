"""Sums of a window: of half, sparse, complex, conjugate and missing gradients, in any order."""

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
    scalar,
    sgd,
)
from support.tensors import HALF_DTYPES, dtype_id
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(8)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
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


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
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


def test_complex_parameters():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=2, max_norm=1.0)
    for factor in (3.0, 3.0):
        opt.backward((parameter * factor).real.sum())
        opt.step()
    assert opt.last.total_norm.item() == pytest.approx(3 * 2**0.5)
    torch.testing.assert_close(parameter.real, torch.full((2,), -(0.5**0.5), dtype=torch.float64))


def test_conjugate_gradients():
    for window, max_norm in ((1, None), (1, 1.0), (2, None), (2, 1.0)):
        results = []
        for conjugate in (False, True):
            parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
            opt = AccumulatingOptimizer(sgd([parameter]), window=window, max_norm=max_norm)
            for _ in range(window):
                grad = torch.full((3,), 1 + 2j)
                parameter.grad = grad.conj() if conjugate else grad.conj().resolve_conj()
                opt.step()
            results.append(parameter.detach())
        assert_equal(results[:1], results[1:])


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_negative_view_is_its_value(window, max_norm):
    parameter = nn.Parameter(torch.zeros(1000))
    opt = AccumulatingOptimizer(sgd([parameter]), window=window, max_norm=max_norm)
    for _ in range(window):
        parameter.grad = torch._neg_view(torch.ones(1000))
        opt.step()
    expected = 1.0 if max_norm is None else 1.0 / (1000**0.5 + 1e-6)
    assert opt.last.total_norm.item() == pytest.approx(1000**0.5, rel=1e-6)
    torch.testing.assert_close(parameter.detach(), torch.full((1000,), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [1, 2])
def test_sparse_half_gradients_close_a_window(dtype, window):
    weights = []
    for sparse in (True, False):
        embedding = nn.Embedding(5, 2, sparse=sparse)
        with torch.no_grad():
            embedding.weight.zero_()
        embedding.to(dtype)
        opt = AccumulatingOptimizer(sgd(embedding.parameters()), window=window, max_norm=0.5)
        for _ in range(window):
            opt.backward(embedding(torch.tensor([1, 1, 2])).float().sum())
            opt.step()
        assert not opt.last.skipped
        weights.append(embedding.weight.detach())
    # A window of one rounds the clipped gradient of each occurrence apart if it is sparse.
    torch.testing.assert_close(weights[0], weights[1], rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_meta_parameters(window, max_norm):
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    opt = AccumulatingOptimizer(sgd([parameter], momentum=0.5), window=window, max_norm=max_norm)
    for _ in range(window):
        opt.backward((parameter * 2).sum())
        opt.step()
    assert opt.stepped
    assert "momentum_buffer" in opt.state[parameter]


# Whose memory a sum has


@pytest.mark.parametrize("loop", ["accumulate", "step", "backward"])
def test_the_first_gradient_is_taken_without_a_copy(loop):
    """Also where the user holds it, who then sees it change, as with stock PyTorch."""
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]), window=3, reduction="sum")
    held = []
    parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    if loop == "backward":
        opt.backward(parameter.sum())
    else:
        parameter.sum().backward()
        getattr(opt, loop)()
    assert parameter.grad is None
    with torch.no_grad():
        held[0].mul_(3.0)
    assert opt.main_grad(parameter).tolist() == [3.0] * 2
    parameter.sum().backward()
    opt.step()
    assert held[0].tolist() == [4.0] * 2


SHARING = {
    "bucket-view": lambda memory: memory[:2],  # which DDP writes again in the next backward pass
    "alias": lambda memory: memory.data[2:4],
    "expanded": lambda memory: memory[:1].expand(2),
    "numpy": lambda memory: torch.from_numpy(memory.numpy())[:2],
}


@pytest.mark.parametrize("make", SHARING.values(), ids=SHARING)
def test_memory_that_is_shared_is_copied(make):
    parameter, memory = nn.Parameter(torch.zeros(2)), torch.zeros(4)
    opt = AccumulatingOptimizer(sgd([parameter]), window=2, reduction="sum")
    for value in (1.0, 10.0):
        memory.fill_(value)
        parameter.grad = make(memory)
        opt.accumulate()
        assert memory.tolist() == [value] * 4
    opt.step()
    assert parameter.tolist() == [-11.0, -11.0]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_one_tensor_in_two_grads_is_two_gradients(max_norm, window):
    parameters, grad = [scalar(), scalar()], torch.tensor(2.0)
    opt = AccumulatingOptimizer(sgd(parameters), window=window, max_norm=max_norm)
    for step in range(2 * window):
        for parameter in parameters:
            parameter.grad = grad if step % window == 0 else grad.clone()
        opt.step()
        grad = torch.tensor(2.0)
    clipped = 2.0 if max_norm is None else 2.0 / (8.0**0.5 + 1e-6)
    for parameter in parameters:
        assert parameter.item() == pytest.approx(-2 * clipped, rel=1e-6)


@pytest.mark.parametrize("call", ["accumulate", "step", "flush"])
def test_a_tensor_that_the_window_took_is_refused_in_the_same_window(call):
    parameter, grad = scalar(), torch.tensor(2.0)
    opt = AccumulatingOptimizer(sgd([parameter]), window=2)
    parameter.grad = grad
    opt.step()
    parameter.grad = grad
    text = f"{OP}: .grad must be another tensor in every micro-batch of a window, got one that"
    with pytest.raises(RuntimeError, match=says(text)):
        getattr(opt, call)()
    assert opt.main_grad(parameter).item() == 2.0
    parameter.grad = grad.clone()
    opt.step()
    parameter.grad = grad  # in the next window it may come again
    opt.step()
    assert (parameter.item(), opt.stepped) == (-2.0, False)
