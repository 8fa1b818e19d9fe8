"""Dropout before and behind the cell, and between its layers. That it is torch's, element by
element, is seen in test_decode_loss.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder
from support.decoding import BATCH, EXACT, TARGETS, run
from support.device import Launches, cpu_as_device
from torch import Tensor, nn


@pytest.mark.parametrize("kind", ["kernels", "module", "function"])
def test_there_is_none_in_eval_mode(kind):
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
def test_everything_dropped_leaves_the_bias(feedback):
    decoder = make_decoder("lstm_cell")
    out = run(decoder, feedback=feedback, embedding_dropout=1.0, output_dropout=1.0)
    expected = F.cross_entropy(decoder.head.bias.expand(TARGETS.numel(), -1), TARGETS.flatten())
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=0)
    gradients = decoder.gradients(out.loss)
    assert [bool(g.any()) for g in gradients].count(True) == 1


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_masks_of_a_device_are_drawn_at_once(rate):
    """On a CPU they are those that the module would draw, one step and layer after the other."""
    decoder, masks, draw, seen = (
        make_decoder("lstm", dropout=rate),
        [],
        Tensor.bernoulli_,
        Launches(),
    )
    state = tuple(torch.zeros_like(part, requires_grad=False) for part in decoder.state)

    def recorded(mask: Tensor, *args: float) -> Tensor:
        masks.append(draw(mask, *args))
        return masks[-1]

    with pytest.MonkeyPatch.context() as patch, cpu_as_device():
        patch.setattr(Tensor, "bernoulli_", recorded)
        with seen:
            out = run(decoder, None, state, embedding_dropout=rate, output_dropout=rate)
            out.loss.backward()
    drawn = {name: n for name, n in seen.calls.items() if "dropout" in name or "bernoulli" in name}
    assert sum(drawn.values()) == len(masks) == 3
    assert {mask.numel() for mask in masks} == {len(TARGETS) * BATCH * 5}
    assert all(mask.dtype == torch.bool for mask in masks)
    kept = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    # 270 draws: 5 standard deviations are 0.13
    assert abs(kept - (1 - rate)) < 0.14 * (rate < 1) + 1e-12
