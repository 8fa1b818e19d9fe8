"""Gradients of every kind (sharded, sparse, complex, half) as the op layer takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from accumext import ops

Scalar: TypeAlias = float | Tensor  # a host number, or 0-dim float64 on the device
HALF_DTYPES = (torch.float16, torch.bfloat16)


def main_dtype(parameter: Tensor) -> torch.dtype:
    """float32 for half-precision parameters, otherwise the dtype of the parameter."""
    return torch.float32 if parameter.dtype in HALF_DTYPES else parameter.dtype


def own(grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Gradients as main gradients: the tensors themselves where no one else writes their memory."""
    mains: dict[Tensor, Tensor] = {}
    casts: list[tuple[Tensor, ...]] = []
    for parameter, grad in grads.items():
        grad = grad.detach() if grad.requires_grad else grad
        dtype = main_dtype(parameter)
        if grad.is_sparse:
            mains[parameter] = grad.to(dtype)
        elif grad.dtype == dtype:
            mains[parameter] = grad if _owns_memory(_local(grad)) else grad.clone()
        else:
            mains[parameter] = torch.empty_like(grad, dtype=dtype)
            casts.append((mains[parameter], grad))
    for pairs in by_device(casts).values():
        ops.accumulate_(
            [plain(main) for main, _ in pairs], [plain(grad) for _, grad in pairs], overwrite=True
        )
    return mains


def _local(tensor: Any) -> Tensor:
    """This process's part of a DTensor, in the same memory; any other tensor as it is."""
    return cast(Tensor, tensor._local_tensor) if is_dtensor(tensor) else tensor


def _owns_memory(grad: Tensor) -> bool:
    """False for a view into a larger buffer, such as a DDP bucket, that its owner writes again."""
    return grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is one process's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def plain(tensor: Tensor) -> Tensor:
    """The dense real tensor that holds the numbers of a DTensor, a sparse or a complex tensor."""
    tensor = _local(tensor)
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def scale_(tensors: Iterable[Tensor], factor: Scalar) -> None:
    """Multiply in place, on whatever devices; the host number 1.0 costs nothing."""
    if isinstance(factor, Tensor) or factor != 1.0:
        for device, rows in by_device([(tensor,) for tensor in tensors]).items():
            ops.scale_([plain(tensor) for (tensor,) in rows], on(device, factor))


def by_device(rows: Iterable[tuple[Tensor, ...]]) -> dict[torch.device, list[tuple[Tensor, ...]]]:
    """Rows of tensors, grouped by the device of the first in each."""
    groups: dict[torch.device, list[tuple[Tensor, ...]]] = {}
    for row in rows:
        groups.setdefault(row[0].device, []).append(row)
    return groups


def on(device: torch.device, value: Scalar) -> Scalar:
    """A scalar where it is needed; a host number is at home everywhere."""
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def on_host(tensor: Tensor) -> bool:
    """Whether the host can read the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def zero_flag(device: torch.device | None) -> Tensor:
    """A found_inf that has found nothing."""
    return torch.zeros((), dtype=torch.float32, device=device)


def nonfinite(grads: dict[Tensor, Tensor]) -> list[Tensor]:
    """The keys whose gradient holds an inf or NaN. Reads the device."""
    return [key for key, grad in grads.items() if not bool(plain(grad).isfinite().all())]
