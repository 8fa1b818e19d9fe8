"""Modules of sequences behind a callable: rows of a batch are no steps of a sequence."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import (
    BATCH,
    EXACT,
    VOCABULARY,
    parts_of,
    raises,
    stateless,
    targets_with_holes,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import accumext


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.inner(2 * x / 2, state)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "module": Wrapper,
    "AveragedModel": AveragedModel,
    "function": lambda rnn: lambda x, state: rnn(x, state),
    "partial": functools.partial,
    "bound method": lambda rnn: rnn.forward,
    "compiled": lambda rnn: torch.compile(Wrapper(rnn), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, by nn.GRU
@pytest.mark.parametrize("budget", [None, 2000], ids=["graph kept", "steps run again"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn"])
def test_a_wrapper_is_read_as_what_it_wraps(kind, wrapper, budget):
    decoder, targets = stateless(make_decoder(kind)), targets_with_holes()
    cell = WRAPPERS[wrapper](decoder.cell)
    given = list(cell.parameters() if wrapper == "AveragedModel" else decoder.cell.parameters())
    parts = (decoder.embedding, decoder.cell, decoder.head)
    expected = accumext.decode_loss(*parts, targets, feedback="greedy")
    decoder.cell.batch_first = wrapper == "function"
    call = (decoder.embedding, cell, decoder.head)
    found = accumext.decode_loss(*call, targets, feedback="greedy", memory_budget=budget)
    assert torch.equal(found.tokens, expected.tokens)
    for a, b in zip(parts_of(found.state), parts_of(expected.state), strict=True):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)
    ours = torch.autograd.grad(found.loss, given)
    by_weights = torch.autograd.grad(expected.loss, [*decoder.cell.parameters()])
    assert relative_distance(list(ours), list(by_weights)) < EXACT
    start = torch.zeros(BATCH, dtype=torch.int64)
    said = [accumext.generate(*given, max_length=5, start=start).tokens for given in (call, parts)]
    assert torch.equal(*said)


def test_a_cell_that_reads_no_sequence_is_told_how():
    decoder, targets = make_decoder("gru"), targets_with_holes()
    rnn, more = nn.GRU(7, 5).double(), torch.zeros(BATCH, 2).double()
    cure = "y, s = rnn(x[None], s); return y[0], s"
    for cell in (
        lambda x, s: rnn(torch.cat([x, more], 1), s),
        lambda x, s: (decoder.cell(x, s)[0].sum(0), s),
    ):
        with raises(TypeError, "cell must take (x [B, E], state) and return") as caught:
            accumext.decode_loss(decoder.embedding, cell, decoder.head, targets, feedback="greedy")
        assert str(caught.value).endswith(cure)


def test_what_is_no_batch_may_be_a_sequence():
    """Vectors that all rows share, as many as they may be."""
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    memory, encoder = torch.randn(BATCH + 1, 4).double(), nn.GRU(4, 5).double()

    def cell(x: Tensor, state: Any) -> Any:
        read = encoder(memory)[0].mean(0)
        state = decoder.cell(x, read.expand(BATCH, 5) if state is None else state)
        return state, state

    out = accumext.decode_loss(decoder.embedding, cell, decoder.head, targets, feedback="greedy")
    assert out.loss.isfinite()


@pytest.mark.parametrize("state", [None, torch.zeros(1, 5)], ids=["None", "[1, H]"])
def test_tbptt_says_how_to_read_a_step(state):
    words, rnn, out = nn.Embedding(VOCABULARY, 5), nn.GRU(5, 5), nn.Linear(5, VOCABULARY)

    def wrong(token: Tensor, state: Any) -> Any:
        y, state = rnn(words(token), state)
        return out(y), state

    def right(token: Tensor, state: Any) -> Any:
        y, state = rnn(words(token)[None], state)
        return out(y[0]), state

    text = r"^tbptt: step must take tokens \[B\], got nn.GRU, LSTM or RNN called with \[B, E\]"
    with pytest.raises(TypeError, match=text):
        accumext.tbptt(wrong, targets_with_holes(), state, criterion=F.cross_entropy)
    if state is None:
        accumext.tbptt(right, targets_with_holes(), state, criterion=F.cross_entropy)
