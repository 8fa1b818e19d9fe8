"""The optimizer with accumext's wrapper around it, in runs that show a cure."""

from typing import Any

import torch
from _factors import WINDOW, optimizer_of


def wrapped(optimizer: torch.nn.Module | torch.optim.Optimizer, **options: Any) -> Any:
    """Of a model, or around an optimizer."""
    import accumext  # no other run needs it

    if isinstance(optimizer, torch.nn.Module):
        optimizer = optimizer_of(optimizer)
    return accumext.AccumulatingOptimizer(optimizer, window=WINDOW, **options)
