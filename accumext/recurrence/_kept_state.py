"""Hidden state: values that a function keeps from one call to the next, beside the state that it
returns. They may be in attributes of its modules and objects, lists, dicts, buffers and closures.

Before steps run again, these values are set back to those before the steps; after the replay, to
those before the replay. So a replay reads the values that the steps read, and its own writes are
undone: each step writes once, as in plain PyTorch.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accumext.recurrence._states import write_counts
from accumext.tensors.checks import message
from accumext.tensors.torch_private import (
    GLOBAL_HOOKS,
    PARAMETRIZED,
    forward_hooks,
    own_buffers,
    own_children,
)

SMALL = 2**16  # a tensor of at most so many bytes is copied before the first call may write it
LONGEST = 1000  # a list, set or dict with more entries is not searched
DEEPEST = 3  # levels of objects within objects that are searched
MOST = 5000  # values that are visited, breadth first from the function

_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "accumext"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)
# Attributes of every module, such as hooks, which are not searched. Parameters are no state of a
# recurrence, and `fully_shard` exchanges them.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Variables(NamedTuple):
    """Some variables of a namespace: globals that a function uses, or attributes."""

    variables: dict[str, Any]
    names: list[str]


class _Draws:
    """The state of a random number generator, as a value that can be read and written."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self.put = get, put
        self._last = get()

    def state(self) -> Any:
        """Return the state; the same object as long as nothing is drawn."""
        now = self._get()
        if not (torch.equal(now, self._last) if isinstance(now, Tensor) else now == self._last):
            self._last = now
        return self._last


class _Copy:
    """The content of a tensor at one moment; None for a large one that no call had written yet."""

    __slots__ = ("content",)

    def __init__(self, content: Tensor | None) -> None:
        self.content = content


class _Watched:
    """A tensor that calls may write into, and a copy of its latest content."""

    def __init__(self, tensor: Tensor, counting: list[Tensor], first: bool) -> None:
        self.tensor = weakref.ref(tensor)  # weak, for its graph may hold this object
        # The tensors whose numbers of writes show that `tensor` was written.
        self._counting = [weakref.ref(other) for other in counting]
        self._writes = write_counts(counting)
        copied = tensor.nbytes <= SMALL or not (first or self._writes[0] == 0)
        self._copy = _Copy(tensor.detach().clone() if copied else None)

    def look(self) -> _Copy:
        """Return a copy of the content; a new one only if the tensor was written."""
        tensor = self.tensor()
        writes = write_counts([t for t in (ref() for ref in self._counting) if t is not None])
        if tensor is not None and writes != self._writes:
            self._writes, self._copy = writes, _Copy(tensor.detach().clone())
        return self._copy

    def put(self, copy: _Copy) -> bool:
        """Write a copy back, and tell whether that was possible. The write is not counted, for else
        autograd would report a changed tensor."""
        tensor = self.tensor()
        if tensor is not None and self.look() is not copy:
            if copy.content is None:
                return False
            if tensor.shape == copy.content.shape:
                tensor.data.copy_(copy.content)
            else:  # the tensor was resized
                tensor.data = copy.content.clone()
            self._copy = copy
        return True


class Snapshot(NamedTuple):
    """The hidden state of a function at one moment."""

    contents: list[tuple[Any, list[Any]]]  # places, and the values in each
    copies: list[_Copy]  # contents of all watched tensors


class KeptState:
    """The places in which a function may keep values between calls. They are found by a search.

    It visits modules and submodules, objects in closures, methods, attributes and hooks, the lists,
    dicts, deques and sets in any of them, and random number generators.

    A graph refers to this object for its replays. So nothing here may refer to a graph, or the
    cycle would never be freed.
    """

    def __init__(self, op: str, name: str, function: object) -> None:
        self.op, self.name = op, name
        self.keeps_graphs = False  # whether `save` has met a tensor with a graph
        self._tensors: list[_Watched] = []
        self._by_id: dict[int, _Watched] = {}
        self._places: list[tuple[Any, list[Any]]] = []
        self._seen: dict[int, object] = {}  # by id, kept alive
        # Places that exist before the first call, and the values in them.
        of_all = chain.from_iterable(hooks.values() for hooks in GLOBAL_HOOKS)
        parametrized = _Variables(*PARAMETRIZED)
        places: list[tuple[Any, list[Any]]] = [(parametrized, _read(parametrized))]
        places += self._find([function, *of_all, *places[0][1]], first=True)
        values = [value for _, contents in places for value in contents]
        self._graphs = [weakref.ref(v) for v in values if isinstance(v, Tensor) and _has_graph(v)]
        self._places = [
            (place, [None if _has_graph(v) else v for v in contents]) for place, contents in places
        ]

    def save(self, graphs: bool = False) -> Snapshot:
        """Return the hidden state. Its tensors have no graphs unless `graphs` is true."""
        contents, copies = self._look()
        known = len(self._places)
        for index, (place, values) in enumerate(contents):
            if not graphs and (index >= known or values is not self._places[index][1]):
                self.keeps_graphs = self.keeps_graphs or any(map(_has_graph, values))
                contents[index] = place, list(map(_without_graph, values))
        return Snapshot(contents, copies)

    def restore(self, snapshot: Snapshot) -> None:
        """Set the hidden state back to a snapshot."""
        for place, saved in snapshot.contents:
            if not _same(_read(place), saved):
                _write(place, saved)
        with torch.no_grad():
            for watched, copy in zip(self._tensors, snapshot.copies, strict=False):
                if not watched.put(copy):
                    self._fail(watched.tensor())

    @contextmanager
    def replaying(self, snapshot: Snapshot) -> Iterator[None]:
        """Set the hidden state to a snapshot in this context, and restore it afterwards."""
        now = self._look()
        try:
            self.restore(snapshot)
            yield
        finally:
            self.restore(now)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor shares memory with one that `restore` writes."""
        storage = tensor.untyped_storage().data_ptr()
        kept = (watched.tensor() for watched in self._tensors)
        return any(t is not None and t.untyped_storage().data_ptr() == storage for t in kept)

    def check_no_graph(self) -> None:
        """Raise if calls have put a tensor with a graph into one of the places."""
        before = [graph() for graph in self._graphs]
        for value in chain.from_iterable(contents for _, contents in self._look().contents):
            if not _has_graph(value) or any(value is other for other in before):
                continue
            contract = "keep no tensor with a graph from one call to the next if k1 < k2"
            got = f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else "a tuple"
            advice = "Hand it on in the state, pass it as context, or detach it"
            raise RuntimeError(message(self.op, self.name, contract, got, advice))

    def _look(self) -> Snapshot:
        contents, changed = [], []
        for place, then in self._places:
            now = _read(place)
            if _same(now, then):
                now = then
            else:
                changed += now
            contents.append((place, now))
        if changed:
            contents += self._find(changed, first=False)
        return Snapshot(contents, [watched.look() for watched in self._tensors])

    def _find(self, given: Iterable[object], first: bool) -> list[tuple[Any, list[Any]]]:
        """Search values for places that are not known yet, and return these with their contents."""
        discovered: list[tuple[Any, list[Any]]] = []
        seen = self._seen if first else dict(self._seen)
        waiting = deque((value, DEEPEST) for value in given)
        while waiting and len(seen) < MOST:
            value, depth = waiting.popleft()  # depth: levels of objects still to search
            if (isinstance(value, _PLAIN) and value is not random) or id(value) in seen:
                continue
            if isinstance(value, Tensor):
                self._watch(value, [value], first)
                continue
            if not first or not isinstance(value, tuple):
                seen[id(value)] = value
            if isinstance(value, nn.Module):
                places, inside = self._of_module(value, first)
                depth = DEEPEST
            elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                places, inside = _of_function(value)
                depth = DEEPEST
            elif isinstance(value, Sized) and type(value) in _CONTAINERS:
                places, inside = [value] if len(value) <= LONGEST else [], []
            else:
                places, inside = _of_object(value, depth)
                depth -= 1
            for place in places:
                contents = _read(place)
                discovered.append((place, contents))
                if not isinstance(value, nn.Module) or place is not vars(value):
                    inside += contents
            waiting += ((inner, depth) for inner in inside)
        return discovered

    def _of_module(self, module: nn.Module, first: bool) -> tuple[list[Any], list[Any]]:
        if isinstance(module, torch.jit.ScriptModule):  # keeps its attributes in C++
            buffers: Any = dict(module.named_buffers(recurse=False))
            self._watch_counted(buffers, first)
            return [], [*buffers.values(), *module.children()]
        buffers, children = own_buffers(module), own_children(module)
        self._watch_counted(buffers, first)
        places: list[Any] = [buffers, children] if children else [buffers]
        inside: list[Any] = []
        for hooks in forward_hooks(module):
            inside += hooks.values()
        kind, values = type(module), vars(module)
        functions: list[Any] = [getattr(kind, "forward", None), kind.__call__]
        if "forward" not in values and all(map(_is_of_library, (kind, *functions))):
            # torch's own modules keep state in buffers only, and read `training`.
            places.append(_Variables(values, ["training"]))
        else:
            places.append(values)
            inside += functions
            inside += (values[name] for name in values.keys() - _OF_EVERY_MODULE)
        return places, inside

    def _watch_counted(self, buffers: dict[str, Tensor | None], first: bool) -> None:
        """Watch running statistics by `num_batches_tracked`: batch norms write them uncounted."""
        count = buffers.get("num_batches_tracked")
        if count is not None:
            for buffer in buffers.values():
                if buffer is not None:
                    self._watch(buffer, [buffer, count], first)

    def _watch(self, tensor: Tensor, counting: list[Tensor], first: bool) -> None:
        known = self._by_id.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return
        parameter = isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if plain and not parameter:
            self._by_id[id(tensor)] = watched = _Watched(tensor, counting, first)
            self._tensors.append(watched)

    def _fail(self, tensor: Tensor | None) -> None:
        contract = f"write into no tensor of its own above {SMALL} bytes after steps that run again"
        got = f"a write into one of shape {[] if tensor is None else list(tensor.shape)}"
        advice = "Hand it on in the state: a new tensor in place of a write"
        raise RuntimeError(message(self.op, self.name, contract, got, advice))


def _of_object(value: Any, depth: int) -> tuple[list[Any], list[Any]]:
    """Return the places in a value that is no module, function or container, and other values to
    visit."""
    if isinstance(value, tuple):
        return [], list(value)
    if isinstance(value, types.CellType):
        return [value], []
    if isinstance(value, torch.Generator):
        return [_Draws(value.get_state, value.set_state)], []
    if value is random or isinstance(value, random.Random):
        return [_Draws(value.getstate, value.setstate)], []
    if depth == 0 or not hasattr(value, "__dict__"):
        return [], []
    if _is_of_library(type(value)) and not isinstance(value, types.SimpleNamespace):
        return [], []
    return [vars(value)], [type(value).__call__]


def _of_function(function: Any) -> tuple[list[Any], list[Any]]:
    """Return the places that a function uses, and other values to visit."""
    if isinstance(function, types.MethodType):
        return [], [function.__self__, function.__func__]
    if isinstance(function, functools.partial):
        return [], [function.func, *function.args, *function.keywords.values()]
    inside: list[Any] = [function.__defaults__, function.__kwdefaults__]
    if function.__globals__.get("__name__", "").partition(".")[0] != "torch":
        inside += function.__closure__ or ()
    places: list[Any] = [function.__dict__]  # leads to the function in a torch.compile wrapper
    if not _is_of_library(function):
        variables = function.__globals__
        places.append(
            _Variables(variables, [n for n in function.__code__.co_names if n in variables])
        )
    return places, inside


def _has_graph(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_graph, value))
    return isinstance(value, Tensor) and value.grad_fn is not None


def _without_graph(value: Any) -> Any:
    """Return a tensor, or a tuple of tensors, as leaves without a graph; and any other value as it
    is."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    if not _has_graph(value):
        return value
    parts = map(_without_graph, value)
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _is_of_library(definition: Any) -> bool:
    """Tell whether a class or function is of Python, torch, numpy or accumext."""
    return str(getattr(definition, "__module__", "torch")).partition(".")[0] in _LIBRARIES


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _read(place: Any) -> list[Any]:
    """Return the values in a place, with which `_write` restores it."""
    if isinstance(place, dict):
        return [*place, *place.values()]
    if isinstance(place, types.CellType):
        try:
            return [place.cell_contents]
        except ValueError:  # an empty cell
            return []
    if isinstance(place, _Draws):
        return [place.state()]
    if isinstance(place, _Variables):
        return [place.variables.get(name) for name in place.names]
    return list(place)


def _write(place: Any, contents: list[Any]) -> None:
    if isinstance(place, types.CellType):
        if contents:
            place.cell_contents = contents[0]
        else:
            del place.cell_contents
    elif isinstance(place, _Draws):
        place.put(contents[0])
    elif isinstance(place, _Variables):
        place.variables.update(zip(place.names, contents, strict=True))
    elif isinstance(place, dict):
        keys, values = contents[: len(contents) // 2], contents[len(contents) // 2 :]
        if list(place) != keys:
            place.clear()
        place.update(zip(keys, values, strict=True))
    else:
        place.clear()
        place.update(contents) if isinstance(place, set) else place.extend(contents)
