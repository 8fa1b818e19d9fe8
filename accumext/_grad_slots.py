"""What lies in `.grad` of an optimizer's parameters, and what the wrapper itself did to it.

Nothing is marked: a gradient that a user writes through `.data`, assigns a second time, shares with
another parameter or fills by replaying a captured graph is a gradient like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import TensorWeakRef

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


def exchange(
    parameters: Sequence[Tensor], lent: Sequence[Tensor | None], before: Sequence[Tensor | None]
) -> None:
    """Put back what was there before, wherever what was lent still is."""
    for parameter, mine, grad in zip(parameters, lent, before, strict=True):
        if mine is not grad and parameter.grad is mine:
            parameter.grad = grad


def clear(parameters: Iterable[Tensor]) -> None:
    """Empty `.grad`."""
    for parameter in parameters:
        parameter.grad = None


def versions(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """How often each tensor has been written, as far as autograd was told; None without a count."""
    tensors = list(tensors)
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
        grads: Iterable[Tensor | None] = (),
        brought: Iterable[Tensor | None] = (),  # by the wrapper's own backward pass
    ) -> None:
        there = [grad for grad in grads if grad is not None]
        self._brought = {id(grad) for grad in brought}.intersection(map(id, there))
        self._seen = {  # weakly: the memory is the user's to free
            id(grad): (TensorWeakRef(grad), version)
            for grad, version in zip(there, versions(there), strict=True)
        }

    def __contains__(self, grad: Tensor) -> bool:
        """Whether this gradient is one of them, unless it was seen to be written since."""
        reference, version = self._seen.get(id(grad), (None, None))
        return reference is not None and reference() is grad and versions([grad]) == [version]

    def used_up(self, grad: Tensor) -> bool:
        """Whether it is one that no step takes again."""
        return id(grad) in self._brought and grad in self

    def __getstate__(self) -> dict[str, Any]:
        return {"_seen": {}, "_brought": set()}  # a copy's parameters come without `.grad`


class Attachment:
    """A window's gradients while they lie in `.grad`, for the user to see.

    A backward pass of the user's own would add to them there, although it is another micro-batch.
    So hooks wait for one, for as long as this lasts, and have the window leave `.grad` first.
    """

    def __init__(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        self.parameters = parameters  # all: whatever comes to lie there belongs to the window
        self.grads = grads
        self._leave: Callable[[], None] | None = None
        self._handles: list[RemovableHandle] = []
        self._one_at_a_time = RLock()  # a backward pass runs on one thread per device

    def is_where_it_was(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether `.grad` of every parameter is still the same tensor."""
        return len(grads) == len(self.grads) and all(map(is_, self.grads, grads))

    @property
    def brought(self) -> Sequence[Tensor | None]:
        """The gradients, if it was the wrapper's own backward pass that brought them."""
        return () if self._leave is None else self.grads

    def watch(self, leave: Callable[[], None]) -> None:
        """Call `leave` before any backward pass adds to one of the gradients."""
        self._leave = leave
        self.resume()

    def resume(self) -> None:
        """Watch again, if this had watched and was ended."""
        if self._leave is not None and not self._handles:
            self._handles = [
                p.register_hook(unserializable_hook(partial(self._before_accumulation, p)))
                for p in self.parameters
                if p.requires_grad
            ]

    def end(self) -> None:
        """Wait no longer."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before_accumulation(self, parameter: Tensor, grad: Tensor) -> None:
        """The hook: autograd has a gradient, for `.grad` or for `autograd.grad` to return."""
        with self._one_at_a_time:
            if self._handles and self._leave is not None and _accumulates(parameter):
                self._leave()


def _accumulates(parameter: Tensor) -> bool:
    """Inside a backward pass: whether it is one that adds to `.grad`."""
    try:
        node = get_gradient_edge(parameter).node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf, while autograd.grad runs
        return False
