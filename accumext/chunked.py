"""`chunked_loss`: part of a model in slices of the batch, one slice's graph at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accumext._checks import fail_type, fail_value, one_of, positive_int, type_name

OP = "chunked_loss"


def chunked_loss(
    fn: Callable[..., Tensor],
    inputs: Tensor,  # [N, ...]
    *args: Any,
    chunks: int | None = None,
    chunk_size: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The loss of `fn` over a batch, computed slice by slice in the memory of one slice.

    `mean`: sum_i n_i / N * fn(slice i), with n_i rows in slice i, so a mean over rows stays the
    mean over the batch; `sum`: sum_i fn(slice i). The forward pass keeps no graph of a slice; the
    backward pass runs each slice again, takes its gradients under the upstream factor that reached
    the loss, and frees its graph before the next. So it is a loss like any other: the trunk runs
    once, DDP's hooks fire once, and a loss scale protects half-precision gradients inside `fn`.

    Args:
        fn: `(inputs_slice, *args_slices) -> 0-dim loss`, over any parameters. Called twice per
            slice, with the same random numbers.
        inputs: [N, ...], sliced along dimension 0.
        args: tensors of N rows are sliced likewise; anything that is no tensor is handed on as it
            is.
        chunks: number of slices, as equal as they can be (at most N). Give this or `chunk_size`.
        chunk_size: rows per slice; the last may have fewer.
        reduction: "mean" or "sum".

    Returns:
        A 0-dim loss.

    Raises:
        ValueError: a value or shape is wrong, or not exactly one of `chunks` and `chunk_size` is
            given.
        TypeError: a type is wrong.

    Example:
        >>> features = trunk(x)
        >>> head_loss = lambda h, y: F.cross_entropy(head(h), y)
        >>> loss = accumext.chunked_loss(head_loss, features, y, chunks=10)
        >>> loss.backward()

    Source: Chen et al. 2016 (recomputation), by `torch.utils.checkpoint`.
    """
    total: Tensor | None = None
    for begin, end in _check(fn, inputs, args, chunks, chunk_size, reduction):
        slices = [a[begin:end] if isinstance(a, Tensor) else a for a in (inputs, *args)]
        loss = (
            checkpoint(fn, *slices, use_reentrant=False) if torch.is_grad_enabled() else fn(*slices)
        )
        if not isinstance(loss, Tensor):
            fail_type(OP, "fn", "return a tensor", type_name(loss))
        if loss.dim() != 0:
            fail_value(OP, "fn", "return a 0-dim loss", f"shape {list(loss.shape)}")
        if reduction == "mean":
            loss = loss * ((end - begin) / len(inputs))
        total = loss if total is None else total + loss
    if total is not None:
        return total
    rows = inputs if inputs.is_floating_point() else inputs.float()
    return rows.sum()  # of no rows: 0, with a zero gradient


def _check(
    fn: Any, inputs: Any, args: tuple[Any, ...], chunks: Any, chunk_size: Any, reduction: Any
) -> list[tuple[int, int]]:
    """The [begin, end) rows of every slice."""
    if not callable(fn):
        fail_type(OP, "fn", "be callable", type_name(fn))
    if not isinstance(inputs, Tensor):
        fail_type(OP, "inputs", "be a tensor [N, ...]", type_name(inputs))
    if inputs.dim() == 0:
        fail_value(OP, "inputs", "have a dimension to slice", "a 0-dim tensor")
    rows = len(inputs)
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor) and (arg.dim() == 0 or len(arg) != rows):
            fail_value(OP, f"args[{index}]", f"have the {rows} rows of inputs", list(arg.shape))
    one_of(OP, "reduction", reduction, ("mean", "sum"))
    if (chunks is None) == (chunk_size is None):
        got = "neither" if chunks is None else "both"
        fail_value(OP, "chunks", "be given, or chunk_size, and not both", got)
    if chunks is not None:
        count = min(positive_int(OP, "chunks", chunks), rows)
        borders = [rows * i // count for i in range(count + 1)] if rows else [0]
        return list(pairwise(borders))
    size = positive_int(OP, "chunk_size", chunk_size)
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
