"""Hooks on parameters: they take gradients while a backward pass runs, or notice such a pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from threading import Lock, RLock
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from accumext import _checks
from accumext._torch_private import accumulates
from accumext.optimizer._grad_ownership import held_elsewhere

# Bytes of gradients that one call adds. A GPU moves them, and the main gradients, in about the
# time that a call takes to launch, so more in a call saves little, and less would cost calls.
BUNDLE_BYTES = 4 * 2**20


class _Pass:
    """A backward pass, for as long as it runs."""


class GradCollector:
    """Hands over every gradient of a backward pass once it is complete, in bundles.

    The hooks are there for the length of the pass alone. So a backward pass of the user's own finds
    none, parameters may come and thaw at any time, and copies and pickles have nothing to carry.
    """

    def __init__(
        self, op: str, take: Callable[[dict[Tensor, Tensor], Container[int]], None]
    ) -> None:
        self._op = op
        self._take = take
        # Parameters whose gradient waits in `.grad`, and the bytes of those gradients. A backward
        # pass runs on one thread per device.
        self._waiting: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
        self._bytes: defaultdict[torch.device, int] = defaultdict(int)
        self._taken: set[Tensor] = set()
        self._running = ref(_Pass())
        self._lock = Lock()

    @contextmanager
    def watching(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """A context for the backward pass. Gradients of the last bundles are left in `.grad`."""
        handles = []
        running = _Pass()
        self._running = ref(running)  # a hook that an interrupt leaves behind does nothing
        try:
            for parameter in parameters:
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(self._collect))
            yield
        finally:
            del running
            for handle in handles:
                handle.remove()
        self._refuse_late_gradients()

    def _collect(self, parameter: Tensor) -> None:
        """The hook: `.grad` is complete."""
        grad = parameter.grad
        if grad is None or self._running() is None:  # a hook of the user's was faster
            return
        device = grad.device
        self._waiting[device].append(parameter)
        self._bytes[device] += grad.numel() * grad.element_size()
        if self._bytes[device] >= BUNDLE_BYTES:
            self._bytes[device] = 0
            self._hand_over(self._waiting.pop(device))

    def _hand_over(self, bundle: list[Tensor]) -> None:
        foreign = held_elsewhere(bundle)
        grads = {p: p.grad for p in bundle if p.grad is not None}
        with self._lock:
            self._take(grads, foreign)
            for parameter in grads:
                parameter.grad = None
            self._taken |= grads.keys()

    def _refuse_late_gradients(self) -> None:
        """Raise if a gradient was written after it was taken, as DistributedDataParallel does."""
        waiting = set(chain.from_iterable(self._waiting.values()))
        if any(parameter.grad is not None for parameter in self._taken - waiting):
            contract = "be complete when autograd has accumulated it"
            got = "one that was written again, as DistributedDataParallel does"
            advice = "Use `with opt.micro_batch(model):`, or accumulate_in_backward=False"
            raise RuntimeError(_checks.message(self._op, ".grad", contract, got, advice))


class BackwardWatch:
    """Notices a backward pass that is about to add to `.grad` while it holds main gradients.

    The hooks stay from one step to the next, since to add and remove them takes longer than a small
    step itself. Otherwise they only look whether there is a callback. They keep nothing alive, and
    are removed with the optimizer.
    """

    def __init__(self) -> None:
        self.callback: Callable[[], None] | None = None
        self._watched: list[ReferenceType[Tensor]] = []
        self._handles: list[RemovableHandle] = []
        self._lock = RLock()  # a backward pass runs on one thread per device

    def begin(self, parameters: Sequence[Tensor], callback: Callable[[], None]) -> None:
        """Call `callback` once, before the next backward pass adds to `.grad` of any of these."""
        watched = [reference() for reference in self._watched]
        if len(watched) != len(parameters) or not all(map(is_, watched, parameters)):
            self._register(parameters)
        self.callback = callback

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

    def _notice(self, parameter: Tensor | None) -> None:
        with self._lock:
            if self.callback is not None and parameter is not None and accumulates(parameter):
                callback, self.callback = self.callback, None
                callback()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BackwardWatch.__init__(self)


def _before_accumulation(
    watch: ReferenceType[BackwardWatch], parameter: ReferenceType[Tensor], grad: Tensor
) -> None:
    """The hook: autograd has a gradient, for `.grad` or for `autograd.grad` to return."""
    listener = watch()
    if listener is not None and listener.callback is not None:
        listener._notice(parameter())


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
