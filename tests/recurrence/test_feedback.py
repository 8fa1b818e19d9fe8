"""The tokens that decode_loss feeds, predicts and leaves out: feedback, lengths, ends, padding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder
from support.decoding import BATCH, EXACT, STEPS, TARGETS, VOCABULARY, run
from torch import nn

import accumext


def targets_with_hole() -> torch.Tensor:
    targets = torch.randint(VOCABULARY, (STEPS, BATCH))
    targets[STEPS // 2, 0] = -100
    return targets


def test_inputs_replay_a_run() -> None:
    decoder = make_decoder("gru_cell")
    targets = targets_with_hole()
    call = (decoder.embedding, decoder.cell, decoder.head, targets, decoder.state)
    mask = torch.rand(STEPS, BATCH) < 0.5
    mixed = accumext.decode_loss(*call, feedback=mask, start=7)
    assert (mixed.inputs[0] == 7).all()
    fed = targets[:-1].where(targets[:-1] != -100, 0)
    assert torch.equal(mixed.inputs[1:], fed.where(mask[1:], mixed.tokens[:-1]))
    replay = accumext.decode_loss(*call, feedback="teacher", inputs=mixed.inputs)
    assert torch.equal(replay.tokens, mixed.tokens)
    torch.testing.assert_close(replay.loss, mixed.loss, rtol=EXACT, atol=0)
    greedy = accumext.decode_loss(*call, feedback="greedy")
    assert torch.equal(greedy.inputs[1:], greedy.tokens[:-1])


def test_scheduled_draws_per_token_and_repeats_under_a_generator() -> None:
    decoder = make_decoder("gru_cell", batch=50)
    targets = torch.randint(VOCABULARY, (40, 50))
    call = (decoder.embedding, decoder.cell, decoder.head, targets, decoder.state.detach())

    def run(feedback: str, seed: int) -> accumext.DecodeOutput:
        generator = torch.Generator().manual_seed(seed)
        return accumext.decode_loss(
            *call,
            feedback=feedback,
            generator=generator,
            **({"teacher_forcing": 0.3} if feedback == "scheduled" else {}),
        )

    for feedback in ("scheduled", "sample"):
        one, same, other = run(feedback, 1), run(feedback, 1), run(feedback, 2)
        assert torch.equal(one.inputs, same.inputs)
        assert not torch.equal(one.inputs, other.inputs)
    out = run("scheduled", 1)
    told_apart = out.tokens[:-1] != targets[:-1]
    forced = (out.inputs[1:] == targets[:-1])[told_apart].double()
    # 1,800 coins of probability 0.3 have a standard deviation of 0.011
    assert abs(forced.mean() - 0.3) < 0.055
    assert forced.view(-1).unique().numel() == 2


def test_samples_follow_the_softmax_at_a_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    head = (torch.zeros(3, 1), logits)
    embedding, cell = torch.zeros(3, 1), nn.GRUCell(1, 1)
    targets = torch.zeros(1, 20000, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0, 3.0):
        out = accumext.decode_loss(
            embedding, cell, head, targets, feedback="sample", temperature=temperature,
            generator=generator,
        )  # fmt: skip
        share = out.tokens.flatten().bincount(minlength=3) / targets.numel()
        # 20,000 draws: 5 standard deviations are 0.018
        torch.testing.assert_close(share, (logits / temperature).softmax(0), rtol=0, atol=0.018)


def test_ties_go_to_the_lowest_index() -> None:
    weight = torch.zeros(7, 2)
    bias = torch.tensor([0.0, 1.0, 2.0, 2.0, -1.0, 2.0, 0.0])
    out = accumext.decode_loss(
        torch.zeros(7, 2), nn.GRUCell(2, 2), (weight, bias), torch.zeros(3, 2, dtype=torch.int64),
        feedback="greedy",
    )  # fmt: skip
    assert (out.tokens == 2).all()


def test_padding_is_fed_where_the_target_is_ignored() -> None:
    decoder = make_decoder("gru_cell", padding_idx=6)
    targets = targets_with_hole()
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="teacher"
    )
    assert out.inputs[STEPS // 2 + 1, 0] == 6
    out.loss.backward()
    assert (decoder.embedding.weight.grad[6] == 0).all()


def test_lengths_replay_a_sampled_run_that_ended() -> None:
    decoder = make_decoder("gru_cell", vocabulary=VOCABULARY)
    torch.manual_seed(1)
    out = run(decoder, feedback="sample", eos=2, temperature=3.0)
    assert out.lengths.min() < len(TARGETS)
    again = run(decoder, inputs=out.inputs, lengths=out.lengths)
    torch.testing.assert_close(again.loss, out.loss, rtol=EXACT, atol=0)
    assert torch.equal(again.lengths, out.lengths)


MASK = torch.ones(5, 3, dtype=torch.bool)
COIN = "teacher_forcing must be left at 1.0 unless feedback is 'scheduled', got 0"
HEAT = "temperature must be left at 1.0 unless samples are drawn, got 2.0"


@pytest.mark.parametrize("op", ["decode_loss", "decode_memory", "tbptt"])
@pytest.mark.parametrize(
    ("feedback", "option", "text"),
    [
        ("teacher", {"teacher_forcing": 0.5}, COIN),
        ("teacher", {"teacher_forcing": 0.0}, COIN),
        ("greedy", {"teacher_forcing": 0.5}, COIN),
        ("sample", {"teacher_forcing": 0.5}, COIN),
        (MASK, {"teacher_forcing": 0.5}, COIN),
        ("teacher", {"temperature": 2.0}, HEAT),
        ("greedy", {"temperature": 2.0}, HEAT),
        ("scheduled", {"temperature": 2.0}, HEAT),
        (MASK, {"temperature": 2.0}, HEAT),
        ("greedy", {"teacher_forcing": 0.0}, None),  # as ever
        ("sample", {"teacher_forcing": 1, "temperature": 2.0}, None),
        ("scheduled", {}, None),  # of share 1, by default and at the begin of a schedule
        ("greedy", {"generator": torch.Generator()}, None),
    ],
)
def test_options_without_effect(
    op: str, feedback: Any, option: dict[str, Any], text: str | None
) -> None:
    decoder = make_decoder("gru_cell")
    targets, state = torch.zeros(5, 3, dtype=torch.int64), decoder.state

    def step(token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = decoder.cell(decoder.embedding(token), state)
        return decoder.head(state), state

    def call() -> object:
        if op == "tbptt":
            criterion = F.cross_entropy
            return accumext.tbptt(
                step, targets, state, criterion=criterion, feedback=feedback, **option
            )
        modules = (decoder.embedding, decoder.cell, decoder.head)
        return getattr(accumext, op)(*modules, targets, state, feedback=feedback, **option)

    if text is None:
        call()
        return
    name = "decode_loss" if op.startswith("decode") else "tbptt"
    with pytest.raises(ValueError, match=f"^{name}: {re.escape(text)}"):
        call()


def test_options_without_effect_on_numbers() -> None:
    numbers = torch.randn(5, 3, requires_grad=True)
    call = {"criterion": F.mse_loss, "feedback": "teacher", "start": torch.zeros(3)}
    for option, text in ({"teacher_forcing": 0.5}, COIN), ({"temperature": 2.0}, HEAT):
        with pytest.raises(ValueError, match=f"^tbptt: {re.escape(text)}"):
            accumext.tbptt(lambda x, s: (x + s, s), numbers, numbers[0], **call, **option)
