"""One good call of each gradient operation; a test replaces an argument of it, or looks at all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PAIRS = ("accumulate_", "unscale_check_clip_accumulate_")
LISTS = {
    **dict.fromkeys(PAIRS, ("main_grads", "grads")),
    "total_norm": ("grads",),
    "scale_": ("grads",),
    "copy_rounded_": ("targets", "sources"),
}


def good(op: str) -> dict[str, Any]:
    """Return new arguments by name."""
    wide = [torch.ones(3), torch.ones(2, 2, dtype=torch.float64)]
    narrow = [torch.ones(3).half(), torch.ones(2, 2)]
    found_inf = torch.tensor(0.25)  # which good gradients leave as it is
    if op == "scale_":
        return {"grads": narrow, "factor": 2.0}
    if op == "copy_rounded_":
        return {"targets": narrow, "sources": wide, "seed": torch.tensor(1)}
    if op == "total_norm":
        return {"grads": narrow, "found_inf": found_inf}
    limit = {} if op == "accumulate_" else {"max_norm": 1.0}
    return {"main_grads": wide, "grads": narrow, "found_inf": found_inf, **limit}


def written(op: str, arguments: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes."""
    flags = [arguments["found_inf"]] if "found_inf" in arguments else []
    return flags if op == "total_norm" else [*arguments[LISTS[op][0]], *flags]


def with_lists(op: str, arguments: dict[str, Any], make: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Return the arguments with other tensors in the lists."""
    return arguments | {name: [make(t) for t in arguments[name]] for name in LISTS[op]}


def copies(arguments: dict[str, Any]) -> list[Tensor]:
    """Return copies of all tensors among the arguments."""
    lists = [a if isinstance(a, list) else [a] for a in arguments.values()]
    return [t.detach().clone() for some in lists for t in some if isinstance(t, Tensor)]
