"""`chunked_loss`: part of a model in slices of the batch, one slice's graph at a time."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from accumext.distributed import gathered_once
from accumext.recurrence import KeptState, Replay, cuts, fingerprints_of
from accumext.tensors import scalars
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import (
    REDUCTIONS,
    Reduction,
    fail_type,
    fail_value,
    forward_of,
    message,
    one_of,
    positive_int,
    type_name,
    zero_dim_loss,
)
from accumext.tensors.kinds import versions
from accumext.tensors.scalars import Scalar
from accumext.tensors.torch_private import (
    assert_on_device,
    is_since,
    next_node_number,
    node_number,
    nodes_since,
    sparse_indices,
    sparse_values,
)

OP = "chunked_loss"
IGNORED = -100  # the default `ignore_index` of F.cross_entropy
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)  # that can hold it
_CROSS_ENTROPIES = (F.cross_entropy, F.nll_loss)
_LINEAR_CROSS_ENTROPY = getattr(F, "linear_cross_entropy", None)  # of torch 2.13
_LOSS = "Pass one such as lambda h, y: F.cross_entropy(head(h), y)"
_ADVICE = (
    "Pass weights=, what each row counts: targets != ignore_index, class_weight[targets], or "
    "torch.ones(len(inputs)) if all count alike"
)
_SUMMED = "Pass reduction='sum' to chunked_loss, too, for the sum over the batch"


class _Share(NamedTuple):
    """The weight of a slice's loss in the loss of the batch."""

    factor: Scalar
    empty: Tensor | None = None  # 0-dim bool: whether the weight is 0; None: known not to be


@explained
def chunked_loss(
    fn: Callable[..., Tensor],
    inputs: Tensor,  # [N, ...]
    *args: Any,
    chunks: int | None = None,
    chunk_size: int | None = None,
    reduction: Reduction = "mean",
    weights: Tensor | None = None,  # [N, ...]
) -> Tensor:
    """Compute the loss of `fn` over a batch slice by slice, in the memory of one slice.

    `mean`: sum_i w_i / w * fn(slice i), where w_i is the divisor of the mean over slice i, and w
    their sum. So it stays the mean over the batch. w_i is the divisor of the F.cross_entropy or
    F.nll_loss (or their modules) that `fn` calls, with any targets, `ignore_index` and class
    weights, or else the number of rows. `sum`: sum_i fn(slice i). The forward pass keeps no graph
    of a slice; the backward pass runs each slice again, multiplies its gradients by the upstream
    gradient of the loss, and frees its graph before the next. So it is a loss like any other: the
    trunk runs once, DDP's hooks fire once (call it inside of DDP's forward), and a loss scale
    protects half-precision gradients inside `fn`.

    Args:
        fn: `(inputs_slice, *args_slices) -> 0-dim loss`, over any parameters. Called twice per
            slice, with the same random numbers. State that it keeps between calls is restored for
            the second call (docs/decoder.md, "Cells that keep state of their own"). Statistics
            that it takes over the batch, as BatchNorm does in training, are those of a slice.
        inputs: [N, ...], sliced along dimension 0.
        args: tensors of N rows are sliced in the same way; other values are passed on unchanged.
        chunks: number of slices, at most N, with equal numbers of rows if possible. Give this or
            `chunk_size`.
        chunk_size: rows per slice; the last may have fewer.
        reduction: "mean" or "sum".
        weights: for "mean", the weight of each row in the divisor, if `fn` takes several means, or
            one that is not a cross entropy of torch: `targets != ignore_index` if targets are
            ignored, `class_weight[targets]` with weighted classes. Bools, ints or floats [N, ...],
            of which trailing dimensions are summed. A slice of weight 0 adds exactly 0 to the loss
            and to every gradient, even if `fn` is NaN there. So no other computation, such as
            another loss, may use a tensor with a graph that `fn` made for such a slice.

    Returns:
        A 0-dim loss.

    Raises:
        RuntimeError: the second call of `fn` has another result; or, with weights of rows or
            classes, `fn` uses a part of the graph of an earlier slice, such as a tensor that it
            computed once and kept.
        ValueError: a value or shape is wrong; not exactly one of `chunks` and `chunk_size` is
            given; under "mean", `fn` returns a loss of torch with reduction="sum"; or `weights` are
            missing under "mean". They are needed if `fn` calls several cross entropies that do not
            count all rows alike, or one that is no mean and ignores targets; or if it calls none,
            and an integer tensor in `args` holds -100. Values on a GPU are device asserts instead.
        TypeError: a type is wrong.

    Example:
        >>> features = trunk(x)
        >>> head_loss = lambda h, y: F.cross_entropy(head(h), y)
        >>> loss = accumext.chunked_loss(head_loss, features, y, chunks=10)
        >>> loss.backward()

    Source: Chen et al. 2016 (recomputation), by `torch.utils.checkpoint`.
    """
    borders = _check(fn, inputs, args, chunks, chunk_size, reduction)
    shares = _known_shares(inputs, borders, reduction, weights)
    watched: list[_CrossEntropies] = []
    losses: list[Tensor] = []
    stopped: list[range] = []  # numbers of graph nodes of slices whose weight may be 0
    replay = None
    if torch.is_grad_enabled():
        replay = Replay(KeptState(OP, "fn", fn), inputs.device)
    with gathered_once(OP, fn) as gathered:
        for index, (begin, end) in enumerate(borders):
            slices = [a[begin:end] if isinstance(a, Tensor) else a for a in (inputs, *args)]
            first, part = next_node_number(), fn
            if shares is None:
                watched.append(part := _CrossEntropies(fn))
            loss = part(*slices) if replay is None else _run_again(replay, part, slices)
            loss = zero_dim_loss(OP, "fn", loss, _LOSS)
            if stopped:
                _check_apart(loss, stopped)
            empty = watched[-1].empty() if shares is None else shares[index].empty
            if empty is not None:
                _stop_gradients_where(empty, loss, first)
                stopped.append(range(first, next_node_number()))
                torch.clear_autocast_cache()  # cached weights would connect the next slice's graph
            losses.append(loss)
        if losses:
            shares = shares or _watched_shares(watched, args, borders)
            total = functools.reduce(operator.add, map(_share_of, losses, shares))
            return total if gathered is None else gathered.finish(total)
    rows = inputs if inputs.is_floating_point() else inputs.float()
    return rows.sum()  # there are no rows: a loss of 0, with a zero gradient


def _run_again(replay: Replay, part: Callable[..., Tensor], slices: list[Any]) -> Tensor:
    """Return the loss of a slice with a graph that keeps no tensors: backward runs it again."""
    snapshot, calls = replay.kept.save(), itertools.count()
    known: list[Tensor] | None = None

    def run(*slices: Any) -> Tensor:
        nonlocal known
        with ExitStack() as stack:
            if next(calls):
                stack.enter_context(replay.modes())
                stack.enter_context(replay.kept.replaying(snapshot))
            loss = part(*slices)
        if known is not None:
            replay.check_same(loss, known)
        else:
            known = fingerprints_of(loss)
        return loss

    with set_checkpoint_early_stop(False):  # run up to the loss, which is compared
        result: Tensor = checkpoint(run, *slices, use_reentrant=False)
    return result


class _CrossEntropies(TorchFunctionMode):
    """Calls `fn`, and records the divisors of the means of torch's cross entropies in it."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def __call__(self, *slices: Any) -> Tensor:
        self.divisors: list[Tensor] = []  # 0-dim
        self.left_out: list[Tensor] = []  # 0-dim bool: a cross entropy that is no mean ignores some
        self.may_be_nan = False  # whether a mean of no targets has NaN for gradients
        # What the last loss of torch with reduction="sum" returned, and its version.
        self._summed: tuple[Tensor, int | None] | None = None
        with self:
            loss = self.fn(*slices)
        summed, self._summed = self._summed, None  # whose graph may be freed
        if summed is not None and loss is summed[0] and versions([loss]) == [summed[1]]:
            fail_value(OP, "fn", "return a mean", "a loss with reduction='sum'", _SUMMED)
        return loss

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CROSS_ENTROPIES:
            self._take(*args, **kwargs)
        elif func is _LINEAR_CROSS_ENTROPY:
            self._take(*args[1:], **kwargs)
            self.may_be_nan = True
        result = func(*args, **kwargs)
        if kwargs.get("reduction") == "sum":
            self._summed = result, versions([result])[0]
        return result

    def _take(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None,
        size_average: bool | None = None, ignore_index: int | None = None,
        reduce: bool | None = None, reduction: str = "mean", **_: Any,
    ) -> None:  # fmt: skip
        """Record the divisor of a call of F.cross_entropy with these arguments."""
        if target.is_floating_point():  # probabilities of classes: every row counts
            target, weight = target.select(min(1, target.dim() - 1), 0), None
            counted = torch.ones_like(target, dtype=torch.bool)
        else:
            counted = target != (IGNORED if ignore_index is None else ignore_index)
        if reduction != "mean" or size_average is not None or reduce is not None:
            self.left_out.append(~counted.all())
        elif weight is None:
            self.divisors.append(counted.sum())
        else:
            self.may_be_nan = True
            of_targets = weight.detach()[torch.where(counted, target, 0).long()]
            self.divisors.append(torch.where(counted, of_targets, 0).sum(dtype=torch.float64))

    def empty(self) -> Tensor | None:
        """Return whether the weight is 0, with gradients of NaN; None: known not to be so."""
        if not (self.may_be_nan and self.divisors):
            return None
        empty = torch.stack(self.divisors).sum() == 0
        return None if scalars.on_host(empty) and not empty else empty


def _known_shares(
    inputs: Tensor, borders: list[tuple[int, int]], reduction: Reduction, weights: Tensor | None
) -> list[_Share] | None:
    """Return the weights of all slices; None if they depend on the cross entropies in `fn`."""
    if weights is not None:
        _check_weights(weights, inputs, reduction)
        weights = weights.detach()
        dtype = torch.float64 if weights.is_floating_point() else torch.int64
        return _shares([weights[begin:end].sum(dtype=dtype) for begin, end in borders])
    return [_Share(1.0)] * len(borders) if reduction == "sum" else None


def _watched_shares(
    watched: list[_CrossEntropies], args: tuple[Any, ...], borders: list[tuple[int, int]]
) -> list[_Share]:
    """Return the weights of all slices: the divisors of their cross entropies, or their rows."""
    rows = [end - begin for begin, end in borders]
    calls = {len(part.divisors) for part in watched}
    if calls == {1}:
        return _shares([part.divisors[0] for part in watched])
    for index, arg in enumerate(args):
        if calls == {0} and isinstance(arg, Tensor) and arg.dtype in INTEGERS:
            _check_nothing_is_ignored(f"args[{index}]", arg)
    for left_out in (flag for part in watched for flag in part.left_out):
        contract = "not leave targets out of an F.cross_entropy that is no mean"
        _require(~left_out, "fn", contract, lambda: "some", _ADVICE)
    if calls != {0}:
        contract = "call one F.cross_entropy in every slice, or several that count all rows alike"
        if len(calls) > 1:
            fail_value(OP, "fn", contract, f"{min(calls)} to {max(calls)} calls", _ADVICE)
        table = torch.stack([torch.stack(part.divisors).double() for part in watched])
        of_rows = torch.tensor(rows, device="cpu").to(table.device, non_blocking=True)[:, None]
        alike = (table * rows[0] == table[0] * of_rows).all()
        _require(alike, "fn", contract, lambda: "others", _ADVICE)
    return [_Share(count / sum(rows)) for count in rows]


def _shares(counts: list[Tensor]) -> list[_Share]:
    """Return the 0-dim counts divided by their sum; as floats if the counts are on a CPU."""
    if not counts:
        return []
    sums = torch.stack(counts)
    empty = sums == 0
    factors = torch.where(empty, 0, sums / sums.sum().double())
    if not scalars.on_host(sums):
        return [_Share(*share) for share in zip(factors, empty, strict=True)]
    shares = zip(factors.tolist(), empty.tolist(), empty, strict=True)
    return [_Share(factor, flag if is_empty else None) for factor, is_empty, flag in shares]


def _share_of(loss: Tensor, share: _Share) -> Tensor:
    """Return the term of a slice in the loss, in the slice's dtype; 0 if the slice is empty."""
    factor, dtype = share.factor, loss.dtype
    if isinstance(factor, Tensor):
        factor = factor.to(torch.promote_types(dtype, torch.float32))
    loss = (loss * factor).to(dtype)
    return loss if share.empty is None else torch.where(share.empty, 0, loss)


def _stop_gradients_where(empty: Tensor, loss: Tensor, first: int) -> None:
    """Zero gradients that leave the graph of an empty slice, to leaves or nodes before `first`.

    A factor of 0 at the loss is not enough: 0 / 0 inside of `fn` is NaN, and so is 0 * infinity.
    """

    def stop(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else _zero_where(empty, g) for g in gradients)

    for node in nodes_since(first, [loss]):
        if not all(is_since(n, first) for n, _ in node.next_functions if n is not None):
            node.register_hook(stop)


def _check_apart(loss: Tensor, stopped: list[range]) -> None:
    """Raise if the graph of a slice contains nodes of another slice, whose gradients are zeroed."""
    for node in nodes_since(stopped[0].start, [loss]):
        if any(node_number(node) in nodes for nodes in stopped):
            contract = "make its graph anew for every slice if slices may count nothing"
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
    """Check the arguments, and return the rows [begin, end) of every slice."""
    if not callable(fn):
        fail_type(OP, "fn", "be callable", type_name(fn))
    if args and forward_of(fn) in (nn.Linear.forward, nn.Sequential.forward):
        fail_type(OP, "fn", "be the loss of its arguments", f"a layer, {type_name(fn)}", _LOSS)
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
        return cuts(0, rows, [rows * i // count for i in range(count)])
    return cuts(0, rows, positive_int(OP, "chunk_size", chunk_size))


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
    _require(right.all(), "weights", contract, lambda: weights[~right][0].item())


def _check_nothing_is_ignored(name: str, targets: Tensor) -> None:
    """Raise if a target may be ignored, for then the number of rows would not be the divisor."""
    ignored, contract = targets == IGNORED, f"have no ignored targets ({IGNORED}) without weights"
    advice = f"Pass weights=({name} != {IGNORED}), or weights=torch.ones(len(inputs)) if all count"
    _require(~ignored.any(), name, contract, lambda: f"{int(ignored.sum())} of them", advice)


def _require(
    right: Tensor,  # 0-dim bool
    argument: str, contract: str, got: Callable[[], object], advice: str | None = None,
) -> None:  # fmt: skip
    """Raise unless `right` is true. On a GPU, for which the host would wait, assert it there."""
    if not scalars.on_host(right):
        assert_on_device(right, message(OP, argument, contract, "others", advice))
    elif not right:
        fail_value(OP, argument, contract, got(), advice)
