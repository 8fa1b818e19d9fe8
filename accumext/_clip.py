"""clip_grad_norm_: torch's function over the operators total_norm and scale_."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from accumext import _checks, reference
from accumext._numbers import on_host
from accumext.ops import scale_, total_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` in one read, and one write only where it clips.

    `grad = grad * min(1, max_norm / (total_norm + 1e-6))`, in place, over all gradients as one
    vector.

    Args:
        parameters: an iterable of tensors, or one tensor. Those without a gradient are passed over;
            dtypes and devices may differ. A sparse gradient counts with its coalesced values.
        max_norm: the largest norm the gradients may keep.
        norm_type: p of the p-norm, any nonzero number, or `inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is not finite. This alone reads the device.
        foreach: accepted for torch's signature; there is one implementation.

    Returns:
        The norm before clipping, on the device of the first gradient: 0-dim, float32 also for half
        gradients (torch rounds it to their dtype), float64 if a gradient is.

    Raises:
        ValueError: `max_norm` is negative or NaN, `norm_type` is 0 or NaN, or a gradient overlaps
            itself.
        TypeError: a gradient is not floating point.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; nothing was scaled.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> parameter.grad = torch.tensor([3.0, 4.0])
        >>> accumext.clip_grad_norm_([parameter], max_norm=1.0)
        tensor(5.)
        >>> parameter.grad
        tensor([0.6000, 0.8000])
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, Iterable):
        iterable, got = "be a tensor or an iterable of tensors", _checks.type_name(parameters)
        _checks.fail_type("clip_grad_norm_", "parameters", iterable, got)
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn("`parameters` is an empty generator, nothing is clipped.", stacklevel=3)
    parameters = list(parameters)
    p = float(norm_type) if norm_type in ("inf", "-inf") else norm_type  # as torch does
    p = _checks.clip_limits(max_norm, p, foreach)
    try:  # dense gradients on one device: where they are not, the operator finds out
        groups = [[grad for parameter in parameters if (grad := parameter.grad) is not None]]
        norms = [total_norm(groups[0], norm_type=p)]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        _checks.clip_grad_norm_(parameters)
        by_device = _by_device(parameters)
        groups = [[_values(grad) for grad in grads] for grads in by_device]
        norms = [
            total_norm([_values(_coalesced(grad)) for grad in grads], norm_type=p)
            for grads in by_device
        ]
    if len(norms) == 1:
        norm = norms[0]
    else:
        norm = total_norm([n.to(norms[0].device) for n in norms], norm_type=p)
    if error_if_nonfinite and not norm.isfinite():
        advice = "To scale by a non-finite norm anyway, set error_if_nonfinite=False"
        op, got = "clip_grad_norm_", norm.item()
        raise RuntimeError(_checks.message(op, "total_norm", "be finite", got, advice))
    coef = reference.clip_coef(norm, max_norm)
    if on_host(coef) and coef == 1.0:
        return norm
    for grads, device_norm in zip(groups, norms, strict=True):
        try:
            scale_(grads, coef.to(device_norm.device))
        except ValueError:  # a gradient overlaps itself: say which
            _checks.clip_grad_norm_(parameters)
            raise
    return norm


def _by_device(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """The gradients, grouped by the device they lie on."""
    groups: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(parameter.grad.device, []).append(parameter.grad)
    return list(groups.values())


def _values(grad: Tensor) -> Tensor:
    """The memory of the gradient; if uncoalesced, terms that add up to its elements."""
    return grad._values() if grad.is_sparse else grad


def _coalesced(grad: Tensor) -> Tensor:
    """The same gradient with each element stored once."""
    return grad.coalesce() if grad.is_sparse else grad
