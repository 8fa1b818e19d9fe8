"""The truncated gradient of a loop through `tbptt`: its distance; the loop stays as it is."""

import copy
from typing import Any

import pytest
import torch
from by_definition import distance
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import accumext

WORDS, SIZE, STEPS, ROWS = 11, 6, 9, 3


class Decoder(nn.Module):
    """With what a second run would change: a generator, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, SIZE)
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(SIZE, WORDS)

    def forward(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.drop(self.embedding(token)), hidden)
        return self.head(self.norm(hidden)), hidden


def model() -> Decoder:
    torch.manual_seed(1)
    return Decoder().double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (STEPS, ROWS)), torch.randn(ROWS, 4, dtype=torch.float64)


def train(one: Decoder, audited: bool, **options: Any) -> tuple[list[Tensor], Tensor, Any]:
    """Two steps on states of an encoder, whose graph is used again after `tbptt`."""
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    torch.manual_seed(2)
    with accumext.audit(one, optimizer, windows=2 if audited else 1) as audit:
        if not audited:
            optimizer.step()  # the window is over before the loop begins
        for _ in range(2):
            targets, x = batch()
            hidden = one.encoder(x)
            settings = {"criterion": cross_entropy, "k1": 2} | options
            accumext.tbptt(one, targets, hidden, **settings)
            optimizer.step()
            optimizer.zero_grad()
    tensors = [*one.parameters(), *one.buffers()]
    return [t.detach().clone() for t in tensors], torch.get_rng_state(), audit


def test_the_loop_stays_as_it_was():
    """Parameters, buffers and generators, where the state has a graph of its own"""
    tensors, rng, audit = train(model(), audited=True)
    plain, plain_rng, _ = train(model(), audited=False)
    (finding,) = audit.findings
    assert finding.name == "truncated gradient"
    assert "k1=2, k2=2 of 9 steps" in finding.evidence
    assert all(map(torch.equal, tensors, plain))
    assert torch.equal(rng, plain_rng)


@pytest.mark.parametrize("share", [0.0, 0.4], ids=["", "resets"])
def test_distance_of_a_regression_with_context(share):
    one = nn.GRUCell(2, 2).double()
    before = copy.deepcopy(one.state_dict())
    x, y = torch.randn(2, STEPS, ROWS, 2, dtype=torch.float64)
    memory = torch.randn(ROWS, 2, dtype=torch.float64, requires_grad=True) * 1.0
    resets = torch.rand(STEPS, ROWS) < share

    def step(value, state, memory):
        state = one(value + memory, state)
        return state, state

    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    with accumext.audit(one, optimizer) as audit:
        accumext.tbptt(
            step, y, torch.zeros(ROWS, 2, dtype=torch.float64), criterion=mse_loss, inputs=x,
            feedback="teacher", k1=1, context=(memory,), resets=resets if share else None,
        )  # fmt: skip
        optimizer.step()

    def gradient(cut):
        state, losses = torch.zeros(ROWS, 2, dtype=torch.float64), []
        for value, target, anew in zip(x, y, resets, strict=True):
            state = (state.detach() if cut else state).masked_fill(anew[:, None], 0)
            out, state = step(value, state, memory.detach())
            losses.append(mse_loss(out, target))
        grads = torch.autograd.grad(torch.stack(losses).mean(), list(one.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    one.load_state_dict(before)
    right = distance(gradient(True), gradient(False))
    assert [(f.name, f.value) for f in audit.findings] == [
        ("truncated gradient", pytest.approx(right, rel=1e-6))
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"feedback": "scheduled", "teacher_forcing": 0.5},
        {"lengths": torch.tensor([9, 5, 2])},
        {"k1": STEPS},
    ],
    ids=["scheduled", "lengths", "exact"],
)
def test_what_is_not_measured_or_exact(options):
    _, _, audit = train(model(), audited=True, **options)
    assert audit.findings == ()


def test_a_step_that_cannot_be_run_again_is_left_alone():
    one, calls = model(), []

    def step(token, hidden):
        calls.append(token)
        if len(calls) == STEPS + 2:
            raise ValueError("no more")
        return one(token, hidden)

    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    targets, x = batch()
    hidden = one.encoder(x).detach()
    with accumext.audit(one, optimizer) as audit:
        with pytest.warns(UserWarning, match="truncated gradient was not measured: no more"):
            accumext.tbptt(step, targets, hidden, criterion=cross_entropy, k1=1)
        optimizer.step()
    assert [f.name for f in audit.findings] == ["parameters without gradient"]  # the encoder's
    with pytest.raises(RuntimeError, match="inside the block"):
        audit.measure_truncation(one, targets, hidden, criterion=cross_entropy, k1=1)
