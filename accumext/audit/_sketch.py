"""Gradients in eight numbers per parameter, by which sums of gradients are told apart.

A sketch is a product with fixed random signs. It is linear, so that the factors with which passes
are in a sum of gradients follow from their sketches alone, and it needs none of the memory that a
second set of gradients would. Source: Alon, Matias & Szegedy 1996.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from accumext import _torch_private as private

SIZE = 8  # numbers of a sketch
_WIDTH = 1024  # elements that share a row of signs
_ROWS = 4096  # that are converted to float64 at once


@lru_cache
def _signs(seed: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Entries 1 and -1, the same in every process; the generators of the loop are not asked."""
    draws = torch.randint(2, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return (2.0 * draws - 1.0).to(device, torch.float64)


def dense(grad: Tensor) -> Tensor:
    """The elements of a gradient on this process, zeros of sparse ones included."""
    grad = private.local_part(grad) if hasattr(grad, "_local_tensor") else grad
    grad = grad.detach()
    grad = grad.to_dense() if grad.layout is not torch.strided else grad
    return torch.view_as_real(grad) if grad.is_complex() else grad


@torch.no_grad()
def sketch(grad: Tensor) -> Tensor:
    """float64 [SIZE], on the gradient's device; small gradients are their own."""
    flat = dense(grad).reshape(-1)
    if flat.numel() <= SIZE:
        return torch.nn.functional.pad(flat.double(), (0, SIZE - flat.numel()))
    signs = _signs(0, _WIDTH, SIZE, flat.device)
    total = signs.new_zeros(SIZE)
    for number, part in enumerate(flat.split(_ROWS * _WIDTH)):
        part, of_rows = part.double(), _signs(number + 1, _ROWS + 1, 1, flat.device)[:, 0]
        rows, rest = divmod(part.numel(), _WIDTH)
        whole = part[: rows * _WIDTH].view(rows, _WIDTH)
        total += of_rows[:rows] @ (whole @ signs)
        total += of_rows[-1] * (part[rows * _WIDTH :] @ signs[:rest])
    return total
