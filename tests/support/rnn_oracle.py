"""References of recurrent operators: torch's cells in float64, one step at a time."""

import torch
from torch import Tensor, nn

KINDS = ["gru", "lstm", "rnn_tanh", "rnn_relu"]  # an operator's `kind` is an index
BATCHES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33]  # around panels of 8 columns, vectors of 16
UNITS = [1, 7, 11, 12, 13, 48, 49, 100]  # around row blocks of 12, 48 units of a thread
# Relative to the largest value: float64, two orders of summation of a few hundred terms; float32,
# the same after five steps, each with functions within a few units in the last place.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def close(actual: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected.detach().double(), rtol=0, atol=TOLERANCE[actual.dtype] * scale
    )


def make_cell(kind: str, inputs: int, units: int) -> nn.RNNCellBase:
    if kind in ("gru", "lstm"):
        factory = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind]
        return factory(inputs, units, dtype=torch.float64)
    return nn.RNNCell(inputs, units, nonlinearity=kind[4:], dtype=torch.float64)


def advance(
    cell: nn.RNNCellBase, x: Tensor, parts: tuple[Tensor, ...], live: Tensor | None
) -> tuple[Tensor, ...]:
    new = cell(x, parts if len(parts) == 2 else parts[0])
    new = new if isinstance(new, tuple) else (new,)
    if live is None:
        return new
    return tuple(torch.where(live[:, None], n, o) for n, o in zip(new, parts, strict=True))
