"""Matrix products with half-precision operands whose sums are kept in fp32 (fp64 for fp64).

On a CPU torch rounds the product of two half-precision matrices to half precision. Here a slice of
rows at a time is multiplied and added to fp32 sums. Where the processor has no instruction for
bfloat16 products, slices of the operands are converted to fp32 instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from accumext._torch_private import cpu_multiplies_bfloat16


class HeadDtypes(NamedTuple):
    """The precisions of the output layer in one call."""

    accumulation: torch.dtype  # of sums, states and losses: fp64 for fp64, fp32 otherwise
    product: torch.dtype  # to which the operands of the products are rounded
    exps: torch.dtype  # of the stored exponentials, factors in [0, 1] of the deferred products


def head_dtypes(weight: Tensor) -> HeadDtypes:
    """The dtypes for this head weight [V, H], under the autocast mode of the caller."""
    kind = weight.device.type
    accumulation = torch.promote_types(weight.dtype, torch.float32)
    product = weight.dtype
    if product != torch.float64 and torch.amp.is_autocast_available(kind):
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else product
    fast = product == torch.bfloat16 and (kind == "cuda" or cpu_multiplies_bfloat16())
    return HeadDtypes(accumulation, product, torch.bfloat16 if fast else accumulation)


@contextmanager
def no_grad_no_autocast(device: torch.device) -> Iterator[None]:
    """Neither a graph nor autocast: the head has precisions of its own."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


