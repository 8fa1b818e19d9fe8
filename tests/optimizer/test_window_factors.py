"""What a window's step is found from the norm: on the host, and by the operator for a device."""

from __future__ import annotations

import math

import pytest
import torch
from support import oracle
from support.device import cpu_as_device
from support.window_cases import (
    CASES,
    Case,
    assert_factors,
    expected,
    number,
    operands,
    unwritten,
)

from accumext.optimizer._window_factors import Normaliser, device_factors, window_factors

CPU = torch.device("cpu")

each = pytest.mark.parametrize("case", CASES, ids=str)


@each
def test_numbers_of_the_host(case):
    factors = window_factors(
        number(case.norm),
        Normaliser(case.unit, number(case.weight), case.scale),
        max_norm=case.max_norm,
        normalised=case.normalised,
        checks_norm=case.checks_norm,
        overflow=number(case.overflow, torch.float32),
        found_infs=[] if case.found_inf is None else [number(case.found_inf, torch.float32)],
        finite=case.finite,
    )
    numbers, (_, *flags) = expected(case)
    got = [*map(float, factors[:3]), float(factors.skip), float(factors.found_inf)]
    assert got == pytest.approx([*numbers, *flags], rel=1e-15, abs=0, nan_ok=True)
    if case.weight is None:
        assert not any(isinstance(value, torch.Tensor) for value in factors)


@each
@pytest.mark.parametrize("on_device", [False, True])
def test_the_operator(case, on_device):
    numbers, flags = unwritten()
    options = operands(case, on_device)
    torch.ops.accumext.window_factors(numbers, flags, [], number(case.norm), **options)
    assert_factors(numbers, flags, case)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_finds_the_norm(dtype, bad):
    tensors = [oracle.random([33, 7], torch.float32), oracle.random([5], dtype), torch.zeros(0)]
    if bad is not None:
        tensors[1][2] = bad
    norm = torch.ops.accumext.total_norm.scalar(tensors, inv_scale=1.0)
    case = Case(norm.item(), scale=3.0, max_norm=0.7, checks_norm=False, overflow=bad is not None)
    numbers, flags = unwritten()
    options = operands(case, True) | {"overflow": None}
    torch.ops.accumext.window_factors(numbers, flags, tensors, None, **options)
    assert_factors(numbers, flags, case)


@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("scale", [1.0, 3.0, number(3.0)], ids=["one", "three", "device"])
@pytest.mark.parametrize("weight", [None, 5.0])
def test_what_the_host_knows_stays_there(weight, scale, max_norm):
    case = Case(unit=0.1, weight=weight, scale=float(scale), max_norm=max_norm)
    normaliser = Normaliser(case.unit, number(weight), scale)
    with cpu_as_device():
        factors = device_factors(
            CPU, [], number(case.norm), normaliser, max_norm=max_norm, checks_norm=True
        )
    known = max_norm is None and weight is None and not isinstance(scale, torch.Tensor)
    assert isinstance(factors.factor, float) == known
    assert isinstance(factors.clip_coef, float) == (max_norm is None)
    assert factors.skip is factors.found_inf
    got = torch.stack([torch.as_tensor(n, dtype=torch.float64) for n in factors[:3]])
    assert_factors(got, torch.stack([factors.inverse, factors.skip, factors.found_inf]), case)
