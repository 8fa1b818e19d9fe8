"""The host's use of a device, seen on a CPU: its reads, and the kernels that it launches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accumext.tensors import scalars


class DeviceReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: reads of a value, or of a list.

    And `made`, tensors made of a number on the host: their copy to a device waits for it, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.lists = 0
        self.made = 0

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
        self.made += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


# Kernels of an operator of ours on a device; a table is uploaded only where tensors have moved.
OWN_KERNELS = {
    "accumulate_": 2,
    "copy_rounded_": 1,
    "scale_": 1,
    "total_norm": 2,
    "unscale_check_clip_accumulate_": 3,
}


class Launches(TorchDispatchMode):
    """Counts what would be launched on a device, copies to and from the host among it.

    An operator of torch counts as one kernel; so does one on a list, which torch launches once for
    some hundred tensors. Views and uninitialised memory are free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "accumext":
            self.calls[name] += _own_kernels(name, args)
        elif namespace == "aten" and not func.is_view and "empty" not in name and name != "detach":
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def _own_kernels(name: str, args: tuple[object, ...]) -> int:
    if name == "window_factors":  # after the norm's own, or alone
        return 1 if args[3][0] is not None else 2
    return OWN_KERNELS.get(name, 0)  # of the decoder: not counted here


@contextmanager
def cpu_as_device() -> Iterator[None]:
    """Treat tensors on the CPU as if on a device that the host must not wait for."""
    on_host = scalars.on_host
    scalars.on_host = lambda tensor: False
    try:
        yield
    finally:
        scalars.on_host = on_host
