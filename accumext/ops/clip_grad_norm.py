"""clip_grad_norm_: torch's function over the operators total_norm and scale_."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accumext.ops import _contracts, reference, scale_, total_norm
from accumext.ops.any_tensors import count_nonzero, global_norm, group_by_device
from accumext.ops.wgrad_fusion import warn_nothing_to_clip
from accumext.tensors import scalars
from accumext.tensors.checks import bools, fail_type, fail_value, message, number, type_name
from accumext.tensors.kinds import coalesced, is_dtensor, local_tensor, zero_flag
from accumext.tensors.torch_private import sparse_values

_OP = "clip_grad_norm_"


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
        contract = "be a tensor or an iterable of tensors"
        fail_type(_OP, "parameters", contract, type_name(parameters))
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn("`parameters` is an empty generator, nothing is clipped.", stacklevel=3)
    parameters = list(parameters)
    p, limit = _checked_limits(max_norm, norm_type, error_if_nonfinite, foreach)
    grads: list[Tensor] = []
    try:  # as if all were dense gradients on one device: else the operator raises
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        norm, usual = total_norm(grads, norm_type=p), True
    except (AttributeError, RuntimeError, TypeError, ValueError):
        _check_parameters(parameters)
        norm, usual = _norm_anywhere(grads, p), False
    if not grads:
        warn_nothing_to_clip(parameters)
    if error_if_nonfinite and not norm.isfinite():
        advice = "To scale by a non-finite norm anyway, set error_if_nonfinite=False"
        raise RuntimeError(message(_OP, "total_norm", "be finite", norm.item(), advice))
    coef = reference.clip_coef(norm, limit)
    if not (scalars.on_host(coef) and coef == 1.0):
        try:
            for device, (mine,) in group_by_device(grads, one_call=usual):
                scale_(mine, coef.to(device))
        except ValueError:  # a gradient overlaps itself: say which
            _check_parameters(parameters)
            raise
    return norm if usual else _on_mesh_of(grads, norm)


def _checked_limits(
    max_norm: Any, norm_type: Any, error_if_nonfinite: Any, foreach: Any
) -> tuple[float, float]:
    """Return norm type and largest norm; raise for what is no number, or no bool.

    Numbers are converted by `float`, as in torch, but strings other than "inf" and "-inf" are
    refused.
    """
    bools(_OP, error_if_nonfinite=error_if_nonfinite)
    if not (foreach is None or isinstance(foreach, bool)):
        fail_type(_OP, "foreach", "be a bool or None", type_name(foreach))
    is_word = isinstance(norm_type, str) and norm_type in ("inf", "-inf")
    p = float(norm_type) if is_word else _any_number("norm_type", norm_type)
    return number(_OP, "norm_type", p), _any_number("max_norm", max_norm)


def _any_number(argument: str, value: Any) -> float:
    """Return any number that `float` reads, also from a tensor of one element; refuse strings."""
    if isinstance(value, Tensor) and value.numel() != 1:
        fail_value(_OP, argument, "have one element", f"shape {list(value.shape)}")
    try:
        return float("none" if isinstance(value, str) else value)
    except (TypeError, ValueError, RuntimeError):
        fail_type(_OP, argument, "be a number", type_name(value))


def _check_parameters(parameters: list[Any]) -> None:
    """Raise unless all are tensors with gradients that can be clipped, or without any."""
    for i, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor):
            fail_type(_OP, f"parameters[{i}]", "be a tensor", type_name(parameter))
        if parameter.grad is not None:
            grad = local_tensor(parameter.grad)
            grad = sparse_values(grad) if grad.is_sparse else grad
            _contracts.dense_float(_OP, f"parameters[{i}].grad", grad, written=True)


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
