"""The peak memory of a call, which the demo, tests and benchmarks measure."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
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
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
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
