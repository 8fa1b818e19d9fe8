"""Gradients of a device on their way to the host, and rounded parameters on their way back.

Both go through pinned memory, so that neither the device nor the host waits for the other more than
it must: while the processor adds one bundle of gradients, or rounds one of masters, the next is on
its way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from accumext import ops

# Bytes of parameters that are rounded before they are sent: enough for the bus's full speed, little
# enough for the sending to overlap with the rounding of the next.
BUNDLE_BYTES = 16 * 2**20

Take: TypeAlias = Callable[[dict[Tensor, Tensor], Container[int]], None]


class HostTransfer:
    """Hands gradients over on the host, one bundle after they were given on a device.

    Several threads may give some, as a backward pass has one per device, but one at a time.
    """

    def __init__(self, take: Take, to_host: Callable[[Tensor], bool]) -> None:
        self._take = take
        self._to_host = to_host  # whether gradients of a parameter go there
        self._on_the_way: Bundle | None = None

    def give(self, grads: dict[Tensor, Tensor], foreign: Container[int]) -> None:
        """Send these, and hand over the ones before."""
        arrived, self._on_the_way = self._on_the_way, Bundle(grads, foreign, self._to_host)
        if arrived is not None:
            self._take(arrived.wait(), arrived.foreign)

    def finish(self) -> None:
        """Hand over the last ones."""
        arrived, self._on_the_way = self._on_the_way, None
        if arrived is not None:
            self._take(arrived.wait(), arrived.foreign)


class Bundle:
    """Gradients, of which some are being copied to the host."""

    def __init__(
        self,
        grads: dict[Tensor, Tensor],
        foreign: Container[int],  # ids of gradients that somebody else holds; none is a copy
        to_host: Callable[[Tensor], bool],
    ) -> None:
        self.foreign = foreign
        self._grads = {p: _sent(grad) if to_host(p) else grad for p, grad in grads.items()}
        sources = {grad.device for p, grad in grads.items() if to_host(p) and not grad.is_cpu}
        self._events = [torch.accelerator.current_stream(d).record_event() for d in sources]

    def wait(self) -> dict[Tensor, Tensor]:
        """The gradients, once they are there."""
        for event in self._events:
            event.synchronize()
        return self._grads


def _sent(grad: Tensor) -> Tensor:
    """A copy on the host, which a device may still be writing."""
    grad = grad.detach()
    if grad.is_sparse:
        return grad.cpu()
    return _pinned_like(grad, grad.dtype, grad).copy_(grad, non_blocking=True)


def _pinned_like(tensor: Tensor, dtype: torch.dtype, other: Tensor) -> Tensor:
    """New memory of the host in the layout of a tensor; pinned where `other` is on a device."""
    pin = not other.is_cpu
    return torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=pin)


def send_rounded(
    parameters: Sequence[Tensor],
    masters: Sequence[Tensor],  # on the host, of these shapes
    seeds: Iterator[Tensor] | None = None,  # for stochastic rounding, one for each bundle
) -> None:
    """Round masters, and write them into the parameters of a device."""
    for begin, end in _bundles(parameters):
        sources = masters[begin:end]
        pairs = list(zip(parameters[begin:end], sources, strict=True))
        rounded = [_pinned_like(master, p.dtype, p) for p, master in pairs]
        ops.copy_rounded_(rounded, sources, seed=None if seeds is None else next(seeds))
        for (parameter, _), values in zip(pairs, rounded, strict=True):
            parameter.copy_(values, non_blocking=True)


def _bundles(parameters: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Ranges of parameters of about `BUNDLE_BYTES` each."""
    begin = size = 0
    for end, parameter in enumerate(parameters, 1):
        size += parameter.nbytes
        if size >= BUNDLE_BYTES or end == len(parameters):
            yield begin, end
            begin, size = end, 0
