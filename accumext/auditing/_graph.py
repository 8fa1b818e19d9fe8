"""The graph of a backward pass: its losses, and the tensors that autograd has saved for it."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from accumext.auditing._events import Constant, Event, Graph, Loss, Pass, only
from accumext.auditing._torch_private import (
    leaf_of,
    local_part,
    order_of,
    packed_by,
    saved_by,
    write_count,
)

# Nodes that scale a loss, and nodes that join several: the losses are among their inputs.
_SCALES = ("Mul", "Div", "Neg", "ToCopy", "Clone", "View", "Reshape", "Squeeze", "Unsqueeze",
           "Expand", "Alias", "Select", "NanToNum", "_DDPSink")  # fmt: skip
_JOINS = (*_SCALES, "Add", "Sub", "Stack", "Cat")
_LISTS = ("Stack", "Cat")  # lists of losses, if a mean or a sum of them follows
_CASTS = ("ToCopy", "T", "Transpose", "Permute", "View")
SCALED = "accumext.audit.scaled"  # metadata of a scaled loss's node: the scale, the unscaled loss
_NUMBERS = count()
_NLL = ("NllLoss", "NllLoss2D")
_REDUCTIONS = {1: "mean", 2: "sum"}  # as torch's losses save them


class Losses:
    """The losses at the root of a graph; hooks read their coefficients in the backward pass."""

    def __init__(self, root: Any) -> None:
        chain = [root]  # nodes that scale the loss, down to it or to a node that joins several
        while len(inner := _inner(chain[-1])) == 1 and _scales(chain[-1]):
            chain.append(inner[0])
        passed = list(_nodes(root, _leads_to_losses))
        found = [node for node in passed if not _leads_to_losses(node) and leaf_of(node) is None]
        kinds = {node: _kind(node) for node in found}
        self._kinds = {node_number(node): kind for node, kind in kinds.items()}
        # Shape of the tensor that a loss of the user's own sums up.
        sums = [node for node, (known, kind, _) in kinds.items() if not known and kind == "sum"]
        self._summed = next((saved_by(node, "self_sym_sizes") for node in sums), None) or ()
        logits = [_saved(node, "self") for node in found if _is(node, _NLL)]
        # The greatest number of classes of a cross-entropy; 0 without one.
        self.classes = max((t.shape[1] for t in logits if t is not None and t.dim() > 1), default=0)
        mains = [node for node, (known, _, _) in kinds.items() if known]
        mains = mains or [node for node, (_, reduction, _) in kinds.items() if reduction == "mean"]
        self.number, self.separate = max(len(mains), 1), len(mains) > 1 and _are_separate(mains)
        self._seen: dict[int, Tensor] = {}
        self._chain = [(node_number(node), node.name()[:3]) for node in chain]
        self.scaled = next((n.metadata[SCALED] for n in passed if SCALED in n.metadata), None)
        self._handles = [
            node.register_prehook(functools.partial(self._see, node_number(node)))
            for node in dict.fromkeys((*chain, *found))
        ]

    def _see(self, number: int, grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            self._seen[number] = grads[0].detach().clone()

    def end(self) -> Callable[[], tuple[tuple[Loss, ...], float, tuple[Constant, ...]]]:
        """Remove the hooks after the pass. Return a function that reads the losses, the coefficient
        of all of them together, and the constants whose product it is."""
        for handle in self._handles:
            handle.remove()
        chain, seen, kinds, summed = self._chain, self._seen, self._kinds, self._summed

        def read() -> tuple[tuple[Loss, ...], float, tuple[Constant, ...]]:
            factors = {number: float(grad.double().sum()) for number, grad in seen.items()}
            losses = tuple(
                Loss(number, known, reduction, None if n is None else float(n), factors[number])
                for number, (known, reduction, n) in kinds.items()
                if number in factors
            )
            along = [(factors.get(number, 0.0), name) for number, name in chain]
            constants = tuple(
                Constant(abs(after / before), name == "Div")
                for (before, name), (after, _) in pairwise(along)
                if before and name in ("Mul", "Div")
            )
            if len(losses) == 1 and summed and constants and constants[-1].divided:
                sizes = (math.prod(summed), summed[0])  # all elements, or rows
                found = [n for n in sizes if same_number(constants[-1].value * n, 1.0)]
                losses = (replace(losses[0], over=next(iter(found), None)),)
            return losses, along[-1][0], constants

        return read


def same_number(a: float, b: float) -> bool:
    """Tell whether two numbers are equal up to rounding in float32."""
    return math.isclose(a, b, rel_tol=1e-6)


def own_means(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events, with a line's sums as means if each is divided by its elements or rows."""
    every, sums = only(events, Pass), Counter[str]()
    for one in every:
        sums[one.where] += len(one.losses) == 1 and one.losses[0].over is not None
    lines = Counter(one.where for one in every)
    for event in events:
        if isinstance(event, Pass) and sums[event.where] == lines[event.where]:
            (loss,) = event.losses
            assert loss.over is not None
            slope = loss.coefficient * loss.over
            mean = replace(loss, reduction="mean", count=loss.over, coefficient=slope)
            yield replace(event, losses=(mean,), coefficient=slope, constants=event.constants[:-1])
        else:
            yield event


def _inner(node: Any) -> list[Any]:
    return [inner for inner, _ in node.next_functions if inner is not None]


def _nodes(root: Any, goes_on: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield the nodes of a graph, each once; inputs of a node only if `goes_on` is true for it."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        yield node
        for inner in _inner(node) if goes_on(node) else []:
            if inner not in seen:
                seen.add(inner)
                waiting.append(inner)


def leaves(root: Any) -> list[Tensor]:
    """Return the leaves that a graph uses."""
    return [leaf for node in _nodes(root) if (leaf := leaf_of(node)) is not None]


def inner_nodes(root: Any) -> frozenset[int]:
    """Return the numbers of a graph's nodes, without those of leaves."""
    return frozenset(node_number(node) for node in _nodes(root) if leaf_of(node) is None)


def _are_separate(losses: list[Any]) -> bool:
    """Tell whether the graphs of these losses share no nodes but leaves."""
    seen: set[Any] = set()
    for loss in sorted(losses, key=order_of):
        own = set()
        for node in _nodes(loss):
            if node in seen:
                return False
            if leaf_of(node) is None:
                own.add(node)
        seen |= own
    return True


def _scales(node: Any) -> bool:
    """Tell whether a node scales one number; the mean or sum of one number does, too."""
    one = saved_by(node, "self_sym_numel") == 1 or saved_by(node, "self_sym_sizes") in ((), (1,))
    return _is(node, _SCALES) or (_is(node, ("Mean", "Sum")) and one)


def _is(node: Any, names: tuple[str, ...]) -> bool:
    return node.name().partition("Backward")[0] in names


def node_number(node: Any) -> int:
    """Return a number that a node keeps while it lives; torch's numbers are unique per thread."""
    number: int = node.metadata.setdefault("accumext.audit", next(_NUMBERS))
    return number


def _leads_to_losses(node: Any) -> bool:
    """Tell whether a node scales a loss or joins several; otherwise it is a loss itself."""
    inner = _inner(node)
    of_list = _is(node, ("Mean", "Sum")) and any(_is(n, _LISTS) for n in inner)
    return bool(inner) and (of_list or _scales(node) or _is(node, _JOINS))


def _kind(node: Any) -> tuple[bool, str | None, Tensor | float | None]:
    """Tell whether a node is one of torch's losses, its reduction, and its number of targets."""
    reduction = saved_by(node, "reduction")
    if reduction is not None:
        if _is(node, _NLL):
            return True, _REDUCTIONS.get(reduction), _saved(node, "total_weight")
        read = _saved(node, "self")  # without classes every element is a target
        numbers = float(read.numel()) if read is not None and reduction in _REDUCTIONS else None
        return True, _REDUCTIONS.get(reduction), numbers
    if node.name() in ("MeanBackward0", "SumBackward0"):
        mean = node.name() == "MeanBackward0"
        return False, "mean" if mean else "sum", saved_by(node, "self_sym_numel") if mean else None
    return False, None, None


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved; None if a checkpoint would have to compute it again."""
    packed = packed_by(node, name)
    if isinstance(packed, Tensor):  # saved before the audit opened
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
        """Return the tensor; raise if it was written: autograd leaves this check to the hooks."""
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

    bytes: int
    width: int  # size of the tensor's last dimension
    born: int  # the number of passes before it
    users: int = 0


class SavedTensors:
    """The bytes that living graphs hold, each storage once, without parameters."""

    def __init__(self) -> None:
        self.watching = True
        self._parameters: dict[int, int] = {}  # numbers by the address of a storage
        self._leaves: dict[int, int] = {}  # numbers by id
        self._held: dict[int, _Memory] = {}  # by the address of a storage
        self._bytes, self._passes = 0, 0
        self._uses = Counter[int]()  # of each parameter
        self._at: dict[int, tuple[int, int]] = {}  # bytes held at the first and the last use

    def know(self, parameters: list[Tensor]) -> None:
        """Note which storages belong to parameters."""
        storages = [local_part(t).untyped_storage() for t in parameters]
        self._parameters = {storage.data_ptr(): n for n, storage in enumerate(storages)}
        self._leaves = {id(t): n for n, t in enumerate(parameters)}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the tensors that graphs save inside the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, Held.unpack):
            yield

    def _pack(self, tensor: Tensor) -> Held:
        try:
            storage = local_part(tensor).untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # the tensor has no storage
            key, size = 0, 0
        own = self._parameters.get(key) if self.watching else None
        counted = self.watching and own is None
        parameter = self._leaf(tensor) if counted else own
        return Held(tensor, key if counted else 0, size, parameter, self)

    def _leaf(self, tensor: Tensor) -> int | None:
        """Return the parameter of which a tensor is a cast, as under autocast, or a view of one."""
        node: Any = tensor.grad_fn
        for _ in range(3):
            if node is None or (leaf := leaf_of(node)) is not None:
                break
            node = _inner(node)[0] if _is(node, _CASTS) else None
        return None if node is None else self._leaves.get(id(leaf))

    def count(self, held: Held, by: int) -> None:
        """Add (`by` = 1) or remove (-1) one user of a storage and of a parameter."""
        if held.key:
            width = held.tensor.shape[-1] if held.tensor.dim() else 0
            memory = self._held.setdefault(held.key, _Memory(held.size, width, self._passes))
            memory.users += by
            if memory.users == max(by, 0):  # the first user, or the last one
                self._bytes += by * memory.bytes
            if not memory.users:
                del self._held[held.key]
        if held.parameter is not None:
            self._uses[held.parameter] += by
            first = self._at[held.parameter][0] if self._uses[held.parameter] > 1 else self._bytes
            self._at[held.parameter] = first, self._bytes

    def graph(self, losses: Losses) -> Graph:
        """Describe what graphs hold at the beginning of a pass."""
        parameter = max(self._uses, key=self._uses.__getitem__, default=None)
        calls, (first, last) = 0, (0, 0)
        if parameter is not None:
            calls, (first, last) = self._uses[parameter], self._at[parameter]
        memories = list(self._held.values())
        logits = [memory for memory in memories if memory.width == losses.classes > 0]
        classes = sum(memory.bytes for memory in logits)
        held = len({memory.born for memory in memories} - {self._passes})
        self._passes += 1
        per_call = (last - first) / max(calls - 1, 1)
        return Graph(self._bytes, calls, per_call, classes, losses.number, losses.separate, held)
