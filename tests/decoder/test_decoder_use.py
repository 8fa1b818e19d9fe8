"""What people do around decode_loss and tbptt: right, or an error that says why not."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from torch import nn

import accumext

STEPS, BATCH, VOCABULARY = 6, 3, 13
EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
TARGETS = torch.arange(STEPS * BATCH).view(STEPS, BATCH) % VOCABULARY


def run(
    decoder: Decoder, cell: Any = None, state: Any = None, **call: Any
) -> accumext.DecodeOutput:
    call = {"feedback": "teacher", **call}
    cell = decoder.cell if cell is None else cell
    state = decoder.state if state is None else state
    return accumext.decode_loss(decoder.embedding, cell, decoder.head, TARGETS, state, **call)


def raises(kind: type[Exception], text: str) -> Any:
    return pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}")


@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 3, 0])], ids=["whole", "lengths"])
def test_a_cell_may_write_into_its_state(lengths: torch.Tensor | None) -> None:
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, state: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        state["h"] = decoder.cell(x, state["h"])
        state["steps"] = state["steps"] + 1
        return state["h"], state

    mine = {"h": decoder.state, "steps": torch.zeros(())}
    out = run(decoder, cell, mine, lengths=lengths)
    expected = run(decoder, lengths=lengths)
    torch.testing.assert_close(out.state["h"], expected.state, rtol=EXACT, atol=EXACT)
    assert out.state["steps"] == STEPS
    assert mine["h"] is decoder.state
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss))
    assert distance < EXACT


def test_modules_that_do_more_than_their_weight_are_refused() -> None:
    decoder = make_decoder("gru_cell")

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    decoder.head = Twice(5, VOCABULARY).double()
    text = "head must compute as a plain nn.Linear, for its forward is not called, got Twice"
    with raises(TypeError, text):
        run(decoder)
    decoder = make_decoder("gru_cell")
    decoder.embedding.register_forward_hook(lambda *_: None)
    with raises(TypeError, "embedding must compute as a plain nn.Embedding"):
        run(decoder)


def test_parametrizations_are_followed() -> None:
    decoder = make_decoder("gru_cell")
    nn.utils.parametrizations.weight_norm(decoder.head)
    decoder.leaves = [*decoder.head.parameters(), decoder.state]
    out = run(decoder)
    losses, divisor, _ = decode(decoder, TARGETS, out.inputs)
    expected = decoder.gradients(losses.sum() / divisor)
    assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


def test_the_global_generator_may_be_given_beside_dropout() -> None:
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.dropout(decoder.cell(x, h))
        return h, h

    grads = []
    for generator in (None, torch.default_generator):
        torch.manual_seed(0)
        out = run(decoder, cell, feedback="sample", generator=generator)
        grads.append(decoder.gradients(out.loss))
    assert relative_distance(*grads) == 0


def test_containers_that_cannot_be_looked_into_are_refused() -> None:
    decoder = make_decoder("gru_cell")

    @dataclasses.dataclass
    class Hidden:
        h: torch.Tensor

    def cell(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h = decoder.cell(x, state)
        return h, Hidden(h)

    text = "state must nest tensors in tuples, lists and dicts, got Hidden"
    with raises(TypeError, text):
        run(decoder, cell)
    with raises(TypeError, text):
        run(decoder, cell, Hidden(decoder.state), k2=1)


def test_a_pair_may_be_a_list_and_a_single_state_may_not_be_a_tuple() -> None:
    decoder = make_decoder("lstm_cell")
    lengths = torch.tensor([6, 3, 0])
    assert (
        run(decoder, state=list(decoder.state), lengths=lengths).loss
        == run(decoder, lengths=lengths).loss
    )
    decoder = make_decoder("gru_cell")
    with raises(TypeError, "state must be a tensor for this cell, got tuple"):
        run(decoder, state=(decoder.state,))


def test_cells_that_return_something_else() -> None:
    decoder = make_decoder("gru_cell")
    with raises(TypeError, "cell must return (output, state), got a float64 tensor"):
        run(decoder, decoder.cell.__call__)
    calls = iter(range(100))

    def shrinks(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(x, h)
        return (h if next(calls) < 2 else h[:1]), h

    with raises(ValueError, "cell must return an output of shape [3, 5], got [1, 5]"):
        run(decoder, shrinks)


def test_results_are_the_callers_to_write() -> None:
    decoder = make_decoder("gru_cell")
    expected = decoder.gradients(run(decoder).loss)
    out = run(decoder)
    for result in (out.inputs, out.tokens, out.token_losses):
        result.zero_()
    assert relative_distance(decoder.gradients(out.loss), expected) == 0


def test_parameters_that_changed_before_the_backward_pass_are_an_error() -> None:
    text = "parameters must be those of the forward pass until the backward pass has run"
    for change in ("embedding", "cell", "head"):
        decoder = make_decoder("gru_cell")
        out = run(decoder)
        with torch.no_grad():
            next(getattr(decoder, change).parameters()).add_(1)
        with raises(RuntimeError, text):
            out.loss.backward()
    decoder = make_decoder("gru_cell")
    other = {
        name: p.detach().clone().requires_grad_() for name, p in decoder.cell.named_parameters()
    }

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = decoder.cell

        def forward(self) -> torch.Tensor:
            return run(decoder).loss

    swapped = {f"cell.{name}": p for name, p in other.items()}
    loss = torch.func.functional_call(Whole(), swapped, ())
    with raises(RuntimeError, text):
        loss.backward()


def test_a_backward_pass_that_failed_leaves_nothing_behind() -> None:
    decoder = make_decoder("gru_cell", tied=True)
    expected = decoder.gradients(run(decoder).loss)
    out = run(decoder)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = decoder.state.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        out.loss.backward(retain_graph=True)
    handle.remove()
    for leaf in decoder.leaves:
        leaf.grad = None
    assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


def test_lengths_replay_a_sampled_run_that_ended() -> None:
    decoder = make_decoder("gru_cell", vocabulary=VOCABULARY)
    torch.manual_seed(1)
    out = run(decoder, feedback="sample", eos=2, temperature=3.0)
    assert out.lengths.min() < STEPS
    again = run(decoder, inputs=out.inputs, lengths=out.lengths)
    torch.testing.assert_close(again.loss, out.loss, rtol=EXACT, atol=0)
    assert torch.equal(again.lengths, out.lengths)


def test_decode_memory_takes_meta_tensors_beside_real_modules() -> None:
    decoder = make_decoder("gru_cell")
    parts = (decoder.embedding, decoder.cell, decoder.head)
    expected = accumext.decode_memory(*parts, TARGETS, decoder.state, feedback="greedy")
    meta = (TARGETS.to("meta"), decoder.state.to("meta"))
    assert accumext.decode_memory(*parts, *meta, feedback="greedy") == expected
    with raises(TypeError, "embedding must be an nn.Embedding"):
        accumext.decode_memory([1], *parts[1:], TARGETS, feedback="greedy")


def test_tbptt_keeps_what_only_early_windows_use() -> None:
    decoder = make_decoder("gru_cell")
    bonus = torch.randn(BATCH, VOCABULARY, dtype=torch.float64, requires_grad=True)

    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h = decoder.cell(decoder.embedding(token), state[0])
        return decoder.head(h) + state[1], (h, torch.zeros_like(state[1]))

    grads = []
    for k1, k2 in ((1, 3), (6, 6)):
        bonus.grad = None
        accumext.tbptt(
            step, TARGETS, (decoder.state, bonus), criterion=F.cross_entropy, feedback="teacher",
            k1=k1, k2=k2,
        )  # fmt: skip
        grads.append(bonus.grad)
    assert grads[0].abs().sum() > 0
    assert relative_distance([grads[0]], [grads[1]]) < EXACT


@pytest.mark.parametrize(
    ("criterion", "kind", "text"),
    [
        (lambda z, y: F.cross_entropy(z, y, reduction="none"), ValueError,
         "criterion must return a 0-dim loss, got shape [3]"),
        (lambda z, y: 3.0, TypeError, "criterion must return a tensor, got float"),
    ],
    ids=["rows", "number"],
)  # fmt: skip
def test_tbptt_criterion(criterion: Any, kind: type[Exception], text: str) -> None:
    decoder = make_decoder("gru_cell")

    def step(token: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(decoder.embedding(token), h)
        return decoder.head(h), h

    with pytest.raises(kind, match=rf"^tbptt: {re.escape(text)}$"):
        accumext.tbptt(step, TARGETS, decoder.state, criterion=criterion)
