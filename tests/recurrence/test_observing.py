"""Observers are told of calls before they run, with all arguments by name."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accumext
from accumext.recurrence.observing import observers


@pytest.fixture
def calls():
    seen = []
    observers.append(seen.append)
    yield seen
    observers.remove(seen.append)


def test_a_decode_loss_is_told(calls):
    embedding, cell, head = nn.Embedding(7, 4), nn.GRUCell(4, 5), nn.Linear(5, 7)
    targets = torch.randint(7, (3, 2))
    out = accumext.decode_loss(embedding, cell, head, targets, feedback="greedy", k2=2)
    (call,) = calls
    assert call.function is accumext.decode_loss
    assert list(call.arguments) == list(inspect.signature(accumext.decode_loss).parameters)
    assert call.arguments["targets"] is targets
    assert (call.arguments["k1"], call.arguments["k2"]) == (None, 2)
    assert torch.equal(call.function(**call.arguments).loss, out.loss)


def test_a_tbptt_is_told_before_it_is_checked(calls):
    cell = nn.GRUCell(4, 7)
    targets = torch.randint(7, (3, 2))

    def step(token, state):
        state = cell(torch.zeros(len(token), 4), state)
        return state, state

    with pytest.raises(ValueError, match="k1"):
        accumext.tbptt(step, targets, torch.zeros(2, 7), criterion=cross_entropy, k1=0)
    (call,) = calls
    assert call.function is accumext.tbptt
    assert list(call.arguments) == list(inspect.signature(accumext.tbptt).parameters)
    assert call.arguments["k1"] == 0


def test_an_observer_that_raises_ends_the_call(calls):
    """No observer is called in silence that cannot do its work"""

    def fails(call):
        raise RuntimeError("an observer")

    observers.append(fails)
    try:
        with pytest.raises(RuntimeError, match="an observer"):
            accumext.decode_loss(
                nn.Embedding(7, 4), nn.GRUCell(4, 5), nn.Linear(5, 7), torch.zeros(2, 1).long(),
                feedback="greedy",
            )  # fmt: skip
    finally:
        observers.remove(fails)
    assert len(calls) == 1
