"""The peak memory of a call, which the demo, tests and benchmarks measure."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def peak_memory(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the peak bytes of tensors during a call, over those allocated before it.

    On CUDA the figure is `torch.cuda.max_memory_allocated`. The CPU's allocator has no such
    counter. For it the figure is the highest running sum of the allocations and releases that the
    profiler recorded, in the order of their times: the same in every run, and without what the C
    library keeps for later use. Scratch memory from other allocators counts in neither figure.

    Args:
        fn: called once; what it returns counts, and is dropped.
        device: where its tensors are.

    Example:
        >>> peak_memory(lambda: torch.zeros(1024, 1024)) // 2**20
        4
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no greetings of the profiler on stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True)
    with _large_blocks_from_the_system(), profile as profiler:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    current = peak = 0
    for _, change in sorted(changes, key=lambda at: at[0]):  # stable: equal times keep their order
        current += change
        peak = max(peak, current)
    return peak


@contextlib.contextmanager
def _large_blocks_from_the_system() -> Iterator[None]:
    """Make glibc take blocks of a megabyte from the system, and give them back at once.

    In its heap the events of the profiler, which stay, would be put where large tensors were. The
    next ones would then need new memory: 5 GB after a hundred backward passes of a head whose
    gradient has 26 MB. Afterwards the bounds are those that glibc reaches by itself.
    """
    set_bound = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_bound is None:
        yield
        return
    mmap_threshold, trim_threshold, mib = -3, -1, 2**20  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    set_bound(mmap_threshold, mib)
    try:
        yield
    finally:
        set_bound(mmap_threshold, 32 * mib)
        set_bound(trim_threshold, 64 * mib)
