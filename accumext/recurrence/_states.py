"""Recurrent states: tensors in tuples, lists, dicts and dataclasses. Functions that detach them,
freeze rows of them, and more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.tensors.checks import dtype_name, fail_type, fail_value, message, type_name
from accumext.tensors.torch_private import tree_leaves, tree_map, write_count

# A tensor, None, or any nesting of tuples, lists, dicts and dataclasses of them.
State: TypeAlias = Any


def leaves(state: State) -> list[Any]:
    """Return the entries of a state, in order."""
    if state is None or isinstance(state, Tensor):  # a short cut for common states
        return [state]
    if type(state) in (tuple, list):
        return [leaf for part in state for leaf in leaves(part)]
    entries: list[Any] = []
    for leaf in tree_leaves(state):
        entries += leaves(_field_values(leaf)) if _has_fields(leaf) else [leaf]
    return entries


def map_leaves(function: Callable[[Any], Any], state: State) -> State:
    """Return the same nesting, in new containers, with `function` applied to every entry."""

    def of_leaf(leaf: Any) -> Any:
        if not _has_fields(leaf):
            return function(leaf)
        made = copy.copy(leaf)  # not by a call of the class, which may have its own __init__
        for name, value in _field_values(leaf).items():
            object.__setattr__(made, name, map_leaves(function, value))
        return made

    if state is None or isinstance(state, Tensor):
        return function(state)
    if type(state) in (tuple, list):
        return type(state)([map_leaves(function, part) for part in state])
    return tree_map(of_leaf, state)


def _has_fields(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def _field_values(instance: Any) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name) for f in fields(instance)}


def tensors(state: State) -> list[Tensor]:
    """Return the tensors of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    return [leaf for leaf in leaves(state) if isinstance(leaf, Tensor)]


def size_of(state: State) -> int:
    """Return the bytes of a state's tensors."""
    return sum(tensor.nbytes for tensor in tensors(state))


def check_nesting(op: str, name: str, state: State) -> None:
    """Raise if a state has another container: its tensors would be neither detached nor frozen."""
    for leaf in () if state is None or isinstance(state, Tensor) else leaves(state):
        if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
            contract = "nest tensors in tuples, lists, dicts and dataclasses"
            fail_type(op, name, contract, type_name(leaf))


def copy_nesting(state: State) -> State:
    """Return the same tensors in new containers, which a cell may write into."""
    return state if isinstance(state, Tensor) else map_leaves(lambda leaf: leaf, state)


def map_tensors(function: Callable[[Tensor], Any], state: State) -> State:
    """Return the same nesting with `function` applied to every tensor."""
    if state is None:
        return None
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, state)


class _Words(str):
    """Text that a container prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def with_shapes(output: Any) -> str:
    """Return a named tuple as text, with dtype and shape of each tensor: this reads no device."""

    def shape(tensor: Tensor) -> _Words:
        device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
        return _Words(f"{dtype_name(tensor.dtype)} {list(tensor.shape)}{device}")

    fields = [f"{name}={map_tensors(shape, value)!r}" for name, value in output._asdict().items()]
    return f"{type(output).__name__}({', '.join(fields)})"


def detach(state: State) -> State:
    """Return the same values in the same nesting, without a graph."""
    return map_tensors(Tensor.detach, state)


def called(op: str) -> str:
    """Return the name of the argument that an operation calls at every step."""
    return "step" if op in ("tbptt", "rollout") else "cell"


def freeze(op: str, active: Tensor, new: State, old: State, batch_dim: int) -> State:
    """Return `new` in the rows where `active` [B] is true, and `old` in the others.

    A tensor may have grown in one dimension, such as a cache of keys: inactive rows get zeros
    behind their own entries.
    """

    def choose(new_leaf: Any) -> Any:
        old_leaf = next(before)
        if not isinstance(new_leaf, Tensor) or not isinstance(old_leaf, Tensor):
            return new_leaf
        if new_leaf.dim() == 0:  # of the whole batch, such as a counter
            return new_leaf
        _check_rows(op, new_leaf, batch_dim, active.shape[0])
        old_leaf = _grown(op, old_leaf, new_leaf, batch_dim)
        shape = [-1 if dim == batch_dim else 1 for dim in range(new_leaf.dim())]
        return torch.where(active.view(shape), new_leaf, old_leaf)

    if old is None:  # the first step of a cell that makes its own initial state
        return new
    entries = leaves(old)
    if len(leaves(new)) != len(entries):
        contract = f"return a state with the {len(entries)} entries of the one before"
        advice = "Keep a cache in one tensor that grows: torch.cat([keys, key[:, None]], 1)"
        fail_value(op, called(op), contract, len(leaves(new)), advice)
    before = iter(entries)
    return map_leaves(choose, new)


def _grown(op: str, old: Tensor, new: Tensor, batch_dim: int) -> Tensor:
    """Return `old`, padded with zeros to the shape of `new`."""
    if old.shape == new.shape:
        return old
    longer = [now - was for was, now in zip(old.shape, new.shape, strict=False)]
    if old.dim() != new.dim() or longer[batch_dim] or any(sorted(longer)[:-1]):
        contract = "return a state of the shapes of the one before, or longer in one dimension"
        fail_value(op, called(op), contract, f"{list(new.shape)} after {list(old.shape)}")
    return F.pad(old, [size for by in reversed(longer) for size in (0, by)])


def write_counts(given: list[Tensor]) -> list[int]:
    """Return the number of writes into each tensor, for `check_unwritten`."""
    try:
        return list(map(write_count, given))
    except RuntimeError:
        return [0 if t.is_inference() else write_count(t) for t in given]


def check_unwritten(op: str, name: str, what: str, given: list[Tensor], counts: list[int]) -> None:
    """Raise if a function has written into tensors that are read again."""
    if write_counts(given) == counts:
        return
    for tensor, before, now in zip(given, counts, write_counts(given), strict=True):
        if before != now:
            contract = f"write into {what}"
            got = f"a write into one of shape {list(tensor.shape)}"
            advice = "Make new ones: count + 1 in place of count += 1"
            raise RuntimeError(message(op, name, contract, got, advice))


def check_batch_dim(op: str, state: State, batch: int, batch_dim: int | None) -> None:
    """Raise unless the tensors of a state have the batch in `batch_dim`. If that is None, it must
    be in dimension 0, and no other dimension may have its size, but for the last one."""
    shapes = [tensor.shape for tensor in tensors(state) if tensor.dim() > 0]
    for tensor in tensors(state):
        if tensor.dim() > 0:
            _check_rows(op, tensor, batch_dim or 0, batch)
    # The last dimension is one of features.
    inner = range(1, min(map(len, shapes), default=1) - 1)
    others = [dim for dim in inner if all(shape[dim] == batch for shape in shapes)]
    if batch_dim is None and others and batch > 1:
        contract = f"be given if dimensions 0 and {others[0]} may both be the batch of {batch}"
        fail_value(op, "batch_dim", contract, f"a state of shape {list(shapes[0])}")


def _check_rows(op: str, tensor: Tensor, batch_dim: int, batch: int) -> None:
    """Raise if a tensor of a state, whose rows are to be frozen, lacks the batch in `batch_dim`."""
    if tensor.dim() > batch_dim and tensor.shape[batch_dim] == batch:
        return
    contract = f"hold tensors with the batch in dimension {batch_dim} to be frozen by row"
    elsewhere = [dim for dim, size in enumerate(tensor.shape) if size == batch]
    advice = f"Pass batch_dim={elsewhere[0]} if it is there" if elsewhere else None
    fail_value(op, "state", contract, f"shape {list(tensor.shape)}", advice)


def join(op: str, function: Callable[[list[Tensor]], Tensor], parts: list[State]) -> State:
    """Join states of the same nesting into one: each tensor is `function` of the tensors in its
    place, and any other entry is that of the first state."""
    first, places = parts[0], [leaves(part) for part in parts]
    if any(len(place) != len(places[0]) for place in places):
        contract = f"return extras with {len(places[0])} entries at every step"
        fail_value(op, "cell", contract, [len(place) for place in places])
    columns = zip(*places, strict=True)

    def joined(leaf: Any) -> Any:
        column = next(columns)
        return function(list(column)) if isinstance(leaf, Tensor) else leaf

    return map_leaves(joined, first)


def hook_beyond(view: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the gradient that a view passes on to its base. Unlike a tensor hook, it
    leaves the gradient of the view itself alone, which a step may ask torch.autograd.grad for."""

    def beyond(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else function(g) for g in gradients)

    assert view.grad_fn is not None
    view.grad_fn.register_hook(beyond)


def zero_dependency(given: list[Tensor]) -> Tensor | None:
    """Return a 0 that depends on every given tensor: its backward gives each a zero gradient."""
    zeros = [t.reshape(-1)[:0].sum().real for t in given if t.requires_grad]
    return torch.stack([t.to(zeros[0].dtype) for t in zeros]).sum() if zeros else None
