"""The precisions of a call: operands may be of half precision, sums are in fp32 (fp64 for fp64)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext.tensors.torch_private import cpu_multiplies_bfloat16


class Dtypes(NamedTuple):
    """The precisions of one call."""

    accumulation: torch.dtype  # of sums, states and losses: fp64 for fp64, fp32 otherwise
    product: torch.dtype  # to which the operands of the output layer's products are rounded
    exps: torch.dtype  # of the stored exponentials, factors in [0, 1] of the deferred products
    cell: torch.dtype  # to which the operands of the products of torch's modules are rounded


def dtypes_of(weight: Tensor) -> Dtypes:
    """Return the dtypes for this head weight [V, H], under the autocast mode of the caller."""
    kind = weight.device.type
    accumulation = torch.promote_types(weight.dtype, torch.float32)
    product = weight.dtype
    if product != torch.float64 and torch.amp.is_autocast_available(kind):
        product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else product
    if kind == "cuda":
        fast = product in (torch.bfloat16, torch.float16)
    else:
        fast = product == torch.bfloat16 and cpu_multiplies_bfloat16()
    narrow = product if fast else accumulation
    return Dtypes(accumulation, product, exps=narrow, cell=narrow)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, which may be entered several times."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


@contextmanager
def no_grad_no_autocast(device: torch.device) -> Iterator[None]:
    """Switch off autograd and autocast: a call chooses its own precisions."""
    with torch.no_grad(), no_autocast(device):
        yield
