"""What a window's step needs to know, found from the norm of its sums by one operator.

On a device it does so in the launch that finishes the norm. The formula stands here, for the
default kernel, and in csrc/math/window_factors.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accumext import _scalars, ops
from accumext._checks import Reduction
from accumext._scalars import (
    Scalar,
    any_nonfinite,
    as_flag,
    as_tensor,
    at_most_one,
    divide,
    maximum,
    sent,
    to_host_if_free,
)
from accumext._tensor_kinds import zero_flag
from accumext._torch_private import call_of_operator
from accumext.optimizer._window import Window


class Normaliser(NamedTuple):
    """`unit / weight / scale`: what makes the window's gradient of its sums."""

    unit: Scalar = 1.0
    weight: Tensor | None = None  # 0, where nothing counts, makes 0 of everything
    scale: Scalar = 1.0

    def value(self) -> Scalar:
        """The quotient."""
        unit, weight, scale = self
        if weight is not None:
            positive = weight > 0
            unit = unit / torch.where(positive, weight, 1.0) * positive
        return divide(unit, scale)

    @property
    def on_device(self) -> bool:
        """Whether only a device knows it."""
        return self.weight is not None or any(isinstance(n, Tensor) for n in self)


def normaliser(window: Window, reduction: Reduction) -> Normaliser:
    """What makes a window's gradient of its sums; finite also for a zero weight."""
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


def _formula(
    norm: Tensor,  # []
    quotient: Normaliser,
    *,
    max_norm: Scalar | None,  # None: no clip
    normalised: bool,  # the norm is that of the normalised gradient already
    checks_norm: bool,  # a norm that is not finite skips the step
    overflow: Tensor | None,  # []; 1.0 where a sum is not finite
    found_inf: Scalar,  # 1.0 where a gradient that came in was not finite
    finite: Scalar | None,  # micro-batches that were, where the others were left out
) -> WindowFactors:
    """What follows from the norm of the sums."""
    factor, number = quotient.value(), to_host_if_free(norm)
    broken = any_nonfinite(number, factor) if checks_norm else any_nonfinite(factor)
    if overflow is not None:
        broken = maximum(broken, to_host_if_free(overflow))
    if not normalised:
        number = number * factor
    clip_coef: Scalar = 1.0
    if max_norm is not None:
        clip_coef = at_most_one(max_norm / (number + 1e-6))
        factor = factor * clip_coef
    anything = maximum(broken, found_inf)
    skip = anything if finite is None else maximum(broken, as_flag(finite == 0))
    return WindowFactors(number, clip_coef, factor, skip, anything)


def _kernel(
    numbers: Tensor,  # fp64 [3]: norm, clip_coef, factor
    flags: Tensor,  # fp32 [3]: 1 / factor, skip, found_inf
    main_grads: Sequence[Tensor],
    norm: Tensor | None,  # [], as are the tensors that follow
    *,
    unit: float,
    device_unit: Tensor | None,  # in place of unit
    weight: Tensor | None,
    scale: Tensor | None,  # None: 1
    max_norm: float | None,
    normalised: bool,
    checks_norm: bool,
    overflow: Tensor | None,  # None: 0
    found_inf: Tensor | None,  # None: 0
    finite: Tensor | None,
) -> None:
    """The operator in plain PyTorch: in float64, on the device of the numbers."""

    def wide(number: Scalar) -> Scalar:
        return to_host_if_free(as_tensor(number, torch.float64, numbers.device))

    def tensor(number: Scalar) -> Tensor:
        return as_tensor(number, torch.float64, numbers.device)

    if norm is None:
        overflow = zero_flag(numbers.device)
        norm = ops.total_norm(main_grads, found_inf=overflow)
    factors = _formula(
        norm,
        Normaliser(
            wide(unit if device_unit is None else device_unit),
            None if weight is None else tensor(weight),
            wide(1.0 if scale is None else scale),
        ),
        max_norm=max_norm,
        normalised=normalised,
        checks_norm=checks_norm,
        overflow=overflow,
        found_inf=0.0 if found_inf is None else wide(found_inf),
        finite=finite,
    )
    inverse = divide(1.0, factors.factor)
    rows = numbers, (factors.norm, factors.clip_coef, factors.factor)
    for written, values in rows, (flags, (inverse, factors.skip, factors.found_inf)):
        written.copy_(torch.stack([tensor(value) for value in values]))


# Where no norm is given it is the 2-norm of the sums, which are checked, too; else they
# are not looked at.
torch.library.define(
    "accumext::window_factors",
    "(Tensor(a!) numbers, Tensor(b!) flags, Tensor[] main_grads, Tensor? norm, *, float unit, "
    "Tensor? device_unit, Tensor? weight, Tensor? scale, float? max_norm, bool normalised, "
    "bool checks_norm, Tensor? overflow, Tensor? found_inf, Tensor? finite) -> ()",
)
torch.library.impl("accumext::window_factors", "default", _kernel)
torch.library.register_fake("accumext::window_factors", lambda *_, **__: None)

_call = call_of_operator(torch.ops.accumext.window_factors.default)


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
    """What follows from the norm, by the operator; numbers of the host where it has them free."""
    unit, weight, scale = quotient
    found = found_inf if isinstance(found_inf, Tensor) or found_inf != 0.0 else None
    numbers = torch.empty(3, dtype=torch.float64, device=device)
    flags = torch.empty(3, dtype=torch.float32, device=device)
    _call(
        numbers,
        flags,
        [] if norm is not None else sums,
        norm,
        unit=1.0 if isinstance(unit, Tensor) else unit,
        device_unit=sent(unit, device) if isinstance(unit, Tensor) else None,
        weight=weight if weight is None else sent(weight, device),
        scale=None if not isinstance(scale, Tensor) and scale == 1.0 else _there(scale, device),
        max_norm=max_norm,
        normalised=normalised,
        checks_norm=checks_norm,
        overflow=overflow,
        found_inf=None if found is None else _there(found, device),
        finite=None if finite is None else _there(finite, device),
    )
    if _scalars.on_host(numbers):
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


def _there(number: Scalar, device: torch.device) -> Tensor:
    """On the device of the operator."""
    return as_tensor(number, torch.float64, device)
