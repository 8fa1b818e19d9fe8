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
from accumext._scalars import Scalar, as_tensor, divide, maximum, sent, to_host_if_free
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


def _kernel(
    numbers: Tensor,  # fp64 [3]: norm, clip_coef, factor
    flags: Tensor,  # fp32 [3]: 1 / factor, skip, found_inf
    main_grads: Sequence[Tensor],  # the sums, looked at where no norm is given
    norm: Tensor | None,  # []; None: their 2-norm, and whether they are finite, is found
    *,
    unit: float,
    device_unit: Tensor | None,  # [], as are the tensors that follow; in place of unit
    weight: Tensor | None,
    scale: Tensor | None,  # None: 1
    max_norm: float | None,  # None: no clip
    normalised: bool,  # the norm is that of the normalised gradient already
    checks_norm: bool,  # a norm that is not finite skips the step
    overflow: Tensor | None,  # 1.0 where a sum is not finite; None: 0
    found_inf: Tensor | None,  # 1.0 where a gradient that came in was not finite; None: 0
    finite: Tensor | None,  # micro-batches that were, where the others were left out
) -> None:
    """The operator in plain PyTorch; on the host, in numbers. In float64 either way."""
    device, wide = numbers.device, torch.float64
    if norm is None:
        overflow = zero_flag(device)
        norm = ops.total_norm(main_grads, found_inf=overflow)
    if device_unit is None:  # a number divided by a tensor would be rounded twice
        device_unit = as_tensor(unit, wide, device)
    factor = Normaliser(
        to_host_if_free(device_unit),
        None if weight is None else as_tensor(weight, wide, device),
        1.0 if scale is None else to_host_if_free(scale),
    ).value()
    total = to_host_if_free(norm)
    broken = _scalars.any_nonfinite(total if checks_norm else 0.0, factor)
    if overflow is not None:
        broken = maximum(broken, to_host_if_free(overflow))
    if not normalised:
        total = total * factor
    clip_coef: Scalar = 1.0
    if max_norm is not None:
        clip_coef = _scalars.at_most_one(max_norm / (total + 1e-6))
        factor = factor * clip_coef
    anything = broken if found_inf is None else maximum(broken, to_host_if_free(found_inf))
    skip = anything if finite is None else maximum(broken, _scalars.as_flag(finite == 0))
    rows = (total, clip_coef, factor), (divide(1.0, factor), skip, anything)
    for written, row in zip((numbers, flags), rows, strict=True):
        written.copy_(torch.stack([as_tensor(number, wide, device) for number in row]))


_SCHEMA = torch.library.infer_schema(_kernel, mutates_args=("numbers", "flags"))
torch.library.define("accumext::window_factors", _SCHEMA)
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
    wide = torch.float64
    ones = not isinstance(scale, Tensor) and scale == 1.0
    none_found = not isinstance(found_inf, Tensor) and found_inf == 0.0
    numbers = torch.empty(3, dtype=wide, device=device)
    flags = torch.empty(3, dtype=torch.float32, device=device)
    _call(
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
