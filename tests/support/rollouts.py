"""Rollouts of a GRU in float64, and the plain loop of the same steps."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumext.loops import _kept_graph

EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
BATCH, SIZE = 3, 4


@contextmanager
def free(bytes_: int | None) -> Iterator[None]:
    """So much memory is free; None: as it is."""
    kept = {"ALWAYS_KEPT": 0, "free_memory": lambda device: bytes_}
    with nullcontext() if bytes_ is None else patch.multiple(_kept_graph, **kept):
        yield


def gru(steps: int = 20) -> tuple[nn.GRUCell, Any, dict[str, Any]]:
    """A cell that reads its own state, and the keywords of its rollout."""
    cell = nn.GRUCell(SIZE, SIZE, dtype=torch.float64)
    series = torch.randn(steps, BATCH, SIZE, dtype=torch.float64)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    start = torch.randn(BATCH, SIZE, dtype=torch.float64, requires_grad=True)
    return cell, step, {"loss": lambda x, t: F.mse_loss(x, series[t]), "start": start}


def zeros() -> Tensor:
    return torch.zeros(BATCH, SIZE, dtype=torch.float64, requires_grad=True)


def plain_gru(step: Any, h: Any, steps: int, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, losses = call["start"], []
    for t in range(steps):
        x, h = step(x, h)
        losses.append(call["loss"](x, t))
    return torch.stack(losses).mean(), h
