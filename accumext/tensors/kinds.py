"""Gradients of every kind (sharded, sparse, complex, half), and the numbers in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from accumext.tensors.torch_private import local_part, sparse_values, write_count

Group: TypeAlias = "dist.ProcessGroup"

HALF_DTYPES = (torch.float16, torch.bfloat16)
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}

is_sparse = attrgetter("is_sparse")
dtype_of = attrgetter("dtype")


def main_dtype(parameter: Tensor) -> torch.dtype:
    """Return float32 for half-precision parameters, otherwise the dtype of the parameter."""
    return torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype


def main_dtypes(parameters: Sequence[Tensor]) -> list[torch.dtype]:
    """Return the `main_dtype` of each parameter."""
    dtypes = list(map(dtype_of, parameters))
    return [torch.float32 if dtype in HALF_DTYPES else dtype for dtype in dtypes]


def any_half(tensors: Sequence[Tensor]) -> bool:
    """Tell whether any of the tensors is of half precision."""
    return not set(map(dtype_of, tensors)).isdisjoint(HALF_DTYPES)


def local_tensor(tensor: Any) -> Tensor:
    """Return this process's part of a DTensor, in the same memory; any other tensor as it is."""
    return local_part(tensor) if is_dtensor(tensor) else tensor


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the `local_tensor` of each tensor."""
    return list(map(local_tensor, tensors)) if any_dtensor(tensors) else tensors


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether the tensor is a DTensor, without importing its class."""
    return hasattr(tensor, "device_mesh")


def any_dtensor(tensors: Collection[Tensor]) -> bool:
    """Tell whether any of the tensors is a DTensor."""
    return any(hasattr(kind, "device_mesh") for kind in set(map(type, tensors)))


def dense_storage(tensor: Tensor) -> Tensor:
    """Return the dense real tensor with the numbers of a DTensor, sparse or complex tensor."""
    tensor = local_tensor(tensor)
    tensor = sparse_values(tensor) if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dense_storages(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the `dense_storage` of each tensor."""
    return tensors if fit_one_call(tensors) else list(map(dense_storage, tensors))


def fit_one_call(tensors: Collection[Tensor]) -> bool:
    """Tell whether all are dense real tensors on one device, which one call of an operator takes.

    Nearly all gradients are, and this needs no loop in Python to tell.
    """
    return (
        set(map(type, tensors)) <= {Tensor}
        and not any(map(is_sparse, tensors))
        and _COMPLEX.isdisjoint(map(dtype_of, tensors))
        and len(set(map(Tensor.get_device, tensors))) <= 1
    )


def zero_flag(device: torch.device | None) -> Tensor:
    """Return a new found_inf flag of 0."""
    return torch.zeros((), dtype=torch.float32, device=device)


def coalesced(grad: Any) -> Any:
    """Return a gradient as norms need it: sparse ones coalesced, a DTensor's partial sums added."""
    if is_dtensor(grad):
        from torch.distributed.tensor import Replicate  # here, as its import takes long

        added = [Replicate() if p.is_partial() else p for p in grad.placements]
        return grad if list(grad.placements) == added else grad.redistribute(placements=added)
    return grad.coalesce() if grad.is_sparse else grad


def nonfinite(grads: Sequence[Tensor]) -> list[int]:
    """Return the indices of gradients that hold an inf or NaN. Reads the device."""
    return [i for i, g in enumerate(grads) if not bool(dense_storage(g).isfinite().all())]


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return autograd's count of writes into each tensor; None if a tensor has no count."""
    try:
        return list(map(write_count, tensors))
    except (AttributeError, RuntimeError):  # a missing tensor, or one made in inference mode
        return [None if t is None or t.is_inference() else write_count(t) for t in tensors]
