"""Losses that are divided, or summed, as a window does itself: what their graph tells, unread."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from torch import Tensor

from accumext.tensors import scalars
from accumext.tensors.torch_private import saved_factor, shape_into

_MEAN, _SUM = 1, 2  # what nodes of torch's losses save for their `reduction`


def is_divided(loss: Tensor, by: int) -> bool:
    """Tell whether a loss is a mean cross-entropy divided by the window.

    Such a division has hardly another meaning. Division by 2 does not count: half a loss is common.
    Nor do other mean losses: a third of one may be the mean over three coordinates.
    """
    node: Any = loss.grad_fn
    number = saved_factor(node) if by > 2 and node and node.name() == "DivBackward0" else None
    if not scalars.on_device(number) or number.dim() or not scalars.on_host(number):
        return False
    inner = node.next_functions[0][0]
    if inner is None or not inner.name().startswith("NllLoss") or inner._saved_reduction != _MEAN:
        return False
    with suppress(RuntimeError):  # a dispatch mode is on, in which the number cannot be read
        return float(number) == by
    return False


def summed_sizes(loss: Tensor) -> tuple[int, int] | None:
    """Return the number of rows and of terms that a loss of torch sums, ignored ones among them;
    None for any other loss. Terms that were saved are not read, for hooks may have packed them."""
    node: Any = loss.grad_fn
    if getattr(node, "_saved_reduction", None) != _SUM or node.next_functions[0][0] is None:
        return None
    shape = list(shape_into(node))
    if node.name().startswith("NllLoss"):
        del shape[min(1, len(shape) - 1)]  # classes
    return (shape[0], math.prod(shape)) if shape else None


def are_counts(weights: list[float], sizes: list[tuple[int, int]]) -> bool:
    """Tell whether weights can only be numbers of rows, or of terms, of losses of these sizes: all
    of them, or some that differ from loss to loss, as where others are ignored."""
    pairs = [
        (weight, size)
        for weight, size in zip(weights, sizes, strict=True)
        if not weight == 1 == size[0]  # a batch of one row tells nothing
    ]
    if len(pairs) < 2 or not all(1 < w <= size[1] and w.is_integer() for w, size in pairs):
        return False
    return len({weight for weight, _ in pairs}) > 1 or all(w in size for w, size in pairs)
