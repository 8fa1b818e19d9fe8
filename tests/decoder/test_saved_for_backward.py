"""The backward pass's needs from the forward pass: once, again, and after a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import EXACT, check_exact, raises, run, targets_with_holes
from torch import nn

import accumext


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


def test_frozen_parts_get_no_gradient() -> None:
    for frozen, kind in itertools.product(("embedding", "cell", "head"), ("gru_cell", "lstm")):
        decoder = make_decoder(kind)
        getattr(decoder, frozen).requires_grad_(False)
        decoder.leaves = [leaf for leaf in decoder.leaves if leaf.requires_grad]
        check_exact(decoder, targets_with_holes(), {"feedback": "greedy"})


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


@pytest.mark.parametrize(
    "options", [{}, {"k1": 2, "k2": 2}, {"k1": 2, "k2": 5}, {"memory_budget": 4000}], ids=str
)
@pytest.mark.parametrize("name", ["bias_ih", "bias_hh", "weight_hh"])
def test_parameters_of_a_function_that_changed_are_an_error(
    name: str, options: dict[str, Any]
) -> None:
    """They are found in the graph of its steps."""
    decoder = make_decoder("gru_cell")
    out = accumext.decode_loss(
        decoder.embedding, called(decoder), decoder.head, targets_with_holes(20), decoder.state,
        feedback="greedy", **options,
    )  # fmt: skip
    with torch.no_grad():
        getattr(decoder.cell, name).add_(1)
    with raises(RuntimeError, "parameters must be those of the forward pass"):
        out.loss.backward()


@pytest.mark.parametrize("kind", ["gru_cell", "lstm"])
def test_a_frozen_parameter_that_changed_is_an_error(kind: str) -> None:
    """Gradients go through it, and the backward pass reads it again."""
    decoder = make_decoder(kind)
    decoder.cell.requires_grad_(False)
    out = run(decoder)
    with torch.no_grad():
        next(decoder.cell.parameters()).add_(1)
    with raises(RuntimeError, "parameters must be those of the forward pass"):
        out.loss.backward()


@pytest.mark.parametrize("where", ["table", "cell", "function"])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "called"])
def test_renormalised_embeddings_are_no_changed_parameters(kind: str, where: str) -> None:
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

            def forward(self, x: torch.Tensor, state: Any) -> Any:
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


def test_an_average_that_the_cell_holds_may_be_updated() -> None:
    decoder = make_decoder("gru_cell")

    class WithAverage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder.cell
            self.average = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
            return decoder.step(x, h)

    cell = WithAverage()
    out = run(decoder, cell)
    cell.average.weight.mul_(0.9)
    out.loss.backward()


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


def called(decoder: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(x, h)
        return h, h

    return cell


@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "callable"])
@pytest.mark.parametrize("name", ["resets", "token_weight", "class_weight", "num_items"])
def test_buffers_of_the_caller_may_be_written_after_the_call(kind: str, name: str) -> None:
    decoder = make_decoder("gru_cell" if kind == "callable" else kind)
    cell = decoder.cell if kind != "callable" else called(decoder)
    targets = targets_with_holes()
    made = {
        "resets": torch.rand(targets.shape) < 0.4,
        "token_weight": torch.rand(targets.shape, dtype=torch.float64),
        "class_weight": torch.rand(decoder.head.out_features, dtype=torch.float64),
        "num_items": torch.tensor(5.0, dtype=torch.float64),
    }[name]
    reduction = "mean" if name == "num_items" else "none"
    found = []
    for write in (False, True):
        buffer = made.clone()
        loss = accumext.decode_loss(
            decoder.embedding, cell, decoder.head, targets, decoder.state, feedback="greedy",
            reduction=reduction, **{name: buffer},
        ).loss  # fmt: skip
        if write:
            buffer.zero_()
        found.append(torch.autograd.grad(loss.sum(), decoder.leaves))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("budget", [None, 4000])
def test_a_state_that_changed_before_the_backward_pass_is_an_error(budget: int | None) -> None:
    """As it is for plain autograd."""
    decoder = make_decoder("gru_cell")
    state = torch.randn(*decoder.state.shape, dtype=torch.float64)
    out = accumext.decode_loss(
        decoder.embedding, called(decoder), decoder.head, targets_with_holes(), state,
        feedback="teacher", memory_budget=budget,
    )  # fmt: skip
    state.zero_()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|must be those"):
        out.loss.backward()
