"""scale_ against float64 truth, exactly where the data are dyadic, and against the reference."""

import math

import pytest
import torch
from support import oracle
from support.tensors import assert_equal

import accumext
from accumext.ops import reference


def assert_scales(grads, factor):
    """Exactly dyadic data."""
    expected = [(g.double() * factor).to(g.dtype) for g in grads]
    assert accumext.scale_(grads, factor) is None
    assert_equal(grads, expected)


def test_dyadic_data_is_exact_at_every_edge(dtype):
    assert_scales([oracle.dyadic([n], dtype) for n in oracle.EDGE_SIZES], 0.5)


def test_mixed_dtypes_and_strides():
    base = oracle.dyadic([6, 40], torch.float16)
    untouched = base[:, 1::2].clone()
    grads = [
        oracle.dyadic([30, 20], torch.float32).t(),
        oracle.dyadic([2, 3, 4, 5], torch.bfloat16).contiguous(memory_format=torch.channels_last),
        base[1:5, ::2],
        oracle.dyadic([], torch.float64),
        oracle.dyadic([0], torch.float64),
    ]
    assert_scales(grads, 0.25)
    assert torch.equal(base[:, 1::2], untouched)


def test_random_data_has_the_bits_of_the_reference(dtype):
    grads = [oracle.random([65537], dtype), oracle.random([7, 9], dtype).t()]
    expected = [g.clone() for g in grads]
    reference.scale_(expected, 0.37)
    torch.ops.accumext.scale_(grads, 0.37)
    assert_equal(grads, expected)


@pytest.mark.parametrize("factor", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
def test_one_changes_nothing(factor, dtype):
    grad = torch.tensor([math.inf, -math.inf, -0.0, 0.0, 1.5], dtype=dtype)
    bits = grad.view(torch.uint8).clone()
    accumext.scale_([grad], factor)
    assert torch.equal(grad.view(torch.uint8), bits)


@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan], ids=str)
def test_nonfinite_products_are_those_of_ieee(factor):
    grad = torch.tensor([1.0, -2.0, 0.0, math.inf])
    expected = grad * factor
    accumext.scale_([grad], torch.tensor(factor))
    torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)
