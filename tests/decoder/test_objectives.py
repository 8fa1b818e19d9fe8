"""What soft targets and an entropy bonus may be, and cost. Their losses and gradients are held
against autograd on the definitions by test_decode_loss.py."""

from typing import Any

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import (
    BATCH,
    EXACT,
    FEEDBACKS,
    STEPS,
    VOCABULARY,
    check,
    options,
    run,
    targets_with_holes,
    wrapped,
)
from support.objectives import SOFT, soft_targets
from torch import Tensor, nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _operators

# A float32 product of some dozens of terms, and differences of logarithms: relative to the largest
# gradient. Half precision rounds the operands of the head's products to 8 bits.
SINGLE, HALF = 2e-5, 2e-2


@pytest.mark.parametrize("feedback", ["mask, samples", "sample"])
def test_samples_are_those_of_the_cross_entropy(feedback):
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    call = FEEDBACKS[feedback](STEPS, BATCH, VOCABULARY) | {"memory_budget": 2 * 8 * VOCABULARY}
    for cell in (decoder.cell, wrapped(decoder)):
        found = []
        for others in ({}, options(["soft_tokens", "entropy_weight"])):
            torch.manual_seed(5)
            found.append(run(decoder, cell, targets=targets, **call, **others).tokens)
        assert torch.equal(*found)


def test_a_teacher_in_another_precision():
    decoder, call = make_decoder("gru_cell"), options(["soft_teacher"])
    call["targets"] = targets_with_holes()
    single = tuple(tensor.float() for tensor in call["soft_targets"])
    losses = [
        run(decoder, **call | {"soft_targets": soft}).loss
        for soft in (single, tuple(tensor.double() for tensor in single))
    ]
    torch.testing.assert_close(*losses, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", SOFT)
def test_a_teacher_with_any_strides_which_gets_no_gradient(kind):
    def strided(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        apart = tensor.mT if tensor.dim() > 1 else tensor.repeat_interleave(2)
        apart = apart.contiguous().mT if tensor.dim() > 1 else apart[::2]
        return apart.requires_grad_(apart.is_floating_point())

    decoder, call = make_decoder("gru_cell"), options([kind])
    call["soft_targets"] = tuple(map(strided, call["soft_targets"]))
    check(decoder, targets_with_holes(), call)
    run(decoder, targets=targets_with_holes(), **call).loss.backward()
    assert all(tensor is None or tensor.grad is None for tensor in call["soft_targets"])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", SOFT)
def test_single_and_half_precision(kind, autocast):
    steps, batch, words, size = 6, 9, 500, 32
    parts = nn.Embedding(words, size), nn.LSTM(size, size, 2), nn.Linear(size, words)
    soft = soft_targets(kind, steps, batch, words, torch.float32)
    targets = torch.randint(words, (steps, batch))
    call = {"soft_weight": 0.7, "soft_temperature": 2.0, "entropy_weight": 0.1}

    def gradients(modules: Any, given: Any) -> list[Tensor]:
        out = accumext.decode_loss(
            *modules, targets, feedback="teacher", soft_targets=given, **call
        )
        parameters = [p for module in modules for p in module.parameters()]
        return list(torch.autograd.grad(out.loss, parameters))

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = gradients(parts, soft)
    doubled = tuple(t.double() if t is not None and t.is_floating_point() else t for t in soft)
    expected = gradients([part.double() for part in parts], doubled)
    distance = relative_distance([g.double() for g in actual], expected)
    assert distance < (HALF if autocast else SINGLE)


def test_rows_that_do_not_count_cost_nothing_and_may_be_anything(monkeypatch):
    """Neither past a row's length nor where the target is ignored is a distribution looked at."""
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    lengths = torch.tensor([STEPS, 2, 0])
    call = options(["soft_tokens", "entropy_weight"]) | {"targets": targets, "lengths": lengths}
    counted = (targets != -100) & (torch.arange(STEPS)[:, None] < lengths)
    expected = run(decoder, **call)

    seen: list[int] = []
    operator = _operators.head_objective

    def counting(hidden: Tensor, *others: Any) -> None:
        seen.append(len(hidden))
        operator(hidden, *others)

    monkeypatch.setattr(_operators, "head_objective", counting)
    probabilities, indices = call["soft_targets"]
    probabilities[~counted] = torch.tensor([torch.nan, -1.0, 0.0], dtype=torch.float64)
    indices[~counted] = -100
    out = run(decoder, **call)
    assert sum(seen) == int(counted.sum())
    for name in ("loss", "entropies", "tokens"):
        assert torch.equal(getattr(out, name), getattr(expected, name))
    assert relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss)) == 0


def test_without_a_bonus_there_are_no_entropies():
    decoder, call = make_decoder("gru_cell"), options(["soft_words"])
    call["targets"] = targets_with_holes()
    assert not run(decoder, **call, entropy_weight=0.1).entropies.requires_grad
    assert run(decoder, **call, entropy_weight=0.0).entropies is None


@pytest.mark.parametrize("kind", SOFT)
def test_the_memory_is_that_of_the_cross_entropy(kind):
    """And of as many logits again of the teacher, whose probabilities of all words are given
    anyway."""
    steps, batch, words, size = 20, 16, 8000, 16
    parts = nn.Embedding(words, size), nn.GRUCell(size, size), nn.Linear(size, words)
    targets = torch.randint(words, (steps, batch))
    soft = soft_targets(kind, steps, batch, words, torch.float32)
    for feedback in ("teacher", "greedy"):

        def peak(feedback: str = feedback, **call: Any) -> int:
            def step() -> None:
                accumext.decode_loss(*parts, targets, feedback=feedback, **call).loss.backward()

            for part in parts:
                part.zero_grad()
            return peak_memory(step)

        logits = 32 * words * 4
        if accumext.backend() == "reference":  # each formula of which is a tensor of as many
            logits *= 10
        call = {"soft_targets": soft, "entropy_weight": 0.1}
        assert peak(**call) < peak() + 1.25 * logits  # and statistics of their rows
        if accumext.backend() != "reference":
            predicted = accumext.decode_memory(*parts, targets, feedback=feedback, **call)
            assert predicted == pytest.approx(peak(**call), rel=0.1)
