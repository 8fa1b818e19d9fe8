"""The graph of a backward pass: its losses, and the tensors that autograd has saved for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext._tensor_kinds import is_dtensor
from accumext._torch_private import (
    leaf_of,
    local_part,
    node_number,
    packed_by,
    saved_by,
    write_count,
)
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
        self._kinds = [(node_number(node), *_kind(node)) for node in found]
        logits = [_saved(node, "self") for node in found if _is(node, ("Nll",))]
        # Of the cross-entropy with most classes; 0 without one.
        self.classes = max((t.shape[1] for t in logits if t is not None and t.dim() > 1), default=0)
        self._seen: dict[int, Tensor] = {}
        nodes = {node_number(node): node for node in (base, *found)}
        self._base = node_number(base)
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
        elif leaf_of(node) is None:
            yield node


def _kind(node: Any) -> tuple[bool, str | None, Tensor | float | None]:
    """Whether a node is one of torch's losses, its reduction, and how many targets it counts."""
    reduction = saved_by(node, "reduction")
    if reduction is not None:
        counted = _saved(node, "total_weight") if _is(node, ("Nll",)) else None
        return True, _REDUCTIONS.get(reduction), counted
    if node.name() in ("MeanBackward0", "SumBackward0"):
        mean = node.name() == "MeanBackward0"
        return False, "mean" if mean else "sum", saved_by(node, "self_sym_numel") if mean else None
    return False, None, None


def _saved(node: Any, name: str) -> Any:
    """What a node has saved; None where a checkpoint would compute it again."""
    packed = packed_by(node, name)
    if isinstance(packed, Tensor):  # the audit was not yet open
        return saved_by(node, name)
    return packed.tensor if isinstance(packed, Held) else None


class Held:
    """A saved tensor, while a graph holds it."""

    __slots__ = ("key", "parameter", "size", "tensor", "tracker", "version")

    def __init__(
        self, tensor: Tensor, key: int, size: int, parameter: int | None, tracker: SavedTensors
    ) -> None:
        # Detached: a node that saves its own output would hold itself.
        self.tensor, self.version = tensor.detach(), write_count(tensor)
        self.key, self.size, self.parameter, self.tracker = key, size, parameter, tracker
        tracker.count(self, 1)

    def __del__(self) -> None:
        self.tracker.count(self, -1)

    def unpack(self) -> Tensor:
        """The tensor, unless it was written: autograd leaves this check to those with hooks."""
        version = write_count(self.tensor)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.tensor.type()} {list(self.tensor.shape)}] is at "
                f"version {version}; expected version {self.version} instead."
            )
        return self.tensor


@dataclass
class _Memory:
    """A storage that graphs hold."""

    users: int
    bytes: int
    width: int  # of its last dimension


class SavedTensors:
    """Bytes that the living graphs hold, each storage once, without parameters."""

    def __init__(self) -> None:
        self.watching = True
        self._parameters: dict[int, int] = {}  # by the address of a storage
        self._leaves: dict[int, int] = {}  # by id
        self._held: dict[int, _Memory] = {}  # by the address of a storage
        self._bytes, self._by_width = 0, Counter[int]()
        self._uses = Counter[int]()  # of parameters
        self._at: dict[int, tuple[int, int]] = {}  # bytes at the first and the last of these

    def know(self, parameters: list[Tensor]) -> None:
        """Which storages are parameters'."""
        inner = [local_part(t) if is_dtensor(t) else t for t in parameters]
        self._parameters = {t.untyped_storage().data_ptr(): n for n, t in enumerate(inner)}
        self._leaves = {id(t): n for n, t in enumerate(parameters)}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is saved inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, Held.unpack):
            yield

    def _pack(self, tensor: Tensor) -> Held:
        inner = local_part(tensor) if is_dtensor(tensor) else tensor
        try:
            storage = inner.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # no memory of its own
            key, size = 0, 0
        own = self._parameters.get(key) if self.watching else None
        counted = self.watching and own is None
        parameter = self._leaf(tensor) if counted else own
        return Held(tensor, key if counted else 0, size, parameter, self)

    def _leaf(self, tensor: Tensor) -> int | None:
        """The parameter that a tensor is a cast of, as under autocast, or a view of that."""
        node: Any = tensor.grad_fn
        for _ in range(3):
            if node is None or (leaf := leaf_of(node)) is not None:
                break
            node = _inner(node)[0] if _is(node, _CASTS) else None
        return None if node is None else self._leaves.get(id(leaf))

    def count(self, held: Held, by: int) -> None:
        """One user more or less of a storage, and of a parameter."""
        if held.key:
            width = held.tensor.shape[-1] if held.tensor.dim() else 0
            memory = self._held.setdefault(held.key, _Memory(0, held.size, width))
            memory.users += by
            if memory.users == max(by, 0):
                self._bytes += by * memory.bytes
                self._by_width[memory.width] += by * memory.bytes
            if not memory.users:
                del self._held[held.key]
        if held.parameter is not None:
            self._uses[held.parameter] += by
            first = self._at[held.parameter][0] if self._uses[held.parameter] > 1 else self._bytes
            self._at[held.parameter] = first, self._bytes

    def graph(self, classes: int) -> Graph:
        """What is saved now, when a pass begins."""
        parameter = max(self._uses, key=self._uses.__getitem__, default=None)
        if parameter is None:
            return Graph(self._bytes, 0, 0, 0.0, self._by_width[classes])
        calls, (first, last) = self._uses[parameter], self._at[parameter]
        per_call = (last - first) / max(calls - 1, 1)
        return Graph(self._bytes, calls, parameter, per_call, self._by_width[classes])
