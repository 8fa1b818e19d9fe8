"""The kinds of cells, and all that they may be given and return."""

from __future__ import annotations

from typing import Any

import torch
from support.decode_oracle import make_decoder
from support.decoding import raises, run

STEPS, BATCH, VOCABULARY = 6, 3, 13


def test_containers_that_cannot_be_looked_into_are_refused() -> None:
    decoder = make_decoder("gru_cell")

    class Hidden:
        def __init__(self, h: torch.Tensor) -> None:
            self.h = h

    def cell(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h = decoder.cell(x, state)
        return h, Hidden(h)

    text = "state must nest tensors in tuples, lists, dicts and dataclasses, got Hidden"
    with raises(TypeError, text):
        run(decoder, cell)
    with raises(TypeError, text):
        run(decoder, cell, Hidden(decoder.state), k2=1)


def test_a_pair_may_be_a_list_and_a_single_state_may_not_be_a_tuple() -> None:
    decoder = make_decoder("lstm_cell")
    lengths = torch.tensor([6, 3, 0])
    assert (
        run(decoder, state=list(decoder.state), lengths=lengths).loss
        == run(decoder, lengths=lengths).loss
    )
    decoder = make_decoder("gru_cell")
    with raises(TypeError, "state must be a tensor for this cell, got tuple"):
        run(decoder, state=(decoder.state,))


def test_cells_that_return_something_else() -> None:
    decoder = make_decoder("gru_cell")
    with raises(TypeError, "cell must return (output, state), got a float64 tensor"):
        run(decoder, decoder.cell.__call__)
    calls = iter(range(100))

    def shrinks(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(x, h)
        return (h if next(calls) < 2 else h[:1]), h

    with raises(ValueError, "cell must return an output of shape [3, 5], got [1, 5]"):
        run(decoder, shrinks)
