"""A backward pass for every step of a recurrent module: whether its state was detached."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

import accumext
from accumext.auditing._states import States
from accumext.auditing._torch_private import RECURRENT

STEPS, ROWS, SIZE, WORDS = 20, 3, 6, 11
CELLS = {
    "GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN,
    "GRUCell": nn.GRUCell, "LSTMCell": nn.LSTMCell, "RNNCell": nn.RNNCell,
}  # fmt: skip
CUTS = {
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "in a new shape": lambda h: h.detach().view(h.shape),
}


class Decoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.cell = CELLS[kind](SIZE, SIZE)
        self.head = nn.Linear(SIZE, WORDS)
        self.kind = kind

    def begin(self):
        rows = (ROWS,) if self.kind.endswith("Cell") else (1, ROWS)
        state = torch.zeros(*rows, SIZE)
        return (state, state) if self.kind.startswith("LSTM") else state

    def forward(self, token, state):
        x = self.embedding(token)
        if self.kind.endswith("Cell"):
            state = self.cell(x, state)
            return self.head(state[0] if isinstance(state, tuple) else state), state
        y, state = self.cell(x[None], state)
        return self.head(y[0]), state


def asked(kind, cut, retain=False, step_each=False):
    """The questions of a loop with a pass for each step, and one step of the optimizer for all, or
    for each; with their values."""
    torch.manual_seed(0)
    model = Decoder(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with accumext.audit() as audit:
        for _ in range(2):
            state, token = model.begin(), torch.zeros(ROWS, dtype=torch.int64)
            for target in torch.randint(WORDS, (STEPS, ROWS)):
                output, state = model(token, state)
                loss = cross_entropy(output, target) / (1 if step_each else STEPS)
                loss.backward(retain_graph=retain)
                state, token = tree_map(cut, state), output.argmax(1)
                if step_each:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.findings == ()
    return {one.id: one.value for one in audit.questions}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", CELLS)
def test_a_detached_state(kind, cut):
    assert asked(kind, CUTS[cut]) == {"truncation.detached": STEPS - 1}


@pytest.mark.parametrize("kind", CELLS)
def test_a_state_that_keeps_its_graph(kind):
    """Every pass goes back to the first step: what grows is said, and no truncation"""
    said = asked(kind, lambda h: h, retain=True)
    assert said.keys() == {"memory.growing", "memory.graph"}


def test_a_state_that_is_computed_anew():
    """As zeros, or a copy of numbers: not what a step computed"""
    assert asked("GRU", torch.zeros_like) == {}


def test_windows_of_one_step():
    """Truncated backpropagation through a text that goes on from step to step is usual"""
    assert asked("GRU", torch.Tensor.detach, step_each=True) == {}


def test_tbptt_is_measured_instead():
    """It detaches by itself: that is said with its distance from the exact gradient"""
    torch.manual_seed(0)
    model = Decoder("GRUCell")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accumext.audit(model, optimizer) as audit:
        targets = torch.randint(WORDS, (STEPS, ROWS))
        accumext.tbptt(model, targets, model.begin(), criterion=cross_entropy, k1=1)
        optimizer.step()
    assert {one.id for one in audit.questions} == {"truncation.distance"}


def test_memory_that_is_used_again():
    """A batch may come to lie where a state has been that is gone"""
    states, memory = States(lambda: True), torch.zeros(64).numpy()
    for gone in (False, True):
        state = torch.from_numpy(memory).requires_grad_()
        states._see(None, state)  # computed by a step, which begins without a state
        batch = torch.from_numpy(memory) if gone else state.detach()
        if gone:
            del state
        states._see(batch, None)
        assert states.end() == (not gone)


def test_torch_is_put_back():
    usual = torch._C._VariableFunctions
    with accumext.audit():
        assert torch._VF.gru is not usual.gru
    assert all(getattr(torch._VF, name) is getattr(usual, name) for name in RECURRENT)
