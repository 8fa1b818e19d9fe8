"""The backward pass's needs from the forward pass: once, again, and after a failure."""

from typing import Any

import pytest
import torch
from support.decode_oracle import decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, STEPS, raises, run, targets_with_holes, wrapped
from torch import Tensor, nn

CHANGED = "parameters must be those of the forward pass until the backward pass has run"


def test_a_graph_that_is_not_retained_runs_once():
    decoder = make_decoder("lstm_cell", tied=True)
    out = run(decoder, feedback="greedy")
    decoder.gradients(out.loss)
    with pytest.raises(RuntimeError, match="second time"):
        decoder.gradients(out.loss)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm"])
def test_parameters_that_changed_before_the_backward_pass_are_an_error(kind, frozen):
    """Also those that want no gradient, for gradients go through them."""
    for change in ("embedding", "cell", "head")[frozen : 3 - frozen]:
        decoder = make_decoder(kind)
        getattr(decoder, change).requires_grad_(not frozen)
        out = run(decoder)
        with torch.no_grad():
            next(getattr(decoder, change).parameters()).add_(1)
        with raises(RuntimeError, CHANGED):
            out.loss.backward()


@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "function", "module"])
def test_parameters_of_functional_call_are_those_of_the_backward_pass_outside(kind):
    """Its own, which the model has again by then, get no gradient, and are not read."""
    decoder, targets = make_decoder("lstm" if kind == "lstm" else "gru_cell"), targets_with_holes()

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder.cell

        def forward(self, x: Tensor, state: Any) -> Any:
            state = self.inner(x, state)
            return state, state

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = decoder.embedding, decoder.head
            self.cell = Own() if kind == "module" else decoder.cell

        def forward(self) -> Tensor:
            cell = wrapped(decoder) if kind == "function" else self.cell
            return run(decoder, cell, targets=targets).loss

    whole = Whole()
    others = {n: (p.detach() * 1.1).requires_grad_() for n, p in whole.named_parameters()}
    if kind == "module":  # it would be called again with its own
        loss = torch.func.functional_call(whole, others, ())
        with raises(RuntimeError, f"{CHANGED}, got others. Under functional_call run the backward"):
            loss.backward()
        return
    found = torch.autograd.grad(torch.func.functional_call(whole, others, ()), [*others.values()])
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(1.1)
    inputs = torch.cat([torch.zeros_like(targets[:1]), targets[:-1].clamp(min=0)])
    losses, divisor, _ = decode(decoder, targets, inputs)
    expected = torch.autograd.grad(losses.sum() / divisor, [*whole.parameters()])
    assert relative_distance(list(found), list(expected)) < EXACT


@pytest.mark.parametrize(
    "options", [{}, {"k1": 2, "k2": 2}, {"k1": 2, "k2": 5}, {"memory_budget": 4000}], ids=str
)
def test_parameters_of_a_function_that_changed_are_an_error(options):
    """They are found in the graph of its steps; and so is a state, as it is for plain autograd."""
    decoder, targets = make_decoder("gru_cell"), targets_with_holes(20)
    for name in ("bias_ih", "bias_hh", "weight_hh"):
        out = run(decoder, wrapped(decoder), targets=targets, feedback="greedy", **options)
        with torch.no_grad():
            getattr(decoder.cell, name).add_(1)
        with raises(RuntimeError, "parameters must be those of the forward pass"):
            out.loss.backward()
    if "k1" not in options:
        state = torch.randn(BATCH, 5, dtype=torch.float64)
        out = run(decoder, wrapped(decoder), state, targets=targets, **options)
        state.zero_()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|must be those"):
            out.loss.backward()


@pytest.mark.parametrize("where", ["table", "cell", "function"])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "called"])
def test_renormalised_embeddings_are_no_changed_parameters(kind, where):
    """Lookups write into the weight: of another call before the backward pass, of a replay."""
    if where == "table":
        decoder = make_decoder("gru_cell" if kind == "called" else kind)
        decoder.embedding.max_norm = 0.5
        cell: Any = decoder.step if kind == "called" else decoder.cell
    else:
        decoder = make_decoder("gru_cell")

        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = decoder.cell
                self.words = nn.Embedding(30, 5, max_norm=0.5, dtype=torch.float64)

            def forward(self, x: Tensor, state: Any) -> Any:
                h, t = state
                h = self.inner(x + self.words(t), h)
                return h, (h, t + 1)

        own = Own()
        cell = own if where == "cell" else own.forward
        decoder.state = (decoder.state, torch.zeros(3, dtype=torch.int64))
        decoder.leaves = [leaf for leaf in decoder.leaves if leaf is not decoder.state]
    for options in ({"feedback": "teacher"}, {"feedback": "greedy", "memory_budget": 4000}):
        calls = [run(decoder, cell, **options) for _ in range(2)]
        expected = torch.autograd.grad(calls[1].loss, decoder.leaves, retain_graph=True)
        again = torch.autograd.grad(calls[1].loss, decoder.leaves)
        other = torch.autograd.grad(calls[0].loss, decoder.leaves)
        assert relative_distance(list(again), list(expected)) < EXACT
        assert relative_distance(list(other), list(expected)) < EXACT


def test_an_average_that_the_cell_holds_may_be_updated():
    decoder = make_decoder("gru_cell")

    class WithAverage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder.cell
            self.average = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            return decoder.step(x, h)

    cell = WithAverage()
    out = run(decoder, cell)
    cell.average.weight.mul_(0.9)
    out.loss.backward()


def test_a_backward_pass_that_failed_leaves_nothing_behind():
    decoder = make_decoder("gru_cell", tied=True)
    expected = decoder.gradients(run(decoder).loss)
    out = run(decoder)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    handle = decoder.state.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        out.loss.backward(retain_graph=True)
    handle.remove()
    for leaf in decoder.leaves:
        leaf.grad = None
    assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "callable"])
def test_buffers_of_the_caller_may_be_written_after_the_call(kind):
    decoder, targets = make_decoder("lstm" if kind == "lstm" else "gru_cell"), targets_with_holes()
    cell = wrapped(decoder) if kind == "callable" else None
    for name, made in (
        ("resets", torch.rand(STEPS, BATCH) < 0.4),
        ("token_weight", torch.rand(STEPS, BATCH, dtype=torch.float64)),
        ("class_weight", torch.rand(13, dtype=torch.float64)),
        ("num_items", torch.tensor(5.0, dtype=torch.float64)),
    ):
        call = {"feedback": "greedy", "reduction": "mean" if name == "num_items" else "none"}
        found = []
        for write in (False, True):
            buffer = made.clone()
            loss = run(decoder, cell, targets=targets, **call, **{name: buffer}).loss
            if write:
                buffer.zero_()
            found.append(decoder.gradients(loss.sum()))
        assert relative_distance(*found) == 0
