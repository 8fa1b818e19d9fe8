"""unscale_check_clip_accumulate_: a micro-batch clipped as it is accumulated, by definition."""

import math

import pytest
import torch
from support import oracle
from support.device import DeviceReads
from support.tensors import assert_equal

import accumext


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_a_clipped_micro_batch(norm_type, main_dtype, grad_dtype):
    main_grads = [oracle.random(shape, main_dtype) for shape in [(2049,), (13, 7), ()]]
    grads = [oracle.random(m.shape, grad_dtype) for m in main_grads]
    just_above = 1.25 * oracle.norm(grads, norm_type, 0.25)  # which must not scale up
    for max_norm in (0.0, 0.5, just_above, 1e9, math.inf):
        added = oracle.clipped(grads, inv_scale=0.25, max_norm=max_norm, norm_type=norm_type)
        sums = [m.clone() for m in main_grads]
        norm = accumext.unscale_check_clip_accumulate_(
            sums, grads, inv_scale=0.25, max_norm=max_norm, norm_type=norm_type
        )
        rtol = oracle.CLIP_RTOL[main_dtype]
        for got, main_grad, term in zip(sums, main_grads, added, strict=True):
            want = (main_grad.double() + term).to(main_dtype)
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)
        oracle.assert_norm(norm, grads, norm_type=norm_type, inv_scale=0.25, rtol=4e-6)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_below_max_norm_it_is_accumulate(main_dtype, grad_dtype, overwrite):
    main_grads = [oracle.random([n], main_dtype) for n in (65537, 3)]
    grads = [oracle.random([n], grad_dtype) for n in (65537, 3)]
    expected = [m.clone() for m in main_grads]
    accumext.accumulate_(expected, grads, inv_scale=0.37, overwrite=overwrite)
    accumext.unscale_check_clip_accumulate_(
        main_grads, grads, inv_scale=0.37, max_norm=1e9, overwrite=overwrite
    )
    assert_equal(main_grads, expected)


@pytest.mark.parametrize(("where", "value"), [(0, math.inf), (35000, -math.inf), (69999, math.nan)])
def test_if_finite_keeps_every_bit(where, value, main_dtype, grad_dtype):
    main_grads = [
        oracle.random([70000], main_dtype),
        torch.tensor([math.nan, -0.0], dtype=main_dtype),
    ]
    before = [m.view(torch.uint8).clone() for m in main_grads]
    grads = [oracle.random([70000], grad_dtype), torch.ones(2, dtype=grad_dtype)]
    grads[0][where] = value
    found_inf = torch.zeros(())
    with DeviceReads() as reads:
        norm = accumext.unscale_check_clip_accumulate_(
            main_grads, grads, max_norm=1.0, found_inf=found_inf, if_finite=True
        )
    assert reads.count == 0
    assert found_inf.item() == 1.0
    assert not norm.isfinite()
    for main_grad, bits in zip(main_grads, before, strict=True):
        assert torch.equal(main_grad.view(torch.uint8), bits)


def test_if_finite_accumulates_finite_gradients():
    main_grads, expected = [torch.ones(5)], [torch.ones(5)]
    grads = [torch.arange(5.0)]
    found_inf = torch.ones(())  # of an earlier micro-batch: sticky, and no reason to skip this one
    accumext.unscale_check_clip_accumulate_(expected, grads, max_norm=1.0)
    accumext.unscale_check_clip_accumulate_(
        main_grads, grads, max_norm=1.0, found_inf=found_inf, if_finite=True
    )
    assert torch.equal(main_grads[0], expected[0])
    assert found_inf.item() == 1.0


def test_a_nonfinite_micro_batch_goes_in_like_torchs():
    grads = [torch.tensor([1.0, math.inf]), torch.tensor([2.0])]
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.cat(grads)
    torch.nn.utils.clip_grad_norm_(parameter, 1.0)
    main_grads = [torch.zeros(2), torch.zeros(1)]
    accumext.unscale_check_clip_accumulate_(main_grads, grads, max_norm=1.0)
    torch.testing.assert_close(torch.cat(main_grads), parameter.grad, equal_nan=True)


@pytest.mark.parametrize("max_norm", [math.inf, 1e39])  # beyond float32
def test_without_a_limit_an_overflowed_norm_clips_nothing(max_norm):
    grads = [torch.full((4,), 1e30)]  # finite, but their squares are not
    main_grads = [torch.zeros(4)]
    norm = accumext.unscale_check_clip_accumulate_(main_grads, grads, max_norm=max_norm)
    assert norm.isinf()
    assert torch.equal(main_grads[0], grads[0])
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = grads[0].clone()
    assert accumext.clip_grad_norm_(parameter, max_norm).isinf()
    assert torch.equal(parameter.grad, grads[0])
