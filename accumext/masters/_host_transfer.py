"""Gradients of a device on their way to the host, and rounded parameters on their way back.

Both go through pinned memory, so that neither the device nor the host waits for the other more than
it must: while the processor adds one bundle of gradients, or rounds one of masters, the next is on
its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from accumext import ops

# Bytes of parameters that are rounded before they are sent: enough for the bus's full speed, little
# enough for the sending to overlap with the rounding of the next.
BUNDLE_BYTES = 16 * 2**20


def crosses(parameter: Tensor, master: Tensor) -> bool:
    """Whether the one is on a device and the other in the host's memory."""
    return master.is_cpu and not parameter.is_cpu


class Sending:
    """Gradients, of which some are being copied to the host."""

    def __init__(self, grads: Sequence[Tensor | None], to_host: Sequence[bool]) -> None:
        pairs = list(zip(grads, to_host, strict=True))
        self._grads = [_sent(g) if far and g is not None else g for g, far in pairs]
        sources = {g.device for g, far in pairs if far and g is not None and not g.is_cpu}
        self._events = [torch.accelerator.current_stream(d).record_event() for d in sources]

    def wait(self) -> list[Tensor | None]:
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
