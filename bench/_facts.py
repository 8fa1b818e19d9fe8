"""Facts about a run besides its times: the machine, and promises that are kept or not."""

from __future__ import annotations

import math
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _gradient_jobs import Gradients
from _results import command
from _timing import Shape
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import accumext


def machine(device: torch.device) -> dict[str, Any]:
    """Return the facts that the times depend on."""
    facts: dict[str, Any] = {
        "command": command(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),  # torch's; accumext follows
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accumext": accumext.__version__,
        "backend": accumext.backend(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        facts["cuda"] = torch.version.cuda
    return facts


def free_bytes(device: torch.device) -> float:
    """Return the bytes that tensors may still take; infinity if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def promises(device: torch.device) -> list[dict[str, Any]]:
    """Return rows like those of the figures, of what holds or does not."""
    calls = _calls(Shape(2 * 10**6, 2000), device)
    if device.type == "cpu":
        return [
            _row(f"{name}: the same bits from 1 and 2 threads", True, same_bits(call))
            for name, call in calls.items()
        ]
    alone = {name: launches(call) for name, call in _calls(Shape(2 * 10**6, 1), device).items()}
    rows = []
    for name, call in calls.items():
        rows += [
            _row(f"{name}: launches for 2,000 tensors, target for 1", alone[name], launches(call)),
            _row(f"{name}: no synchronisation", True, not synchronises(call)),
            _row(f"{name}: a CUDA graph replays the same bits", True, replays(call)),
        ]
    return rows


def same_bits(call: Callable[[], Tensor]) -> bool:
    """Tell whether one thread finds the same bits as two."""
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(call())
    torch.set_num_threads(before)
    return torch.equal(*found)


def launches(call: Callable[[], Tensor]) -> int:
    """Count kernels, copies and fills of one call, once everything lasting is in place."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in record.events())


def synchronises(call: Callable[[], object]) -> bool:
    """Tell whether torch sees the call wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def synchronisations(call: Callable[[], object]) -> int:
    """Count the waits for the device that torch sees in a call; 0 if none of its calls is an error
    then."""
    if not synchronises(call):
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return max(1, sum("synchronizing CUDA operation" in str(w.message) for w in caught))


def replays(call: Callable[[], Tensor]) -> bool:
    """Tell whether a captured call returns the bits of an eager one."""
    expected = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    graph.replay()
    return torch.equal(got, expected)


def _calls(shape: Shape, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return calls that may be repeated: their results are the same every time."""
    data = Gradients(shape, torch.float32, device)
    grads, mains = data.tensors, [torch.empty_like(grad) for grad in data.tensors]
    unscale = {"inv_scale": data.inv_scale, "found_inf": data.found_inf}
    return {
        "total_norm": lambda: accumext.total_norm(grads, **unscale),
        "accumulate_": lambda: accumext.accumulate_(mains, grads, overwrite=True, **unscale),
        "unscale_check_clip_accumulate_": lambda: accumext.unscale_check_clip_accumulate_(
            mains, grads, max_norm=data.max_norm, overwrite=True, **unscale
        ),
    }


def _row(text: str, target: bool | int, measured: bool | int) -> dict[str, Any]:
    return {"figure": text, "target": target, "measured": measured}


def _cpu_model() -> str:
    """Return the processor's name, family and model: machines of a cloud share names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    facts = {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    name = facts.get("model name", platform.processor())
    if not {"cpu family", "model"} <= facts.keys():
        return name
    return f"{name}, family {facts['cpu family']}, model {facts['model']}"
