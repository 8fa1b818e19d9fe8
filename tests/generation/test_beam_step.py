"""The cost of a step of beam search on a CPU, apart from its products."""

from support.decode_oracle import make_decoder
from support.device import Launches

import accumext


def test_a_step_calls_few_operators_and_none_in_python():
    """The dispatcher takes as long for an operator in Python as PyTorch for ten of its own."""
    decoder, totals = make_decoder("gru_cell"), []
    for steps in (10, 20):
        with Launches() as launches:
            accumext.generate(
                decoder.embedding, decoder.cell, decoder.head, decoder.state, max_length=steps,
                search="beam",
            )  # fmt: skip
        totals.append(launches.calls.total())
    assert "beam_step" not in launches.calls
    assert totals[1] - totals[0] <= 10 * 40
