"""Embeddings, heads and cells that are not quite the usual ones, in float64 against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from support.device import Launches, cpu_as_device
from torch import Tensor

import accumext
from accumext.decoder import _operators

EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
STEPS, BATCH, VOCABULARY = 5, 3, 13


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


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_dropout_masks_of_a_device_are_drawn_at_once(rate: float) -> None:
    """On a CPU they are those that the module would draw, one step and layer after the other."""
    decoder = make_decoder("lstm", dropout=rate)
    targets = torch.randint(13, (50, 8))
    state = tuple(torch.zeros(2, 8, part.shape[-1], dtype=part.dtype) for part in decoder.state)
    seen, masks = Launches(), []
    draw = torch.Tensor.bernoulli_

    def recorded(mask: Tensor, *args: float) -> Tensor:
        masks.append(draw(mask, *args))
        return masks[-1]

    with pytest.MonkeyPatch.context() as patch, cpu_as_device():
        patch.setattr(torch.Tensor, "bernoulli_", recorded)
        with seen:
            accumext.decode_loss(
                decoder.embedding, decoder.cell, decoder.head, targets, state, feedback="greedy"
            ).loss.backward()
    assert [n for name, n in seen.calls.items() if "dropout" in name or "bernoulli" in name] == [1]
    (mask,) = masks
    assert mask.dtype == torch.bool
    assert mask.shape[0] == len(targets)
    kept = (1.0 - rate) * mask.numel()
    assert abs(mask.sum() - kept) <= 5.0 * (rate * kept) ** 0.5  # standard deviations


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


def run(decoder: Decoder, targets: Tensor, cell: Any = None, **call: Any) -> accumext.DecodeOutput:
    call = {"feedback": "teacher", **call}
    cell = decoder.cell if cell is None else cell
    return accumext.decode_loss(
        decoder.embedding, cell, decoder.head, targets, decoder.state, **call
    )


def wrapped(decoder: Decoder) -> Any:
    """The same cell as a callable, with the batch in dimension 0 of its state."""
    return lambda x, state: decoder.step(x, state)


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


@pytest.mark.parametrize("budget", [None, 1, 2, 4])
@pytest.mark.parametrize("ends", ["eos", "lengths", "both", "nobody"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy", "sample", "mask"])
@pytest.mark.parametrize("own", [False, True], ids=["cell", "callable"])
def test_ended_rows_are_not_pushed_through_the_head(
    feedback: str, ends: str, budget: int | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    decoder = make_decoder("gru_cell", vocabulary=5, padding_idx=2)
    targets = torch.randint(5, (15, BATCH))
    call: dict[str, Any] = {"temperature": 2.0} if feedback == "sample" else {}
    call["feedback"] = torch.rand(15, BATCH) < 0.5 if feedback == "mask" else feedback
    if ends in ("eos", "both"):
        call["eos"] = 1
    if ends in ("lengths", "both"):
        call["lengths"] = torch.tensor([15, 0, 6])
    elif ends == "nobody":
        call["lengths"] = torch.zeros(BATCH, dtype=torch.int64)
    if budget is not None:
        call["memory_budget"] = budget * 5 * 8
    seen = Seen(monkeypatch)
    out = run(decoder, targets, wrapped(decoder) if own else None, **call)
    assert seen.rows == out.lengths.sum() < targets.numel()
    live = torch.arange(15)[:, None] < out.lengths
    losses, divisor, _ = decode(decoder, targets, out.inputs, live)
    expected = losses.sum() / divisor if divisor else losses.sum()
    torch.testing.assert_close(out.loss, expected.detach(), rtol=EXACT, atol=EXACT)
    assert relative_distance(decoder.gradients(out.loss), decoder.gradients(expected)) < EXACT
    torch.testing.assert_close(out.token_losses, losses.detach(), rtol=1e-11, atol=EXACT)


def test_sampled_rows_keep_their_uniforms_when_others_end() -> None:
    """The same generator: a row's sample does not depend on which other rows are alive."""
    decoder = make_decoder("gru_cell")
    targets = torch.randint(VOCABULARY, (9, BATCH))
    tokens = []
    for lengths in (None, torch.tensor([2, 9, 5])):
        generator = torch.Generator().manual_seed(0)
        out = run(decoder, targets, feedback="sample", lengths=lengths, generator=generator)
        tokens.append(out.tokens)
    assert torch.equal(tokens[0][:, 1], tokens[1][:, 1])
    assert torch.equal(tokens[0][:5, 2], tokens[1][:5, 2])
    assert torch.equal(tokens[0][:2, 0], tokens[1][:2, 0])
