"""What the host reads of a device, seen on a CPU: the one place that stands in for such reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accumext import _scalars


class DeviceReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: reads of a value, or of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.lists = 0

    def __enter__(self):
        self._tolist = torch.Tensor.tolist

        def tolist(tensor: Tensor) -> object:  # reads memory, which is no call that is dispatched
            self.lists += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *raised):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """Tensors on the CPU are treated as if on a device that the host must not wait for."""
    on_host = _scalars.on_host
    _scalars.on_host = lambda tensor: False
    try:
        yield
    finally:
        _scalars.on_host = on_host
