"""A window is closed: norm, clip, and the gradient that the wrapped optimizer steps on."""

import math
from contextlib import nullcontext

import pytest
import torch
from support import optimizer_oracle as oracle
from support.device import cpu_as_device
from support.optimizer_oracle import OP
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", oracle.OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 4])
def test_every_optimizer_clips_alike(kind, window, dtype):
    """A fused one loses no float64, though its `grad_scale` is float32; and has none afterwards."""
    # One division more or less per gradient, over 20 steps of at most 0.1 each.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    model, batches = oracle.make_model(dtype), oracle.make_batches(20, dtype)
    opt = oracle.wrapped(model, oracle.OPTIMIZERS[kind], window=window, max_norm=0.05)
    clipped = []
    for batch in batches:
        opt.backward(oracle.loss_of(model, batch), 3.0)
        opt.step()
        clipped.append(opt.stepped and bool(opt.last.clip_coef < 1.0))
    assert any(clipped)
    expected = oracle.train_by_hand(
        oracle.OPTIMIZERS[kind], batches, window, max_norm=0.05, dtype=dtype
    )
    oracle.assert_close(oracle.parameters_of(model), expected, tolerance)
    assert not {"grad_scale", "found_inf"} & set(vars(opt.optimizer))


OVERFLOWS = {  # dtype, norm_type, scale, window and the factor of (3, 4)
    "cubes": (torch.float64, 3.0, 2.0**100, 1, 1e90),  # cubed and scaled, beyond float64
    "squares": (torch.float32, 2.0, 2.0**70, 2, 1.0),  # the scale squared is no float32
}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("kind", OVERFLOWS)
def test_a_norm_whose_powers_overflow_only_while_scaled(kind, max_norm):
    """Also in the pass that adds the second micro-batch, whose gradients are still scaled."""
    dtype, norm_type, scale, window, factor = OVERFLOWS[kind]
    options = {"max_norm": max_norm, "norm_type": norm_type}
    options["scaler"] = oracle.growing_scaler(init_scale=scale)
    parameter, opt = oracle.wrapped_zeros(window, 2, dtype, **options)
    grad = torch.tensor([3.0, 4.0], dtype=dtype) * factor
    for _ in range(window):
        opt.backward((parameter * grad).sum())
    opt.step()
    norm = factor * (3.0**norm_type + 4.0**norm_type) ** (1 / norm_type)
    assert opt.last.total_norm.item() == pytest.approx(norm, rel=1e-6)
    expected = -grad * (1.0 if max_norm is None else max_norm / norm)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


LARGE = {  # dtype, norm_type, and elements whose powers, or their sum, are beyond the dtype
    "squares": (torch.float32, 2.0, 1e25),
    "a sum of squares": (torch.float32, 2.0, 1.5e19),
    "the norm": (torch.float32, 2.0, 1e38),
    "a sum": (torch.float32, 1.0, 1e38),
    "cubes": (torch.float32, 3.0, 1e13),
    "squares in float64": (torch.float64, 2.0, 1e200),
    "squares in bfloat16": (torch.bfloat16, 2.0, 1e25),
}
SIDES = {"host": nullcontext, "device": cpu_as_device}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", LARGE)
def test_a_finite_gradient_is_clipped_though_its_powers_overflow(kind, fused, window, side):
    """On a device only a fused optimizer, whose step the host does not wait for, skips it."""
    dtype, norm_type, value = LARGE[kind]
    if fused and dtype.itemsize == 2:
        pytest.skip("torch's fused SGD leaves parameters of half precision alone on a CPU")
    parameter = nn.Parameter(torch.zeros(128, dtype=dtype))
    options = {"window": window, "max_norm": 2.0, "norm_type": norm_type, "on_nonfinite": "raise"}
    with SIDES[side]():
        opt = AccumulatingOptimizer(oracle.sgd([parameter], fused=fused), **options)
        for _ in range(window):
            oracle.one_call(opt, (parameter * value).sum())
    assert opt.stepped
    assert opt.last.nonfinite == []
    assert opt.last.skipped == (fused and side == "device")
    if not opt.last.skipped:
        expected = torch.full_like(parameter, -2.0 / 128 ** (1 / norm_type))
        rounding = 0.01 if dtype == torch.bfloat16 else 1e-5  # of the factor, a subnormal number
        torch.testing.assert_close(parameter.detach(), expected, rtol=rounding, atol=0)
        norm = value * 128 ** (1 / norm_type)
        assert float(opt.last.total_norm) == pytest.approx(norm, rel=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_norm": math.inf}], ids=str)
def test_without_a_clip_a_norm_that_overflows_skips_nothing(options, dtype):
    parameter, opt = oracle.wrapped_zeros(2, 128, dtype, **options)
    for _ in range(2):
        oracle.one_call(opt, (parameter * 1e25).sum())
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -1e25))
    assert opt.last.clip_coef == 1.0
    assert float(opt.last.total_norm) == pytest.approx(1e25 * 128**0.5, rel=0.01)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("max_norm", [None, 2.0, math.inf])
def test_raise_raises_where_only_the_sum_of_a_window_overflows(max_norm, side):
    with SIDES[side]():
        parameter, opt = oracle.wrapped_zeros(2, max_norm=max_norm, on_nonfinite="raise")
        oracle.one_call(opt, parameter * 3e38)
        opt.backward(parameter * 3e38)
        text = f"{OP}.step: the window's sum must be finite, got inf or NaN in weight"
        with pytest.raises(RuntimeError, match=oracle.says(text)):
            opt.step()
        opt.discard()
        for _ in range(2):
            oracle.one_call(opt, parameter * 1.0)
    assert parameter.item() == -1.0


@pytest.mark.filterwarnings("ignore:AccumulatingOptimizer. one more micro-batch")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
def test_the_norm_adds_up_in_the_order_of_the_optimizer(on_nonfinite, window):
    """Not in that in which gradients came: the last bit of the norm would depend on it."""
    values, norms = [torch.rand(3000), torch.rand(2000)], []
    for order in ((0, 1), (1, 0)):
        parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
        opt = AccumulatingOptimizer(
            oracle.sgd(parameters), window=window, on_nonfinite=on_nonfinite
        )
        for i in order:
            opt.backward((parameters[i] * values[i]).sum())
        opt.flush()
        norms.append(opt.last.total_norm)
    oracle.assert_equal(norms[:1], norms[1:])


SHARED = {
    "one-tensor": lambda memory: (memory[:4], memory[:4]),
    "parts-of-one": lambda memory: (memory[:4], memory[2:6]),
    "rows-and-columns": lambda memory: (memory.view(3, 3)[0], memory.view(3, 3)[:, 0]),
    "an-expanded-element": lambda memory: (memory[:1].expand(4), memory[4:8]),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("scaled_by", ["clipping", "own-scaler", "scaler-around"])
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_gradients_that_share_memory_are_scaled_once(shared, scaled_by, fused):
    """A fused optimizer writes back what it has divided, element by element and list by list."""
    grads = shared(torch.arange(1.0, 10.0))
    if scaled_by == "scaler-around" and 0 in grads[0].stride():
        pytest.skip("GradScaler refuses to look for inf in it")
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes its scale
    opt = AccumulatingOptimizer(
        oracle.sgd(parameters, lr=1.0, fused=fused),
        max_norm=1.0 if scaled_by == "clipping" else None,
        scaler=scaler if scaled_by == "own-scaler" else None,
    )
    factor = 0.25
    if scaled_by == "clipping":
        factor = 1 / (sum(float(grad.square().sum()) for grad in grads) ** 0.5 + 1e-6)
    expected = [-factor * grad for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    if scaled_by == "scaler-around":
        scaler.step(opt)
    else:
        opt.step()
    torch.testing.assert_close([p.detach() for p in parameters], expected)
