"""A forecaster that reads its own predictions for 256 steps.

A GRU reads the history of several series, and from there each prediction is the next input, so that
gradients flow through the predictions, too. In plain PyTorch the graph of all steps is kept; in
accumext that of a few, and the others are run again in the backward pass: less memory, more time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from comparison import compare, wants_quick
from torch import Tensor, nn

import accumext

PERIODS = (12.0, 31.0, 50.0)  # steps
HISTORY = 32  # steps that are read before the first prediction
SEGMENT = 16  # steps whose graph exists at once


class Series(NamedTuple):
    history: Tensor  # [S, B, D]
    future: Tensor  # [T, B, D]


class Forecaster(nn.Module):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.encoder = nn.GRU(channels, size)
        self.cell = nn.GRUCell(channels, size)
        self.change = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, channels))

    def forward(self, value: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next value [B, D], and the state [B, H]."""
        hidden = self.cell(value, hidden)
        return value + self.change(hidden), hidden

    def encode(self, history: Tensor) -> Tensor:
        """The state after the last value but one, which is read first."""
        return self.encoder(history[:-1])[1][0]


def plain_loss(model: Forecaster, series: Series) -> Tensor:
    """The mean squared error over all steps."""
    hidden, value = model.encode(series.history), series.history[-1]
    losses = []
    for true in series.future:
        value, hidden = model(value, hidden)
        losses.append(F.mse_loss(value, true))
    return torch.stack(losses).mean()


def accumext_loss(model: Forecaster, series: Series) -> Tensor:
    """The same."""
    out = accumext.rollout(
        model,
        model.encode(series.history),
        len(series.future),
        loss=lambda value, t: F.mse_loss(value, series.future[t]),
        start=series.history[-1],
        checkpoint=SEGMENT,
    )
    return out.loss


def make(
    channels: int, size: int, steps: int, batch: int, dtype: torch.dtype = torch.float32
) -> tuple[Forecaster, Series]:
    """A model, and sums of sine waves under autoregressive noise."""
    torch.manual_seed(0)
    model = Forecaster(channels, size).to(dtype)
    time = torch.arange(HISTORY + steps, dtype=dtype)[:, None, None]
    values = torch.zeros(HISTORY + steps, batch, channels, dtype=dtype)
    for period in PERIODS:
        phase, amplitude = torch.rand(2, batch, channels, dtype=dtype)
        values += amplitude * torch.sin(2 * torch.pi * (time / period + phase))
    noise = torch.zeros(batch, channels, dtype=dtype)
    for value in values:
        noise = 0.9 * noise + 0.05 * torch.randn(batch, channels, dtype=dtype)
        value += noise
    return model, Series(values[:HISTORY], values[HISTORY:])


def main() -> None:
    quick = wants_quick(__doc__)
    exact = make(channels=2, size=8, steps=40, batch=3, dtype=torch.float64)
    timed = make(2, 8, 40, 3) if quick else make(channels=8, size=256, steps=256, batch=64)
    compare(plain_loss, accumext_loss, exact=exact, timed=timed)


if __name__ == "__main__":
    main()
