"""What lies in `.grad` of an optimizer's parameters, and what the wrapper itself did to it.

Nothing is marked: a gradient that a user writes through `.data`, assigns a second time, shares with
another parameter or fills by replaying a captured graph is a gradient like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import and_, attrgetter, eq, is_
from threading import RLock
from typing import Any, NamedTuple
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle, unserializable_hook

grad_of = attrgetter("grad")
_version_of = attrgetter("_version")


def param_grads(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """`.grad` of every parameter."""
    return list(map(grad_of, parameters))


def put(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Make these the gradients; those that are already are left alone."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is not grad:
            parameter.grad = grad


class Slots(NamedTuple):
    """An optimizer's parameters, and what lay in `.grad` of each at one moment."""

    parameters: list[Tensor]
    grads: list[Tensor | None]

    @classmethod
    def of(cls, parameters: list[Tensor]) -> Slots:
        """As they are now."""
        return cls(parameters, param_grads(parameters))

    def restore(self) -> None:
        """Have them be so again."""
        put(self.parameters, self.grads)

    def replace(self, grads: Sequence[Tensor | None]) -> None:
        """Put these into `.grad`; those that lay there already are left alone."""
        for parameter, mine, grad in zip(self.parameters, grads, self.grads, strict=True):
            if mine is not grad:
                parameter.grad = mine

    def take_back(self, lent: Sequence[Tensor | None]) -> None:
        """After `replace`: have them be so again, wherever what was lent still lies there."""
        for parameter, mine, grad in zip(self.parameters, lent, self.grads, strict=True):
            if mine is not grad and parameter.grad is mine:
                parameter.grad = grad


def clear(parameters: Iterable[Tensor]) -> None:
    """Empty `.grad`."""
    for parameter in parameters:
        parameter.grad = None


def contents_of(grads: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Gradients, and copies of what they hold."""
    return [(grad, grad.detach().clone()) for grad in grads]


@torch.no_grad()
def write(contents: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Have the gradients hold again what they held."""
    for grad, content in contents:
        grad.copy_(content)


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """How often each tensor has been written, as far as autograd was told; None without a count."""
    try:
        return list(map(_version_of, tensors))
    except (AttributeError, RuntimeError):  # a missing tensor, or one made in inference mode
        return [None if t is None or t.is_inference() else t._version for t in tensors]


class Consumed:
    """The gradients that the last step left in `.grad`, as they were then.

    What the wrapper's own `backward` brought is used up: the next one clears it, and `step` passes
    it over. Anything else that lies in `.grad` a `step` takes, also again, as a bare optimizer
    does; only `flush`, which a bare one does not have, asks whether it is new.
    """

    @_disable_dynamo  # it would compile anew for every gradient
    def __init__(
        self,
        grads: Sequence[Tensor | None] = (),  # of the optimizer's parameters, in their order
        brought: Sequence[Tensor | None] = (),  # by the wrapper's own backward pass
    ) -> None:
        # Weakly: the memory is the user's to free.
        self._seen = [None if grad is None else ref(grad) for grad in grads]
        self._versions = versions(grads)
        self._brought = list(map(is_, grads, brought))  # empty where none was

    def among(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Which of these are still there, and were not seen to be written since."""
        if not self._seen:
            return [False] * len(grads)
        same = [r is not None and r() is grad for r, grad in zip(self._seen, grads, strict=False)]
        unwritten = map(eq, self._versions, versions(grads))
        flags = list(map(and_, same, unwritten))
        return flags + [False] * (len(grads) - len(flags))

    def used_up(self, grads: Sequence[Tensor | None]) -> list[bool]:
        """Which of these no step takes again."""
        if not self._brought:
            return [False] * len(grads)
        rest = [False] * (len(grads) - len(self._brought))
        return list(map(and_, self.among(grads), self._brought + rest))

    def fresh(self, grads: Sequence[Tensor | None], new: bool = False) -> list[Tensor | None]:
        """The same, without what is used up; if `new`, without anything that a step has used."""
        flags = self.among(grads) if new else self.used_up(grads)
        return [None if flag else grad for flag, grad in zip(flags, grads, strict=True)]

    def after(
        self, grads: Sequence[Tensor | None], brought: Sequence[Tensor | None] | None
    ) -> Consumed:
        """What is consumed after a step on gradients that were brought or, if None, were not.

        What was used up before, and was passed over, still is.
        """
        if brought is None and not self._brought:
            return Consumed(grads)
        if brought is not None and len(brought) == len(grads) and all(map(is_, brought, grads)):
            return Consumed(grads, grads)
        fresh = [None] * len(grads) if brought is None else brought
        pairs = zip(self.used_up(grads), grads, fresh, strict=True)
        return Consumed(grads, [grad if used else new for used, grad, new in pairs])

    def __getstate__(self) -> dict[str, Any]:
        return {"_seen": [], "_versions": [], "_brought": []}  # copies come without `.grad`


class Watch:
    """Hooks on parameters, which tell that a backward pass is about to add to `.grad`.

    They stay, since to add and remove them for every step takes longer than a small step itself,
    and do nothing but look whether anybody wants to know. They hold nothing alive, and go with the
    optimizer.
    """

    def __init__(self) -> None:
        self.leave: Callable[[], None] | None = None
        self._watched: list[ReferenceType[Tensor]] = []
        self._handles: list[RemovableHandle] = []
        self._one_at_a_time = RLock()  # a backward pass runs on one thread per device

    def begin(self, parameters: Sequence[Tensor], leave: Callable[[], None]) -> None:
        """Call `leave` before the next backward pass adds to `.grad` of any of these."""
        watched = [reference() for reference in self._watched]
        if len(watched) != len(parameters) or not all(map(is_, watched, parameters)):
            self._register(parameters)
        self.leave = leave

    def end(self) -> None:
        """Wait no longer."""
        self.leave = None

    def resume(self, leave: Callable[[], None] | None) -> None:
        """Wait for what was waited for earlier."""
        self.leave = leave

    def _register(self, parameters: Sequence[Tensor]) -> None:
        mine = ref(self)
        before, handles = self._handles, []
        try:
            for parameter in parameters:
                if parameter.requires_grad:
                    hook = partial(_before_accumulation, mine, ref(parameter))
                    handles.append(parameter.register_hook(unserializable_hook(hook)))
            finalize(self, _remove, handles)
            self._handles, self._watched = handles, list(map(ref, parameters))
        finally:
            _remove(before if self._handles is handles else handles)

    def _tell(self, parameter: Tensor | None) -> None:
        with self._one_at_a_time:
            if self.leave is not None and parameter is not None and _accumulates(parameter):
                leave, self.leave = self.leave, None
                leave()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Watch.__init__(self)


def _before_accumulation(
    watch: ReferenceType[Watch], parameter: ReferenceType[Tensor], grad: Tensor
) -> None:
    """The hook: autograd has a gradient, for `.grad` or for `autograd.grad` to return."""
    listener = watch()
    if listener is not None and listener.leave is not None:
        listener._tell(parameter())


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _accumulates(parameter: Tensor) -> bool:
    """Inside a backward pass: whether it is one that adds to `.grad`."""
    try:
        node = get_gradient_edge(parameter).node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf, while autograd.grad runs
        return False


class Attachment(NamedTuple):
    """A window's gradients while they lie in `.grad`, for the user to see."""

    parameters: Sequence[Tensor]  # all: whatever comes to lie there belongs to the window
    grads: Sequence[Tensor | None]
    brought: bool  # by the wrapper's own backward pass

    def is_where_it_was(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether `.grad` of every parameter is still the same tensor."""
        return len(grads) == len(self.grads) and all(map(is_, self.grads, grads))
