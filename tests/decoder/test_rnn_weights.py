"""The choice of torch's modules that are run by their weights, and of those that are called."""

from typing import Any

import torch
from support.decode_oracle import make_decoder
from support.decoding import check, targets_with_holes
from torch import Tensor, nn


def test_parametrized_weights_are_followed():
    decoder = make_decoder("lstm")
    nn.utils.parametrizations.weight_norm(decoder.cell, "weight_hh_l0")
    nn.utils.parametrizations.weight_norm(decoder.head)
    decoder.leaves = [*decoder.cell.parameters(), *decoder.head.parameters(), *decoder.state]
    check(decoder, targets_with_holes(), {"feedback": "greedy"})


def test_cells_that_do_more_than_their_weights_say_are_called():
    """A forward of its own, hooks and projections: their effect is in the loss and the
    gradients."""

    class Doubled(nn.GRUCell):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return super().forward(2 * x, h)

    hooked, own, projected = (make_decoder("gru_cell") for _ in range(3))
    hooked.cell.register_forward_hook(lambda _, __, h: h * 0.5)
    own.cell.__class__ = Doubled
    projected.cell = nn.LSTM(5, 8, proj_size=5, dtype=torch.float64)
    projected.state = torch.randn(1, 3, 5).double(), torch.randn(1, 3, 8).double()

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = projected.cell(x[None], state)
        return output[0], state

    projected.step = step
    projected.leaves = [*projected.cell.parameters()]
    for decoder in (hooked, own, projected):
        check(decoder, targets_with_holes(), {"feedback": "greedy"})
