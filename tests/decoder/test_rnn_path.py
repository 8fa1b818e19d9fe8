"""Embeddings, heads and cells that are not quite the usual ones, in float64 against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.decode_oracle import decode, make_decoder, relative_distance
from torch import nn

import accumext

EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("periods", [(None, None), (2, 2), (1, 3)], ids=str)
def test_sparse_embeddings(
    padding_idx: int | None, tied: bool, periods: tuple[int | None, int | None]
) -> None:
    grads = []
    for sparse in (False, True):
        torch.manual_seed(0)
        decoder = make_decoder("lstm_cell", padding_idx=padding_idx, tied=tied)
        decoder.embedding.sparse = sparse
        targets = torch.randint(13, (7, 3))
        k1, k2 = periods
        accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
            feedback="greedy", k1=k1, k2=k2,
        ).loss.backward()  # fmt: skip
        grad = decoder.embedding.weight.grad
        assert grad.is_sparse == (sparse and not tied)
        grads.append(grad.to_dense())
    assert relative_distance([grads[1]], [grads[0]]) < EXACT


def test_weights_and_states_of_any_layout() -> None:
    """Views with strides, transposed matrices, a bias that is every other element."""
    torch.manual_seed(0)
    plain = make_decoder("gru_cell")
    table, weight = plain.embedding.weight.detach(), plain.head.weight.detach()
    bias, state = plain.head.bias.detach(), plain.state.detach()
    odd = (
        table.t().contiguous().t(),
        weight.t().contiguous().t(),
        torch.stack([bias, bias + 1], 1)[:, 0],
        state.t().contiguous().t(),
    )
    assert not any(t.is_contiguous() for t in odd)
    targets = torch.randint(13, (6, 3))
    results = []
    for given_table, given_weight, given_bias, given_state in ((table, weight, bias, state), odd):
        leaves = [t.requires_grad_() for t in (given_table, given_weight, given_bias, given_state)]
        out = accumext.decode_loss(
            given_table, plain.cell, (given_weight, given_bias), targets, given_state,
            feedback="greedy",
        )  # fmt: skip
        results.append((out, torch.autograd.grad(out.loss, leaves)))
    (out, grads), (same, again) = results
    assert torch.equal(out.tokens, same.tokens)
    torch.testing.assert_close(out.loss, same.loss, rtol=EXACT, atol=0)
    assert relative_distance(list(again), list(grads)) < EXACT


def test_parametrized_cells_are_followed() -> None:
    torch.manual_seed(0)
    decoder = make_decoder("lstm")
    nn.utils.parametrizations.weight_norm(decoder.cell, "weight_hh_l0")
    decoder.leaves = [*decoder.cell.parameters(), *decoder.state]
    targets = torch.randint(13, (6, 3))
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="greedy"
    )
    losses, divisor, _ = decode(decoder, targets, out.inputs)
    expected = decoder.gradients(losses.sum() / divisor)
    assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


def test_cells_that_do_more_than_their_weights_say_are_called() -> None:
    """A forward of its own, and hooks: their effect is in the loss and the gradients."""

    class Doubled(nn.GRUCell):
        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x, h)

    torch.manual_seed(0)
    hooked = make_decoder("gru_cell")
    hooked.cell.register_forward_hook(lambda _, __, h: h * 0.5)
    own = make_decoder("gru_cell")
    own.cell.__class__ = Doubled
    projected = make_decoder("gru_cell")
    projected.cell = nn.LSTM(5, 8, proj_size=5, dtype=torch.float64)
    first = torch.randn(1, 3, 5, dtype=torch.float64), torch.randn(1, 3, 8, dtype=torch.float64)
    projected.state = first

    def step(x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        output, state = projected.cell(x[None], state)
        return output[0], state

    projected.step = step
    projected.leaves = [*projected.cell.parameters()]
    for decoder in (hooked, own, projected):
        targets = torch.randint(13, (6, 3))
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
            feedback="greedy",
        )  # fmt: skip
        losses, divisor, logits = decode(decoder, targets, out.inputs)
        assert torch.equal(out.tokens, logits.argmax(-1))
        expected = decoder.gradients(losses.sum() / divisor)
        assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


@pytest.mark.parametrize("feedback", ["teacher", "greedy", "sample"])
@pytest.mark.parametrize("budget", [None, 1, 4])
def test_without_a_graph_the_results_are_the_same(feedback: str, budget: int | None) -> None:
    decoder = make_decoder("lstm", dropout=0.5)
    targets = torch.randint(13, (9, 3))
    results = []
    for grad in (True, False):
        torch.manual_seed(5)
        with torch.set_grad_enabled(grad):
            results.append(
                accumext.decode_loss(
                    decoder.embedding,
                    decoder.cell,
                    decoder.head,
                    targets,
                    decoder.state,
                    feedback=feedback,
                    eos=1,
                    label_smoothing=0.1,
                    memory_budget=None if budget is None else budget * 13 * 8,
                )
            )
    with_graph, without = results
    assert torch.equal(with_graph.tokens, without.tokens)
    torch.testing.assert_close(with_graph.loss.detach(), without.loss, rtol=EXACT, atol=0)
    assert not without.loss.requires_grad
    assert not any(s.requires_grad for s in without.state)
    with torch.inference_mode():
        torch.manual_seed(5)
        inferred = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
            feedback=feedback, eos=1, label_smoothing=0.1,
        )  # fmt: skip
    assert torch.equal(inferred.tokens, without.tokens)


def test_a_whole_training_step_is_torchs() -> None:
    torch.manual_seed(0)
    mine, its = (make_decoder("gru", dropout=0.0) for _ in range(2))
    for a, b in zip(mine.leaves, its.leaves, strict=True):
        with torch.no_grad():
            b.copy_(a)
    optimizers = [torch.optim.SGD(d.leaves, lr=0.5) for d in (mine, its)]
    for seed in range(4):
        torch.manual_seed(seed)
        targets = torch.randint(13, (6, 3))
        out = accumext.decode_loss(
            mine.embedding, mine.cell, mine.head, targets, mine.state, feedback="greedy"
        )
        out.loss.backward()
        losses, divisor, _ = decode(its, targets, out.inputs)
        (losses.sum() / divisor).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ends = [[leaf.detach() for leaf in d.leaves] for d in (mine, its)]
    assert relative_distance(*ends) < 100 * EXACT
