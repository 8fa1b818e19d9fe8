"""Gradients in eight numbers per parameter, by which sums of gradients are told apart.

A sketch is linear, so that the factors with which passes are in a sum of gradients follow from
their sketches alone, and it needs none of the memory of a second set of gradients. Elements are
summed at a stride, in one read, and the sums are multiplied with fixed random signs. Source: Alon,
Matias & Szegedy 1996.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from accumext.auditing._events import Sketch
from accumext.auditing._torch_private import in_memory, is_half, local_part

SIZE = 8  # numbers of a sketch
_STRIDE = 1021  # a prime, no usual width: over the rows of a matrix gradients may sum up to zero

_SAMPLED = 16  # number of tensors
_ROWS = 1024  # rows that are summed at once: copies in float32 stay small


def sample(tensors: Sequence[Tensor]) -> Tensor:
    """Return a few elements of some of these tensors: they change if the tensors are written.
    What `fully_shard` has freed until the backward pass has none."""
    few = [t for t in tensors[:: max(len(tensors) // _SAMPLED, 1)] if in_memory(t)]
    parts = [dense(t).reshape(-1)[:SIZE].to(few[0].device, wide(few[0].device)) for t in few]
    return torch.cat(parts) if parts else torch.zeros(0)


@lru_cache
def _signs(device: torch.device) -> Tensor:
    """Return random signs, the same in every process; the loop's generators are not used."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(2, (_STRIDE, SIZE), generator=generator, device="cpu")
    return (2.0 * draws - 1.0).to(device, wide(device))


def wide(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def dense(grad: Tensor) -> Tensor:
    """Return the elements of a gradient on this process, including a sparse one's zeros."""
    grad = local_part(grad).detach()
    grad = grad.to_dense() if grad.layout is not torch.strided else grad
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


@torch.no_grad()
def sketch(grad: Tensor) -> Tensor:
    """Return the sketch, [SIZE] on the gradient's device; a smaller gradient is only padded."""
    flat = dense(grad).reshape(-1)
    if flat.numel() <= SIZE:
        return pad(flat.to(wide(flat.device)), (0, SIZE - flat.numel()))
    sums = torch.zeros(_STRIDE, dtype=wide(flat.device), device=flat.device)
    for part in flat.split(_STRIDE * _ROWS):
        part = part.float() if is_half(part) else part
        rows, rest = divmod(part.numel(), _STRIDE)
        sums += part[: rows * _STRIDE].view(rows, _STRIDE).sum(0)
        sums[:rest] += part[rows * _STRIDE :]
    return sums @ _signs(flat.device)


class Sketches:
    """The sketches of gradients of known parameters, in one tensor on their device."""

    def __init__(self, parameters: list[Tensor]) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        self.values = torch.zeros(len(parameters), SIZE, dtype=wide(device), device=device)
        self.present: dict[int, None] = {}  # numbers, in the order in which gradients came

    def add(self, number: int, grad: Tensor, earlier: Tensor | float = 0.0) -> None:
        """Add a gradient; or what was added to a sum that had this sketch earlier."""
        self.values[number] += (sketch(grad) - earlier).to(self.values)
        self.present[number] = None

    def on_host(self, size: int) -> Sketch:
        """Return the sketches in `size` rows; parameters that became known later get zeros."""
        return pad(self.values.cpu().double(), (0, 0, 0, size - len(self.values)))
