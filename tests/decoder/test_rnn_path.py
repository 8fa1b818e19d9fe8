"""Torch's modules: without a graph, with weights of any layout, and what goes through the head."""

from typing import Any

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import EXACT, FEEDBACKS, check, run, wrapped
from torch import Tensor

import accumext
from accumext.decoder import _operators


@pytest.mark.parametrize(
    ("feedback", "budget"), [("teacher", None), ("greedy", 1), ("sample", 4), ("sample", None)]
)
def test_without_a_graph_the_results_are_the_same(feedback, budget):
    """A dropout between layers, which draws the same numbers, among them."""
    decoder = make_decoder("lstm", dropout=0.5)
    call = {"feedback": feedback, "eos": 1, "memory_budget": budget and budget * 13 * 8}
    results = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(5)
        with mode():
            results.append(run(decoder, **call))
    with_graph, *others = results
    for out in others:
        assert torch.equal(with_graph.tokens, out.tokens)
        torch.testing.assert_close(with_graph.loss.detach(), out.loss, rtol=EXACT, atol=0)
        assert not any(t.requires_grad for t in (out.loss, *out.state))


def test_weights_and_states_of_any_layout():
    """Views with strides, transposed matrices, a bias that is every other element."""
    decoder = make_decoder("gru_cell")
    bias = decoder.head.bias.detach()
    plain = [decoder.embedding.weight.detach(), decoder.head.weight.detach(), bias]
    plain.append(decoder.state.detach())
    odd = [t.t().contiguous().t() if t.dim() > 1 else t.repeat_interleave(2)[::2] for t in plain]
    assert not any(t.is_contiguous() for t in odd)
    results = []
    for leaves in (plain, odd):
        table, weight, shift, state = (t.requires_grad_() for t in leaves)
        targets = torch.arange(12).view(4, 3)
        out = accumext.decode_loss(
            table, decoder.cell, (weight, shift), targets, state, feedback="greedy"
        )
        results.append((out, list(torch.autograd.grad(out.loss, leaves))))
    (out, grads), (same, again) = results
    assert torch.equal(out.tokens, same.tokens)
    torch.testing.assert_close(out.loss, same.loss, rtol=EXACT, atol=0)
    assert relative_distance(again, grads) < EXACT


class Seen:
    """Counts the rows that the head sees, however they come to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        steps, forward = _operators.decode_steps, _operators.head_forward

        def counted_steps(*args: Any) -> int:
            rows = steps(*args)
            self.rows += rows
            return rows

        def counted_forward(hidden: Tensor, *args: Any) -> None:
            self.rows += len(hidden)
            forward(hidden, *args)

        monkeypatch.setattr(_operators, "decode_steps", counted_steps)
        monkeypatch.setattr(_operators, "head_forward", counted_forward)


@pytest.mark.parametrize("ends", ["eos", "lengths", "both", "nobody"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy", "sample", "mask"])
@pytest.mark.parametrize("own", [False, True], ids=["cell", "callable"])
def test_ended_rows_are_not_pushed_through_the_head(feedback, ends, own, monkeypatch):
    seen = Seen(monkeypatch)
    for rows in (None, 1, 2, 4):
        torch.manual_seed(3)
        decoder = make_decoder("gru_cell", vocabulary=5, padding_idx=2)
        targets = torch.randint(5, (15, 3))
        call = FEEDBACKS[feedback](15, 3, 5)
        if ends in ("eos", "both"):
            call["eos"] = 1
        if ends != "eos":
            call["lengths"] = torch.tensor([0, 0, 0] if ends == "nobody" else [15, 0, 6])
        call["memory_budget"] = rows and rows * 5 * 8
        seen.rows = 0
        out = check(decoder, targets, call, wrapped(decoder) if own else None)
        assert seen.rows == out.lengths.sum() < targets.numel()
