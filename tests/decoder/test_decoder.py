"""decode_loss against a plain autograd loop over the tokens it emitted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import CELLS, Decoder, decode, make_decoder, relative_distance
from torch import nn

import accumext

STEPS, BATCH, VOCABULARY = 7, 3, 13
EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms


def targets_with_holes(steps: int = STEPS, hole: int = -100) -> torch.Tensor:
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    targets[steps // 2, 0] = hole
    return targets


def check_exact(
    decoder: Decoder, targets: torch.Tensor, call: dict[str, Any]
) -> accumext.DecodeOutput:
    """Loss, token losses and every gradient equal the plain loop's on the same tokens."""
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, **call
    )
    lengths = call.get("lengths")
    live = None if lengths is None else torch.arange(len(targets))[:, None] < lengths
    criterion = {
        k: call[k]
        for k in ("ignore_index", "label_smoothing", "z_loss", "class_weight")
        if k in call
    }
    losses, divisor, logits = decode(decoder, targets, out.inputs, live, **criterion)
    expected = losses.sum() / divisor if divisor else losses.sum()
    torch.testing.assert_close(out.loss, expected.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out.token_losses, losses.detach(), rtol=1e-11, atol=EXACT)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected))
    assert distance < EXACT
    if call.get("feedback") != "sample":
        greedy = logits.argmax(-1)
        assert torch.equal(out.tokens, greedy if live is None else greedy.where(live, out.tokens))
    return out


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy", "scheduled", "sample"])
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_equal_plain_autograd(kind: str, feedback: str, tied: bool) -> None:
    check_exact(
        make_decoder(kind, tied=tied),
        targets_with_holes(),
        {"feedback": feedback, "teacher_forcing": 0.5, "start": 1},
    )


OPTIONS: list[dict[str, Any]] = [
    {"lengths": torch.tensor([7, 0, 4])},
    {"ignore_index": 2},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"class_weight": torch.linspace(0.0, 2.0, VOCABULARY, dtype=torch.float64)},
    {
        "label_smoothing": 0.3,
        "z_loss": 0.1,
        "class_weight": torch.linspace(0.1, 1.0, VOCABULARY, dtype=torch.float64),
        "lengths": torch.tensor([1, 6, 7]),
    },
    {"memory_budget": VOCABULARY * 8},
    {"memory_budget": VOCABULARY * 8 * 5},
    {"start": torch.tensor([3, 0, 12])},
]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "+".join(o))
def test_options_equal_plain_autograd(option: dict[str, Any], feedback: str, bias: bool) -> None:
    decoder = make_decoder("lstm", bias=bias)
    targets = targets_with_holes(hole=option.get("ignore_index", -100))
    check_exact(decoder, targets, {"feedback": feedback, **option})


@settings(max_examples=examples(40), deadline=None)
@given(
    kind=st.sampled_from(sorted(CELLS)),
    steps=st.integers(1, 35),
    feedback=st.sampled_from(["teacher", "greedy", "scheduled", "sample"]),
    tied=st.booleans(),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.2]),
    z_loss=st.sampled_from([0.0, 0.05]),
    weighted=st.booleans(),
    short=st.booleans(),
    padded=st.booleans(),
    rows=st.integers(1, 12),
    seed=st.integers(0, 2**20),
)
def test_any_combination_equals_plain_autograd(
    kind: str, steps: int, feedback: str, tied: bool, bias: bool, smoothing: float, z_loss: float,
    weighted: bool, short: bool, padded: bool, rows: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    call: dict[str, Any] = {
        "feedback": feedback,
        "teacher_forcing": 0.4,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "memory_budget": rows * VOCABULARY * 8,
    }
    if weighted:
        call["class_weight"] = torch.rand(VOCABULARY, dtype=torch.float64)
    if short:
        call["lengths"] = torch.randint(0, steps + 1, (BATCH,))
    decoder = make_decoder(kind, tied=tied, bias=bias, padding_idx=4 if padded else None)
    check_exact(decoder, targets_with_holes(steps), call)


def test_gradcheck() -> None:
    decoder = make_decoder("gru_cell", vocabulary=6, size=3, batch=2)
    targets = torch.randint(6, (4, 2))
    inputs = torch.randint(6, (4, 2))

    def loss(
        state: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        call = {"feedback": "teacher", "inputs": inputs, "label_smoothing": 0.1, "z_loss": 0.1}
        return accumext.decode_loss(
            table, decoder.cell, (weight, bias), targets, state, **call
        ).loss

    leaves = (decoder.state, decoder.embedding.weight, decoder.head.weight, decoder.head.bias)
    assert torch.autograd.gradcheck(loss, tuple(t.detach().requires_grad_() for t in leaves))


@pytest.mark.parametrize("batch_first", [False, True])
def test_upstream_gradient_is_honoured_per_token(batch_first: bool) -> None:
    decoder = make_decoder("gru_cell")
    targets = targets_with_holes()
    upstream = torch.randn(STEPS, BATCH, dtype=torch.float64)

    def flip(t: torch.Tensor) -> torch.Tensor:
        return t.t() if batch_first else t

    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, flip(targets), decoder.state,
        feedback="greedy", reduction="none", batch_first=batch_first,
    )  # fmt: skip
    losses, _, _ = decode(decoder, targets, flip(out.inputs))
    torch.testing.assert_close(flip(out.loss), losses, rtol=EXACT, atol=EXACT)
    actual = decoder.gradients((out.loss * flip(upstream)).sum())
    expected = decoder.gradients((losses * upstream).sum())
    assert relative_distance(actual, expected) < EXACT


def test_loss_scale_is_honoured_and_a_retained_graph_runs_again() -> None:
    decoder = make_decoder("lstm_cell", tied=True)
    targets = targets_with_holes()
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="greedy"
    )
    first = torch.autograd.grad(out.loss * 65536.0, decoder.leaves, retain_graph=True)
    again = torch.autograd.grad(out.loss * 3.0, decoder.leaves)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a / 65536, b / 3, rtol=1e-11, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.loss, decoder.leaves)


def test_reductions_and_divisors() -> None:
    decoder = make_decoder("rnn_cell")
    targets = targets_with_holes()
    call = (decoder.embedding, decoder.cell, decoder.head, targets, decoder.state)
    mean = accumext.decode_loss(*call, feedback="greedy")
    total = accumext.decode_loss(*call, feedback="greedy", reduction="sum")
    by_items = accumext.decode_loss(*call, feedback="greedy", num_items=40)
    by_tensor = accumext.decode_loss(*call, feedback="greedy", num_items=torch.tensor(40))
    count = (targets != -100).sum()
    torch.testing.assert_close(mean.loss * count, total.loss)
    torch.testing.assert_close(by_items.loss * 40, total.loss)
    torch.testing.assert_close(by_tensor.loss, by_items.loss, rtol=0, atol=0)
    torch.testing.assert_close(total.token_losses.sum(), total.loss.detach())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_replays_in_the_backward_pass(dropout: float) -> None:
    decoder = make_decoder("gru", dropout=dropout)
    targets = targets_with_holes(40)
    inputs = torch.randint(VOCABULARY, targets.shape)
    torch.manual_seed(5)
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback="teacher", inputs=inputs,
    )  # fmt: skip
    torch.manual_seed(5)
    losses, divisor, _ = decode(decoder, targets, inputs)
    expected = losses.sum() / divisor
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=EXACT)
    torch.manual_seed(99)  # the backward pass must bring its own
    actual = decoder.gradients(out.loss)
    assert relative_distance(actual, decoder.gradients(expected)) < EXACT


def test_attention_memory_and_any_nesting_of_state() -> None:
    batch, source, size = BATCH, 4, 5
    decoder = make_decoder("gru_cell")
    inner = nn.GRUCell(2 * size, size, dtype=torch.float64)
    memory = torch.randn(batch, source, size, dtype=torch.float64, requires_grad=True)
    state = {"h": (decoder.state, [torch.zeros(batch, dtype=torch.float64), 3])}

    def cell(x: torch.Tensor, state: Any, memory: torch.Tensor) -> tuple[torch.Tensor, Any]:
        hidden, (steps, flag) = state["h"]
        attention = torch.einsum("bsh,bh->bs", memory, hidden).softmax(-1)
        seen = torch.einsum("bs,bsh->bh", attention, memory)
        hidden = inner(torch.cat([x, seen], -1), hidden)
        return torch.tanh(hidden + seen), {"h": (hidden, [steps + 1, flag])}

    leaves = [*inner.parameters(), *decoder.embedding.parameters(), *decoder.head.parameters()]
    leaves += [memory, decoder.state]
    targets = targets_with_holes(21)
    lengths = torch.tensor([21, 5, 9])
    out = accumext.decode_loss(
        decoder.embedding, cell, decoder.head, targets, state,
        feedback="greedy", context=(memory,), lengths=lengths,
    )  # fmt: skip
    assert torch.equal(out.state["h"][1][0], lengths.double())
    assert out.state["h"][1][1] == 3

    total = 0.0
    current: Any = state
    for t in range(21):
        output, new = cell(decoder.embedding(out.inputs[t]), current, memory)
        kept = (t < lengths)[:, None]
        hidden = torch.where(kept, new["h"][0], current["h"][0])
        current = {"h": (hidden, new["h"][1])}
        wanted = targets[t].where(t < lengths, -100)
        total = total + F.cross_entropy(decoder.head(output), wanted, reduction="sum")
    counted = ((targets != -100) & (torch.arange(21)[:, None] < lengths)).sum()
    expected = torch.autograd.grad(total / counted, leaves)
    assert relative_distance(list(torch.autograd.grad(out.loss, leaves)), list(expected)) < EXACT


def test_state_carries_a_graph_into_the_next_call() -> None:
    decoder = make_decoder("lstm_cell")
    targets = targets_with_holes(10)
    call = (decoder.embedding, decoder.cell, decoder.head)
    whole = accumext.decode_loss(*call, targets, decoder.state, feedback="teacher", reduction="sum")
    first = accumext.decode_loss(
        *call, targets[:4], decoder.state, feedback="teacher", reduction="sum"
    )
    second = accumext.decode_loss(
        *call,
        targets[4:],
        first.state,
        feedback="teacher",
        inputs=whole.inputs[4:],
        reduction="sum",
    )
    actual = decoder.gradients(first.loss + second.loss)
    assert relative_distance(actual, decoder.gradients(whole.loss)) < EXACT


def test_frozen_parts_get_no_gradient() -> None:
    for frozen, kind in itertools.product(("embedding", "cell", "head"), ("gru_cell", "lstm")):
        decoder = make_decoder(kind)
        getattr(decoder, frozen).requires_grad_(False)
        decoder.leaves = [leaf for leaf in decoder.leaves if leaf.requires_grad]
        check_exact(decoder, targets_with_holes(), {"feedback": "greedy"})


def test_no_graph_without_grad_mode() -> None:
    decoder = make_decoder("gru_cell")
    with torch.no_grad():
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets_with_holes(), feedback="greedy"
        )
    assert not out.loss.requires_grad
    assert out.state.shape == (BATCH, 5)


def test_sparse_embedding_gradients() -> None:
    decoder = make_decoder("gru_cell")
    targets = targets_with_holes()
    call = (decoder.cell, decoder.head, targets, decoder.state.detach())
    dense = accumext.decode_loss(decoder.embedding, *call, feedback="greedy")
    dense.loss.backward()
    sparse = nn.Embedding(
        VOCABULARY, 5, sparse=True, _weight=decoder.embedding.weight.detach().clone()
    )
    accumext.decode_loss(sparse, *call, feedback="greedy").loss.backward()
    assert sparse.weight.grad.is_sparse
    torch.testing.assert_close(sparse.weight.grad.to_dense(), decoder.embedding.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_low_precision_is_no_worse_than_plain(dtype: torch.dtype, feedback: str) -> None:
    """error(accumext) <= error(plain PyTorch in that dtype) + tolerance, against float64."""
    decoder = make_decoder("gru_cell", vocabulary=50, size=16, dtype=dtype)
    targets = torch.randint(50, (12, BATCH))
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback=feedback
    )
    actual = decoder.gradients(
        out.loss * 1024
    )  # loss scaled: fp16 must neither under- nor overflow
    assert out.loss.dtype == out.token_losses.dtype == torch.float32
    assert [g.dtype for g in actual] == [dtype] * len(actual)
    losses, divisor, _ = decode(decoder, targets, out.inputs)
    plain = decoder.gradients(losses.sum() / divisor * 1024)
    truth = make_decoder("gru_cell", vocabulary=50, size=16)
    with torch.no_grad():
        for exact, leaf in zip(truth.leaves, decoder.leaves, strict=True):
            exact.copy_(leaf)
    losses, divisor, _ = decode(truth, targets, out.inputs)
    expected = truth.gradients(losses.sum() / divisor * 1024)
    # half a unit in the last place of the results, for they too are rounded to the dtype
    rounding = torch.finfo(dtype).eps
    assert relative_distance(actual, expected) <= relative_distance(plain, expected) + rounding


def test_autocast_rounds_the_products_only() -> None:
    decoder = make_decoder("gru_cell", vocabulary=50, size=16, dtype=torch.float32)
    targets = torch.randint(50, (12, BATCH))
    with torch.autocast("cpu", torch.bfloat16):
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="greedy"
        )
        losses, divisor, _ = decode(decoder, targets, out.inputs)
    grads = decoder.gradients(out.loss)
    assert {g.dtype for g in grads} == {torch.float32}
    assert out.loss.dtype == torch.float32
    exact, counted, _ = decode(decoder, targets, out.inputs)
    truth = decoder.gradients(exact.sum() / counted)
    plain = relative_distance(decoder.gradients(losses.sum() / divisor), truth)
    assert 0 < relative_distance(grads, truth) <= plain + torch.finfo(torch.bfloat16).eps
