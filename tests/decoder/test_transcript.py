"""The random numbers of a call, its rows, and what counts in its loss."""

from typing import Any

import pytest
import torch
from support.decode_oracle import make_decoder
from support.decoding import BATCH, FEEDBACKS, TARGETS, VOCABULARY, run, targets_with_holes, wrapped
from support.device import DeviceReads

import accumext


@pytest.mark.parametrize("feedback", ["teacher", "greedy", "sample", "scheduled"])
def test_no_number_of_the_host_is_copied_to_the_device(feedback):
    """Such a copy waits until the device has done all that it was given."""
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    given = FEEDBACKS[feedback](*targets.shape, VOCABULARY)
    for options in ({}, {"num_items": 40}, {"num_items": 0.5, "eos": 1}):
        for cell in (decoder.cell, wrapped(decoder)):
            with DeviceReads() as reads:
                run(decoder, cell, targets=targets, **given, **options).loss.backward()
            assert reads.made == 0


def test_sampled_rows_keep_their_uniforms_when_others_end():
    """The same generator: a row's sample does not depend on which other rows are alive."""
    decoder, tokens = make_decoder("gru_cell"), []
    for lengths in (None, torch.tensor([2, 6, 5])):
        generator = torch.Generator().manual_seed(0)
        tokens.append(run(decoder, feedback="sample", lengths=lengths, generator=generator).tokens)
    for row, length in enumerate((2, 6, 5)):
        assert torch.equal(tokens[0][:length, row], tokens[1][:length, row])


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("feedback", ["scheduled", "mask"])
def test_frequencies_of_samples_that_are_fed_are_the_softmax(feedback, called):
    """With one random number per token for the coin and the sample, a call that never feeds the
    target is `sample`."""
    decoder = make_decoder("gru_cell", batch=4000)
    decoder.state = decoder.state[:1].expand(4000, -1)
    never: dict[str, Any] = {"feedback": "scheduled", "teacher_forcing": 0.0}
    if feedback == "mask":
        never = {"feedback": torch.zeros(2, 4000, dtype=torch.bool)}
    targets = torch.zeros(2, 4000, dtype=torch.int64)
    cell = wrapped(decoder) if called else None
    out = run(decoder, cell, targets=targets, draw="sample", temperature=2.0, **never)
    assert torch.equal(out.inputs[1], out.tokens[0])
    output, _ = decoder.step(decoder.embedding(torch.zeros(1).long()), decoder.state[:1])
    expected = (decoder.head(output).detach() / 2).softmax(-1)[0] * 4000
    counts = out.tokens[0].bincount(minlength=VOCABULARY)
    chi_square = float(((counts - expected).square() / expected).sum())
    # mean and 5 standard deviations of a chi-square of 12 degrees of freedom
    assert chi_square < 12 + 5 * 24**0.5


def test_a_mean_divides_by_the_tokens_whatever_their_weights():
    decoder = make_decoder("gru_cell")
    lengths = torch.tensor([4, 6, 0])
    weights = torch.rand(TARGETS.shape)
    weights[5, 0] = float("nan")  # past the length, where nothing counts
    out = run(decoder, lengths=lengths, token_weight=weights)
    expected = (out.token_losses * weights.nan_to_num()).sum() / lengths.sum()
    torch.testing.assert_close(out.loss, expected)
    assert all(gradient.isfinite().all() for gradient in decoder.gradients(out.loss))


def test_weights_of_half_precision_models():
    decoder = make_decoder("gru_cell", dtype=torch.bfloat16)
    weights = torch.rand(TARGETS.shape, dtype=torch.float64)
    out = run(decoder, token_weight=weights, reduction="sum")
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, (out.token_losses * weights).sum().float())


def test_how_many_rows_there_are_without_targets():
    decoder, layers = make_decoder("gru_cell"), make_decoder("lstm", batch=6)
    start, lengths = torch.zeros(5, dtype=torch.int64), torch.tensor([1, 4])
    for parts, call, shape in (
        (decoder, {}, (4, 1)),
        (decoder, {"start": start}, (4, 5)),
        (decoder, {"lengths": lengths}, (4, 2)),
        (layers, {"state": layers.state, "batch_first": True}, (6, 4)),
        (decoder, {"state": decoder.state, "steps": 0}, (0, BATCH)),
    ):
        modules = (parts.embedding, parts.cell, parts.head, None)
        out = accumext.decode_loss(*modules, feedback="greedy", **{"steps": 4, **call})
        assert out.tokens.shape == shape
        assert out.loss == 0 if shape[0] == 0 else out.loss > 0
        assert "lengths" not in call or torch.equal(out.lengths, lengths)
