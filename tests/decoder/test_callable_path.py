"""Callable cells, which autograd differentiates, in segments and windows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, VOCABULARY, raises, run, targets_with_holes
from torch import nn

import accumext


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


@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 3, 0])], ids=["whole", "lengths"])
def test_a_cell_may_replace_the_tensors_in_its_state(lengths: torch.Tensor | None) -> None:
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, state: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        state["h"] = decoder.cell(x, state["h"])
        state["steps"] = state["steps"] + 1
        return state["h"], state

    mine = {"h": decoder.state, "steps": torch.zeros(())}
    out = run(decoder, cell, mine, lengths=lengths)
    expected = run(decoder, lengths=lengths)
    torch.testing.assert_close(out.state["h"], expected.state, rtol=EXACT, atol=EXACT)
    assert out.state["steps"] == len(TARGETS)
    assert mine["h"] is decoder.state
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss))
    assert distance < EXACT


WRITES = "cell must write into no tensor of its state or context, got a write into one of shape"


@pytest.mark.parametrize(
    "options", [{}, {"k1": 2, "k2": 2}, {"k1": 2, "k2": 5}, {"memory_budget": 4000}], ids=str
)
@pytest.mark.parametrize("what", ["state", "context"])
def test_a_cell_that_writes_into_its_tensors_is_an_error(
    what: str, options: dict[str, Any]
) -> None:
    """Its steps run again from the same tensors."""
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, state: Any, seen: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h, count = state
        h = decoder.cell(x, h)
        (count if what == "state" else seen).add_(1)
        return h * (1 + count + seen)[:, None], (h, count)

    count, seen = (torch.zeros(BATCH, dtype=torch.float64) for _ in range(2))
    with raises(RuntimeError, WRITES + " [3]. Make new ones: count + 1 in place of count += 1"):
        run(decoder, cell, (decoder.state, count), context=(seen,), **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cell_that_writes_into_its_state_without_a_graph(mode: Any) -> None:
    """It may, where nothing reads the state again; in inference mode always."""
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, state: Any, written: bool = True) -> tuple[torch.Tensor, Any]:
        h, count = state
        h = decoder.cell(x, h)
        count = count.add_(1) if written else count + 1
        return h, (h, count)

    def state() -> Any:
        return decoder.state, torch.zeros(BATCH, dtype=torch.float64)

    with mode():
        assert run(decoder, cell, state()).state[1].tolist() == [len(TARGETS)] * BATCH
        for lengths in ([6, 3, 0], [2, 2, 5]):
            if mode is torch.no_grad:
                with raises(RuntimeError, WRITES):
                    run(decoder, cell, state(), lengths=lengths)
                continue
            assert run(decoder, cell, state(), lengths=lengths).state[1].tolist() == lengths


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
@pytest.mark.parametrize("what", ["state", "buffer"])
def test_a_cell_may_return_the_same_memory_at_every_step_without_a_graph(
    what: str, feedback: str, mode: Any
) -> None:
    decoder = make_decoder("gru_cell")
    buffer = torch.empty(BATCH, 5, dtype=torch.float64)

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = h if what == "state" else buffer
        out.copy_(decoder.cell(x, h))
        return out, out, out

    with mode():
        expected = run(decoder, decoder.step, feedback=feedback, return_outputs=True)
        out = run(decoder, cell, decoder.state.clone(), feedback=feedback, return_outputs=True)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.outputs, expected.outputs)
    torch.testing.assert_close(out.extras, expected.outputs)


@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_rows_that_ended_keep_a_state_from_a_buffer_in_inference_mode(feedback: str) -> None:
    """Also after the first step of a cell that makes its own initial state."""
    decoder = make_decoder("gru_cell")
    buffer = torch.empty(BATCH, 5, dtype=torch.float64)

    def cell(x: torch.Tensor, h: torch.Tensor | None, written: bool) -> tuple[torch.Tensor, ...]:
        new = decoder.cell(x, h)
        return (buffer.copy_(new),) * 2 if written else (new, new)

    def decode(written: bool) -> accumext.DecodeOutput:
        return accumext.decode_loss(
            decoder.embedding, partial(cell, written=written), decoder.head, TARGETS,
            feedback=feedback, lengths=[6, 3, 1],
        )  # fmt: skip

    with torch.inference_mode():
        expected, out = decode(False), decode(True)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.state, expected.state)


@pytest.mark.parametrize("options", [{}, {"k1": 2, "k2": 5}, {"memory_budget": 4000}], ids=str)
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
@pytest.mark.parametrize("what", ["output", "extras"])
def test_an_output_that_the_cell_writes_again_is_an_error(
    what: str, feedback: str, options: dict[str, Any]
) -> None:
    decoder = make_decoder("gru_cell")
    buffer = torch.zeros(BATCH, 5, dtype=torch.float64)

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = decoder.cell(x, h)
        buffer.copy_(h.detach())
        return (buffer if what == "output" else h), h, buffer

    text = "cell must write into no output or extras of an earlier step, got a write into one of"
    with raises(RuntimeError, text):
        run(decoder, cell, feedback=feedback, **options)


@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_states_in_two_buffers_in_turn(feedback: str) -> None:
    """Windows begin with states that are overwritten two steps later."""
    decoder = make_decoder("gru_cell")
    buffers, calls = [torch.zeros(BATCH, 5, dtype=torch.float64) for _ in range(2)], []

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(x, h)
        if torch.is_grad_enabled():
            return h, h
        calls.append(1)
        return h, buffers[len(calls) % 2].copy_(h)

    out = run(decoder, cell, feedback=feedback, k1=2, k2=4)
    expected = run(decoder, feedback=feedback, k1=2, k2=4)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss))
    assert distance < EXACT


@pytest.mark.parametrize("options", [{}, {"k1": 2, "k2": 5}, {"memory_budget": 4000}], ids=str)
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_a_cell_may_write_into_what_it_reads(feedback: str, options: dict[str, Any]) -> None:
    """Such as by dropout in place: each step has an embedded input of its own."""
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return decoder.step(x.mul_(2), h)

    def plain(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return decoder.step(x * 2, h)

    found = [run(decoder, each, feedback=feedback, **options).loss for each in (cell, plain)]
    distance = relative_distance(*(decoder.gradients(loss) for loss in found))
    assert distance < EXACT


@pytest.mark.parametrize("periods", [(2, 2), (2, 5)])
def test_dropout_is_the_same_in_overlapping_windows(periods: tuple[int, int]) -> None:
    decoder = make_decoder("lstm", dropout=0.5)
    targets = torch.randint(VOCABULARY, (9, BATCH))
    k1, k2 = periods
    torch.manual_seed(1)
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback="teacher", k1=k1, k2=k2,
    )  # fmt: skip
    torch.manual_seed(1)
    whole = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="teacher"
    )
    torch.testing.assert_close(out.loss, whole.loss, rtol=EXACT, atol=0)
    # with masks that differed between windows, the last step's own loss would have another gradient
    last = torch.zeros_like(targets).fill_(-100)
    last[-1] = targets[-1]
    short = {"feedback": "teacher", "inputs": out.inputs}
    torch.manual_seed(1)
    cut = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, last, decoder.state, k1=1, k2=9, **short
    )
    torch.manual_seed(1)
    exact = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, last, decoder.state, **short
    )
    assert relative_distance(decoder.gradients(cut.loss), decoder.gradients(exact.loss)) < EXACT


@pytest.mark.parametrize("options", [{}, {"k1": 4, "k2": 4}, {"return_outputs": True}], ids=str)
def test_a_cell_is_not_called_once_every_row_has_ended(options: dict[str, Any]) -> None:
    decoder, calls = make_decoder("gru_cell"), []

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        calls.append(1)
        h = decoder.cell(x, h)
        return h, h, h.sum(1)

    targets = torch.randint(VOCABULARY, (90, BATCH))
    lengths = torch.tensor([5, 2, 0])
    call = {"feedback": "greedy", "lengths": lengths, **options}
    modules = (decoder.embedding, cell, decoder.head)
    out = accumext.decode_loss(*modules, targets, decoder.state, **call)
    assert len(calls) < 20
    short = accumext.decode_loss(*modules, targets[:5], decoder.state, **call)
    assert torch.equal(out.tokens[:5], short.tokens)
    torch.testing.assert_close(out.loss, short.loss, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out.state, short.state, rtol=EXACT, atol=EXACT)
    assert out.extras.shape == (90, BATCH)
    assert not out.extras[20:].any()
    if out.outputs is not None:
        assert torch.equal(out.outputs[:5], short.outputs)
        assert not out.outputs[5:].any()
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(short.loss))
    assert distance < EXACT
