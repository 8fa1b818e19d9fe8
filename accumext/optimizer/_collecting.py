"""Gradients that autograd cannot add to the sums: those of half precision, added after the backward
pass or, to free their memory, while it runs; and those of a window that is sent meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import Lock
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor

from accumext.optimizer._engine import Engine
from accumext.optimizer._grads import clear_grads, grads_of, is_none, set_grads
from accumext.optimizer._reducer import Sending
from accumext.optimizer._sums import adding, adopt, is_plain, with_sum
from accumext.optimizer._window import Window
from accumext.tensors.checks import message
from accumext.tensors.kinds import HALF_DTYPES
from accumext.tensors.scalars import Scalar
from accumext.tensors.torch_private import record_function

# Bytes of gradients that one call adds. A GPU moves them, and the sums, in about the time that a
# launch takes. Larger bundles would save little, smaller ones would cost more launches.
BUNDLE_BYTES = 4 * 2**20

Lookup: TypeAlias = Callable[[Tensor], Tensor | None]  # the sum that an operator may add to


class Collecting:
    """Adds the gradients of one backward pass: after it, or bundle by bundle while it runs.

    For sums that autograd cannot add to, and for a window that is sent during the pass.
    """

    def __init__(self, engine: Engine, op: str, window: Window, sending: Sending | None) -> None:
        self._engine, self._op, self._window = engine, op, window
        self._parameters, self._sending = window.parameters, sending
        self._arriving: Callable[[], list[Tensor | None]] | None = None

    def run(self, run: Callable[[Scalar, Lookup], None], factor: Scalar) -> Window:
        """Return the window with the gradients of a loss times a factor added."""
        pairs = list(zip(self._parameters, self._window.sums, strict=True))
        lent = [m if m is not None and m.dtype == p.dtype else None for p, m in pairs]
        set_grads(self._parameters, lent)
        with GradCollector(self._op, self._parameters, self._take).watching(self._watched()):
            run(factor, self._main_grad)
        grads = grads_of(self._parameters)
        if self._sending is not None:
            self._take([i for i, grad in enumerate(grads) if grad is not None])
        else:
            self._arrive()
            self._arriving = self._engine.tensors.send(grads)
        with record_function("accumext::accumulate"), torch.no_grad():
            self._arrive()
        clear_grads(self._parameters)
        return self._window

    def _watched(self) -> list[int]:
        """Return the indices of parameters whose gradients are added while the pass runs."""
        engine, parameters = self._engine, self._parameters
        if self._sending is not None:
            return list(range(len(parameters)))
        if engine.settings.accumulate_in_backward and not self._window.autograd_adds:
            return [i for i, p in enumerate(parameters) if p.dtype in HALF_DTYPES]
        return [i for i, far in enumerate(engine.tensors.goes_to_host()) if far]

    def _main_grad(self, parameter: Tensor) -> Tensor | None:
        """Return the sum of a parameter for an operator to add to; None if it cannot."""
        index = next((i for i, p in enumerate(self._parameters) if p is parameter), None)
        if index is None:
            return None
        main = self._window.sums[index]
        if main is None:
            if not (
                self._engine.settings.accumulate_in_backward and parameter.dtype in HALF_DTYPES
            ):
                return None
            self._window, main = with_sum(self._window, index)
        return main if is_plain(main) and main.device == parameter.device else None

    def _take(self, indices: list[int]) -> None:
        """Add the gradients of some parameters, which are complete, and free them."""
        with record_function("accumext::accumulate"), torch.no_grad():
            grads: list[Tensor | None] = [None] * len(self._parameters)
            for i in indices:
                grads[i] = self._parameters[i].grad
            self._arrive()  # while one bundle is added on the host, the next is on its way
            self._arriving = self._engine.tensors.send(grads)
            if self._engine.tensors.is_parameters:
                self._arrive()
            for i in indices:
                self._parameters[i].grad = None
            if self._sending is not None:
                sums, quotient = list(self._window.sums), self._window.ledger.quotient("sum")
                self._window = self._window._replace(sums=sums)
                self._sending.buckets.send_complete(self._op, sums, quotient.value(), indices)

    def _arrive(self) -> None:
        if self._arriving is not None:
            self._add(self._arriving())
            self._arriving = None

    def _add(self, grads: list[Tensor | None]) -> None:
        """Adopt the sums that autograd has added to, and add gradients of half precision."""
        window, parameters = self._window, self._parameters
        if window.autograd_adds:
            self._window = adopt(window, grads)
            return
        halves: list[Tensor | None] = [None] * len(grads)
        for i, parameter in enumerate(parameters):
            if parameter.dtype in HALF_DTYPES:
                halves[i], grads[i] = grads[i], None
        if not all(map(is_none, grads)):
            window = adopt(window, grads)
        self._window = adding(window, halves, 1.0).run([])


class GradCollector:
    """Hands over every gradient of a backward pass once it is complete, in bundles.

    The hooks exist only during the pass. So they do not run in backward passes of the user's own,
    parameters may be added or unfrozen at any time, and copies and pickles contain no hooks.
    """

    def __init__(
        self, op: str, parameters: Sequence[Tensor], take: Callable[[list[int]], None]
    ) -> None:
        self._op = op
        self._parameters = parameters
        self._take = take
        # Parameters whose gradient waits in `.grad`, and the bytes of those gradients. A backward
        # pass runs on one thread per device.
        self._waiting: defaultdict[torch.device, list[int]] = defaultdict(list)
        self._bytes: defaultdict[torch.device, int] = defaultdict(int)
        self._taken: set[int] = set()
        self._lock = Lock()

    @contextmanager
    def watching(self, indices: Iterable[int]) -> Iterator[None]:
        """Hook parameters during the backward pass. The last bundles are left in `.grad`."""
        handles = []
        try:
            for i in indices:
                if self._parameters[i].requires_grad:
                    hook = self._hook_of(i)
                    handles.append(self._parameters[i].register_post_accumulate_grad_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._refuse_late_gradients()

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        collector_of = ref(self)  # a hook that an interrupt leaves behind does nothing

        def hook(parameter: Tensor) -> None:
            collector = collector_of()
            if collector is not None and parameter.grad is not None:  # no other hook removed it
                collector._collect(index, parameter.grad)

        return hook

    def _collect(self, index: int, grad: Tensor) -> None:
        """Note a complete gradient, and take its bundle if that is full."""
        device = grad.device
        self._waiting[device].append(index)
        self._bytes[device] += grad.numel() * grad.element_size()
        if self._bytes[device] >= BUNDLE_BYTES:
            self._bytes[device] = 0
            bundle = self._waiting.pop(device)
            with self._lock:
                self._take(bundle)
                self._taken.update(bundle)

    def _refuse_late_gradients(self) -> None:
        """Raise if a gradient was written after it was taken, as DistributedDataParallel does."""
        waiting = set(chain.from_iterable(self._waiting.values()))
        if any(self._parameters[i].grad is not None for i in self._taken - waiting):
            contract = "be complete when autograd has accumulated it"
            got = "one that was written again, as DistributedDataParallel does"
            advice = "Use `with opt.micro_batch(model):`, or accumulate_in_backward=False"
            raise RuntimeError(message(self._op, ".grad", contract, got, advice))
