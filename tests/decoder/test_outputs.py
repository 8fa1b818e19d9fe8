"""Other results of a call: what a callable returns besides its output, and losses of one's own on
the outputs of the cell."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, raises, run
from torch import Tensor, nn

STEPS = len(TARGETS)


def attention(decoder: Decoder) -> Any:
    """A cell that also returns its weights."""

    def cell(x: Tensor, h: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        weights = torch.einsum("bsh,bh->bs", memory, h).softmax(-1)
        h = decoder.cell(x + torch.einsum("bs,bsh->bh", weights, memory), h)
        return h, h, {"weights": weights, "state": h}

    return cell


def plain_attention(
    decoder: Decoder, inputs: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, weights [T, B, S] and outputs [T, B, H]."""
    cell, h, losses, weights, outputs = attention(decoder), decoder.state, [], [], []
    for t in range(STEPS):
        output, h, extras = cell(decoder.embedding(inputs[t]), h, memory)
        losses.append(F.cross_entropy(decoder.head(output), TARGETS[t]))
        weights.append(extras["weights"])
        outputs.append(output)
    return torch.stack(losses).mean(), torch.stack(weights), torch.stack(outputs)


@pytest.mark.parametrize("periods", [(None, None), (2, 2), (2, 4)])
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_extras_are_stacked_once(feedback, periods):
    decoder = make_decoder("gru_cell")
    memory = torch.randn(BATCH, 4, 5, dtype=torch.float64, requires_grad=True)
    call = {"feedback": feedback, "context": (memory,), "k1": periods[0], "k2": periods[1]}
    out = run(decoder, attention(decoder), **call)
    loss, weights, outputs = plain_attention(decoder, out.inputs, memory)
    assert not out.extras["weights"].requires_grad
    assert out.outputs is None
    out.loss.backward()
    for actual, expected in (
        (out.extras["weights"], weights), (out.extras["state"], outputs), (out.loss, loss)
    ):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=EXACT, atol=EXACT)
    turned = run(
        decoder, attention(decoder), **call, targets=TARGETS.t(), inputs=out.inputs.t(),
        batch_first=True,
    )  # fmt: skip
    torch.testing.assert_close(turned.extras["weights"].transpose(0, 1), out.extras["weights"])


def test_extras_and_outputs_carry_a_graph_on_request():
    decoder = make_decoder("gru_cell")
    memory = torch.randn(BATCH, 4, 5, dtype=torch.float64, requires_grad=True)
    decoder.leaves.append(memory)
    out = run(decoder, attention(decoder), context=(memory,), return_outputs=True)
    loss, weights, outputs = plain_attention(decoder, out.inputs, memory)
    alignment, value = torch.rand_like(weights), torch.randn_like(outputs)
    actual = out.loss + (out.extras["weights"] * alignment).sum() + (out.outputs * value).sum()
    expected = loss + (weights * alignment).sum() + (outputs * value).sum()
    assert relative_distance(decoder.gradients(actual), decoder.gradients(expected)) < EXACT


def test_extras_must_not_change_their_nesting():
    decoder, calls = make_decoder("gru_cell"), iter(range(100))

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        h = decoder.cell(x, h)
        return h, h, [h] * (1 + next(calls) // 3)

    with raises(ValueError, "cell must return extras with 1 entries at every step"):
        run(decoder, cell)


@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "rnn_relu"])
def test_the_outputs_alone_have_gradients(kind):
    """A value head without the loss."""
    decoder, outputs = make_decoder(kind), []
    out = run(decoder, return_outputs=True)
    decode(decoder, TARGETS, out.inputs, outputs=outputs)
    factors = torch.randn_like(out.outputs)
    actual = decoder.gradients((out.outputs * factors).sum())
    expected = decoder.gradients((torch.stack(outputs) * factors).sum())
    assert relative_distance(actual, expected) < EXACT


def test_a_second_head_in_one_pass():
    """The loss of a value head beside that of the words, in windows, and its own parameters'
    gradients."""
    decoder, value = make_decoder("lstm_cell"), nn.Linear(5, 1, dtype=torch.float64)
    out = run(decoder, return_outputs=True, k1=3, k2=3)
    returns = torch.randn(STEPS, BATCH, dtype=torch.float64)
    loss = out.loss + F.mse_loss(value(out.outputs).squeeze(-1), returns)
    loss.backward()
    total, state = 0.0, decoder.state
    for t in range(STEPS):
        if t == 3:
            state = tuple(s.detach() for s in state)
        output, state = decoder.step(decoder.embedding(out.inputs[t]), state)
        total = total + F.cross_entropy(decoder.head(output), TARGETS[t])
        total = total + F.mse_loss(value(output).squeeze(-1), returns[t])
    leaves = [*value.parameters(), *decoder.leaves]
    expected = torch.autograd.grad(total / STEPS, leaves)
    assert relative_distance([leaf.grad for leaf in leaves], list(expected)) < EXACT
