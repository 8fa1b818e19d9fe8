"""total_norm against float64 sums by definition, and against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.budget import examples

import accumext
from accumext.ops import reference

NORM_TYPES = [1.0, 2.0, 3.0, 0.5, 2.5, math.inf, -math.inf, -1.0, -2.5]
# float32 pow is good to a few units in the last place; a root of p < 1 multiplies that by 1 / p.
POW_RTOL = 4e-6


def rtol(norm_type: float) -> float | None:
    return None if norm_type in (1.0, 2.0, math.inf, -math.inf) else POW_RTOL


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_p_at_every_edge(norm_type, dtype):
    grads = [oracle.random([n], dtype) + 0.1 for n in oracle.EDGE_SIZES]
    norm = accumext.total_norm(grads, norm_type=norm_type)
    oracle.assert_norm(norm, grads, norm_type=norm_type, rtol=rtol(norm_type))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_no_worse_than_the_reference(norm_type):
    grads = [oracle.random([n], torch.float32) for n in (65537, 300, 1)]
    norm = torch.ops.accumext.total_norm(grads, norm_type=norm_type)
    truth = oracle.norm(grads, norm_type)
    reference_norm = reference.total_norm(grads, norm_type=norm_type)
    oracle.assert_no_worse(
        norm, reference_norm, truth, rtol(norm_type) or oracle.NORM_RTOL[norm.dtype]
    )


@settings(max_examples=examples(60), deadline=None)
@given(sizes=st.lists(st.sampled_from(oracle.EDGE_SIZES[:15]), max_size=12))
def test_any_list_of_sizes(sizes):
    grads = [oracle.random([n], torch.float32) for n in sizes]
    oracle.assert_norm(accumext.total_norm(grads), grads)


def test_mixed_dtypes_give_float64():
    grads = [oracle.random([50], d) for d in (torch.float16, torch.bfloat16, torch.float32)]
    assert accumext.total_norm(grads).dtype == torch.float32
    grads.append(oracle.random([50], torch.float64))
    oracle.assert_norm(accumext.total_norm(grads), grads, rtol=oracle.NORM_RTOL[torch.float32])


def test_strided_and_expanded():
    grads = [
        oracle.random([60, 40], torch.float32).t(),
        oracle.random([2, 3, 4, 5], torch.float16).contiguous(memory_format=torch.channels_last),
        oracle.random([100], torch.float64)[::3],
        oracle.random([1, 7], torch.float32).expand(5, 7),
        oracle.random([], torch.bfloat16),
    ]
    oracle.assert_norm(accumext.total_norm(grads), grads, rtol=oracle.NORM_RTOL[torch.float32])


def test_half_gradients_whose_norm_is_no_half():
    grads = [torch.full([100], 60000.0, dtype=torch.float16)]
    oracle.assert_norm(accumext.total_norm(grads), grads)  # 600000; torch says inf


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_the_norm_of_either_zero_is_positive_zero(norm_type, dtype):
    for zero in (0.0, -0.0):
        norm = accumext.total_norm([torch.tensor([zero], dtype=dtype)], norm_type=norm_type)
        assert norm.item() == 0.0
        assert not norm.signbit()


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_empty_is_zero(norm_type):
    for grads in ([], [torch.empty(0)], [torch.empty(2, 0), torch.empty(0)]):
        norm = accumext.total_norm(grads, norm_type=norm_type)
        assert norm.dtype == torch.float32
        assert norm.item() == 0.0
    grads = [torch.empty(0), torch.tensor([2.0]), torch.empty(0)]
    assert accumext.total_norm(grads, norm_type=norm_type).item() == pytest.approx(2.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_inf_and_nan_are_kept_wherever_they_are(norm_type, dtype):
    for where in (0, 40000, 69999):
        for value in (-math.inf, math.nan):
            grad = torch.ones(70000, dtype=dtype)
            grad[where] = value
            norm = accumext.total_norm([torch.ones(5), grad], norm_type=norm_type).item()
            if math.isnan(value):
                assert math.isnan(norm)
            elif norm_type > 0:
                assert norm == math.inf
            else:  # what is infinite adds nothing
                assert norm == pytest.approx(70004 ** (1 / norm_type))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_inv_scale(norm_type, dtype):
    grads = [oracle.random([1000], dtype), oracle.random([7, 9], torch.float32)]
    inv_scale = torch.tensor(2.0**-16 * 3)
    norm = accumext.total_norm(grads, norm_type=norm_type, inv_scale=inv_scale)
    limit = rtol(norm_type) or oracle.NORM_RTOL[torch.float32]
    oracle.assert_norm(norm, grads, norm_type=norm_type, inv_scale=inv_scale.item(), rtol=limit)


def test_unscaling_comes_before_squaring():
    # The square of 1e25 is no float32; that of 1e25 * 1e-20 is.
    norm = accumext.total_norm([torch.tensor([3e25, 4e25])], inv_scale=1e-20)
    assert norm.item() == pytest.approx(5e5, rel=1e-6)


def test_found_inf_is_about_elements_not_about_the_norm():
    found_inf = torch.zeros(())
    norm = accumext.total_norm([torch.tensor([3e38, 3e38])], found_inf=found_inf)
    assert norm.item() == math.inf
    assert found_inf.item() == 0.0
