"""The graph of a backward pass: its losses, and the tensors that autograd has saved for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext import _torch_private as private
from accumext._tensor_kinds import is_dtensor
from accumext.audit._events import Graph, Loss

# Nodes that scale a loss, and those that also join losses: behind them are the losses themselves.
_SCALES = ("Mul", "Div", "Neg", "ToCopy", "Clone", "View", "Reshape", "Squeeze", "Unsqueeze",
           "Expand", "Alias", "Select", "_DDPSink")  # fmt: skip
_JOINS = (*_SCALES, "Add", "Sub", "Stack", "Cat")
_LISTS = ("Stack", "Cat")  # of losses, where a mean or a sum follows
_CASTS = ("ToCopy", "TBackward", "Transpose", "Permute", "View")
_REDUCTIONS = {1: "mean", 2: "sum"}  # as torch's losses save them


class Losses:
    """The losses at the root of a graph; the pass that follows tells their coefficients."""

    def __init__(self, root: Any) -> None:
        base = root
        while len(inner := _inner(base)) == 1 and _is(base, _SCALES):
            base = inner[0]
        found = list(_losses(root))
        self._kinds = [(private.node_number(node), *_kind(node)) for node in found]
        logits = [saved(node, "self") for node in found if _is(node, ("Nll",))]
        # Of the cross-entropy with most classes; 0 without one.
        self.classes = max((t.shape[1] for t in logits if t is not None and t.dim() > 1), default=0)
        self._seen: dict[int, Tensor] = {}
        nodes = {private.node_number(node): node for node in (base, *found)}
        self._base = private.node_number(base)
        self._handles = [
            node.register_prehook(self._saver(number)) for number, node in nodes.items()
        ]

    def _saver(self, number: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        def save(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                self._seen[number] = grads[0].detach().clone()

        return save

    def end(self) -> Callable[[], tuple[tuple[Loss, ...], float]]:
        """After the pass: what returns the losses, and the coefficient of all of them together."""
        for handle in self._handles:
            handle.remove()
        base, seen, kinds = self._base, self._seen, self._kinds

        def read() -> tuple[tuple[Loss, ...], float]:
            factors = {number: float(grad.double().sum()) for number, grad in seen.items()}
            losses = tuple(
                Loss(number, known, reduction, None if n is None else float(n), factors[number])
                for number, known, reduction, n in kinds
                if number in factors
            )
            return losses, factors.get(base, 0.0)

        return read


def _inner(node: Any) -> list[Any]:
    return [inner for inner, _ in node.next_functions if inner is not None]


def _is(node: Any, names: tuple[str, ...]) -> bool:
    return bool(node.name().startswith(names))


def _losses(root: Any) -> Iterator[Any]:
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        inner = _inner(node)
        of_list = _is(node, ("Mean", "Sum")) and any(_is(n, _LISTS) for n in inner)
        if inner and (of_list or _is(node, _JOINS)):
            waiting += inner
        else:
            yield node


def _kind(node: Any) -> tuple[bool, str | None, Tensor | float | None]:
    """Whether a node is one of torch's losses, its reduction, and how many targets it counts."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        counted = saved(node, "total_weight") if _is(node, ("Nll",)) else None
        return True, _REDUCTIONS.get(reduction), counted
    if node.name() in ("MeanBackward0", "SumBackward0"):
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        mean = node.name() == "MeanBackward0"
        return False, "mean" if mean else "sum", torch.Size(sizes).numel() if mean else None
    return False, None, None


def saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node has saved; None where unpacking it would compute it again."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return None
    data = getattr(raw, "data", None)  # from torch 2.12 on
    if isinstance(data, Held):
        return data.tensor
    unpacked: Tensor | None = None if data is not None else getattr(node, f"_saved_{name}")
    return unpacked


class Held:
    """A saved tensor, while a graph holds it."""

    __slots__ = ("key", "size", "tensor", "tracker", "version")

    def __init__(self, tensor: Tensor, key: int, size: int, tracker: SavedTensors) -> None:
        self.tensor, self.version = tensor, private.write_count(tensor)
        self.key, self.size, self.tracker = key, size, tracker
        tracker.count(self, 1)

    def __del__(self) -> None:
        self.tracker.count(self, -1)

    def unpack(self) -> Tensor:
        """The tensor, unless it was written: autograd leaves this check to those with hooks."""
        version = private.write_count(self.tensor)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at "
                f"version {version}; expected version {self.version} instead."
            )
        return self.tensor


@dataclass
class _Uses:
    """How often a parameter is in a graph, and the bytes saved at its first and last use."""

    calls: int
    first: int
    last: int


class SavedTensors:
    """Bytes that the living graphs hold, each storage once, without parameters."""

    def __init__(self) -> None:
        self._parameters: dict[int, int] = {}  # by the address of a storage
        self._leaves: dict[int, int] = {}  # by id
        self._users = Counter[int]()  # of a storage
        self._bytes, self._by_width = 0, Counter[int]()
        self._uses: dict[int, _Uses] = {}
        self.watching = True

    def know(self, parameters: list[Tensor]) -> None:
        """Which storages are parameters'."""
        inner = [private.local_part(t) if is_dtensor(t) else t for t in parameters]
        self._parameters = {t.untyped_storage().data_ptr(): n for n, t in enumerate(inner)}
        self._leaves = {id(t): n for n, t in enumerate(parameters)}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is saved inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | Held:
        if not self.watching:
            return Held(tensor, 0, 0, self)
        inner = private.local_part(tensor) if is_dtensor(tensor) else tensor
        try:
            storage = inner.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # no memory of its own
            key, size = 0, 0
        index = self._parameters.get(key)
        held = Held(tensor, 0 if index is not None else key, size, self)
        index = self._leaf(tensor) if index is None else index
        if index is not None:
            uses = self._uses.setdefault(index, _Uses(0, self._bytes, self._bytes))
            uses.calls, uses.last = uses.calls + 1, self._bytes
        return held

    @staticmethod
    def _unpack(held: Held) -> Tensor:
        return held.unpack()

    def _leaf(self, tensor: Tensor) -> int | None:
        """The parameter that a tensor is a cast of, as under autocast, or a view of that."""
        node: Any = tensor.grad_fn
        for _ in range(3):
            if node is None or (leaf := private.leaf_of(node)) is not None:
                break
            node = _inner(node)[0] if _is(node, _CASTS) else None
        return None if node is None else self._leaves.get(id(leaf))

    def count(self, held: Held, by: int) -> None:
        """One user more or less of a storage."""
        if not held.key:
            return
        users = self._users[held.key] = self._users[held.key] + by
        if users == (1 if by > 0 else 0):
            width = held.tensor.shape[-1] if held.tensor.dim() else 0
            self._bytes += by * held.size
            self._by_width[width] += by * held.size
        if not users:
            del self._users[held.key]

    def graph(self, classes: int) -> Graph:
        """What is saved now, when a pass begins."""
        index, uses = max(
            self._uses.items(), key=lambda item: item[1].calls, default=(0, _Uses(0, 0, 0))
        )
        per_call = (uses.last - uses.first) / max(uses.calls - 1, 1)
        return Graph(self._bytes, uses.calls, index, per_call, self._by_width[classes])

    def end_pass(self) -> None:
        """A pass has run: what is used from here on belongs to the next."""
        self._uses.clear()
