"""The choice of torch's modules that are run by their weights, and of those that are called."""

from __future__ import annotations

from typing import Any

import torch
from support.decode_oracle import decode, make_decoder, relative_distance
from torch import nn

import accumext

EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms


def test_parametrized_cells_are_followed() -> None:
    torch.manual_seed(0)
    decoder = make_decoder("lstm")
    nn.utils.parametrizations.weight_norm(decoder.cell, "weight_hh_l0")
    decoder.leaves = [*decoder.cell.parameters(), *decoder.state]
    targets = torch.randint(13, (6, 3))
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="greedy"
    )
    losses, divisor, _ = decode(decoder, targets, out.inputs)
    expected = decoder.gradients(losses.sum() / divisor)
    assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


def test_cells_that_do_more_than_their_weights_say_are_called() -> None:
    """A forward of its own, and hooks: their effect is in the loss and the gradients."""

    class Doubled(nn.GRUCell):
        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x, h)

    torch.manual_seed(0)
    hooked = make_decoder("gru_cell")
    hooked.cell.register_forward_hook(lambda _, __, h: h * 0.5)
    own = make_decoder("gru_cell")
    own.cell.__class__ = Doubled
    projected = make_decoder("gru_cell")
    projected.cell = nn.LSTM(5, 8, proj_size=5, dtype=torch.float64)
    first = torch.randn(1, 3, 5, dtype=torch.float64), torch.randn(1, 3, 8, dtype=torch.float64)
    projected.state = first

    def step(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        output, state = projected.cell(x[None], state)
        return output[0], state

    projected.step = step
    projected.leaves = [*projected.cell.parameters()]
    for decoder in (hooked, own, projected):
        targets = torch.randint(13, (6, 3))
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
            feedback="greedy",
        )  # fmt: skip
        losses, divisor, logits = decode(decoder, targets, out.inputs)
        assert torch.equal(out.tokens, logits.argmax(-1))
        expected = decoder.gradients(losses.sum() / divisor)
        assert relative_distance(decoder.gradients(out.loss), expected) < EXACT
