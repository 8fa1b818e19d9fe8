"""The numbers of a window, and those of its step, which one operator computes from the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext.ops import reference
from accumext.tensors import scalars
from accumext.tensors.checks import Reduction
from accumext.tensors.scalars import Scalar, as_tensor, equals, maximum, sent

_NOT_FOUND: Scalar = 0.0  # nobody has looked for an inf or NaN


class Ledger(NamedTuple):
    """The numbers of a window: floats if the host knows them all, else some are 0-dim tensors.

    `sums[i] = base_scale / base_weight * sum(weight_k * grad_k[i])` over its micro-batches k.

    | number | is |
    |---|---|
    | `micro_batches` | how many micro-batches this process has added |
    | `counted` | how many of them count, if others are left out; None: all of them |
    | `of_all` | how many count on all processes, once the window is summed over them |
    | `weight` | the sum of the weights that count |
    | `base_weight` | the weight with factor 1 in the sums; None while all weights were zero |
    | `base_scale` | the loss scale that the sums carry: that of the one that set `base_weight` |
    | `loss_scale` | the loss scale of the latest micro-batch |
    | `found_inf` | 1 if an inf or NaN was found in a gradient before it was added |
    """

    micro_batches: int = 0
    counted: Scalar | None = None
    of_all: Scalar | None = None
    weight: Scalar = 0.0
    base_weight: Scalar | None = None
    base_scale: Scalar = 1.0
    loss_scale: Scalar = 1.0
    found_inf: Scalar = _NOT_FOUND

    def with_micro_batch(
        self,
        weight: Scalar,
        scale: Scalar,
        base: Scalar | None = None,
        found_inf: Scalar | None = None,
    ) -> tuple[Ledger, Scalar]:
        """Count a micro-batch whose loss had this scale. The first whose weight the host does not
        know to be 0 sets both bases.

        Args:
            base: the base of the weights, if it does not depend on the first weight.
            found_inf: the flag of a check of the gradients, if there was one.

        Returns:
            The ledger, and `weight / base_weight`: gradients are multiplied by it and `base_scale`.
        """
        first = self.base_weight is None
        ratio: Scalar = 1.0
        if not first or base is not None:
            base = base if first else self.base_weight
            ratio = 1.0 if weight is base else weight / base  # type: ignore[operator]
        elif isinstance(weight, Tensor):  # the base is a divisor, so a zero on a device becomes 1
            base, ratio = torch.where(weight > 0, weight, 1.0), (weight > 0).double()
        elif weight == 0.0:
            ratio = 0.0
        else:
            base = weight
        found = self.found_inf if found_inf is None else maximum(self.found_inf, found_inf)
        after = Ledger(
            self.micro_batches + 1,
            self.counted,
            None,
            self.weight + weight,
            base,
            scale if first else self.base_scale,
            scale,
            found,
        )
        return after, ratio

    def with_larger_base(self, weight: Scalar) -> tuple[Ledger, Scalar]:
        """Return the ledger with the largest weight as base, so that no loss is multiplied by more
        than its scale: gradients of half precision could overflow.

        Returns:
            Also the factor by which the sums are to be multiplied.
        """
        base = self.base_weight
        if base is None:
            return self, 1.0
        larger = maximum(weight, base)
        return (self, 1.0) if larger is base else (self._replace(base_weight=larger), base / larger)

    def quotient(self, reduction: Reduction) -> Quotient:
        """Return the factor from sums to the window's gradient; finite also for weight 0."""
        base, weight, scale = self.base_weight, self.weight, self.base_scale
        base = 1.0 if base is None else base
        if reduction == "sum":
            weight = 1.0
        elif isinstance(weight, Tensor):
            return Quotient(base, weight, _UNSCALED if equals(scale, 1.0) else scale)
        quotient = base / (weight or base)
        if isinstance(scale, Tensor) or scale == 0.0:
            return Quotient(quotient, None, scale)
        return Quotient(quotient / scale)


_UNSCALED: Scalar = 1.0


class Quotient(NamedTuple):
    """`base_weight / weight / base_scale`, of which the host has divided what it knows."""

    numerator: Scalar = 1.0  # base_weight, divided by what is not among the following two
    weight: Tensor | None = None  # if it is 0, as if nothing counts, the value is 0
    base_scale: Scalar = _UNSCALED

    def value(self) -> Scalar:
        """Return the quotient as one number."""
        if self.weight is None and self.base_scale is _UNSCALED:
            return self.numerator
        return reference.window_quotient(*self)

    @property
    def on_device(self) -> bool:
        """True if only a device knows the value."""
        numerator, weight, scale = self
        return weight is not None or isinstance(numerator, Tensor) or isinstance(scale, Tensor)


class StepFactors(NamedTuple):
    """The numbers of a step."""

    norm: Scalar  # of the normalised gradient, before clipping
    clip_coef: Scalar
    factor: Scalar  # from sums to the clipped gradient
    skip: Scalar  # 1.0 if no step may be taken
    found_inf: Scalar  # 1.0 if any gradient that was to be added was not finite
    inverse: Tensor | None = None  # 1 / factor in float32, if it is on a device


def step_factors(
    ledger: Ledger,
    quotient: Quotient,
    max_norm: float | None,
    *,
    device: torch.device,
    sums: Sequence[Tensor],
    norm: Tensor | None,  # None: the operator computes their 2-norm
    overflow: Tensor | None,  # not 0 if a sum is not finite; None: 0
    normalised: bool,  # the norm is that of the normalised gradient
    checks_norm: bool,  # a norm that is not finite skips the step
) -> StepFactors:
    """Return the numbers of a step, which the operator computes from the norm; floats if reading
    them does not wait for a device."""
    base, weight, scale = quotient
    found_inf, counted, wide = ledger.found_inf, ledger.counted, torch.float64
    device_base = sent(base, device) if isinstance(base, Tensor) else None
    numbers = torch.empty(3, dtype=wide, device=device)
    flags = torch.empty(3, dtype=torch.float32, device=device)
    ops.WINDOW_FACTORS(
        numbers,
        flags,
        [] if norm is not None else sums,
        [
            norm,
            overflow,
            device_base,
            None if weight is None else sent(weight, device),
            None if scale is _UNSCALED else as_tensor(scale, wide, device),
            None if found_inf is _NOT_FOUND else as_tensor(found_inf, wide, device),
            None if counted is None else as_tensor(counted, wide, device),
        ],
        base if device_base is None else 1.0,
        max_norm,
        normalised,
        checks_norm,
    )
    if scalars.on_host(numbers):
        (total, clip_coef, factor), (_, skip, anything) = numbers.tolist(), flags.tolist()
        return StepFactors(total, clip_coef, factor, skip, anything)
    total, clip_coef, factor = numbers.unbind()
    inverse, skip, anything = flags.unbind()
    return StepFactors(
        total,
        1.0 if max_norm is None else clip_coef,
        factor if max_norm is not None or quotient.on_device else quotient.value(),
        anything if counted is None else skip,
        anything,
        inverse,
    )
