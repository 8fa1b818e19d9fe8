"""`chunked_loss`: part of a model in slices of the batch, each slice's graph freed before the
next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext._checks import fail_type, fail_value, message, one_of, positive_int, type_name

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
    mean over the batch; `sum`: sum_i fn(slice i). Each slice runs forward and backward once, at
    once. The gradients for `inputs`, for tensors in `args` and for every parameter that `fn` uses
    wait in one buffer each until `loss.backward()` hands them on, times whatever factor reaches the
    loss: the trunk runs once, DDP's hooks fire once, loss scaling and weights work.

    Args:
        fn: `(inputs_slice, *args_slices) -> 0-dim loss`. It may use any parameters, but no tensor
            with a graph other than its arguments: pass such a tensor in `args`.
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
        RuntimeError: `fn` uses a tensor with a graph of its own.

    Example:
        >>> features = trunk(x)
        >>> head_loss = lambda h, y: F.cross_entropy(head(h), y)
        >>> loss = accumext.chunked_loss(head_loss, features, y, chunks=10)
        >>> loss.backward()
    """
    spans = _check(fn, inputs, args, chunks, chunk_size, reduction)
    tracked = torch.is_grad_enabled()
    sliced = [a for a in (inputs, *args) if isinstance(a, Tensor)]
    gradients = _Gradients([t for t in sliced if tracked and t.requires_grad])
    total: Tensor | None = None
    for begin, end in spans:
        share = (end - begin) / len(inputs) if reduction == "mean" else 1.0
        slices = [a[begin:end].detach() if isinstance(a, Tensor) else a for a in (inputs, *args)]
        for whole, part in zip((inputs, *args), slices, strict=True):
            if isinstance(whole, Tensor) and whole.requires_grad and tracked:
                part.requires_grad_()
        mark = _newest_node()
        loss = fn(*slices) * share
        if loss.dim() != 0:
            fail_value(OP, "fn", "return a 0-dim loss", f"shape {list(loss.shape)}")
        if tracked and loss.requires_grad:
            parts = [s for s in slices if isinstance(s, Tensor) and s.requires_grad]
            gradients.add(loss, parts, begin, end, mark)
        total = loss.detach() if total is None else total + loss.detach()
    if total is None:  # no rows
        total = inputs.new_zeros(())
    if not gradients.receivers:
        return total
    result: Tensor = _Hand.apply(  # type: ignore[no-untyped-call]
        total, gradients.values, *gradients.receivers
    )
    return result


class _Gradients:
    """One buffer per tensor that gets a gradient: the sliced ones, filled by rows, and the leaves
    that `fn` used, summed."""

    def __init__(self, sliced: list[Tensor]) -> None:
        self.receivers = list(sliced)
        self.values = [torch.zeros_like(t) for t in sliced]
        self._sliced = len(sliced)
        self._place: dict[int, int] = {}  # of a leaf, by id

    def add(self, loss: Tensor, parts: list[Tensor], begin: int, end: int, mark: int) -> None:
        """Run the backward pass of one slice."""
        own = {id(p) for p in parts}
        leaves = [leaf for leaf in _leaves(loss, mark) if id(leaf) not in own]
        with _without_hooks(leaves):
            found = torch.autograd.grad(loss, [*parts, *leaves], allow_unused=True)
        for value, gradient in zip(self.values, found[: self._sliced], strict=False):
            if gradient is not None:
                value[begin:end] = gradient
        for leaf, gradient in zip(leaves, found[self._sliced :], strict=True):
            if gradient is None:
                continue
            place = self._place.get(id(leaf))
            if place is None:
                self._place[id(leaf)] = len(self.receivers)
                self.receivers.append(leaf)
                self.values.append(gradient)
            else:
                self.values[place] = self.values[place] + gradient


class _Hand(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, values: list[Tensor], *receivers: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [value * upstream.to(value.dtype) for value in ctx.saved_tensors]
        return None, None, *scaled


def _leaves(loss: Tensor, mark: int) -> list[Tensor]:
    """The leaf tensors that a graph built since `mark` ends in."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # an AccumulateGrad: the gradient's place in a leaf
            found.append(node.variable)
        elif node._sequence_nr() <= mark:
            what = f"a tensor with a graph ({node.name()})"
            advice = "Pass it as an argument: chunked_loss(fn, inputs, *args)"
            raise RuntimeError(message(OP, "fn", "use no graph but its arguments'", what, advice))
        else:
            waiting.extend(parent for parent, _ in node.next_functions)
    return found


def _newest_node() -> int:
    """The sequence number that autograd gave last; later nodes have higher ones."""
    probe: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    return -1 if probe is None else int(probe._sequence_nr())


@contextmanager
def _without_hooks(leaves: list[Tensor]) -> Iterator[None]:
    """Keep users' tensor hooks for the gradient that is handed on: per slice they would run on
    parts, and then once more."""
    held = [
        (leaf._backward_hooks, dict(leaf._backward_hooks))
        for leaf in leaves
        if leaf._backward_hooks
    ]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in held:
            hooks.update(content)


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
