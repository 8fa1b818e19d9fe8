"""Sums of a window: of half, sparse, complex, conjugate and missing gradients, in any order."""

from contextlib import nullcontext

import pytest
import torch
from support import optimizer_oracle as oracle
from support.device import cpu_as_device
from support.optimizer_oracle import OP
from support.tensors import HALF_DTYPES, dtype_id
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


@pytest.mark.parametrize("inside", [False, True], ids=["a-window", "a-micro-batch"])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
def test_half_parameters_add_up_in_float32(dtype, on_nonfinite, scaled, inside):
    """256 + 1 is 256 in bfloat16, 2048 + 1 is 2048 in float16: only a float32 sum sees the ones."""
    big = 256.0 if dtype == torch.bfloat16 else 2048.0
    grads = [big] + [1.0] * 15
    scaler = oracle.growing_scaler(init_scale=4.0) if scaled else None
    options = {"reduction": "sum", "scaler": scaler, "on_nonfinite": on_nonfinite}
    parameter, opt = oracle.wrapped_zeros(2 if inside else 16, 3, dtype, **options)
    with opt.micro_batch() if inside else nullcontext():
        for grad in grads:
            opt.backward((parameter.float() * grad).sum())
    assert opt.main_grad(parameter).tolist() == [sum(grads)] * 3
    opt.flush()
    oracle.assert_equal([parameter.detach()], [torch.full((3,), -sum(grads)).to(dtype)])


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
def test_main_grad_of_half_precision_is_float32(dtype, window):
    """Also where the window is what lies in `.grad`, whose dtype could not hold it unscaled."""
    small = 2.0**-26
    parameter, opt = oracle.wrapped_zeros(
        window, 2, dtype, scaler=oracle.growing_scaler(init_scale=2.0**16)
    )
    opt.backward((parameter.float() * small).sum())
    main = opt.main_grad(parameter)
    assert (main.dtype, main.tolist()) == (torch.float32, [small] * 2)


@pytest.mark.parametrize("where", [nullcontext, cpu_as_device], ids=["host", "device"])
def test_an_overflow_in_the_cast_to_float16_skips(where):
    parameter, opt = oracle.wrapped_zeros(2, 2, torch.float16, reduction="sum")
    with where():
        for _ in range(2):
            opt.backward((parameter.float() * 60000.0).sum())
        opt.step()
    assert opt.last.skipped
    assert parameter.tolist() == [0.0, 0.0]


def test_complex_parameters():
    parameter, opt = oracle.wrapped_zeros(2, 2, torch.complex128, max_norm=1.0)
    for factor in (3.0, 3.0):
        opt.backward((parameter * factor).real.sum())
        opt.step()
    assert opt.last.total_norm.item() == pytest.approx(3 * 2**0.5)
    torch.testing.assert_close(parameter.real, torch.full((2,), -(0.5**0.5), dtype=torch.float64))


LAZY = {  # a tensor whose values are computed when it is read, and the same that is not
    "conjugate": lambda: torch.full((1000,), 1 + 2j).conj(),
    "negative": lambda: torch._neg_view(torch.ones(1000)),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_a_conjugate_or_negative_view_is_its_value(make, window, max_norm):
    grad = make().resolve_conj().resolve_neg()
    parameter, opt = oracle.wrapped_zeros(window, 1000, grad.dtype, max_norm=max_norm)
    for _ in range(window):
        parameter.grad = make()
        opt.step()
    norm = grad.norm().item()
    assert opt.last.total_norm.item() == pytest.approx(norm, rel=1e-6)
    factor = 1.0 if max_norm is None else 1.0 / (norm + 1e-6)
    torch.testing.assert_close(parameter.detach(), -factor * grad)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("window", [1, 2])
def test_sparse_half_gradients_close_a_window(dtype, window):
    weights = []
    for sparse in (True, False):
        embedding = nn.Embedding(5, 2, sparse=sparse)
        with torch.no_grad():
            embedding.weight.zero_()
        embedding.to(dtype)
        opt = AccumulatingOptimizer(oracle.sgd(embedding.parameters()), window=window, max_norm=0.5)
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
    opt = AccumulatingOptimizer(
        oracle.sgd([parameter], momentum=0.5), window=window, max_norm=max_norm
    )
    for _ in range(window):
        opt.backward((parameter * 2).sum())
        opt.step()
    assert opt.stepped
    assert "momentum_buffer" in opt.state[parameter]


@pytest.mark.parametrize("loop", ["accumulate", "step", "backward"])
def test_the_first_gradient_is_taken_without_a_copy(loop):
    """Also where the user holds it, who then sees it change, as with stock PyTorch."""
    parameter, opt = oracle.wrapped_zeros(3, shape=2, reduction="sum")
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
    (parameter, opt), memory = oracle.wrapped_zeros(2, shape=2, reduction="sum"), torch.zeros(4)
    for value in (1.0, 10.0):
        memory.fill_(value)
        parameter.grad = make(memory)
        opt.accumulate()
        assert memory.tolist() == [value] * 4
    opt.step()
    assert parameter.tolist() == [-11.0, -11.0]


@pytest.mark.parametrize("call", ["accumulate", "step", "flush"])
def test_a_tensor_that_the_window_took_is_refused_in_the_same_window(call):
    (parameter, opt), grad = oracle.wrapped_zeros(2), torch.tensor(2.0)
    parameter.grad = grad
    opt.step()
    parameter.grad = grad
    text = f"{OP}: .grad must be another tensor in every micro-batch of a window, got one that"
    with pytest.raises(RuntimeError, match=oracle.says(text)):
        getattr(opt, call)()
    assert opt.main_grad(parameter).item() == 2.0
    parameter.grad = grad.clone()
    opt.step()
    parameter.grad = grad  # in the next window it may come again
    opt.step()
    assert (parameter.item(), opt.stepped) == (-2.0, False)
