"""`chunked_loss`: part of a model in slices of the batch, one slice's graph at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accumext import _scalars
from accumext._checks import (
    REDUCTIONS,
    Reduction,
    fail_type,
    fail_value,
    message,
    one_of,
    positive_int,
    type_name,
)
from accumext._scalars import Scalar
from accumext._torch_private import (
    assert_on_device,
    is_since,
    next_node_number,
    node_number,
    nodes_since,
    sparse_indices,
    sparse_values,
)
from accumext.decoder._sharded_modules import gathered_once

OP = "chunked_loss"
IGNORED = -100  # the default `ignore_index` of F.cross_entropy
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)  # that can hold it


class _Share(NamedTuple):
    """What a slice's loss counts of the whole."""

    factor: Scalar
    empty: Tensor | None = None  # 0-dim bool: weighs nothing; None: known not to be so


def chunked_loss(
    fn: Callable[..., Tensor],
    inputs: Tensor,  # [N, ...]
    *args: Any,
    chunks: int | None = None,
    chunk_size: int | None = None,
    reduction: Reduction = "mean",
    weights: Tensor | None = None,  # [N, ...]
) -> Tensor:
    """The loss of `fn` over a batch, computed slice by slice in the memory of one slice.

    `mean`: sum_i w_i / w * fn(slice i), with w_i the weight of slice i and w that of all, so a mean
    over rows, or over what counts of them, stays the mean over the batch; `sum`: sum_i fn(slice i).
    The forward pass keeps no graph of a slice; the
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
        weights: what each row counts in the divisor of `fn`'s mean, for "mean": `targets != -100`
            where targets are ignored, `class_weight[targets]` with weighted classes; by default 1.
            Bools, ints or floats [N, ...], of which trailing dimensions are summed. A slice of
            weight 0 adds exactly 0 to the loss and to every gradient, even if `fn` is NaN there; so
            nothing else, no other loss either, may use a tensor with a graph that `fn` made in it.

    Returns:
        A 0-dim loss.

    Raises:
        RuntimeError: with `weights`, `fn` uses a part of the graph of an earlier slice, such as a
            tensor that it computed once and kept.
        ValueError: a value or shape is wrong; not exactly one of `chunks` and `chunk_size` is
            given; or an integer tensor in `args` holds -100, which F.cross_entropy ignores, under
            "mean" without `weights`. Values on a GPU are device asserts instead.
        TypeError: a type is wrong.

    Example:
        >>> features = trunk(x)
        >>> head_loss = lambda h, y: F.cross_entropy(head(h), y)
        >>> loss = accumext.chunked_loss(head_loss, features, y, chunks=10)
        >>> loss.backward()

    Source: Chen et al. 2016 (recomputation), by `torch.utils.checkpoint`.
    """
    borders = _check(fn, inputs, args, chunks, chunk_size, reduction)
    total: Tensor | None = None
    stopped: list[range] = []  # numbers of nodes of slices that may weigh nothing
    with gathered_once(OP, fn) as gathered:
        for (begin, end), share in zip(
            borders, _shares(inputs, args, borders, reduction, weights), strict=True
        ):
            slices = [a[begin:end] if isinstance(a, Tensor) else a for a in (inputs, *args)]
            first = 0 if share.empty is None else next_node_number()
            loss = (
                checkpoint(fn, *slices, use_reentrant=False)
                if torch.is_grad_enabled()
                else fn(*slices)
            )
            if not isinstance(loss, Tensor):
                fail_type(OP, "fn", "return a tensor", type_name(loss))
            if loss.dim() != 0:
                fail_value(OP, "fn", "return a 0-dim loss", f"shape {list(loss.shape)}")
            if stopped:
                _check_apart(loss, stopped)
            if share.empty is not None:
                _stop_gradients_where(share.empty, loss, first)
                stopped.append(range(first, next_node_number()))
                torch.clear_autocast_cache()  # what it has cast is a part of its graph
            loss = _share_of(loss, share)
            total = loss if total is None else total + loss
        if total is not None:
            return total if gathered is None else gathered.finish(total)
    rows = inputs if inputs.is_floating_point() else inputs.float()
    return rows.sum()  # of no rows: 0, with a zero gradient


def _shares(
    inputs: Tensor,
    args: tuple[Any, ...],
    borders: list[tuple[int, int]],
    reduction: Reduction,
    weights: Tensor | None,
) -> list[_Share]:
    """What every slice counts."""
    if weights is not None:
        _check_weights(weights, inputs, reduction)
        return _weighted_shares(weights.detach(), borders)
    if reduction == "sum":
        return [_Share(1.0)] * len(borders)
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.dtype in INTEGERS:
            _check_nothing_is_ignored(f"args[{index}]", arg)
    return [_Share((end - begin) / len(inputs)) for begin, end in borders]


def _weighted_shares(weights: Tensor, borders: list[tuple[int, int]]) -> list[_Share]:
    """Weights over their sum, on the host where they are there."""
    if not borders:
        return []
    dtype = torch.float64 if weights.is_floating_point() else torch.int64
    sums = torch.stack([weights[begin:end].sum(dtype=dtype) for begin, end in borders])
    empty = sums == 0
    factors = torch.where(empty, 0, sums / sums.sum().double())
    if not _scalars.on_host(weights):
        return [_Share(*share) for share in zip(factors, empty, strict=True)]
    shares = zip(factors.tolist(), empty.tolist(), empty, strict=True)
    return [_Share(factor, flag if is_empty else None) for factor, is_empty, flag in shares]


def _share_of(loss: Tensor, share: _Share) -> Tensor:
    """What a slice adds to the loss, in the dtype of its loss; 0 where it is empty."""
    factor, dtype = share.factor, loss.dtype
    if isinstance(factor, Tensor):
        factor = factor.to(torch.promote_types(dtype, torch.float32))
    loss = (loss * factor).to(dtype)
    return loss if share.empty is None else torch.where(share.empty, 0, loss)


def _stop_gradients_where(empty: Tensor, loss: Tensor, first: int) -> None:
    """Zero what leaves the graph of a slice, towards leaves and nodes from before `first`.

    A factor of 0 at the loss does not: 0 / 0 inside of `fn` is NaN, and so is 0 times infinity.
    """

    def stop(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else _zero_where(empty, g) for g in gradients)

    for node in nodes_since(first, [loss]):
        if not all(is_since(n, first) for n, _ in node.next_functions if n is not None):
            node.register_hook(stop)


def _check_apart(loss: Tensor, stopped: list[range]) -> None:
    """Raise if the graph of a slice goes through that of another one, whose gradients stop."""
    for node in nodes_since(stopped[0].start, [loss]):
        if any(node_number(node) in nodes for nodes in stopped):
            contract = "make its graph anew for every slice where slices may count nothing"
            raise RuntimeError(message(OP, "fn", contract, f"a {node.name()} of another slice"))


def _zero_where(empty: Tensor, gradient: Tensor) -> Tensor:
    if gradient.layout != torch.sparse_coo:
        return torch.where(empty, 0, gradient)
    values = torch.where(empty, 0, sparse_values(gradient))
    indices = sparse_indices(gradient)
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


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
    one_of(OP, "reduction", reduction, REDUCTIONS)
    if (chunks is None) == (chunk_size is None):
        got = "neither" if chunks is None else "both"
        fail_value(OP, "chunks", "be given, or chunk_size, and not both", got)
    if chunks is not None:
        count = min(positive_int(OP, "chunks", chunks), rows)
        borders = [rows * i // count for i in range(count + 1)] if rows else [0]
        return list(pairwise(borders))
    size = positive_int(OP, "chunk_size", chunk_size)
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def _check_weights(weights: Any, inputs: Tensor, reduction: Reduction) -> None:
    if not isinstance(weights, Tensor) or weights.is_complex():
        contract = "be a tensor [N, ...] of bools, ints or floats"
        fail_type(OP, "weights", contract, type_name(weights))
    if weights.dim() == 0 or len(weights) != len(inputs):
        fail_value(OP, "weights", f"have the {len(inputs)} rows of inputs", list(weights.shape))
    if reduction != "mean":
        fail_value(OP, "weights", "be None unless reduction is 'mean'", type_name(weights))
    if not weights.is_cpu and weights.device != inputs.device:
        contract = f"be on the CPU or on the device of inputs, {inputs.device}"
        fail_value(OP, "weights", contract, weights.device)
    if weights.dtype == torch.bool:
        return
    right, contract = weights.isfinite() & (weights >= 0), "be finite and at least 0"
    if not _scalars.on_host(weights):
        assert_on_device(right.all(), message(OP, "weights", contract, "others"))
    elif not right.all():
        fail_value(OP, "weights", contract, weights[~right][0].item())


def _check_nothing_is_ignored(name: str, targets: Tensor) -> None:
    """Raise for targets that F.cross_entropy leaves out of its mean, which then counts no rows."""
    ignored, contract = targets == IGNORED, f"have no ignored targets ({IGNORED}) without weights"
    advice = f"Pass weights=({name} != {IGNORED}), or weights=torch.ones(len(inputs)) if all count"
    if not _scalars.on_host(targets):
        assert_on_device(~ignored.any(), message(OP, name, contract, "some", advice))
    elif ignored.any():
        fail_value(OP, name, contract, f"{int(ignored.sum())} of them", advice)
