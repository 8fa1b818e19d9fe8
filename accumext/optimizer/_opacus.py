"""What has to be known of Opacus, which is never imported."""

from __future__ import annotations

import sys

from torch.optim import Optimizer

# What such an optimizer is, in an error, and the advice.
PER_SAMPLE = (
    "DPOptimizer, which steps on gradients of single samples, not on .grad",
    "Opacus accumulates by itself, in BatchMemoryManager",
)


def has_own_gradients(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer steps on gradients of single samples, which every backward pass
    leaves on the parameters, and not on `.grad`."""
    return isinstance(optimizer, getattr(sys.modules.get("opacus.optimizers"), "DPOptimizer", ()))
