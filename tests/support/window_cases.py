"""Numbers of a window and what follows from them, by definition: for every implementation of it."""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

INF, NAN = math.inf, math.nan


class Case(NamedTuple):
    """The numbers that a window's step is found from; None: not given."""

    norm: float = 3.0
    base_weight: float = 1.0
    weight: float | None = None
    scale: float = 1.0
    max_norm: float | None = None
    normalised: bool = False
    checks_norm: bool = True
    overflow: float | None = None
    found_inf: float | None = None
    counted: float | None = None


# A third and a tenth show an operation that is rounded twice.
CASES = [
    Case(norm, base_weight, weight, scale, max_norm)
    for norm, base_weight, weight, scale, max_norm in itertools.product(
        (0.0, 0.1, 7.3), (1.0, 0.1), (None, 3.0), (1.0, 3.0, 65536.0), (None, 0.0, 0.7, 1e9)
    )
]
CASES += [
    Case(max_norm=max_norm, overflow=overflow, found_inf=found_inf, counted=counted)
    for max_norm, overflow, found_inf, counted in itertools.product(
        (None, 0.7), (None, 0.0, 1.0), (None, 0.0, 1.0), (None, 0.0, 2.0)
    )
]
CASES += [
    Case(norm, normalised=normalised, checks_norm=checks_norm, scale=3.0, max_norm=0.7)
    for norm, normalised, checks_norm in itertools.product(
        (0.1, INF, NAN), (False, True), (False, True)
    )
]
CASES += [
    Case(weight=0.0, scale=2.0, max_norm=0.7),
    *(
        Case(scale=scale, max_norm=max_norm)
        for scale in (0.0, INF, NAN)
        for max_norm in (None, 1.0)
    ),
]


class Expected(NamedTuple):
    """Norm, clip coefficient, factor; 1 / factor, skip, found_inf."""

    numbers: list[float]
    flags: list[float]


def expected(case: Case) -> Expected:
    """By the definition, in Python's floats."""
    relative = case.base_weight
    if case.weight is not None:
        relative = case.base_weight / case.weight if case.weight > 0.0 else 0.0
    normaliser = _quotient(relative, case.scale)
    norm = case.norm if case.normalised else case.norm * normaliser
    coef = 1.0
    if case.max_norm is not None:
        coef = case.max_norm / (norm + 1e-6)
        coef = 1.0 if coef > 1.0 else coef
    factor = normaliser * coef
    broken = bool(case.overflow) or not math.isfinite(normaliser)
    broken = broken or (case.checks_norm and not math.isfinite(case.norm))
    found = broken or bool(case.found_inf)
    skip = found if case.counted is None else broken or case.counted == 0.0
    return Expected([norm, coef, factor], [_quotient(1.0, factor), float(skip), float(found)])


def _quotient(a: float, b: float) -> float:
    return a / b if b != 0.0 else math.copysign(INF, a) if a != 0.0 else NAN


def number(value: float | None, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """0-dim, or None."""
    return None if value is None else torch.tensor(value, dtype=dtype)


def operands(case: Case, on_device: bool, norm: bool = True) -> list[Any]:
    """The arguments of the operator after the sums; with `on_device` every number that may be is a
    tensor. Without `norm` the operator is to find it, and what overflows."""
    ledger = [
        number(case.norm) if norm else None,
        number(case.overflow, torch.float32) if norm else None,
        number(case.base_weight) if on_device else None,
        number(case.weight),
        number(case.scale, torch.float32) if on_device or case.scale != 1.0 else None,
        number(case.found_inf, torch.float32),
        number(case.counted),
    ]
    base_weight = NAN if on_device else case.base_weight
    return [ledger, base_weight, case.max_norm, case.normalised, case.checks_norm]


def unwritten() -> tuple[Tensor, Tensor]:
    """Numbers and flags, not yet set."""
    return torch.full((3,), -7.0, dtype=torch.float64), torch.full((3,), -7.0)


def assert_factors(numbers: Tensor, flags: Tensor, case: Case) -> None:
    """Bit for bit; any NaN is NaN."""
    want = expected(case)
    torch.testing.assert_close(
        numbers, torch.tensor(want.numbers, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(flags, torch.tensor(want.flags), rtol=0, atol=0, equal_nan=True)
