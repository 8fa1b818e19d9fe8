"""The loss of what the decoder itself said, and what may choose and weigh it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.decode_oracle import CELLS, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, VOCABULARY, raises, run

import accumext


def speak(decoder: Any, **call: Any) -> accumext.DecodeOutput:
    """Nine steps of the decoder's own."""
    call = {"feedback": "sample", "steps": 9, "generator": torch.Generator().manual_seed(3), **call}
    return accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, None, decoder.state, **call
    )


@pytest.mark.parametrize("kind", sorted(CELLS))
@pytest.mark.parametrize("feedback", ["sample", "greedy"])
def test_the_loss_is_that_of_a_replay(kind: str, feedback: str) -> None:
    decoder = make_decoder(kind)
    out = speak(decoder, feedback=feedback, eos=2)
    again = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, out.tokens, decoder.state,
        feedback="teacher", inputs=out.inputs, lengths=out.lengths,
    )  # fmt: skip
    torch.testing.assert_close(out.loss, again.loss, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out.token_losses, again.token_losses, rtol=EXACT, atol=EXACT)
    actual, expected = decoder.gradients(out.loss), decoder.gradients(again.loss)
    assert relative_distance(actual, expected) < EXACT


def test_the_policy_gradient_in_one_pass() -> None:
    """Weights of the tokens' losses, and factors of unreduced ones, give the same gradient."""
    decoder, advantage = make_decoder("gru_cell"), torch.randn(9, BATCH)
    weighted = speak(decoder, token_weight=advantage, reduction="sum")
    unreduced = speak(decoder, reduction="none")
    torch.testing.assert_close(weighted.token_losses, unreduced.token_losses.detach())
    assert torch.equal(weighted.tokens, unreduced.tokens)
    actual = decoder.gradients(weighted.loss)
    expected = decoder.gradients((unreduced.loss * advantage).sum())
    assert relative_distance(actual, expected) < EXACT


def test_a_mean_divides_by_the_tokens_whatever_their_weights() -> None:
    decoder = make_decoder("gru_cell")
    lengths = torch.tensor([4, 6, 0])
    weights = torch.rand(TARGETS.shape)
    weights[5, 0] = float("nan")  # past the length, where nothing counts
    out = run(decoder, lengths=lengths, token_weight=weights)
    expected = (out.token_losses * weights.nan_to_num()).sum() / lengths.sum()
    torch.testing.assert_close(out.loss, expected)
    assert all(gradient.isfinite().all() for gradient in decoder.gradients(out.loss))


def test_weights_of_half_precision_models() -> None:
    decoder = make_decoder("gru_cell", dtype=torch.bfloat16)
    weights = torch.rand(TARGETS.shape, dtype=torch.float64)
    out = run(decoder, token_weight=weights, reduction="sum")
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, (out.token_losses * weights).sum().float())


@pytest.mark.parametrize("kind", ["gru_cell", "callable"])
@pytest.mark.parametrize("feedback", ["scheduled", "mask"])
def test_scheduled_sampling_feeds_samples(kind: str, feedback: str) -> None:
    """With one random number per token both, a call that never feeds the target is `sample`."""
    decoder = make_decoder("gru_cell")
    cell = decoder.cell if kind == "gru_cell" else decoder.step
    never: Any = {"feedback": torch.zeros(6, BATCH).bool()}
    if feedback == "scheduled":
        never = {"feedback": feedback, "teacher_forcing": 0.0}
    out = run(decoder, cell, **never, draw="sample", temperature=2.0)
    assert torch.equal(out.inputs[1:], out.tokens[:-1])
    drawn = [run(decoder, cell, **never, draw="sample").tokens[0, 0] for _ in range(40)]
    assert len({int(token) for token in drawn}) > 1  # the argmax would be one and the same
    mixed = run(decoder, cell, feedback="scheduled", teacher_forcing=0.5, draw="sample")
    target, said = TARGETS[:-1] == mixed.inputs[1:], mixed.tokens[:-1] == mixed.inputs[1:]
    assert (target | said).all()
    assert not target.all()
    assert not said.all()


def test_frequencies_of_scheduled_samples_are_the_softmax() -> None:
    decoder = make_decoder("gru_cell", batch=4000)
    decoder.state = decoder.state[:1].expand(4000, -1)
    targets = torch.zeros(1, 4000, dtype=torch.int64)
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback="scheduled", draw="sample",
    )  # fmt: skip
    output, _ = decoder.step(decoder.embedding(torch.zeros(1).long()), decoder.state[:1])
    expected = decoder.head(output).detach().softmax(-1)[0] * 4000
    counts = out.tokens.flatten().bincount(minlength=VOCABULARY)
    chi_square = float(((counts - expected).square() / expected).sum())
    # mean and 5 standard deviations of a chi-square of 12 degrees of freedom
    assert chi_square < 12 + 5 * 24**0.5


def test_how_many_rows_there_are() -> None:
    decoder = make_decoder("gru_cell")
    call = (decoder.embedding, decoder.cell, decoder.head, None)
    options = {"feedback": "greedy", "steps": 4}
    assert accumext.decode_loss(*call, **options).tokens.shape == (4, 1)
    start = torch.zeros(5, dtype=torch.int64)
    assert accumext.decode_loss(*call, start=start, **options).tokens.shape == (4, 5)
    lengths = torch.tensor([1, 4])
    out = accumext.decode_loss(*call, lengths=lengths, **options)
    assert torch.equal(out.lengths, lengths)
    layers = make_decoder("lstm", batch=6)
    out = accumext.decode_loss(
        layers.embedding, layers.cell, layers.head, None, layers.state, batch_first=True, **options
    )
    assert out.tokens.shape == (6, 4)


def test_nothing_is_said_in_no_steps() -> None:
    decoder = make_decoder("gru_cell")
    out = speak(decoder, steps=0)
    assert out.loss == 0
    assert out.tokens.shape == (0, BATCH)
    assert not any(g.any() for g in decoder.gradients(out.loss))


def test_what_does_not_go_together() -> None:
    decoder = make_decoder("gru_cell")
    with raises(ValueError, "steps must be given where targets are None, got None"):
        speak(decoder, steps=None)
    with raises(ValueError, "steps must be at least 0, got -1"):
        speak(decoder, steps=-1)
    with raises(TypeError, "steps must be an int, got float"):
        speak(decoder, steps=2.0)
    with raises(ValueError, "steps must be None where there are targets, got 6"):
        run(decoder, steps=6)
    contract = "feedback must be 'sample' or 'greedy' where targets are None, got "
    with raises(ValueError, contract + "'teacher'"):
        speak(decoder, feedback="teacher")
    with raises(ValueError, contract + "a bool tensor"):
        speak(decoder, feedback=torch.ones(9, BATCH).bool())
    with raises(ValueError, "inputs must be None where targets are None, got an int64 tensor"):
        speak(decoder, inputs=torch.zeros(9, BATCH).long())
    contract = "draw must be left at 'argmax' unless feedback is 'sample', 'scheduled' or a mask"
    for feedback in ("teacher", "greedy"):
        with raises(ValueError, contract):
            run(decoder, feedback=feedback, draw="sample")
    with raises(ValueError, "draw must be one of 'argmax', 'sample', got 'beam'"):
        run(decoder, draw="beam")
    with raises(TypeError, "token_weight must be a floating-point tensor [T, B], got an int64"):
        run(decoder, token_weight=TARGETS)
    with raises(ValueError, "token_weight must have shape [6, 3], got [3, 6]"):
        run(decoder, token_weight=torch.rand(3, 6))
