"""What a function keeps from one call to the next, beside the state that it hands on: attributes of
its modules and objects, what is in their lists, dicts and buffers, variables of its closure.

Steps that run again find it as it was before them, and leave it as it was before the replay. So a
replay reads what the steps read, and what the steps wrote is written once, as in plain PyTorch.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accumext._checks import message
from accumext._torch_private import own_buffers
from accumext.recurrence._states import write_counts

SMALL = 2**16  # bytes of a tensor that is copied before the first call, which may write into it
LONGEST = 1000  # entries of a list or dict that is looked into
DEEPEST = 3  # objects in objects that are looked into
MOST = 5000  # values that are looked at; those next to the function come first

_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "accumext"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)
# Hooks and the like. Parameters are no state of a recurrence, and `fully_shard` exchanges them.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Globals(NamedTuple):
    """Global variables that a function names."""

    variables: dict[str, Any]
    names: list[str]


class _Draws:
    """A generator of random numbers, by its state."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self.put = get, put
        self._last = get()

    def state(self) -> Any:
        """The state; the same object as long as nothing is drawn."""
        now = self._get()
        if not (torch.equal(now, self._last) if isinstance(now, Tensor) else now == self._last):
            self._last = now
        return self._last


class _Copy:
    """What was in a tensor; None if it was too large to be copied before a call had written it."""

    __slots__ = ("content",)

    def __init__(self, content: Tensor | None) -> None:
        self.content = content


class _Watched:
    """A tensor that calls may write into, and a copy of what it holds now."""

    def __init__(self, tensor: Tensor, counting: list[Tensor], first: bool) -> None:
        self.tensor = tensor
        self._counting = counting  # the tensors whose numbers of writes tell that it was written
        self._writes = write_counts(counting)
        copied = tensor.nbytes <= SMALL or not (first or self._writes[0] == 0)
        self._copy = _Copy(tensor.detach().clone() if copied else None)

    def look(self) -> _Copy:
        """The copy of what the tensor holds now."""
        writes = write_counts(self._counting)
        if writes != self._writes:
            self._writes, self._copy = writes, _Copy(self.tensor.detach().clone())
        return self._copy

    def put(self, copy: _Copy) -> bool:
        """Write a copy back, and tell whether that was possible. The number of writes stays, for
        autograd would take the tensor for a changed one."""
        if self.look() is not copy:
            if copy.content is None:
                return False
            self.tensor.data.copy_(copy.content)
            self._copy = copy
        return True


class Snapshot(NamedTuple):
    """What a function kept at one moment."""

    contents: list[list[Any]]  # of each place that was known
    copies: list[_Copy]  # of each tensor


class KeptState:
    """The places in which a function may keep something, found by looking at what it refers to.

    A module and its submodules are looked at, and so are objects that a closure, a method or an
    attribute names, lists, dicts, deques and sets in any of them, and generators.
    """

    def __init__(self, op: str, name: str, function: object) -> None:
        self.op, self.name = op, name
        self._places: list[Any] = []
        self._contents: list[list[Any]] = []  # of each place when it was looked at last
        self._tensors: list[_Watched] = []
        self._seen: dict[int, object] = {}  # by id, kept alive
        self._find([function], first=True)

    def save(self) -> Snapshot:
        """Look at all places."""
        for index, place in enumerate(self._places):
            now = _read(place)
            if not _same(now, self._contents[index]):
                self._contents[index] = now
                self._find(now, first=False)
        return Snapshot(self._contents.copy(), [watched.look() for watched in self._tensors])

    def restore(self, snapshot: Snapshot) -> None:
        """Put everything back to what it was."""
        for index, saved in enumerate(snapshot.contents):
            if not _same(_read(self._places[index]), saved):
                _write(self._places[index], saved)
                self._contents[index] = saved
        with torch.no_grad():
            for watched, copy in zip(self._tensors, snapshot.copies, strict=False):
                if not watched.put(copy):
                    self._fail(watched.tensor)

    @contextmanager
    def replaying(self, snapshot: Snapshot) -> Iterator[None]:
        """Calls in this context find what there was then, and leave what there is now."""
        now = self.save()
        try:
            self.restore(snapshot)
            yield
        finally:
            self.save()  # what the calls have made may be in places of its own
            self.restore(now)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the memory of one that is put back."""
        storage = tensor.untyped_storage().data_ptr()
        return any(w.tensor.untyped_storage().data_ptr() == storage for w in self._tensors)

    def tensor_with_graph(self, since: Snapshot) -> Tensor | None:
        """A tensor with a graph that has come into one of the places, if there is any."""
        self.save()
        before = {id(value) for contents in since.contents for value in contents}
        for value in chain.from_iterable(self._contents):
            if isinstance(value, Tensor) and value.grad_fn is not None and id(value) not in before:
                return value
        return None

    def _find(self, given: Iterable[object], first: bool) -> None:
        """Add the places that values refer to."""
        waiting = deque((value, DEEPEST) for value in given)
        while waiting and len(self._seen) < MOST:
            value, depth = waiting.popleft()  # of the objects that may be in it
            if (isinstance(value, _PLAIN) and value is not random) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                self._watch(value, [value], first)
                continue
            if isinstance(value, nn.Module):
                inside, depth = self._of_module(value, first), DEEPEST
            elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                inside, depth = self._of_function(value), DEEPEST
            elif isinstance(value, Sized) and type(value) in _CONTAINERS:
                inside = self._add(value) if len(value) <= LONGEST else []
            else:
                inside, depth = self._of_object(value, depth), depth - 1
            waiting += ((inner, depth) for inner in inside)

    def _of_module(self, module: nn.Module, first: bool) -> list[object]:
        found: list[object] = list(module.children())
        forward: Any = getattr(type(module), "forward", None)
        if not _is_of_library(forward):  # torch's own modules keep what they keep in buffers
            values = vars(module)
            self._add(values)
            found += [values[name] for name in values.keys() - _OF_EVERY_MODULE]
            found.append(forward)
        buffers = self._add(own_buffers(module))
        if isinstance(module, _BATCH_NORMS) and module.num_batches_tracked is not None:
            # Kernels write the running statistics uncounted.
            for buffer in buffers:
                if isinstance(buffer, Tensor):
                    self._watch(buffer, [buffer, module.num_batches_tracked], first)
        return found + buffers

    def _of_object(self, value: Any, depth: int) -> list[object]:
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, types.CellType):
            return self._add(value)
        if isinstance(value, torch.Generator):
            return self._add(_Draws(value.get_state, value.set_state))
        if value is random or isinstance(value, random.Random):
            return self._add(_Draws(value.getstate, value.setstate))
        if depth == 0 or not hasattr(value, "__dict__"):
            return []
        if _is_of_library(type(value)) and not isinstance(value, types.SimpleNamespace):
            return []
        return [*self._add(vars(value)), type(value).__call__]

    def _of_function(self, function: Any) -> list[object]:
        if isinstance(function, types.MethodType):
            return [function.__self__, function.__func__]
        if isinstance(function, functools.partial):
            return [function.func, *function.args, *function.keywords.values()]
        found: list[object] = [function.__defaults__, function.__kwdefaults__]
        if function.__globals__.get("__name__", "").partition(".")[0] != "torch":
            found += function.__closure__ or ()
        if function.__dict__:  # also what a wrapper, such as torch.compile's, wraps
            found += self._add(function.__dict__)
        if not _is_of_library(function):
            variables = function.__globals__
            names = [name for name in function.__code__.co_names if name in variables]
            if names:
                found += self._add(_Globals(variables, names))
        return found

    def _add(self, place: Any) -> list[Any]:
        """Add a place, and return what is in it."""
        contents = _read(place)
        self._places.append(place)
        self._contents.append(contents)
        return contents

    def _watch(self, tensor: Tensor, counting: list[Tensor], first: bool) -> None:
        self._seen[id(tensor)] = tensor
        parameter = isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if plain and not parameter and not tensor.is_inference():
            self._tensors.append(_Watched(tensor, counting, first))

    def _fail(self, tensor: Tensor) -> None:
        contract = f"write into no tensor of its own above {SMALL} bytes after steps that run again"
        got = f"a write into one of shape {list(tensor.shape)}"
        advice = "Hand it on in the state: a new tensor in place of a write"
        raise RuntimeError(message(self.op, self.name, contract, got, advice))


def _is_of_library(definition: Any) -> bool:
    """Tell whether a class or function is of Python, torch, numpy or accumext."""
    return str(getattr(definition, "__module__", "torch")).partition(".")[0] in _LIBRARIES


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _read(place: Any) -> list[Any]:
    """What is in a place, by which it can be written again."""
    if isinstance(place, dict):
        return [*place, *place.values()]
    if isinstance(place, types.CellType):
        try:
            return [place.cell_contents]
        except ValueError:  # nothing yet
            return []
    if isinstance(place, _Draws):
        return [place.state()]
    if isinstance(place, _Globals):
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
    elif isinstance(place, _Globals):
        place.variables.update(zip(place.names, contents, strict=True))
    elif isinstance(place, dict):
        keys, values = contents[: len(contents) // 2], contents[len(contents) // 2 :]
        if list(place) != keys:
            place.clear()
        place.update(zip(keys, values, strict=True))
    else:
        place.clear()
        place.update(contents) if isinstance(place, set) else place.extend(contents)
