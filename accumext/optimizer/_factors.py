"""The numbers that a window's step needs, found from the norm of its sums by one operator.

On a device it does so in the launch that finishes the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext.ops import reference
from accumext.optimizer._window import Window
from accumext.tensors import scalars
from accumext.tensors.checks import Reduction
from accumext.tensors.scalars import Scalar, as_tensor, sent


class Normaliser(NamedTuple):
    """`unit / weight / scale`: what makes the window's gradient of its sums."""

    unit: Scalar = 1.0
    weight: Tensor | None = None  # 0, where nothing counts, makes 0 of everything
    scale: Scalar = 1.0

    def value(self) -> Scalar:
        """The quotient."""
        return reference.window_quotient(*self)

    @property
    def on_device(self) -> bool:
        """True if only a device knows the quotient."""
        return self.weight is not None or any(isinstance(n, Tensor) for n in self)


def normaliser(window: Window, reduction: Reduction) -> Normaliser:
    """Return the quotient that makes a window's gradient of its sums; finite also for weight 0."""
    unit, weight, scale = window.unit, window.weight, window.scale
    unit = 1.0 if unit is None else unit
    if reduction == "sum":
        weight = 1.0
    elif isinstance(weight, Tensor):
        return Normaliser(unit, weight, scale)
    quotient = unit / (weight or unit)
    if isinstance(quotient, Tensor) or isinstance(scale, Tensor) or scale == 0.0:
        return Normaliser(quotient, None, scale)
    return Normaliser(quotient / scale)


class WindowFactors(NamedTuple):
    """The numbers of a step."""

    norm: Scalar  # of the normalised gradient, before clipping
    clip_coef: Scalar
    factor: Scalar  # sums to clipped gradient
    skip: Scalar  # 1.0 where no step may be taken
    found_inf: Scalar  # 1.0 where anything that came in was not finite
    inverse: Tensor | None = None  # 1 / factor in float32, where a device has formed it


def window_factors(
    device: torch.device,
    sums: Sequence[Tensor],
    norm: Tensor | None,  # None: their 2-norm, to be found
    quotient: Normaliser,
    max_norm: float | None = None,
    *,
    normalised: bool = False,
    checks_norm: bool,
    overflow: Tensor | None = None,
    found_inf: Scalar = 0.0,
    finite: Scalar | None = None,
) -> WindowFactors:
    """Return the numbers that follow from the norm, by the operator; numbers of the host where it
    has them free."""
    unit, weight, scale = quotient
    wide = torch.float64
    ones = not isinstance(scale, Tensor) and scale == 1.0
    none_found = not isinstance(found_inf, Tensor) and found_inf == 0.0
    numbers = torch.empty(3, dtype=wide, device=device)
    flags = torch.empty(3, dtype=torch.float32, device=device)
    ops.WINDOW_FACTORS(
        numbers,
        flags,
        [] if norm is not None else sums,
        norm,
        unit=1.0 if isinstance(unit, Tensor) else unit,
        device_unit=sent(unit, device) if isinstance(unit, Tensor) else None,
        weight=None if weight is None else sent(weight, device),
        scale=None if ones else as_tensor(scale, wide, device),
        max_norm=max_norm,
        normalised=normalised,
        checks_norm=checks_norm,
        overflow=overflow,
        found_inf=None if none_found else as_tensor(found_inf, wide, device),
        finite=None if finite is None else as_tensor(finite, wide, device),
    )
    if scalars.on_host(numbers):
        (total, clip_coef, factor), (_, skip, anything) = numbers.tolist(), flags.tolist()
        return WindowFactors(total, clip_coef, factor, skip, anything)
    total, clip_coef, factor = numbers.unbind()
    inverse, skip, anything = flags.unbind()
    return WindowFactors(
        total,
        1.0 if max_norm is None else clip_coef,
        factor if max_norm is not None or quotient.on_device else quotient.value(),
        anything if finite is None else skip,
        anything,
        inverse,
    )
