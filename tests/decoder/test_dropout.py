"""Dropout before and behind the cell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.decode_oracle import CELLS, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, VOCABULARY, raises, run
from torch import Tensor, nn

from accumext.decoder._rnn_steps import Dropout


@pytest.mark.parametrize("called", [False, True], ids=["kernels", "callable"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
@pytest.mark.parametrize("kind", sorted(CELLS))
def test_it_is_torchs(kind: str, feedback: str, called: bool) -> None:
    """With the same seed the plain loop drops the same elements, between layers, too."""
    decoder = make_decoder(kind, dropout=0.2 if CELLS[kind][1] == 2 else 0.0)
    options = {"feedback": feedback, "embedding_dropout": 0.4, "output_dropout": 0.3}
    cell = decoder.step if called else decoder.cell
    torch.manual_seed(7)
    out = run(decoder, cell, batch_dim=int(CELLS[kind][1] is not None), **options)
    torch.manual_seed(7)
    losses, divisor, logits = decode(
        decoder, TARGETS, out.inputs, embedding_dropout=0.4, output_dropout=0.3
    )
    expected = losses.sum() / divisor
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=EXACT)
    assert torch.equal(out.tokens, logits.argmax(-1))
    torch.manual_seed(99)  # the backward pass must bring its own
    actual = decoder.gradients(out.loss)
    assert relative_distance(actual, decoder.gradients(expected)) < EXACT


@pytest.mark.parametrize("kind", ["kernels", "module", "function"])
def test_there_is_none_in_eval_mode(kind: str) -> None:
    decoder = make_decoder("gru_cell")

    class Module(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return decoder.step(x, h)

    cell: Any = {"kernels": decoder.cell, "module": Module(), "function": Module().forward}[kind]
    expected = run(decoder).loss
    options = {"embedding_dropout": 0.5, "output_dropout": 0.5}
    assert run(decoder, cell, **options).loss != expected
    for module in (decoder.cell, cell, getattr(cell, "__self__", None)):
        if isinstance(module, nn.Module):
            module.eval()
    torch.testing.assert_close(run(decoder, cell, **options).loss, expected, rtol=EXACT, atol=0)


@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_everything_dropped_leaves_the_bias(feedback: str) -> None:
    decoder = make_decoder("lstm_cell")
    out = run(decoder, feedback=feedback, embedding_dropout=1.0, output_dropout=1.0)
    expected = torch.nn.functional.cross_entropy(
        decoder.head.bias.expand(TARGETS.numel(), -1), TARGETS.flatten()
    )
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=0)
    gradients = decoder.gradients(out.loss)
    assert [bool(g.any()) for g in gradients].count(True) == 1


def test_a_loss_that_is_not_reduced_has_the_same_elements() -> None:
    decoder = make_decoder("gru")
    results = []
    for reduction in ("sum", "none"):
        torch.manual_seed(2)
        out = run(decoder, output_dropout=0.5, embedding_dropout=0.5, reduction=reduction)
        results.append(decoder.gradients(out.loss.sum()))
    assert relative_distance(*results) < EXACT


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_masks_of_a_device_are_drawn_at_once(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, masks = make_decoder("gru"), []
    monkeypatch.setattr("accumext._scalars.on_host", lambda _: False)
    bernoulli = Tensor.bernoulli_

    def drawn(mask: Tensor, probability: float) -> Tensor:
        masks.append(bernoulli(mask, probability))
        return mask

    monkeypatch.setattr(Tensor, "bernoulli_", drawn)
    run(decoder, embedding_dropout=rate, output_dropout=rate)
    assert [mask.shape for mask in masks] == [(6, BATCH, 5)] * 2
    kept = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    # 180 draws: 5 standard deviations are 0.16
    assert abs(kept - (1 - rate)) < 0.17 * (rate < 1) + 1e-12


def test_a_part_of_what_is_kept() -> None:
    x, mask = torch.randn(4, 2, 3), torch.rand(4, 2, 3) < 0.5
    assert torch.equal(Dropout(mask, 3.0).apply(x[1:3], slice(1, 3)), (x * mask * 3)[1:3])
    assert Dropout().apply(x, slice(None)) is x


@pytest.mark.parametrize("name", ["embedding_dropout", "output_dropout"])
def test_what_a_rate_must_be(name: str) -> None:
    decoder = make_decoder("gru_cell", vocabulary=VOCABULARY)
    with raises(ValueError, f"{name} must be at most 1, got 1.5"):
        run(decoder, **{name: 1.5})
    with raises(ValueError, f"{name} must be at least 0, got -0.5"):
        run(decoder, **{name: -0.5})
    with raises(TypeError, f"{name} must be a number, got str"):
        run(decoder, **{name: "a"})
