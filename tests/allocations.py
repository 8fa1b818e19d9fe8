"""Peak of torch's own CPU allocations, from the profiler's allocator events: exact, and the same in every run."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(fn: Callable[[], object]) -> int:
    """Bytes above the starting point that tensors made inside `fn` reach at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = fn()
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    del result
    live = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        live += change
        peak = max(peak, live)
    return peak
