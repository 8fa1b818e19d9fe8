"""Scalars of a window: floats where the host knows them, else 0-dim tensors on their device.

Arithmetic operators serve both alike, in float64; what they cannot express for both stands here. A
0-dim tensor on the CPU becomes a float at once, since float arithmetic is twenty times as fast.
"""

from __future__ import annotations

import math
from contextlib import suppress
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import TypeIs

Scalar: TypeAlias = float | Tensor

# Tells whether the host can read a tensor without waiting for a device. Everything that would wait
# asks this function of this module: a test that replaces it has a CPU tensor treated as a GPU's.
on_host = attrgetter("is_cpu")


def on_device(number: object) -> TypeIs[Tensor]:
    """Tell whether only a device knows a number: the one place that asks."""
    return isinstance(number, Tensor)


def equals(number: Scalar, value: float) -> bool:
    """Tell whether a number is this one, as far as the host knows."""
    return not isinstance(number, Tensor) and number == value


def to_host_if_free(number: Tensor) -> Scalar:
    """A 0-dim tensor's value, or the tensor in float64 where reading it would wait for a device."""
    return float(number) if on_host(number) else number.double()


def known_number(value: object) -> float | None:
    """The number that a value of somebody else's is, such as a learning rate; None where it is no
    number, or where reading it would wait for a device."""
    if isinstance(value, Tensor) and not on_host(value):
        return None
    with suppress(Exception):
        number = float(value)  # type: ignore[arg-type]
        return None if math.isnan(number) else number
    return None


def as_tensor(
    number: Scalar | int, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """A 0-dim tensor of the number; where it is, or on the CPU, if no device is given."""
    if isinstance(number, Tensor):
        return sent(number, device or number.device, dtype)
    # torch.tensor would wait for a GPU
    return torch.full((), number, dtype=dtype, device=device or "cpu")


def sent(number: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device, which the host waits for only where it is to read it: on the host.

    A copy that `Tensor.to` makes there without waiting may be read before it has arrived.
    """
    return number.to(device, dtype, non_blocking=device.type != "cpu")


def to_device(device: torch.device, number: Scalar) -> Scalar:
    """The number as an operator on this device takes it; a float stays a float."""
    if isinstance(number, Tensor):
        return sent(number, device)
    if torch.compiler.is_compiling():  # an operator would be compiled anew for every float
        return as_tensor(number, torch.float64, device)
    return number


def divide(a: Scalar, b: Scalar) -> Scalar:
    """`a / b` for numbers of at least 0; division by zero gives inf or NaN, as of tensors."""
    if isinstance(b, Tensor) and not isinstance(a, Tensor):
        # `a / b` would be the reciprocal times a: a launch and a rounding more.
        return torch.true_divide(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b != 0.0:
        return a / b
    return math.inf if a > 0.0 else math.nan


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two, on the device of the first tensor among them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, sent(b, a.device, a.dtype))
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)
