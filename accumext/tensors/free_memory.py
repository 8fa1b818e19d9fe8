"""The memory that tensors may still take on a device."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# By the name of the controller, which is empty in version 2 of control groups: the files of a
# group's limit and of what it uses, and the page cache in that, which it gives back.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that tensors may still take; None if nothing says how many.

    What the caching allocator of a GPU holds unused is free. On a CPU the limits of control groups
    hold, such as that of a container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if torch.cuda.get_allocator_backend() == "pluggable":  # which counts nothing
            return free
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", (PROC / "meminfo").read_text())
        groups = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return None
    if available is None:
        return None
    free_bytes: float = int(available[1]) * 1024
    for _, controller, path in (line.split(":", 2) for line in groups):
        if controller in _FILES:
            group = CGROUPS / controller / path.lstrip("/")
            for folder in (group, *group.parents):
                free_bytes = min(free_bytes, _left(folder, *_FILES[controller]))
    return max(0, int(free_bytes))


def _left(group: Path, limit: str, used: str, cache: str) -> float:
    """Return the bytes that a control group may still take; infinity if it has no limit."""
    try:
        limit_text = (group / limit).read_text().strip()
        if limit_text == "max":
            return math.inf
        cached = re.search(rf"^{cache} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        in_use = int((group / used).read_text()) - (int(cached[1]) if cached else 0)
    except OSError:
        return math.inf
    return int(limit_text) - in_use
