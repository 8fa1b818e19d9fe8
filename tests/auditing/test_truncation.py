"""The truncated gradient of a loop through `tbptt`: its distance; the loop stays as it is."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from by_definition import distance
from support.tensors import assert_equal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import accumext
from accumext.auditing._events import Truncated

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


def asked(audit: accumext.Audit) -> list[tuple[str, float]]:
    assert audit.findings == ()
    return [(question.id, question.value) for question in audit.questions]


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
    assert audit.findings == ()
    (question,) = audit.questions
    assert question.id == "truncation.distance"
    assert "k1=2, k2=2 of 9 steps" in question.evidence
    assert_equal(tensors, plain)
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
    assert asked(audit) == [("truncation.distance", pytest.approx(right, rel=1e-6))]


@pytest.mark.parametrize(
    "options",
    [
        {"feedback": "scheduled", "teacher_forcing": 0.5},
        {"lengths": torch.tensor([9, 5, 2])},
        {"feedback": torch.arange(STEPS)[:, None].expand(STEPS, ROWS) % 2 == 0},
        {"k1": STEPS},
    ],
    ids=["scheduled", "lengths", "mask", "exact"],
)
def test_what_is_not_measured_or_exact(options):
    _, _, audit = train(model(), audited=True, **options)
    assert "truncation.distance" not in dict(asked(audit))


def test_without_a_model_there_is_nothing_to_measure_before_a_pass():
    one, (targets, x) = model(), batch()
    state = one.encoder(x).detach()
    none = pytest.raises(RuntimeError, match=r"^audit: model must be given .*, got None$")
    with accumext.audit() as audit:
        with none:
            audit.measure_truncation(one, targets, state, criterion=cross_entropy, k1=1)
        one(targets[0], state)[0].square().sum().backward()
        assert audit.measure_truncation(one, targets, state, criterion=cross_entropy, k1=1) > 0


# --- decode_loss ----------------------------------------------------------------------------------


class Words(nn.Module):
    """The parts of a decoder; states come from a trunk, whose graph the loop needs later."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.embedding = nn.Linear(4, SIZE), nn.Embedding(WORDS, SIZE)
        self.cell, self.head = nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, WORDS)


def words() -> Words:
    torch.manual_seed(1)
    return Words().double()


def decode_step(one: Words, audited: bool = True, **options: Any) -> tuple[list[Tensor], Any]:
    """Gradients of two calls of `decode_loss`, of which the first is measured."""
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    torch.manual_seed(2)
    targets, x = batch()
    with accumext.audit(one, optimizer) if audited else contextlib.nullcontext() as audit:
        for _ in range(2):
            settings = {"feedback": "greedy"} | options
            losses = accumext.decode_loss(
                one.embedding, one.cell, one.head, targets, one.trunk(x), **settings
            ).loss
            (losses.mean() / 2).backward()
            x = x + 1
        grads = [p.grad.clone() for p in one.parameters()]
        optimizer.step()
    return [*grads, torch.get_rng_state()], audit


def by_hand(one: Words, k1: int, k2: int, feedback: str) -> Tensor:
    """The gradient of every k1 steps' loss, through k2 steps; of all but the trunk's parameters."""
    torch.manual_seed(2)
    targets, x = batch()
    trained = [p for n, p in one.named_parameters() if not n.startswith("trunk")]
    states, tokens = [one.trunk(x).detach()], [torch.zeros(ROWS, dtype=torch.long)]
    with torch.no_grad():
        for target in targets:
            states.append(one.cell(one.embedding(tokens[-1]), states[-1]))
            greedy = one.head(states[-1]).argmax(-1)
            tokens.append(greedy if feedback == "greedy" else target)
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    for end in range(k1, STEPS + 1, k1):
        begin, loss = max(0, end - k2), 0.0
        state = states[begin]
        for t in range(begin, end):
            state = one.cell(one.embedding(tokens[t]), state)
            if t >= end - k1:
                loss = loss + cross_entropy(one.head(state), targets[t]) / STEPS
        total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
    return total


@pytest.mark.parametrize("feedback", ["greedy", "teacher"])
@pytest.mark.parametrize(("k1", "k2"), [(1, 1), (3, 3), (1, 4)])
def test_distance_of_decode_loss(k1, k2, feedback):
    """By detached states in plain torch; measured once, of the first call"""
    one = words()
    right = distance(by_hand(one, k1, k2, feedback), by_hand(one, STEPS, STEPS, feedback))
    _, audit = decode_step(one, k1=k1, k2=k2, feedback=feedback)
    assert asked(audit) == [("truncation.distance", pytest.approx(right, rel=1e-6))]
    assert f"k1={k1}, k2={k2} of 9 steps" in audit.questions[0].evidence
    measured = [event for event in audit.record.events if isinstance(event, Truncated)]
    assert len(measured) == 1


def test_k1_is_k2_if_it_is_left_out():
    _, audit = decode_step(words(), k2=3)
    assert "k1=3, k2=3 of 9 steps" in audit.questions[0].evidence


@pytest.mark.parametrize("options", [{}, {"k1": 1, "k2": 1}], ids=["exact", "truncated"])
def test_the_gradients_of_decode_loss_stay_as_they_were(options):
    """Those of the trunk, too, and what generators draw, with dropout"""
    options |= {"embedding_dropout": 0.3}
    (found, audit), (plain, _) = (decode_step(words(), a, **options) for a in (True, False))
    assert_equal(found, plain)
    assert len(asked(audit)) == bool(options.get("k2"))


@pytest.mark.filterwarnings("ignore:decode_loss. k1=1 has no effect:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"k2": 3, "truncation": "random"},
        {"k1": 1, "k2": 1, "reduction": "none"},
        {"k1": 1, "k2": 1, "feedback": "scheduled", "teacher_forcing": 0.5},
        {"k1": 1, "k2": 1, "feedback": "sample"},
        {"k1": 1, "k2": 1, "lengths": [9, 5, 2]},
        {"k1": STEPS, "k2": STEPS},
        {"k1": 1},
        {},
    ],
    ids=["random", "none", "scheduled", "sample", "lengths", "whole", "k1", "exact"],
)
def test_what_is_not_measured_of_decode_loss(options):
    """A gradient that is drawn, losses of tokens by themselves, and what is exact"""
    _, audit = decode_step(words(), **options)
    assert asked(audit) == []
    measured = [event for event in audit.record.events if isinstance(event, Truncated)]
    assert len(measured) == (options.get("k2") == STEPS)


def test_inputs_with_a_graph_of_their_own():
    """Which the loop's own backward passes still need"""
    one, grads = words(), []
    targets, x = batch()
    series = torch.randn(STEPS, ROWS, 4, dtype=torch.float64)

    def step(value, state):
        state = one.cell(value, state)
        return one.head(state), state

    for watch in (accumext.audit, lambda *_: contextlib.nullcontext()):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        with watch(one, optimizer) as audit:
            settings = {"inputs": one.trunk(series), "feedback": "teacher", "k1": STEPS}
            state = one.trunk(x).detach()
            accumext.tbptt(step, targets, state, criterion=cross_entropy, **settings)
            optimizer.step()
        with watch(one, optimizer) as audit:
            settings = {"inputs": one.trunk(series), "feedback": "teacher", "k1": 3, "k2": 3}
            accumext.decode_loss(
                None, one.cell, one.head, targets, state, **settings
            ).loss.backward()
            optimizer.step()
        if audit is not None:
            assert "truncation.distance" in dict(asked(audit))
        grads.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
        one.zero_grad()
    assert_equal(*grads)


def test_a_call_inside_is_not_measured():
    """A step that decodes by itself: the outer call is measured, alone"""
    one, calls = words(), []
    targets, x = batch()

    def step(token, state):
        calls.append(len(token))
        with torch.no_grad():
            accumext.decode_loss(
                one.embedding, one.cell, one.head, targets, state, feedback="greedy", k2=1
            )
        state = one.cell(one.embedding(token), state)
        return one.head(state), state

    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    with accumext.audit(one, optimizer) as audit:
        accumext.tbptt(step, targets, one.trunk(x).detach(), criterion=cross_entropy, k1=1)
        optimizer.step()
    measured = [event for event in audit.record.events if isinstance(event, Truncated)]
    assert [(event.k1, event.k2) for event in measured] == [(1, 1)]
    assert len(calls) == 3 * STEPS  # the loop's own, a truncated and an exact one


# --- steps that fail ------------------------------------------------------------------------------


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
    assert [id for id, _ in asked(audit)] == ["parameters.no_gradient"]  # the encoder's
    with pytest.raises(RuntimeError, match="inside the block"):
        audit.measure_truncation(one, targets, hidden, criterion=cross_entropy, k1=1)
