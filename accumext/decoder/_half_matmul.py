"""Products with operands of half precision whose sums are not rounded on the way.

A product of two tensors of half precision has a result of half precision on a CPU; a slice of it at
a time is added to where the sums are kept. Where the processor has no instruction for such
products, slices of the operands are widened instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

SLICE = 4096  # rows at once: enough for full speed, few beside a vocabulary


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32 (AVX512-BF16)."""
    return torch.cpu._is_avx512_bf16_supported()


def exps_dtype(operand: torch.dtype, device: torch.device, wide: torch.dtype) -> torch.dtype:
    """In what factors between 0 and 1 of products with such operands are kept."""
    if operand == torch.bfloat16 and (device.type == "cuda" or has_bfloat16_products()):
        return torch.bfloat16
    return wide


def product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """left.t() @ right in `wide`: [V, M] and [V, H] give [M, H]."""
    if left.dtype == right.dtype:
        return torch.mm(left.t(), right).to(wide)
    sums = left.new_zeros(left.shape[1], right.shape[1], dtype=wide)
    for begin in range(0, len(left), SLICE):
        rows = slice(begin, begin + SLICE)
        sums.addmm_(left[rows].t().to(wide), right[rows].to(wide))
    return sums


def add_product(sums: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
    """sums += left @ right, or sums = left @ right if `fresh`: [V, M] and [M, H] into [V, H]."""
    if left.dtype == sums.dtype:
        torch.addmm(sums, left, right, beta=0 if fresh else 1, out=sums)
        return
    right = right.to(left.dtype)
    buffer = left.new_empty(min(SLICE, len(left)), right.shape[1])
    for begin in range(0, len(left), SLICE):
        rows = slice(begin, min(begin + SLICE, len(left)))
        part = torch.mm(left[rows], right, out=buffer[: rows.stop - begin])
        if fresh:
            sums[rows] = part
        else:
            sums[rows].add_(part)
