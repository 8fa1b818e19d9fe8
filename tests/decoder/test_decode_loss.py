"""decode_loss against a plain autograd loop over the tokens it emitted: every cell and every way to
feed it, every option alone."""

from typing import Any

import pytest
import torch
from support.decode_oracle import CELLS, decode, make_decoder, relative_distance
from support.decoding import (
    BATCH,
    EVERY_OPTION,
    EXACT,
    FEEDBACKS,
    VOCABULARY,
    check,
    options,
    run,
    targets_with_holes,
    wrapped,
)
from support.optimizer_oracle import assert_equal
from torch import Tensor

import accumext


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("kind", CELLS)
def test_every_cell_and_feedback(kind, feedback):
    """By torch's module and by a function around it, with a head of its own and a tied one; of the
    cross-entropy, and of whole distributions."""
    for called in (False, True):
        others = ["entropy_weight", "soft_tokens"] if called == ("cell" in kind) else []
        decoder = make_decoder(kind, tied=called)
        call = options([feedback, "eos", *others])
        targets = None if "steps" in call else targets_with_holes()
        check(decoder, targets, call, wrapped(decoder) if called else None)


@pytest.mark.parametrize("option", EVERY_OPTION)
def test_every_option_alone(option):
    for feedback in ("teacher", "greedy"):
        for called in (False, True):
            call = options([option, feedback])
            decoder = make_decoder("lstm", dropout=0.0 if "k2" in call else 0.2, bias=called)
            targets = targets_with_holes(hole=call.get("ignore_index", -100))
            check(decoder, targets, call, wrapped(decoder) if called else None, upstream=-3.0)


@pytest.mark.parametrize(
    ("steps", "call"),
    [
        (4, {"label_smoothing": 0.1, "z_loss": 0.1}),
        (3, {"class_weight": torch.linspace(0.2, 2, 6).double(), "z_loss": 0.05}),
        (3, {"reduction": "sum", "class_weight": torch.linspace(0.2, 2, 6).double()}),
    ],
    ids=["smoothing", "class weights", "sum"],
)
@pytest.mark.parametrize("called", [False, True])
def test_gradcheck(called, steps, call):
    """With its defaults, which ask a second backward pass for the same bits."""
    decoder = make_decoder("gru_cell", vocabulary=6, size=3, batch=2)
    targets, inputs = torch.randint(6, (2, steps, 2))

    def loss(state: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cell, head = decoder.step if called else decoder.cell, (weight, bias)
        given = {"feedback": "teacher", "inputs": inputs, **call}
        return accumext.decode_loss(table, cell, head, targets, state, **given).loss

    leaves = (decoder.state, decoder.embedding.weight, decoder.head.weight, decoder.head.bias)
    assert torch.autograd.gradcheck(loss, tuple(t.detach().requires_grad_() for t in leaves))


# k1 and k2: every step, overlapping windows, windows longer than the sequence.
PERIODS = [(1, 1), (1, 2), (1, 7), (2, 2), (2, 5), (3, 4), (4, 8), (5, 11), (8, 8), (20, 20)]


@pytest.mark.parametrize("called", [False, True], ids=["module", "callable"])
@pytest.mark.parametrize("periods", PERIODS, ids=lambda p: f"k1={p[0]},k2={p[1]}")
def test_truncation_is_that_of_the_definition(periods, called):
    """Every window runs again from a detached state; of sequences that windows divide, and not."""
    for steps, feedback in ((1, "teacher"), (8, "greedy"), (17, "teacher")):
        decoder = make_decoder("lstm_cell", tied=True)
        call = {"feedback": feedback, "k1": periods[0], "k2": periods[1]}
        call["lengths"] = torch.randint(1, steps + 1, (BATCH,))
        targets = torch.randint(VOCABULARY, (steps, BATCH))
        check(decoder, targets, call, wrapped(decoder) if called else None)


@pytest.mark.parametrize("option", EVERY_OPTION)
def test_a_second_backward_pass_has_the_same_bits(option):
    """Under any factor, also in half precision and with a weight that is tied."""
    for feedback, dtype, called in (
        ("teacher", torch.float64, False), ("greedy", torch.float32, True),
        ("sample", torch.bfloat16, True),
    ):  # fmt: skip
        call = options([option, feedback])
        decoder = make_decoder("gru_cell", dtype=dtype, tied=called)
        targets = targets_with_holes(hole=call.get("ignore_index", -100))
        targets = targets.T if "batch_first" in call else targets
        loss = run(decoder, wrapped(decoder) if called else None, targets=targets, **call).loss
        factor = torch.full_like(loss, -0.7)
        first, *others = (
            torch.autograd.grad(loss, decoder.leaves, factor, retain_graph=retain)
            for retain in (True, True, False)
        )
        for other in others:
            assert_equal(other, first)


def test_results_and_arguments_are_the_callers_to_write():
    decoder = make_decoder("gru_cell")
    expected = decoder.gradients(run(decoder).loss)
    out = run(decoder, return_outputs=True)
    for result in (out.inputs, out.tokens, out.token_losses, out.outputs.detach()):
        result.zero_()
    assert relative_distance(decoder.gradients(out.loss), expected) == 0


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("of_loss", [False, True])
def test_second_derivatives_are_refused(called, of_loss):
    """Some, or parts, of them would be missing without a word."""
    decoder = make_decoder("gru_cell")
    out = run(decoder, decoder.step if called else None, return_outputs=True)
    loss = out.loss * decoder.head.bias.sum() if of_loss else out.outputs.square().sum()
    text = "decode_loss: the backward pass must run without create_graph, got create_graph=True. "
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(loss, decoder.leaves, create_graph=True, allow_unused=True)


@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_nothing_counted_is_zero_and_never_nan(feedback):
    """Without a row, too."""
    for shape, batch in (((4, BATCH), BATCH), ((0, BATCH), BATCH), ((2, 0), 0)):
        decoder = make_decoder("gru_cell", batch=batch)
        for reduction in ("mean", "sum", "none"):
            out = run(
                decoder, targets=torch.full(shape, -100), feedback=feedback, reduction=reduction,
                label_smoothing=0.1, z_loss=0.1, return_outputs=True,
            )  # fmt: skip
            assert (out.loss == 0).all()
            assert out.outputs.shape == (*shape, 5)
            assert not any(g.any() for g in decoder.gradients(out.loss.sum()))


def test_the_calls_of_two_segments_are_one():
    """A state carries its graph into the next call."""
    decoder, targets = make_decoder("lstm_cell"), targets_with_holes(10)
    call: dict[str, Any] = {"reduction": "sum"}
    whole = run(decoder, targets=targets, **call)
    first = run(decoder, targets=targets[:4], **call)
    second = run(decoder, None, first.state, targets=targets[4:], inputs=whole.inputs[4:], **call)
    actual = decoder.gradients(first.loss + second.loss)
    assert relative_distance(actual, decoder.gradients(whole.loss)) < EXACT


def test_inputs_are_fed_as_they_are():
    """And replay a run, whoever chose its tokens."""
    decoder = make_decoder("gru_cell", padding_idx=6)
    targets = targets_with_holes()
    given = torch.randint(13, targets.shape)
    out = run(decoder, targets=targets, inputs=given)
    assert torch.equal(out.inputs, given)
    losses, divisor, _ = decode(decoder, targets, given)
    torch.testing.assert_close(out.loss, losses.sum() / divisor, rtol=EXACT, atol=EXACT)
    spoken = run(decoder, targets=targets, feedback="sample", eos=2, temperature=3.0)
    assert spoken.lengths.min() < len(targets)
    again = run(decoder, targets=targets, inputs=spoken.inputs, lengths=spoken.lengths)
    torch.testing.assert_close(again.loss, spoken.loss, rtol=EXACT, atol=0)
    assert torch.equal(again.lengths, spoken.lengths)
