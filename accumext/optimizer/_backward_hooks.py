"""Gradients are taken in, and freed, while the backward pass that makes them is still running."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import Lock
from weakref import ref

import torch
from torch import Tensor

from accumext import _checks
from accumext.optimizer._main_grads import foreign_grads

# Bytes of gradients that one call takes in. A GPU moves them, and the main gradients, in about the
# time that a call takes to launch, so more in a call saves little, and less would cost calls.
BUNDLE_BYTES = 4 * 2**20


class _Pass:
    """A backward pass, for as long as it runs."""


class Intake:
    """What a backward pass hands over: every gradient once it is complete, in bundles.

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
        self._one_at_a_time = Lock()

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
        foreign = foreign_grads(bundle)
        grads = {p: p.grad for p in bundle if p.grad is not None}
        with self._one_at_a_time:
            self._take(grads, foreign)
            for parameter in grads:
                parameter.grad = None
            self._taken |= grads.keys()

    def _refuse_late_gradients(self) -> None:
        """What was taken in must have been all: DistributedDataParallel writes the sum later."""
        waiting = set(chain.from_iterable(self._waiting.values()))
        if any(parameter.grad is not None for parameter in self._taken - waiting):
            contract = "be complete when autograd has accumulated it"
            got = "one that was written again, as DistributedDataParallel does"
            advice = "Use `with opt.micro_batch(model):`, or accumulate_in_backward=False"
            raise RuntimeError(_checks.message(self._op, ".grad", contract, got, advice))
