"""Numbers about a window: floats where the host knows them, elsewhere 0-dim tensors on the device.

Operators serve both alike, in float64; what they cannot say for both stands here. A 0-dim tensor on
the CPU becomes a float at once: arithmetic on those takes a twentieth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

Scalar: TypeAlias = float | Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether the host can read the tensor without waiting for a device."""
    return tensor.is_cpu


def known(number: Tensor) -> Scalar:
    """A 0-dim tensor's value, or the tensor in float64 where reading would wait for a device."""
    return float(number) if on_host(number) else number.double()


def as_tensor(
    number: Scalar | int, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """A 0-dim tensor of the number; on its own device where none is given."""
    if isinstance(number, Tensor):
        return number.to(device, dtype, non_blocking=True)
    return torch.full((), number, dtype=dtype, device=device)  # torch.tensor would wait for a GPU


def on(device: torch.device, number: Scalar) -> Scalar:
    """The number where it is needed; a float is at home everywhere."""
    if isinstance(number, Tensor):
        return number.to(device, non_blocking=True)
    if torch.compiler.is_compiling():  # an operator would be compiled anew for every float
        return torch.tensor(number, dtype=torch.float64, device=device)
    return number


def quotient(a: Scalar, b: Scalar) -> Scalar:
    """`a / b` for numbers of at least 0, by zero as tensors divide."""
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b != 0.0:
        return a / b
    return math.inf if a > 0.0 else math.nan


def larger(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two, on the device of the first tensor among them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b.to(a.device, a.dtype, non_blocking=True))
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def any_of(flags: Iterable[Scalar]) -> Scalar:
    """1.0 where any of the flags is; 0.0 if there are none."""
    result: Scalar = 0.0
    for number in flags:
        result = larger(result, number)
    return result


def at_most_one(number: Scalar) -> Scalar:
    """`min(number, 1)`; NaN stays."""
    return number.clamp(max=1.0) if isinstance(number, Tensor) else min(number, 1.0)


def flag(condition: Tensor | bool) -> Scalar:
    """1.0 where the condition holds, else 0.0."""
    return condition.double() if isinstance(condition, Tensor) else float(condition)


def not_finite(number: Scalar) -> Scalar:
    """1.0 where a number is inf or NaN."""
    return flag(~number.isfinite() if isinstance(number, Tensor) else not math.isfinite(number))
