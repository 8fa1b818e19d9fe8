"""The gradient of a window, formed of its sums: measured in one read, and multiplied in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext.ops.any_tensors import global_norm
from accumext.optimizer._grads import is_none, present
from accumext.optimizer._ledger import Ledger, Quotient, StepFactors, step_factors
from accumext.optimizer._settings import Settings
from accumext.optimizer._sums import multiply, products
from accumext.optimizer._window import Phase, Window
from accumext.tensors import memory_overlap, scalars
from accumext.tensors.kinds import (
    coalesced,
    dtype_of,
    fit_one_call,
    local_tensors,
    zero_flag,
)
from accumext.tensors.scalars import Scalar, as_tensor, divide, equals, on_device, to_device

_WIDE = {torch.float64, torch.complex128}
UNDIVIDED: Scalar = 1.0  # this object: no divisor is left to the optimizer


class InPlace:
    """Multiplications of gradients in place, which can be undone after an exception."""

    def __init__(self) -> None:
        self.done: list[Any] = []  # not empty as soon as they are multiplied
        self._tensors: Sequence[Tensor] = ()
        self._factor: Scalar = 1.0

    def multiply(self, tensors: Sequence[Tensor], factor: Scalar, one_call: bool) -> None:
        """Multiply, and note it so that no signal can come in between."""
        self._tensors, self._factor = tensors, factor
        if one_call and not isinstance(factor, Tensor):
            torch.autograd.graph.increment_version(tensors)
            self.done.extend(map(partial(ops.SCALE, tensors), (factor,)))
        else:
            multiply(self.done, tensors, factor)

    def multiply_and_measure(
        self, tensors: Sequence[Tensor], factor: Scalar, number: Scalar, found_inf: Tensor
    ) -> Tensor:
        """Multiply by `number`, which is `factor` as the device of the tensors takes it. Return the
        norm of the products."""
        self._tensors, self._factor = tensors, factor
        ops.accumulate_recorded(
            self.done, tensors, tensors, inv_scale=number, found_inf=found_inf, overwrite=True
        )
        norm: Tensor = self.done[0]
        return norm

    def undo(self) -> None:
        """Divide by the factor again, which restores the gradient up to a rounding."""
        if self.done:
            multiply([], self._tensors, divide(1.0, self._factor))


class Operands(NamedTuple):
    """The sums of a window as operands of operators."""

    grads: Sequence[Tensor | None]  # by parameter
    tensors: Sequence[Tensor]  # those that are not None
    in_grad: bool  # they are the user's tensors in `.grad`
    one_call: bool  # one operator call can take all of them
    device: torch.device
    dtypes: list[torch.dtype]  # of `tensors`
    dtype: torch.dtype  # of their norm

    @classmethod
    def untouched(cls, in_grads: Sequence[Tensor | None]) -> Operands:
        """Return gradients in `.grad` that no operator is to take."""
        return cls(in_grads, (), True, False, torch.device("cpu"), [], torch.float32)

    @classmethod
    def in_window(cls, window: Window, in_grads: Sequence[Tensor | None]) -> Operands:
        """Return the sums of a window that is in the order of the parameters. `in_grads` are the
        gradients in `.grad`, used if those are the sums."""
        in_grad = window.phase is Phase.IN_GRAD
        grads = in_grads if in_grad else window.sums
        tensors: Any = present(grads) if any(map(is_none, grads)) else grads
        device = tensors[0].device if tensors else torch.device("cpu")
        dtypes = list(map(dtype_of, tensors))
        dtype = torch.float32 if _WIDE.isdisjoint(dtypes) else torch.float64
        one_call = fit_one_call(tensors)
        if not one_call:  # norms of sparse gradients need entries of one index to be summed
            grads = [None if g is None else coalesced(g) for g in grads]
            tensors = present(grads)
        return cls(grads, tensors, in_grad, one_call, device, dtypes, dtype)

    def norm(self, norm_type: float, inv_scale: Scalar, found_inf: Tensor) -> Tensor:
        """Return the norm of the sums times a factor."""
        norm_of = ops.total_norm if self.one_call else global_norm
        return norm_of(self.tensors, norm_type=norm_type, inv_scale=inv_scale, found_inf=found_inf)

    def casts(self, stepped_on: Sequence[Tensor]) -> list[int]:
        """Return the indices of sums whose dtype is not that of the tensor that is stepped on, such
        as float32 sums of a bfloat16 parameter."""
        grads = self.grads
        if self.tensors is grads and list(map(dtype_of, stepped_on)) == self.dtypes:
            return []
        pairs = enumerate(zip(grads, stepped_on, strict=True))
        return [i for i, (grad, p) in pairs if grad is not None and grad.dtype != p.dtype]

    def may_write(self) -> bool:
        """Tell whether the sums may be multiplied in place. Sums of the window's own may. A tensor
        in `.grad` may share memory, be an inference tensor, or a lazy conjugate or negation."""
        if not self.in_grad:
            return True
        parts = local_tensors(self.tensors)
        for apart in (Tensor.is_inference, Tensor.is_neg, Tensor.is_conj):
            if any(map(apart, parts)):
                return False
        return not memory_overlap.any_shared(parts)


def measure(
    sums: Operands,
    window: Window,
    settings: Settings,
    looks: bool,  # for inf and NaN
    in_place: InPlace,
    stepped_on: Sequence[Tensor],
    fused: bool,  # whether the optimizer divides, and may be told by a device not to step
    divides: bool,  # whether it may divide gradients of any kind
) -> tuple[StepFactors, torch.dtype]:
    """Find the norm, the clip coefficient, the factor and whether to skip, in at most one read of
    the gradients, or up to four if powers of their elements overflow. Without clipping, the factor
    does not depend on the norm, and the same pass multiplies by it. Returns also the norm's dtype.
    """
    quotient, norm_type = window.ledger.quotient(settings.reduction), settings.norm_type
    if settings.max_norm is None and not looks:
        factors = StepFactors(math.nan, 1.0, quotient.value(), 0.0, 0.0)
        return _unchecked(factors, window, fused, sums.device), sums.dtype
    norm, overflow, normalised = None, None, False
    plain = norm_type == 2.0 and sums.one_call and bool(sums.tensors)
    if window.norm is not None and norm_type == 2.0 and not sums.in_grad:
        norm = window.norm
    elif not plain or (
        settings.max_norm is None
        and not divides
        and _multiplies(quotient)
        and not sums.casts(stepped_on)
        and sums.may_write()
    ):
        norm, overflow = _normalised(sums, quotient, norm_type, in_place if plain else None)
        normalised = True
    elif settings.max_norm is None and (found := _if_finite(sums, window.ledger, quotient)):
        return found, sums.dtype
    checks_norm = settings.max_norm is not None or (norm is not None and not normalised)
    dtype, retries = sums.dtype, 1 if normalised else 2
    while True:
        factors = step_factors(
            window.ledger, quotient, settings.max_norm, device=sums.device, sums=sums.tensors,
            norm=norm, overflow=overflow, normalised=normalised,
            checks_norm=checks_norm,  # a norm that overflowed would make all gradients zero
        )  # fmt: skip
        if not looks:
            return _unchecked(factors, window, fused, sums.device), dtype
        if factors.inverse is not None and not fused:
            factors = factors._replace(skip=to_host(factors.skip))
        total, skip = factors.norm, factors.skip
        if factors.inverse is not None and (on_device(skip) or not skip):
            return factors, dtype
        broken = overflow is not None and overflow  # an element is inf or NaN
        if math.isfinite(total) or not retries or broken:
            return factors, dtype
        # Powers of the elements may have overflowed: try again with a multiple of the gradient.
        retries -= 1
        if retries:
            norm, overflow = _normalised(sums, quotient, norm_type)
        else:
            scale = 1.0 if in_place.done else quotient.value()
            norm, overflow, dtype = *_rescaled(sums, scale, norm_type), torch.float64
        normalised, checks_norm = True, settings.max_norm is not None


def _if_finite(sums: Operands, ledger: Ledger, quotient: Quotient) -> StepFactors | None:
    """Return the numbers of a step without a clip if the host knows them, and nothing stands
    against the step: a finite norm tells that all elements are."""
    if not scalars.on_host(sums.tensors[0]) or quotient.on_device:
        return None
    if ledger.counted is not None or not equals(ledger.found_inf, 0.0):
        return None
    norm, factor = ops.TOTAL_NORM(sums.tensors, inv_scale=1.0), quotient.value()
    total = float(norm) * factor
    return StepFactors(total, 1.0, factor, 0.0, 0.0) if math.isfinite(total) else None


def _unchecked(
    factors: StepFactors, window: Window, fused: bool, device: torch.device
) -> StepFactors:
    """Return the numbers of a step that only the flag of a GradScaler leaves out."""
    factor, inverse, found_inf = factors.factor, factors.inverse, window.ledger.found_inf
    if not on_device(factor) and math.isnan(factor):  # which operators refuse as a number
        factor = as_tensor(factor, torch.float64, device)
    if on_device(factor) and inverse is None:
        inverse = torch.reciprocal(factor).float()
    skip = found_inf if fused else to_host(found_inf)
    return factors._replace(factor=factor, skip=skip, found_inf=found_inf, inverse=inverse)


def to_host(flag: Scalar) -> Scalar:
    """Read a flag, which waits for its device. Meta tensors have no value: they give 0."""
    if on_device(flag):
        return 0.0 if flag.is_meta else float(bool(flag))
    return flag


def _multiplies(quotient: Quotient) -> bool:
    """Tell whether the quotient is a factor other than 1, or may be one on a device."""
    if quotient.on_device:
        return True
    factor = quotient.value()
    return on_device(factor) or (math.isfinite(factor) and factor != 1.0)


def _normalised(
    sums: Operands, quotient: Quotient, norm_type: float, in_place: InPlace | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of the normalised gradient, and a flag that is not 0 if an element is not
    finite. With `in_place` the same pass multiplies the sums."""
    factor, flag = quotient.value(), zero_flag(sums.device)
    finite = on_device(factor) or math.isfinite(factor)  # else the step is skipped anyway
    number = to_device(sums.device, factor if finite else 1.0)
    if in_place is not None:
        return in_place.multiply_and_measure(sums.tensors, factor, number, flag), flag
    return sums.norm(norm_type, number, flag), flag


def _rescaled(sums: Operands, factor: Scalar, norm_type: float) -> tuple[Tensor, Tensor]:
    """Return the same in float64, after powers of the elements have overflowed: the norm of the
    gradient divided by its largest element, times that. It reads twice, and waits for the device.
    """
    factor, flag = to_device(sums.device, factor), zero_flag(sums.device)
    largest = float(sums.norm(math.inf, factor, flag))
    least = torch.finfo(sums.dtype).tiny  # a subnormal number would lose digits
    inverse = max(float(factor) / largest, least)
    norm = sums.norm(norm_type, inverse, flag)
    return norm.double() * (float(factor) / inverse), flag


def form(
    sums: Operands,
    factors: StepFactors,
    dtype: torch.dtype,  # of their norm
    in_place: InPlace,
    stepped_on: Sequence[Tensor],
    fused: bool,
) -> tuple[Sequence[Tensor | None], Scalar, Sequence[Tensor]]:
    """Multiply the sums by the factor: in place, or in new memory if they are cast or may not be
    written, or not at all if the optimizer divides by the inverse.

    Returns:
        The gradient as the optimizer is to see it, the divisor that the optimizer is to use, and
        the norms of gradients that were rounded to half precision.
    """
    factor = factors.factor
    one = factors.inverse is None and factor == 1.0
    if in_place.done or (one and sums.in_grad):  # as the bare optimizer finds it
        return sums.grads, UNDIVIDED, ()
    casts = sums.casts(stepped_on)
    if one and not casts:
        return sums.grads, UNDIVIDED, ()
    # A fused kernel divides by a float32 and writes the quotients back.
    dense = sums.one_call or not any(grad.is_sparse for grad in sums.tensors)
    folds = fused and dense and not casts and dtype == torch.float32
    everything = sums.in_grad and not sums.may_write()
    if folds and not everything:
        divisor = divide(1.0, factor) if factors.inverse is None else factors.inverse
        return sums.grads, divisor, ()
    grads: Any = sums.grads
    tensors, norms = sums.tensors, list[Tensor]()
    if casts or everything:
        grads = list(grads)
        rest = [i for i, g in enumerate(grads) if g is not None and i not in set(casts)]
        for indices in (casts, rest if everything else []):
            dtypes = [stepped_on[i].dtype for i in indices]
            made, found = products([grads[i] for i in indices], dtypes, factor)
            norms += found if indices is casts else []
            for i, product in zip(indices, made, strict=True):
                grads[i] = product
        tensors = [] if everything else [grads[i] for i in rest]
    if not one:
        in_place.multiply(tensors, factor, sums.one_call)
    return grads, UNDIVIDED, norms
