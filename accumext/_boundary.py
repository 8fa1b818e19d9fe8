"""Closing a window: measure its gradient, then clip it and hand it to the wrapped optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext import ops
from accumext._gradients import per_device, scale_, zero_flag
from accumext._numbers import (
    Scalar,
    any_of,
    as_tensor,
    at_most_one,
    flag,
    known,
    larger,
    not_finite,
    on,
    quotient,
)
from accumext._window import Window
from accumext.distributed import total_norm


class Measure(NamedTuple):
    """What is known of a window's gradient before the step."""

    norm: Scalar  # of the normalised gradient, before clipping
    norm_dtype: torch.dtype  # float64 if any main gradient is, else float32
    device: torch.device  # of the norm
    clip_coef: Scalar
    factor: Scalar  # main gradients to clipped gradient
    skip: Scalar  # 1.0 where no step may be taken
    found_inf: Scalar  # 1.0 where anything that came in was not finite


def measure(
    optimizer: Optimizer,
    window: Window,
    max_norm: float | None,
    norm_type: float,
    reduction: str,
) -> Measure:
    """Norm, finite check, clip coefficient and factor, in at most one read of the gradients.

    Where the factor is known before the norm and nobody else will multiply, the read also writes.
    """
    window.settle()
    found_inf = window.found_inf()
    if window.norm is not None and norm_type == 2.0:
        main_norm = window.norm
        broken = not_finite(known(main_norm))
    elif max_norm is None and norm_type == 2.0 and _may_normalise(optimizer, window, reduction):
        main_norm, overflow = window.normalise(reduction)
        broken = known(overflow)
    else:
        mains = window.mains.tensors
        overflow = zero_flag(mains[0].device if mains else None)
        norm_of = ops.total_norm if window.mains.plain else total_norm
        main_norm = norm_of(mains, norm_type=norm_type, found_inf=overflow)
        broken = known(overflow)
        if max_norm is not None:  # a norm that overflowed would clip everything to zero
            broken = larger(broken, not_finite(known(main_norm)))
    dropped = found_inf if window.survivors is None else flag(window.survivors == 0)
    skip = larger(broken, dropped)
    normaliser = window.normaliser(reduction)
    norm = known(main_norm) * normaliser
    clip_coef: Scalar = 1.0
    factor = normaliser
    if max_norm is not None:
        clip_coef = at_most_one(quotient(max_norm, norm + 1e-6))
        factor = normaliser * clip_coef
    if isinstance(skip, Tensor):  # what is skipped keeps its values, for the report to name
        factor = torch.where(skip > 0, 1.0, factor)
    return Measure(
        norm=norm,
        norm_dtype=main_norm.dtype,
        device=main_norm.device,
        clip_coef=clip_coef,
        factor=factor,
        skip=skip,
        found_inf=larger(broken, found_inf),
    )


def apply(optimizer: Optimizer, window: Window, measured: Measure) -> Scalar:
    """Put `main * factor` into `.grad` and step, unless the gradient is not finite.

    An optimizer that takes `grad_scale` and `found_inf` multiplies and skips in its own read. For
    any other one the gradients are multiplied in place, and the host reads whether to skip.

    Returns:
        1.0 where the step was skipped.
    """
    factor, skip = measured.factor, measured.skip
    if not isinstance(skip, Tensor) and skip:
        return skip
    mains = window.mains
    takes_scale = _takes_scale(optimizer, window)
    casts = {} if window.attached else mains.casts
    # What divides in a fused kernel is a float32, and only where a gradient is dense.
    folds = takes_scale and mains.dense and not casts and measured.norm_dtype == torch.float32
    whole = mains.without(casts)
    multiplied = [] if folds else whole.tensors
    scale_(multiplied, factor, mains.plain)
    try:
        if not window.attached:
            whole.lend()
        if casts:
            skip = larger(skip, _cast(casts, factor))
        if (not takes_scale or not isinstance(skip, Tensor)) and bool(skip):
            return skip
        if takes_scale:
            _step_scaled(optimizer, factor if folds else 1.0, skip, measured.device)
        else:
            optimizer.step()
    except BaseException:
        scale_(multiplied, quotient(1.0, factor), mains.plain)
        if not window.attached:
            mains.withdraw()
        raise
    return skip


def _takes_scale(optimizer: Optimizer, window: Window) -> bool:
    """Whether the optimizer multiplies with `grad_scale` and skips at `found_inf`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not window.mains.sharded


def _may_normalise(optimizer: Optimizer, window: Window, reduction: str) -> bool:
    """Whether main gradients have to be multiplied in place, and one call can do it."""
    if _takes_scale(optimizer, window) or window.mains.casts or not window.mains.plain:
        return False
    factor = window.normaliser(reduction)
    return bool(window.mains.tensors) and (isinstance(factor, Tensor) or factor != 1.0)


def _step_scaled(optimizer: Optimizer, factor: Scalar, skip: Scalar, device: torch.device) -> None:
    """Step with what GradScaler would set; the optimizer divides by grad_scale."""
    attributes: dict[str, Tensor | None] = {"grad_scale": None, "found_inf": None}
    if isinstance(factor, Tensor) or factor != 1.0:
        attributes["grad_scale"] = as_tensor(quotient(1.0, factor), torch.float32, device)
    if isinstance(skip, Tensor):
        attributes["found_inf"] = skip.float()
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        optimizer.step()
    finally:
        for name in attributes:
            delattr(optimizer, name)


def _cast(casts: dict[Tensor, Tensor], factor: Scalar) -> Scalar:
    """`.grad = main * factor` in the dtype of the parameters; 1.0 where that is not finite."""
    grads = [torch.empty_like(main, dtype=p.dtype) for p, main in casts.items()]
    norms = [
        ops.accumulate_(stored, mains, inv_scale=on(device, factor), overwrite=True)
        for device, (stored, mains) in per_device(grads, list(casts.values()))
    ]
    for parameter, grad in zip(casts, grads, strict=True):
        parameter.grad = grad
    return any_of(not_finite(known(norm)) for norm in norms)
