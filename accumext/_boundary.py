"""Closing a window: measure its gradient, then clip it and hand it to the wrapped optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext import ops
from accumext._gradients import Scalar, by_device, is_dtensor, on, on_host, plain, scale_
from accumext._window import Window
from accumext.distributed import total_norm


class Measure(NamedTuple):
    """What is known of a window's gradient before the step."""

    norm: Tensor  # [] of the normalised gradient, before clipping
    clip_coef: Scalar
    factor: Scalar  # main gradients to clipped gradient
    skip: Tensor  # [] 1.0 where no step may be taken
    found_inf: Tensor  # [] 1.0 where anything that came in was not finite


def measure(window: Window, max_norm: float | None, norm_type: float, reduction: str) -> Measure:
    """Norm, finite check, clip coefficient and factor, in at most one read of the gradients."""
    window.coalesce()
    grads = list(window.main.values())
    found_inf = window.found_inf(grads[0].device if grads else None)
    broken = torch.zeros_like(found_inf)
    if window.norm is not None and norm_type == 2.0 and not any(map(is_dtensor, grads)):
        main_norm = window.norm
        broken = _not_finite(main_norm)
    else:
        main_norm = total_norm(grads, norm_type, broken)
        if max_norm is not None:  # a norm that overflowed would clip everything to zero
            broken = torch.maximum(broken, _not_finite(main_norm))
    dropped = found_inf if window.survivors is None else (window.survivors == 0).float()
    skip = torch.maximum(broken, dropped.to(broken.device))
    normaliser = window.normaliser(reduction)
    norm = main_norm.double() * normaliser
    clip_coef: Scalar = 1.0
    factor = normaliser
    if max_norm is not None:
        clip_coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = normaliser * clip_coef
    if isinstance(factor, Tensor):  # what is skipped keeps its values, for the report to name
        factor = torch.where(skip > 0, 1.0, factor)
    found_inf = torch.maximum(found_inf, broken)
    return Measure(norm.to(main_norm.dtype), clip_coef, factor, skip, found_inf)


def apply(optimizer: Optimizer, window: Window, measured: Measure) -> Tensor:
    """Put `main * factor` into `.grad` and step, unless the gradient is not finite.

    An optimizer that takes `grad_scale` and `found_inf` multiplies and skips in its own read. For
    any other one the gradients are multiplied in place, and the host reads whether to skip.

    Returns:
        1.0 where the step was skipped (0-dim).
    """
    factor, skip = measured.factor, measured.skip
    takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False) and not any(
        map(is_dtensor, window.main.values())
    )
    mains = window.main.items()
    folded = takes_scale and all(_folds(p, main) for p, main in mains)
    casts: list[tuple[Tensor, ...]] = [(p, main) for p, main in mains if main.dtype != p.dtype]
    scaled = [main for p, main in mains if main.dtype == p.dtype and not folded]
    scale_(scaled, factor)
    try:
        for parameter, main in mains:
            parameter.grad = main if main.dtype == parameter.dtype else None
        for norm in _cast(casts, factor):
            skip = torch.maximum(skip, _not_finite(norm).to(skip.device))
        if (on_host(skip) or not takes_scale) and bool(skip):
            return skip
        if takes_scale:
            _step_scaled(optimizer, factor if folded else 1.0, skip)
        else:
            optimizer.step()
    except BaseException:
        scale_(scaled, 1.0 / factor)
        if not window.attached:
            for parameter in window.main:
                parameter.grad = None
        raise
    return skip


def _step_scaled(optimizer: Optimizer, factor: Scalar, skip: Tensor) -> None:
    """Step with what GradScaler would set; the optimizer divides by grad_scale."""
    attributes = {"grad_scale": None, "found_inf": skip}
    if isinstance(factor, Tensor) or factor != 1.0:
        attributes["grad_scale"] = (torch.ones_like(skip, dtype=torch.float64) / factor).float()
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        optimizer.step()
    finally:
        for name in attributes:
            delattr(optimizer, name)


def _folds(parameter: Tensor, main: Tensor) -> bool:
    """Whether a fused kernel can multiply this gradient; float64 would see a float32 factor."""
    return main.dtype == parameter.dtype != torch.float64 and not main.is_sparse


def _cast(casts: list[tuple[Tensor, ...]], factor: Scalar) -> list[Tensor]:
    """`.grad = main * factor` in the dtype of the parameters; the norms of what is stored."""
    norms = []
    for device, pairs in by_device(casts).items():
        mains = [plain(main) for _, main in pairs]
        grads = [torch.empty_like(main, dtype=parameter.dtype) for parameter, main in pairs]
        scale = on(device, factor)
        norms.append(
            ops.accumulate_([plain(g) for g in grads], mains, inv_scale=scale, overwrite=True)
        )
        for (parameter, _), grad in zip(pairs, grads, strict=True):
            parameter.grad = grad
    return norms


def _not_finite(norm: Tensor) -> Tensor:
    """1.0 where a norm is inf or NaN."""
    return (~norm.isfinite()).float()
