"""Recurrent states: any nesting, frozen rows, and random numbers that a replay repeats."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, raises, run
from torch import Tensor, nn

import accumext
from accumext.recurrence._states import leaves, map_leaves


def test_the_global_generator_may_be_given_beside_dropout():
    decoder = make_decoder("gru_cell")

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(decoder.cell(x, h))
        return h, h

    grads = []
    for generator in (None, torch.default_generator):
        torch.manual_seed(0)
        out = run(decoder, cell, feedback="sample", generator=generator)
        grads.append(decoder.gradients(out.loss))
    assert relative_distance(*grads) == 0


class Stack(nn.Module):
    """A GRU of three layers behind a module of one's own, with states [3, B, H]."""

    def __init__(self, gru: nn.GRU) -> None:
        super().__init__()
        self.gru = gru

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        output, h = self.gru(x[None], h)
        return output[0], h


@pytest.mark.parametrize("option", ["lengths", "eos", "resets"])
@pytest.mark.parametrize("batch", [2, 3])  # 3: as many as there are layers
def test_rows_are_those_of_the_batch_dimension(batch, option):
    gru = nn.GRU(5, 5, 3, dtype=torch.float64)
    embedding, head = nn.Embedding(7, 5, dtype=torch.float64), nn.Linear(5, 7, dtype=torch.float64)
    state = torch.randn(3, batch, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (6, batch))
    options: dict[str, Any] = {
        "lengths": {"lengths": torch.tensor([4, 6, 0][:batch])},
        "eos": {"eos": 1},
        "resets": {"resets": torch.rand(6, batch) < 0.4},
    }[option]
    options |= {"feedback": "greedy", "inputs": torch.randint(7, (6, batch))}
    leaves = [*gru.parameters(), *embedding.parameters(), *head.parameters(), state]
    expected = accumext.decode_loss(embedding, gru, head, targets, state, **options)
    cell = Stack(gru)
    actual = accumext.decode_loss(embedding, cell, head, targets, state, batch_dim=1, **options)
    torch.testing.assert_close(actual.state, expected.state, rtol=EXACT, atol=EXACT)
    gradients = [list(torch.autograd.grad(out.loss, leaves)) for out in (actual, expected)]
    assert relative_distance(*gradients) < EXACT
    call = (embedding, cell, head, targets, state)
    text = "state must hold tensors with the batch in dimension 0 to be frozen by row, got "
    text += "shape [3, 2, 5]. Pass batch_dim=1 if it is there"
    if batch == 3:
        text = "batch_dim must be given if dimensions 0 and 1 may both be the batch of 3, got "
        text += "a state of shape [3, 3, 5]"
    with raises(ValueError, text):
        accumext.decode_loss(*call, **options)


def test_numbers_are_everyones_and_a_pair_may_be_a_list():
    decoder, lengths = make_decoder("lstm_cell"), torch.tensor([6, 3, 0])
    expected = run(decoder, lengths=lengths).loss
    assert run(decoder, None, list(decoder.state), lengths=lengths, batch_dim=1).loss == expected


@dataclasses.dataclass
class Memory:
    h: Tensor
    steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """With a constructor that must not run again."""

    memory: list[Memory]
    name: str = "a"

    def __post_init__(self) -> None:
        assert self.name == "a"
        object.__setattr__(self, "name", "b")


@pytest.mark.parametrize("periods", [(None, None), (2, 2), (2, 4)])
@pytest.mark.parametrize("ended", [False, True])
def test_states_in_dataclasses(ended, periods):
    decoder = make_decoder("gru_cell")
    k1, k2 = periods
    options: dict[str, Any] = {"feedback": "greedy", "k1": k1, "k2": k2}
    if ended:
        options["lengths"] = torch.tensor([2, 6, 0])

    def cell(x: Tensor, state: Hidden) -> tuple[Tensor, Hidden]:
        (memory,) = state.memory
        h = decoder.cell(x, memory.h)
        state.memory[0] = Memory(h, memory.steps + 1)  # as if it were its own
        return h, state

    mine = Hidden([Memory(decoder.state, 0)])
    out = run(decoder, cell, mine, **options)
    expected = run(decoder, **options)
    assert mine.memory[0].h is decoder.state
    assert isinstance(out.state, Hidden)
    assert out.state.memory[0].steps == len(TARGETS)
    torch.testing.assert_close(out.state.memory[0].h, expected.state, rtol=EXACT, atol=EXACT)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected.loss))
    assert distance < EXACT


def test_leaves_of_any_nesting():
    tree = {"a": [Memory(torch.ones(1), 2), None], "b": (Hidden([Memory(torch.zeros(2), 3)]), 4.0)}
    found = leaves(tree)
    assert [leaf for leaf in found if not isinstance(leaf, Tensor)] == [2, None, 3, "b", 4.0]
    numbers = iter(range(100))
    numbered = map_leaves(lambda _: next(numbers), tree)
    assert leaves(numbered) == list(range(len(found)))
    assert numbered["b"][0].memory == [Memory(3, 4)]
    assert numbered["a"][0] == Memory(0, 1)


def test_outputs_print_the_dtypes_and_shapes_of_what_they_hold():
    decoder = make_decoder("lstm_cell")
    targets = torch.zeros(5, BATCH, dtype=torch.int64)
    call = (decoder.embedding, decoder.cell, decoder.head)
    out = accumext.decode_loss(*call, targets, decoder.state, feedback="greedy")
    state = f"(float64 {list(decoder.state[0].shape)}, float64 {list(decoder.state[1].shape)})"
    tokens = f"int64 [5, {BATCH}]"
    assert repr(out) == (
        f"DecodeOutput(loss=float64 [], tokens={tokens}, inputs={tokens}, "
        f"token_losses=float64 [5, {BATCH}], state={state}, lengths=int64 [{BATCH}], "
        "outputs=None, extras=None, entropies=None)"
    )
    rolled = accumext.rollout(
        lambda x, state: (x, {"cache": [x, 1]}), None, 2, loss=lambda output, t: output.sum(),
        start=torch.ones(2, 3, requires_grad=True),
    )  # fmt: skip
    state = "{'cache': [float32 [2, 3], 1]}"
    expected = f"loss=float32 [], state={state}, output=float32 [2, 3], recomputed=False"
    assert repr(rolled) == f"RolloutOutput({expected})"
    assert repr(rolled._replace(state=torch.empty(2, device="meta"))).count("[2] on meta") == 1
