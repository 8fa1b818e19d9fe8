"""The embedding's gradient: sparse, padded, of frequent words."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import BATCH, EXACT, VOCABULARY, raises, run, targets_with_holes
from torch import Tensor

import accumext


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("periods", [(None, None), (2, 2), (1, 3)], ids=str)
def test_sparse_embeddings(tied, periods):
    decoder = make_decoder("lstm_cell", padding_idx=2, tied=tied)
    call = {"feedback": "greedy", "k1": periods[0], "k2": periods[1]}
    grads = []
    for sparse in (False, True):
        decoder.embedding.sparse, decoder.embedding.weight.grad = sparse, None
        run(decoder, **call).loss.backward()
        grad = decoder.embedding.weight.grad
        assert grad.is_sparse == (sparse and not tied)
        grads.append(grad.to_dense())
    assert relative_distance([grads[1]], [grads[0]]) < EXACT


LIMIT = 0.5  # below the norms that `nn.Embedding` starts with


def limited(kind: str, tied: bool, dtype: torch.dtype = torch.float64) -> Any:
    decoder = make_decoder(kind, tied=tied, dtype=dtype)
    decoder.embedding.max_norm = LIMIT
    return decoder


@pytest.mark.parametrize("options", [{}, {"eos": 2}, {"lengths": [7, 2, 0]}, {"k2": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "callable"])
def test_known_tokens_are_renormalised_before_the_head_reads(kind, tied, options):
    """As where the whole sequence is looked up at once, which is how a plain model does it."""
    targets = targets_with_holes()
    found = []
    for renormalised in (False, True):
        torch.manual_seed(0)
        decoder = limited("gru_cell" if kind == "callable" else kind, tied)
        cell = decoder.step if kind == "callable" else decoder.cell
        inputs = torch.cat([torch.zeros(1, BATCH, dtype=torch.int64), targets[:-1].clamp(min=0)])
        if renormalised:
            live = torch.arange(len(targets))[:, None] < torch.tensor(
                options.get("lengths", [7] * 3)
            )
            torch.embedding_renorm_(decoder.embedding.weight.detach(), inputs[live], LIMIT, 2.0)
            decoder.embedding.max_norm = None
        out = run(decoder, cell, targets=targets, inputs=inputs, **options)
        weight = decoder.embedding.weight.detach().clone()
        found.append((out.loss, decoder.gradients(out.loss), weight))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=EXACT, atol=0)
    assert relative_distance(found[0][1], found[1][1]) < EXACT
    if not options:
        assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("kind", ["gru_cell", "lstm"])
def test_tokens_that_are_fed_back_are_renormalised(kind):
    decoder = limited(kind, tied=False)
    before = decoder.embedding.weight.detach().clone()
    out = run(decoder, feedback="greedy")
    after = decoder.embedding.weight.detach().clone()
    decoder.embedding.max_norm = None
    with torch.no_grad():
        decoder.embedding.weight.copy_(before)
        torch.embedding_renorm_(decoder.embedding.weight, out.inputs, LIMIT, 2.0)
    torch.testing.assert_close(after, decoder.embedding.weight.detach())
    expected = run(decoder, feedback="greedy")
    torch.testing.assert_close(out.loss, expected.loss, rtol=EXACT, atol=0)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss))
    assert distance < EXACT


def test_a_tied_head_is_not_renormalised_between_steps():
    """Plain autograd cannot differentiate that either: the head was saved and then written."""
    decoder = limited("gru_cell", tied=True)
    before = decoder.embedding.weight.detach().clone()
    text = (
        "embedding must have no max_norm if the head shares its weight and predictions are fed, "
        "got 0.5. Renormalise the weight before the call: weight.renorm_(2, 0, max_norm)"
    )
    for head in (decoder.head, (decoder.embedding.weight[:VOCABULARY], None)):
        with raises(ValueError, text):
            accumext.decode_loss(
                decoder.embedding, decoder.cell, head, targets_with_holes(), decoder.state,
                feedback="greedy",
            )  # fmt: skip
    assert torch.equal(decoder.embedding.weight, before)


@pytest.mark.parametrize("search", ["greedy", "sample", "beam"])
@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "autocast"])
def test_generate_reads_a_tied_head_as_the_lookups_leave_it(search, rounds):
    decoder = limited("gru_cell", tied=True, dtype=torch.float32)
    weight, before = decoder.embedding.weight, decoder.embedding.weight.detach().clone()
    generator = torch.Generator().manual_seed(4)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
        out = accumext.generate(
            decoder.embedding, decoder.cell, decoder.head, decoder.state, max_length=9,
            search=search, beams=1, generator=generator,
        )  # fmt: skip
    said = out.tokens.view(9, BATCH)
    with torch.no_grad():
        weight.copy_(before)
        tokens, state, log_probs = torch.zeros(BATCH, dtype=torch.int64), decoder.state, []
        for t in range(9):
            state = decoder.cell(decoder.embedding(tokens), state)
            head = weight.bfloat16().float() if rounds else weight
            hidden = state.bfloat16().float() if rounds else state
            logits: Tensor = F.linear(hidden, head, decoder.head.bias)
            tokens = said[t]
            log_probs.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    # Exact: nine steps of float32 sums in another order. Autocast: the recurrent products may be
    # rounded, too, to bfloat16, 2^-8 relative.
    tolerance = {"rtol": 0.0, "atol": 2e-2} if rounds else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.log_probs.view(9, BATCH), torch.stack(log_probs), **tolerance)
