"""Who holds a gradient, and which gradients may become main gradients without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor

from accumext import ops
from accumext._scalars import Scalar, to_device
from accumext._tensor_kinds import (
    group_by_device,
    local_tensor,
    main_dtype,
)
from accumext._torch_private import is_view, storage_users, tensor_users
from accumext.optimizer._grad_slots import grad_of


def take_ownership(
    grads: dict[Tensor, Tensor], foreign: Container[int] | None
) -> dict[Tensor, Tensor]:
    """Gradients as main gradients: the tensors themselves where nobody else can see them.

    Args:
        foreign: ids of gradients that somebody else holds; None for all.
    """
    narrow = {p: grad for p, grad in grads.items() if is_narrow(p, grad)}
    main_grads, _ = widened(narrow) if narrow else ({}, None)
    for parameter, grad in grads.items():
        if parameter in narrow:
            continue
        ours = foreign is not None and id(grad) not in foreign
        grad = grad.detach() if grad.requires_grad else grad
        if grad.is_sparse:
            grad = grad.to(main_dtype(parameter), copy=not ours)
        elif grad.is_complex() and grad.is_conj():
            grad = grad.resolve_conj()
        elif not (ours and _owns_memory(grad)):
            grad = grad.clone()
        main_grads[parameter] = grad
    return {parameter: main_grads[parameter] for parameter in grads}


def is_narrow(parameter: Tensor, grad: Tensor) -> bool:
    """Whether a gradient has to be widened to become a main gradient: it is of half precision."""
    return grad.dtype != main_dtype(parameter) and not grad.is_sparse


def widened(
    grads: dict[Tensor, Tensor],
    factor: Scalar = 1.0,
    flag_on: Callable[[torch.device], Tensor] | None = None,  # set where one is not finite
) -> tuple[dict[Tensor, Tensor], Tensor | None]:
    """`grad * factor` in the dtype of main gradients, and their 2-norm if one call forms it."""
    wide = {
        p: torch.empty_like(grad, dtype=main_dtype(p), requires_grad=False)
        for p, grad in grads.items()
    }
    norms = [
        ops.accumulate_(
            *lists,
            inv_scale=to_device(device, factor),
            found_inf=None if flag_on is None else flag_on(device),
            overwrite=True,
        )
        for device, lists in group_by_device(list(wide.values()), list(grads.values()))
    ]
    return wide, norms[0] if len(norms) == 1 else None


def held_elsewhere(parameters: Iterable[Tensor]) -> set[int]:
    """ids of the gradients in `.grad` that somebody else holds: a variable, another parameter.

    To be asked before anything of ours refers to them.
    """
    counts = list(map(sys.getrefcount, map(grad_of, parameters)))
    pairs = zip(parameters, counts, strict=True)
    return {
        id(grad)
        for parameter, count in pairs
        if (grad := parameter.grad) is not None
        and (count > _UNHELD or tensor_users(grad) > _IN_ONE_SLOT)
    }


def _owns_memory(grad: Tensor) -> bool:
    """False for a view, such as of a DDP bucket, and for memory that others have as well."""
    local = grad if type(grad) is Tensor else local_tensor(grad)
    if is_view(local) or local.is_inference() or local.is_neg():
        return False
    storage = local.untyped_storage()
    if storage.nbytes() != local.nbytes or not storage.resizable():
        return False
    return storage_users(storage) <= _STORAGE_IN_ONE_TENSOR


# How often a gradient, and its memory, is referred to that only `.grad` of one parameter holds, as
# `held_elsewhere` and `_owns_memory` see it.
_probe = torch.nn.Parameter(torch.zeros(1), requires_grad=True)
_probe.grad = torch.zeros(1)
_UNHELD = next(map(sys.getrefcount, map(grad_of, [_probe])))
_IN_ONE_SLOT = tensor_users(_probe.grad)
_STORAGE_IN_ONE_TENSOR = storage_users(_probe.grad.untyped_storage())
del _probe
