"""What is known of peft: its layers stand around the ones that they adapt."""

from __future__ import annotations

from torch import nn


def base_layer(module: nn.Module) -> nn.Module:
    """The layer that an adapter stands around, which has its sizes; any other module itself."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) else module
