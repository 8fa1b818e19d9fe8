"""`decode_loss` with soft targets and an entropy bonus, against autograd on their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.decode_oracle import CELLS, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, STEPS, VOCABULARY, raises, targets_with_holes
from support.objectives import SOFT, entropy, objective, soft_targets
from torch import Tensor, nn

import accumext
from accumext.decoder import _operators
from accumext.demo.memory import peak_memory

# A float32 product of some dozens of terms, and differences of logarithms: relative to the largest
# gradient. Half precision rounds the operands of the head's products to 8 bits.
SINGLE, HALF = 2e-5, 2e-2
WEIGHTS = torch.arange(1.0, 1 + STEPS * BATCH).view(STEPS, BATCH)
MASK = torch.arange(STEPS * BATCH).view(STEPS, BATCH) % 5 < 3
ROW = 2 * 8 * VOCABULARY  # memory of logits and exponentials of a row at a time


def options(kind: str | None, weight: float = 1.0, temperature: float = 1.0) -> dict[str, Any]:
    call: dict[str, Any] = {"entropy_weight": 0.2}
    if kind is not None:
        call["soft_targets"] = soft_targets(kind, STEPS, BATCH, VOCABULARY)
        call |= {"soft_weight": weight, "soft_temperature": temperature}
    return call


def check(decoder: Any, cell: Any, targets: Tensor | None, call: dict[str, Any]) -> None:
    """Loss, entropies, tokens and gradients equal those of the plain loop on the same tokens."""
    out = accumext.decode_loss(
        decoder.embedding, cell, decoder.head, targets, decoder.state, **call
    )
    wanted = out.tokens if targets is None else targets
    criterion = {k: call[k] for k in ("label_smoothing", "z_loss", "class_weight") if k in call}
    losses, divisor, logits = decode(
        decoder, wanted, out.inputs, objective=objective(call), **criterion
    )
    expected = (losses * call.get("token_weight", 1)).sum() / divisor
    entropies = torch.where(wanted == -100, 0, entropy(logits)).detach()
    if "sample" not in (call["feedback"], call.get("draw")):
        assert torch.equal(out.tokens, logits.argmax(-1))
    for actual, exact in (
        (out.loss, expected), (out.token_losses, losses.detach()), (out.entropies, entropies)
    ):  # fmt: skip
        torch.testing.assert_close(actual, exact, rtol=EXACT, atol=EXACT)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected))
    assert distance < EXACT


@pytest.mark.parametrize("called", [False, True], ids=["module", "callable"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy", "sample"])
@pytest.mark.parametrize("kind", [None, *SOFT])
def test_losses_and_gradients_are_exact(kind: str | None, feedback: str, called: bool) -> None:
    for name in ("gru_cell", "lstm"):
        decoder = make_decoder(name)
        cell = decoder.step if called else decoder.cell
        batch_dim = int(CELLS[name][1] is not None)
        for weight, temperature in ((1.0, 1.0), (0.3, 2.0)):
            call = options(kind, weight, temperature)
            call |= {"feedback": feedback, "batch_dim": batch_dim}
            check(decoder, cell, targets_with_holes(), call)


@pytest.mark.parametrize("kind", [None, *SOFT])
def test_beside_the_options_of_the_cross_entropy(kind: str | None) -> None:
    decoder, call = make_decoder("gru_cell"), options(kind, 0.6, 2.0)
    call |= {"feedback": "teacher", "label_smoothing": 0.2, "z_loss": 0.1}
    for weights in (None, torch.rand(VOCABULARY, dtype=torch.float64)):
        check(decoder, decoder.cell, targets_with_holes(), call | {"class_weight": weights})


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_weight": -0.3},
        {"entropy_weight": -0.3, "soft_targets": None, "soft_weight": 1.0, "soft_temperature": 1.0},
        {"token_weight": WEIGHTS},
        {"token_weight": WEIGHTS, "memory_budget": 12 * 8 * VOCABULARY},  # in pieces
        {"feedback": MASK, "draw": "sample"},
        {"feedback": "sample", "memory_budget": ROW},
        {"feedback": "greedy", "memory_budget": ROW},
    ],
    ids=str,
)
def test_beside_other_options(changes: dict[str, Any]) -> None:
    decoder = make_decoder("gru_cell")
    call = options("soft_tokens", 0.6, 2.0) | {"feedback": "teacher"} | changes
    for cell in (decoder.cell, decoder.step):
        check(decoder, cell, targets_with_holes(), call)


@pytest.mark.parametrize(
    "call",
    [{"feedback": MASK, "draw": "sample"}, {"feedback": "sample", "memory_budget": ROW}],
    ids=str,
)
def test_samples_are_those_of_the_cross_entropy(call: dict[str, Any]) -> None:
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    for cell in (decoder.cell, decoder.step):
        found = []
        for others in ({}, options("soft_tokens")):
            torch.manual_seed(5)
            out = accumext.decode_loss(
                decoder.embedding, cell, decoder.head, targets, decoder.state, **call, **others
            )
            found.append(out.tokens)
        assert torch.equal(*found)


def test_a_teacher_in_another_precision() -> None:
    decoder, call = make_decoder("gru_cell"), options("soft_teacher") | {"feedback": "teacher"}
    single = tuple(tensor.float() for tensor in call["soft_targets"])
    parts, targets = (decoder.embedding, decoder.cell, decoder.head), targets_with_holes()
    losses = [
        accumext.decode_loss(*parts, targets, decoder.state, **call | {"soft_targets": soft}).loss
        for soft in (single, tuple(tensor.double() for tensor in single))
    ]
    torch.testing.assert_close(*losses, rtol=EXACT, atol=EXACT)


def test_policy_gradient_with_entropy() -> None:
    """REINFORCE of the decoder's own samples: advantages as token weights, and the bonus."""
    decoder = make_decoder("gru_cell")
    call = options(None) | {"feedback": "sample", "steps": STEPS}
    check(decoder, decoder.cell, None, call)


@pytest.mark.parametrize("kind", SOFT)
def test_per_token_losses_and_a_second_backward(kind: str) -> None:
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    call = options(kind, 0.5, 3.0) | {"feedback": "teacher", "reduction": "none"}
    parts = decoder.embedding, decoder.cell, decoder.head
    out = accumext.decode_loss(*parts, targets, decoder.state, **call)
    losses, _, _ = decode(decoder, targets, out.inputs, objective=objective(call))
    factors = torch.randn_like(losses)
    actual = decoder.gradients((out.loss * factors).sum())
    assert relative_distance(actual, decoder.gradients((losses * factors).sum())) < EXACT
    again = accumext.decode_loss(*parts, targets, decoder.state, **call | {"reduction": "mean"})
    again.loss.backward(retain_graph=True)
    once = [p.grad.clone() for part in parts for p in part.parameters()]
    again.loss.backward()
    for p, grad in zip((p for part in parts for p in part.parameters()), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", SOFT)
def test_a_teacher_with_any_strides(kind: str) -> None:
    def strided(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        apart = tensor.mT if tensor.dim() > 1 else tensor.repeat_interleave(2)
        return apart.contiguous().mT if tensor.dim() > 1 else apart[::2]

    decoder, call = make_decoder("gru_cell"), options(kind, 0.5) | {"feedback": "teacher"}
    check(decoder, decoder.cell, targets_with_holes(), call)
    call["soft_targets"] = tuple(map(strided, call["soft_targets"]))
    check(decoder, decoder.cell, targets_with_holes(), call)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", SOFT)
def test_single_and_half_precision(kind: str, autocast: bool) -> None:
    steps, batch, words, size = 6, 9, 500, 32
    torch.manual_seed(0)
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
    doubled = [None if t is None or not t.is_floating_point() else t.double() for t in soft]
    if kind == "soft_tokens":
        doubled[1] = soft[1]
    expected = gradients([part.double() for part in parts], tuple(doubled))
    distance = relative_distance([g.double() for g in actual], expected)
    assert distance < (HALF if autocast else SINGLE)


def test_rows_that_do_not_count_cost_nothing_and_may_be_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither past a row's length nor where the target is ignored is a distribution looked at."""
    decoder, targets = make_decoder("gru_cell"), targets_with_holes()
    lengths = torch.tensor([STEPS, 2, 0])
    call = options("soft_tokens") | {"feedback": "teacher", "lengths": lengths}
    counted = (targets != -100) & (torch.arange(STEPS)[:, None] < lengths)
    parts = decoder.embedding, decoder.cell, decoder.head
    expected = accumext.decode_loss(*parts, targets, decoder.state, **call)

    seen: list[int] = []
    operator = _operators.head_objective

    def counting(hidden: Tensor, *others: Any) -> None:
        seen.append(len(hidden))
        operator(hidden, *others)

    monkeypatch.setattr(_operators, "head_objective", counting)
    probabilities, indices = call["soft_targets"]
    probabilities[~counted] = torch.tensor([torch.nan, -1.0, 0.0], dtype=torch.float64)
    indices[~counted] = -100
    out = accumext.decode_loss(*parts, targets, decoder.state, **call)
    assert sum(seen) == int(counted.sum())
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(out.entropies, expected.entropies)
    assert torch.equal(out.tokens, expected.tokens)
    assert relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss)) == 0


def test_no_gradient_reaches_a_teacher() -> None:
    decoder, call = make_decoder("gru_cell"), options("soft_teacher") | {"feedback": "teacher"}
    for tensor in call["soft_targets"]:
        tensor.requires_grad_()
    parts = decoder.embedding, decoder.cell, decoder.head
    accumext.decode_loss(*parts, targets_with_holes(), decoder.state, **call).loss.backward()
    assert all(tensor.grad is None for tensor in call["soft_targets"])


def test_without_a_bonus_there_are_no_entropies() -> None:
    decoder, call = make_decoder("gru_cell"), options("soft_words") | {"feedback": "teacher"}
    parts = decoder.embedding, decoder.cell, decoder.head
    out = accumext.decode_loss(*parts, targets_with_holes(), decoder.state, **call)
    assert out.entropies.shape == (STEPS, BATCH)
    assert not out.entropies.requires_grad
    call["entropy_weight"] = 0.0
    assert (
        accumext.decode_loss(*parts, targets_with_holes(), decoder.state, **call).entropies is None
    )


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_the_memory_is_that_of_the_cross_entropy(kind: str, feedback: str) -> None:
    """And of as many logits again of the teacher, whose probabilities of all words are given
    anyway."""
    steps, batch, words, size = 32, 16, 20000, 32
    parts = nn.Embedding(words, size), nn.GRUCell(size, size), nn.Linear(size, words)
    targets = torch.randint(words, (steps, batch))
    soft = soft_targets(kind, steps, batch, words, torch.float32)

    def peak(**call: Any) -> int:
        def run() -> None:
            accumext.decode_loss(*parts, targets, feedback=feedback, **call).loss.backward()

        for part in parts:
            part.zero_grad()
        return peak_memory(run)

    logits = 32 * words * 4
    if accumext.backend() == "reference":  # each formula of which is a tensor of as many
        logits *= 10
    call = {"soft_targets": soft, "entropy_weight": 0.1}
    assert peak(**call) < peak() + 1.25 * logits  # and statistics of their rows
    if accumext.backend() != "reference":
        predicted = accumext.decode_memory(*parts, targets, feedback=feedback, **call)
        assert predicted == pytest.approx(peak(**call), rel=0.1)


P, AT = torch.ones(STEPS, BATCH, 2) / 2, torch.zeros(STEPS, BATCH, 2, dtype=torch.int64)
W, X = torch.ones(VOCABULARY, 4), torch.ones(STEPS, BATCH, 4)
PAIR = " must be a pair (probabilities [T, B, K], indices [T, B, K] or None) or the head"


@pytest.mark.parametrize(
    ("kind", "text", "soft"),
    [
        (TypeError, PAIR, P),
        (TypeError, PAIR, (P,)),
        (TypeError, "[0] must be a float tensor [T, B, K], got", (AT, AT)),
        (TypeError, "[1] must be an integer tensor", (P, P)),
        (ValueError, "[0] must have shape [7, 3, K], got [6, 3, 2]", (P[1:], AT)),
        (ValueError, "[1] must have shape [7, 3, 2], got", (P, AT[..., :1])),
        (ValueError, "[0] must have all 13 words where no indices", (P, None)),
        (ValueError, "[0] must be at least 0, got -0.5", (-P, AT)),
        (ValueError, "[1] must be in [0, 13), got 13", (P, AT + 13)),
        (ValueError, "[0] must have shape", (P[:, 1:], AT)),
        (TypeError, "[0] must be a floating-point tensor [V, H']", (None, None, X)),
        (ValueError, "[0] must have shape [13, H'], got [12, 4]", (W[1:], None, X)),
        (ValueError, "[1] must have shape [13], got [4]", (W, W[0], X)),
        (ValueError, "[2] must have the teacher's size, 4, got", (W, None, X[..., 1:])),
    ],
)
def test_errors_name_the_soft_target(kind: type[Exception], text: str, soft: Any) -> None:
    decoder = make_decoder("gru_cell")
    parts = decoder.embedding, decoder.cell, decoder.head
    call = {"feedback": "teacher", "soft_targets": soft}
    with raises(kind, f"soft_targets{text}"):
        accumext.decode_loss(*parts, targets_with_holes(), decoder.state, **call)


@pytest.mark.parametrize(
    ("kind", "text", "soft", "call"),
    [
        (ValueError, "soft_weight must be at most 1, got 1.5", (P, AT), {"soft_weight": 1.5}),
        (ValueError, "soft_weight must be at least 0, got -1", (P, AT), {"soft_weight": -1.0}),
        (ValueError, "soft_temperature must be greater", (P, AT), {"soft_temperature": 0}),
        (ValueError, "soft_temperature must be", (P, AT), {"soft_temperature": float("inf")}),
        (ValueError, "soft_weight must be", None, {"soft_weight": 0.5}),
        (ValueError, "soft_temperature must be", None, {"soft_temperature": 2.0}),
        (TypeError, "entropy_weight must be", None, {"entropy_weight": "0.1"}),
    ],
)
def test_errors_name_the_option(
    kind: type[Exception], text: str, soft: Any, call: dict[str, Any]
) -> None:
    decoder = make_decoder("gru_cell")
    parts, call = (decoder.embedding, decoder.cell, decoder.head), {"feedback": "teacher", **call}
    with raises(kind, text):
        accumext.decode_loss(*parts, targets_with_holes(), decoder.state, soft_targets=soft, **call)
