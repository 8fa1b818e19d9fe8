"""Factors of a window's step from the norm: by each kernel of the operator, and its caller."""

import math

import pytest
import torch
from support import oracle
from support.device import cpu_as_device
from support.window_cases import CASES, Case, assert_factors, expected, number, operands, unwritten

import accumext
from accumext.ops import reference
from accumext.optimizer._ledger import Ledger, Quotient, step_factors

CPU = torch.device("cpu")

KERNELS = {"backend": torch.ops.accumext.window_factors, "default": reference.window_factors}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@kernels
@pytest.mark.parametrize("on_device", [False, True])
def test_the_operator(kernel, on_device):
    for case in CASES:
        numbers, flags = unwritten()
        kernel(numbers, flags, [], *operands(case, on_device))
        assert_factors(numbers, flags, case)


@kernels
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_finds_the_norm(dtype, bad, kernel):
    tensors = [oracle.random([33, 7], torch.float32), oracle.random([5], dtype), torch.zeros(0)]
    if bad is not None:
        tensors[1][2] = bad
    norm_of = reference.total_norm if kernel is KERNELS["default"] else accumext.total_norm
    norm = norm_of(tensors)
    case = Case(norm.item(), scale=3.0, max_norm=0.7, checks_norm=False, overflow=bad is not None)
    numbers, flags = unwritten()
    kernel(numbers, flags, tensors, *operands(case, True, norm=False))
    assert_factors(numbers, flags, case)


def called(case, quotient):
    """The factors as the optimizer asks for them."""
    found_inf = 0.0 if case.found_inf is None else case.found_inf
    return step_factors(
        Ledger(found_inf=found_inf, counted=case.counted),
        quotient,
        case.max_norm,
        device=CPU,
        sums=[],
        norm=number(case.norm),
        overflow=number(case.overflow, torch.float32),
        normalised=case.normalised,
        checks_norm=case.checks_norm,
    )


def test_on_the_host_all_are_numbers():
    for case in CASES:
        factors = called(case, Quotient(case.base_weight, number(case.weight), case.scale))
        numbers, (_, *flags) = expected(case)
        assert factors.inverse is None
        assert not any(isinstance(value, torch.Tensor) for value in factors)
        got = [*factors[:3], factors.skip, factors.found_inf]
        assert got == pytest.approx([*numbers, *flags], rel=1e-15, abs=0, nan_ok=True), case


@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("scale", [1.0, 3.0, number(3.0)], ids=["one", "three", "device"])
@pytest.mark.parametrize("weight", [None, 5.0])
def test_what_the_host_knows_stays_there(weight, scale, max_norm):
    case = Case(base_weight=0.1, weight=weight, scale=float(scale), max_norm=max_norm)
    with cpu_as_device():
        factors = called(case, Quotient(case.base_weight, number(weight), scale))
    known = max_norm is None and weight is None and not isinstance(scale, torch.Tensor)
    assert isinstance(factors.factor, float) == known
    assert isinstance(factors.clip_coef, float) == (max_norm is None)
    assert factors.skip is factors.found_inf
    got = torch.stack([torch.as_tensor(n, dtype=torch.float64) for n in factors[:3]])
    assert_factors(got, torch.stack([factors.inverse, factors.skip, factors.found_inf]), case)
