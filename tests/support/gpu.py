"""The effects of a call on a GPU."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # of the runtime and the driver
COPIES = ("cudaMemcpy", "cudaMemset")


def launched(call: Callable[[], object], kinds: tuple[str, ...] = LAUNCHES + COPIES) -> list[str]:
    """Return the names of the calls of CUDA that put work on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return [event.name for event in record.events() if event.name.startswith(kinds)]
