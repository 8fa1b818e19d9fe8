"""clip_grad_norm_: torch's function over the operators total_norm and scale_."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accumext.ops import reference, scale_, total_norm
from accumext.ops.any_tensors import (
    count_nonzero,
    global_norm,
    group_by_device,
)
from accumext.ops.wgrad_fusion import say_nothing_to_clip
from accumext.tensors import checks, scalars
from accumext.tensors.kinds import (
    coalesced,
    is_dtensor,
    zero_flag,
)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_`, in one read, and one write only if it clips.

    `grad = grad * min(1, max_norm / (total_norm + 1e-6))`, in place, over all gradients as one
    vector.

    Args:
        parameters: an iterable of tensors, or one tensor. Those without a gradient are ignored;
            dtypes and devices may differ. A sparse gradient counts with its coalesced values, a
            DTensor (of `fully_shard`) with those of all processes, which must call this together. A
            gradient that several parameters share counts, and is scaled, once for each of them.
        max_norm: the largest norm the gradients may keep. A number or a tensor of one element,
            which is read from its device. Any value goes into the formula, as in torch: a negative
            one negates the gradients, NaN makes them NaN.
        norm_type: p of the p-norm, or `inf` for the largest magnitude; 0 counts the gradients that
            are not all zero, as torch does.
        error_if_nonfinite: raise if the norm is not finite. Reads the device.
        foreach: accepted for torch's signature; there is one implementation.

    Returns:
        The norm before clipping, on the device of the first gradient, 0-dim, float32 also for half
        gradients (torch rounds it to their dtype), float64 if a gradient is. If all gradients are
        DTensors of one mesh, it is a replicated DTensor, so that `norm.full_tensor()` works as with
        torch's, and needs no communication.

    Raises:
        ValueError: `norm_type` is NaN, `max_norm` has more elements than one, or a gradient
            overlaps itself.
        TypeError: a gradient is not floating point, `max_norm` or `norm_type` not a number, or
            `error_if_nonfinite` not a bool.
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
        iterable, got = "be a tensor or an iterable of tensors", checks.type_name(parameters)
        checks.fail_type("clip_grad_norm_", "parameters", iterable, got)
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn("`parameters` is an empty generator, nothing is clipped.", stacklevel=3)
    parameters = list(parameters)
    p, limit = checks.clip_limits(max_norm, norm_type, error_if_nonfinite, foreach)
    grads: list[Tensor] = []
    try:  # as if all were dense gradients on one device: else the operator raises
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        norm, usual = total_norm(grads, norm_type=p), True
    except (AttributeError, RuntimeError, TypeError, ValueError):
        checks.clip_grad_norm_(parameters)
        norm, usual = _norm_anywhere(grads, p), False
    if not grads:
        say_nothing_to_clip(parameters)
    if error_if_nonfinite and not norm.isfinite():
        advice = "To scale by a non-finite norm anyway, set error_if_nonfinite=False"
        op, got = "clip_grad_norm_", norm.item()
        raise RuntimeError(checks.message(op, "total_norm", "be finite", got, advice))
    coef = reference.clip_coef(norm, limit)
    if not (scalars.on_host(coef) and coef == 1.0):
        try:
            for device, (mine,) in group_by_device(grads, one_call=usual):
                scale_(mine, coef.to(device))
        except ValueError:  # a gradient overlaps itself: say which
            checks.clip_grad_norm_(parameters)
            raise
    return norm if usual else _on_mesh_of(grads, norm)


def _norm_anywhere(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of gradients of any kind, on the device of the first."""
    if norm_type == 0:
        return count_nonzero(grads)
    flag = zero_flag(grads[0].device)
    return global_norm(list(map(coalesced, grads)), norm_type=norm_type, found_inf=flag)


def _on_mesh_of(grads: list[Any], norm: Tensor) -> Tensor:
    """Return the norm, as a replicated DTensor if all gradients are DTensors of one mesh."""
    if not grads or not all(map(is_dtensor, grads)):
        return norm
    mesh = grads[0].device_mesh
    if any(grad.device_mesh != mesh for grad in grads):
        return norm
    from torch.distributed.tensor import DTensor, Replicate  # here, as its import takes long

    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
