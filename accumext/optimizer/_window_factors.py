"""What a window's step needs to know, found from the norm of its main gradients.

The formula stands here for numbers of the host and of devices, and in csrc/math/window_factors.h
for the operator, which gives a device all of it in the launch that finishes the norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext._scalars import (
    Scalar,
    any_nonfinite,
    any_set,
    as_flag,
    as_tensor,
    at_most_one,
    divide,
    maximum,
    sent,
    to_device,
    to_host_if_free,
)
from accumext._tensor_kinds import zero_flag


class Normaliser(NamedTuple):
    """`unit / weight / scale`: what makes the window's gradient of its main gradients."""

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


class WindowFactors(NamedTuple):
    """The numbers of a step."""

    norm: Scalar  # of the normalised gradient, before clipping
    clip_coef: Scalar
    factor: Scalar  # main gradients to clipped gradient
    skip: Scalar  # 1.0 where no step may be taken
    found_inf: Scalar  # 1.0 where anything that came in was not finite
    inverse: Tensor | None = None  # 1 / factor in float32, where a device has formed it


def window_factors(
    norm: Tensor,  # []
    quotient: Normaliser,
    *,
    max_norm: Scalar | None,  # None: no clip
    normalised: bool,  # the norm is that of the normalised gradient already
    checks_norm: bool,  # a norm that is not finite skips the step
    overflow: Tensor | None,  # []; 1.0 where a main gradient is not finite
    found_infs: Iterable[Tensor],  # []; 1.0 where a gradient that came in was not finite
    finite: Scalar | None,  # micro-batches that were, where the others were left out
) -> WindowFactors:
    """What follows from the norm of the main gradients."""
    normaliser = quotient.value()
    number = to_host_if_free(norm)
    broken = any_nonfinite(number, normaliser) if checks_norm else any_nonfinite(normaliser)
    if overflow is not None:
        broken = maximum(broken, to_host_if_free(overflow))
    if not normalised:
        number = number * normaliser
    clip_coef: Scalar = 1.0
    factor = normaliser
    if max_norm is not None:
        clip_coef = at_most_one(max_norm / (number + 1e-6))
        factor = normaliser * clip_coef
    anything = maximum(broken, any_set(found_infs))
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
    """`window_factors` on the device of the numbers, in float64."""

    def wide(number: Scalar) -> Tensor:
        return as_tensor(number, torch.float64, numbers.device)

    if norm is None:
        overflow = zero_flag(numbers.device)
        norm = ops.total_norm(main_grads, found_inf=overflow)
    factors = window_factors(
        norm,
        Normaliser(
            wide(unit if device_unit is None else device_unit),
            None if weight is None else wide(weight),
            wide(1.0 if scale is None else scale),
        ),
        max_norm=None if max_norm is None else wide(max_norm),
        normalised=normalised,
        checks_norm=checks_norm,
        overflow=overflow,
        found_infs=[] if found_inf is None else [found_inf],
        finite=finite,
    )
    inverse = divide(wide(1.0), factors.factor)
    rows = numbers, (factors.norm, factors.clip_coef, factors.factor)
    for written, values in rows, (flags, (inverse, factors.skip, factors.found_inf)):
        written.copy_(torch.stack([wide(value) for value in values]))


# Where no norm is given it is the 2-norm of the main gradients, which are checked, too; else they
# are not looked at.
torch.library.define(
    "accumext::window_factors",
    "(Tensor(a!) numbers, Tensor(b!) flags, Tensor[] main_grads, Tensor? norm, *, float unit, "
    "Tensor? device_unit, Tensor? weight, Tensor? scale, float? max_norm, bool normalised, "
    "bool checks_norm, Tensor? overflow, Tensor? found_inf, Tensor? finite) -> ()",
)
torch.library.impl("accumext::window_factors", "default", _kernel)
torch.library.register_fake("accumext::window_factors", lambda *_, **__: None)


def device_factors(
    device: torch.device,
    main_grads: Sequence[Tensor],
    norm: Tensor | None,  # None: their 2-norm, to be found
    normaliser: Normaliser,
    *,
    max_norm: float | None = None,
    normalised: bool = False,
    checks_norm: bool,
    overflow: Tensor | None = None,
    found_inf: Scalar = 0.0,
    finite: Scalar | None = None,
) -> WindowFactors:
    """`window_factors` by the operator; what the host knows of the result stays there."""

    def operand(number: Scalar | None, default: float | None = None) -> Tensor | None:
        if isinstance(number, Tensor):
            return sent(number, device)
        if number is None or number == default:
            return None
        return as_tensor(number, torch.float64, device)

    unit = to_device(device, normaliser.unit)
    numbers = torch.empty(3, dtype=torch.float64, device=device)
    flags = torch.empty(3, dtype=torch.float32, device=device)
    torch.ops.accumext.window_factors(
        numbers,
        flags,
        [] if norm is not None else main_grads,
        operand(norm),
        unit=1.0 if isinstance(unit, Tensor) else unit,
        device_unit=unit if isinstance(unit, Tensor) else None,
        weight=operand(normaliser.weight),
        scale=operand(normaliser.scale, 1.0),
        max_norm=max_norm,
        normalised=normalised,
        checks_norm=checks_norm,
        overflow=operand(overflow),
        found_inf=operand(found_inf, 0.0),
        finite=operand(finite),
    )
    norm, clip_coef, factor = numbers.unbind()
    inverse, skip, found = flags.unbind()
    return WindowFactors(
        norm,
        1.0 if max_norm is None else clip_coef,
        factor if max_norm is not None or normaliser.on_device else normaliser.value(),
        found if finite is None else skip,
        found,
        inverse,
    )
