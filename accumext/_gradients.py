"""Gradients of every kind (sharded, sparse, complex, half) as the op layer takes them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from accumext import ops
from accumext._grad_slots import grad_of
from accumext._numbers import Scalar, on

HALF_DTYPES = (torch.float16, torch.bfloat16)

is_sparse = attrgetter("is_sparse")


def main_dtype(parameter: Tensor) -> torch.dtype:
    """float32 for half-precision parameters, otherwise the dtype of the parameter."""
    return torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype


def own(grads: dict[Tensor, Tensor], foreign: Container[int] | None) -> dict[Tensor, Tensor]:
    """Gradients as main gradients: the tensors themselves where nobody else can see them.

    Args:
        foreign: ids of gradients that somebody else holds; None for all.
    """
    mains: dict[Tensor, Tensor] = {}
    halves: list[Tensor] = []
    casts: list[Tensor] = []
    for parameter, grad in grads.items():
        ours = foreign is not None and id(grad) not in foreign
        grad = grad.detach() if grad.requires_grad else grad
        dtype = main_dtype(parameter)
        if grad.dtype != dtype and not grad.is_sparse:
            mains[parameter] = torch.empty_like(grad, dtype=dtype)
            halves.append(grad)
            casts.append(mains[parameter])
            continue
        if grad.is_sparse:
            grad = grad.to(dtype, copy=not ours)
        elif grad.is_complex() and grad.is_conj():
            grad = grad.resolve_conj()
        elif not (ours and _owns_memory(grad)):
            grad = grad.clone()
        mains[parameter] = grad
    for _, (own_casts, own_halves) in per_device(casts, halves):
        ops.accumulate_(own_casts, own_halves, overwrite=True)
    return mains


def foreign_grads(parameters: Iterable[Tensor]) -> set[int]:
    """ids of the gradients in `.grad` that somebody else holds: a variable, another parameter.

    To be asked before anything of ours refers to them.
    """
    counts = list(map(sys.getrefcount, map(grad_of, parameters)))
    pairs = zip(parameters, counts, strict=True)
    return {
        id(grad)
        for parameter, count in pairs
        if (grad := parameter.grad) is not None and (count > _UNHELD or _users(grad) > _IN_ONE_SLOT)
    }


def _users(tensor: Any) -> int:
    """How many places in torch hold a tensor."""
    return cast(int, tensor._use_count())


def _owns_memory(grad: Tensor) -> bool:
    """False for a view, such as of a DDP bucket, and for memory that others have as well."""
    local = grad if type(grad) is Tensor else _local(grad)
    if local._is_view() or local.is_inference() or local.is_neg():
        return False
    storage = local.untyped_storage()
    if storage.nbytes() != local.nbytes or not storage.resizable():
        return False
    users = torch._C._storage_Use_Count(storage._cdata)
    return users <= _STORAGE_IN_ONE_TENSOR


def _local(tensor: Any) -> Tensor:
    """This process's part of a DTensor, in the same memory; any other tensor as it is."""
    return cast(Tensor, tensor._local_tensor) if is_dtensor(tensor) else tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is one process's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def any_dtensor(tensors: Collection[Tensor]) -> bool:
    """Whether any of the tensors is."""
    return any(hasattr(kind, "device_mesh") for kind in set(map(type, tensors)))


def plain(tensor: Tensor) -> Tensor:
    """The dense real tensor that holds the numbers of a DTensor, a sparse or a complex tensor."""
    tensor = _local(tensor)
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def are_plain(tensors: Collection[Tensor]) -> bool:
    """Whether all are such tensors already, on one device: what one call of an operator takes.

    Nearly all gradients are, and this finds it out without a loop in Python.
    """
    return (
        set(map(type, tensors)) <= {Tensor}
        and not any(map(is_sparse, tensors))
        and not any(map(Tensor.is_complex, tensors))
        and len(set(map(Tensor.get_device, tensors))) <= 1
    )


def per_device(
    *columns: list[Tensor], plain_already: bool = False
) -> Iterator[tuple[torch.device, list[list[Tensor]]]]:
    """Lists of tensors, one for one, as calls of an operator: what it takes, device by device."""
    if plain_already or are_plain(list(chain(*columns))):
        if columns[0]:
            yield columns[0][0].device, list(columns)
        return
    groups: dict[torch.device, list[list[Tensor]]] = {}
    for row in zip(*columns, strict=True):
        group = groups.setdefault(row[0].device, [[] for _ in row])
        for column, tensor in zip(group, row, strict=True):
            column.append(plain(tensor))
    yield from groups.items()


def scale_(tensors: list[Tensor], factor: Scalar, plain_already: bool = False) -> None:
    """Multiply in place, on whatever devices; the host number 1.0 costs nothing."""
    if tensors and (isinstance(factor, Tensor) or factor != 1.0):
        for device, (mine,) in per_device(tensors, plain_already=plain_already):
            ops.scale_(mine, on(device, factor))


def zero_flag(device: torch.device | None) -> Tensor:
    """A found_inf that has found nothing."""
    return torch.zeros((), dtype=torch.float32, device=device)


def settled(grad: Any) -> Any:
    """A main gradient as norms need it: every element in one place, and whole in every shard."""
    if is_dtensor(grad):
        from torch.distributed.tensor import Replicate  # here, as its import takes long

        whole = [Replicate() if p.is_partial() else p for p in grad.placements]
        return grad if list(grad.placements) == whole else grad.redistribute(placements=whole)
    return grad.coalesce() if grad.is_sparse else grad


def nonfinite(grads: dict[Tensor, Tensor]) -> list[Tensor]:
    """The keys whose gradient holds an inf or NaN. Reads the device."""
    return [key for key, grad in grads.items() if not bool(plain(grad).isfinite().all())]


def zeros_like(grad: Tensor) -> Tensor:
    """No gradient: what one that counts for nothing is worth, whatever it holds."""
    return torch.zeros_like(grad).detach()


# How often a gradient, and its memory, is referred to that only `.grad` of one parameter holds, as
# `foreign_grads` and `_owns_memory` see it.
_probe = torch.nn.Parameter(torch.zeros(1), requires_grad=True)
_probe.grad = torch.zeros(1)
_UNHELD = next(map(sys.getrefcount, map(grad_of, [_probe])))
_IN_ONE_SLOT = _users(_probe.grad)
_storage = _probe.grad.untyped_storage()
_STORAGE_IN_ONE_TENSOR = torch._C._storage_Use_Count(_storage._cdata)
del _probe, _storage
