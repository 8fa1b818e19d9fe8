"""Support for peft, whose layers wrap the layers that they adapt."""

from __future__ import annotations

from torch import nn


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer that an adapter wraps, which has its sizes; for other modules themselves."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) else module
