"""Scalars of a window: floats if the host knows them, else 0-dim tensors on their device.

Arithmetic operators work on both alike, in float64; the functions here do what operators cannot. A
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

# Tells whether the host can read a tensor without waiting for a device. All code that would wait
# calls `scalars.on_host`: a test that replaces it makes CPU tensors be treated as a GPU's.
on_host = attrgetter("is_cpu")


def on_device(number: object) -> TypeIs[Tensor]:
    """Tell whether a number is a tensor, whose value only its device knows."""
    return isinstance(number, Tensor)


def equals(number: Scalar, value: float) -> bool:
    """Tell whether a number is known to the host and equal to this value."""
    return not isinstance(number, Tensor) and number == value


def to_host_if_free(number: Tensor) -> Scalar:
    """Return a 0-dim tensor's value, or the tensor in float64 if reading it would wait."""
    return float(number) if on_host(number) else number.double()


def known_number(value: object) -> float | None:
    """Return a value from outside, such as a learning rate, as a float; None if it is no number, or
    if reading it would wait for a device."""
    if isinstance(value, Tensor) and not on_host(value):
        return None
    with suppress(Exception):
        number = float(value)  # type: ignore[arg-type]
        return None if math.isnan(number) else number
    return None


def as_tensor(
    number: Scalar | int, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Return a 0-dim tensor of the number. Without a device, a tensor stays on its own, and a float
    becomes a tensor on the CPU."""
    if isinstance(number, Tensor):
        return sent(number, device or number.device, dtype)
    # torch.tensor would wait for a GPU
    return torch.full((), number, dtype=dtype, device=device or "cpu")


def sent(number: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device. The host waits only for a copy to the host.

    A copy to the host without waiting could be read before it has arrived.
    """
    return number.to(device, dtype, non_blocking=device.type != "cpu")


def to_device(device: torch.device, number: Scalar) -> Scalar:
    """Return the number as an operator on this device takes it; a float stays a float."""
    if isinstance(number, Tensor):
        return sent(number, device)
    if torch.compiler.is_compiling():  # an operator would be compiled anew for every float
        return as_tensor(number, torch.float64, device)
    return number


def divide(a: Scalar, b: Scalar) -> Scalar:
    """Return `a / b` for numbers of at least 0; floats divided by 0.0 give inf or NaN, too."""
    if isinstance(b, Tensor) and not isinstance(a, Tensor):
        # `a / b` would be the reciprocal of b, times a: one more launch and one more rounding.
        return torch.true_divide(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor) or b != 0.0:
        return a / b
    return math.inf if a > 0.0 else math.nan


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger of two numbers, on the device of the first tensor among them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, sent(b, a.device, a.dtype))
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)
