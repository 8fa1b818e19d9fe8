"""Rows that begin anew in the middle of a call. Their losses and gradients, in windows and where
rows end, are held against the plain loop by tests/decoder/test_decode_loss_options.py, and here
those of `tbptt`; those of `rollout` by tests/loops/test_rollout.py."""

# ruff: noqa: E501  (one contract to a line)

import re
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder, relative_distance, truncated
from support.decoding import BATCH, EXACT, TARGETS, VOCABULARY, run, wrapped
from torch import Tensor, nn

import accumext
from accumext.recurrence._resets import Resets, resets_of

STEPS = len(TARGETS)
CPU = torch.device("cpu")


def test_a_mask_that_the_host_does_not_read():
    """As on a GPU: every step may have a reset."""
    decoder = make_decoder("lstm")
    mask = torch.rand(STEPS, BATCH) < 0.3
    known = resets_of("decode_loss", mask, (STEPS, BATCH), decoder.state, CPU, "the head's device")
    assert known.steps == {t for t in range(1, STEPS) if mask[t].any()}
    every = Resets(mask, frozenset(range(1, STEPS)))
    expected = decoder.gradients(run(decoder, feedback="greedy", resets=mask).loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accumext.decoder._tokens.resets_of", lambda *_: every)
        actual = decoder.gradients(run(decoder, feedback="greedy", resets=mask).loss)
    assert relative_distance(actual, expected) < EXACT


def test_random_cuts_spare_resets():
    """A mean of 2 steps cuts half of all gradients, and none of those that a reset sends on."""
    resets = torch.ones(STEPS, BATCH, dtype=torch.bool)
    decoder = make_decoder("gru_cell")
    for cell in (decoder.cell, wrapped(decoder)):
        out = run(decoder, cell, resets=resets, k2=2, truncation="random")
        expected = decoder.gradients(run(decoder, cell, resets=resets).loss)
        assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


class Memory(nn.Module):
    """A GRU cell whose state is nested, has the batch in dimension 1, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 4, dtype=torch.float64)
        self.cell = nn.GRUCell(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, VOCABULARY, dtype=torch.float64)
        self.first = nn.Parameter(torch.randn(2, BATCH, 4, dtype=torch.float64))

    def state(self) -> dict[str, Any]:
        return {"h": (self.first.tanh(), self.first * 2), "steps": torch.zeros(())}

    def forward(self, token: Tensor, state: dict[str, Any], *memory: Tensor) -> Any:
        (h, c), steps = state["h"], state["steps"]
        h = torch.stack([self.cell(self.words(token) + sum(memory), h[0]), h[1] + c[0]])
        return self.head(h.sum(0)), {"h": (h, c * 0.9), "steps": steps + 1}


def one_step(
    model: Memory, t: int, state: Any, live: Tensor, resets: Tensor, *memory: Tensor
) -> Any:
    """By the definition: rows that live and are reset begin with the initial state."""

    def chosen(rows: Tensor, new: Any, old: Any) -> Any:
        pairs = zip(new["h"], old["h"], strict=True)
        h = tuple(torch.where(rows[None, :, None], one, other) for one, other in pairs)
        return {**new, "h": h}

    if t > 0:
        initial = {**model.state(), "steps": state["steps"]}
        state = chosen(resets[t] & live[t], initial, state)
    fed = TARGETS[t - 1] if t > 0 else torch.zeros(BATCH, dtype=torch.int64)
    logits, new = model(torch.where(live[t], fed, 0), state, *memory)
    target = torch.where(live[t], TARGETS[t], -100)
    loss = F.cross_entropy(logits, target) if live[t].any() else logits.sum() * 0
    return loss, chosen(live[t], new, state)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "context"])
@pytest.mark.parametrize("lengths", [[STEPS] * BATCH, [STEPS, 2, 4]], ids=str)
@pytest.mark.parametrize("periods", [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (9, 9)])
def test_tbptt_by_its_definition(periods, lengths, shared):
    """Every reset of a window reaches the initial state, wherever the window begins."""
    model, live = Memory(), torch.arange(STEPS)[:, None] < torch.tensor(lengths)
    resets = torch.rand(STEPS, BATCH) < 0.4

    def context() -> tuple[Tensor, ...]:  # from the graph that the initial state comes from
        return (model.first.tanh()[0],) if shared else ()

    def run(begin: int, end: int, state: Any) -> tuple[list[Tensor], Any]:
        found = []
        for t in range(begin, end):
            loss, state = one_step(model, t, state, live, resets, *context())
            found.append(loss)
        return found, state

    losses, last = truncated(run, model.state(), STEPS, *periods)
    expected = torch.stack(losses).mean()
    expected.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    result = accumext.tbptt(
        model, TARGETS, model.state(), criterion=F.cross_entropy, feedback="teacher", resets=resets,
        lengths=lengths, k1=periods[0], k2=periods[1], context=context(), batch_dim=1,
    )  # fmt: skip
    torch.testing.assert_close(result.loss, expected.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(result.state["h"], tuple(t.detach() for t in last["h"]))
    assert relative_distance([p.grad for p in model.parameters()], wanted) < EXACT
    assert result.state["steps"] == STEPS  # of all rows


def test_tbptt_does_not_read_the_mask_of_a_device(monkeypatch):
    """Every step may then have a reset, and every window reach the initial state."""
    model, resets, found = Memory(), torch.rand(STEPS, BATCH) < 0.3, []
    every = Resets(resets, frozenset(range(1, STEPS)))
    for known in (True, False):
        if not known:
            monkeypatch.setattr(sys.modules["accumext.loops._tbptt"], "resets_of", lambda *_: every)
        accumext.tbptt(
            model, TARGETS, model.state(), criterion=F.cross_entropy, resets=resets, k1=2, k2=3,
            batch_dim=1,
        )  # fmt: skip
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert relative_distance(*found) < EXACT


MASK, ONE = torch.ones(STEPS, BATCH, dtype=torch.bool), torch.ones(1, requires_grad=True)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"resets": MASK.float()}, TypeError, "resets must be a bool tensor [T, B], got a float32 tensor"),
    ({"resets": [True]}, TypeError, "resets must be a bool tensor [T, B], got list"),
    ({"resets": MASK.t()}, ValueError, "resets must have shape [6, 3], got [3, 6]"),
    ({"resets": MASK.to("meta")}, ValueError, "resets must be on {whose}, cpu, or on a CPU, got meta"),
    ({"state": None}, ValueError, "state must be given if rows are reset to it, got None"),
    ({"state": torch.zeros(BATCH, BATCH, 4)}, ValueError,
     "batch_dim must be given if dimensions 0 and 1 may both be the batch of 3, got a state of shape [3, 3, 4]"),
    ({"batch_dim": -1}, ValueError, "batch_dim must be at least 0, got -1"),
    ({"step": lambda x, h: (x * ONE, torch.cat([h, h], 1))}, ValueError,
     "step must keep the shapes of its state if rows are reset, got [3, 10] after [3, 5]. "
     "Keep a cache as long as it gets, and how much of it each row has, [B]"),
]  # fmt: skip


@pytest.mark.parametrize("op", ["tbptt", "rollout"])
@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[t[:60] for _, _, t in WRONG])
def test_wrong_arguments(op, change, kind, text):
    call: dict[str, Any] = {
        "step": lambda x, h: (x * ONE, h),
        "state": torch.zeros(BATCH, 5),
        "resets": MASK,
    }
    numbers = torch.zeros(STEPS, BATCH, 4)
    if op == "tbptt":
        call |= {"targets": numbers, "criterion": F.mse_loss, "feedback": "teacher"}
    else:
        call |= {"steps": STEPS, "start": numbers[0], "loss": lambda x, t: x.mean()}
    getattr(accumext, op)(**call)
    text = text.replace("{whose}", "the device of " + ("targets" if op == "tbptt" else "the state"))
    with pytest.raises(kind, match=rf"^{op}: {re.escape(text)}$"):
        getattr(accumext, op)(**{**call, **change})


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no_grad"])
@pytest.mark.parametrize("op", ["tbptt", "rollout"])
def test_an_initial_state_that_a_step_writes_into_is_an_error(op, graph):
    numbers, weight = torch.zeros(STEPS, BATCH, 4), torch.ones(1, requires_grad=True)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x * weight, h.add_(1)

    if op == "tbptt":
        call = partial(
            accumext.tbptt, step, numbers, numbers[0], criterion=F.mse_loss, feedback="teacher",
            backward=lambda loss: None,
        )  # fmt: skip
    else:
        start = numbers[1]
        call = partial(
            accumext.rollout, step, numbers[0], STEPS, loss=lambda x, t: x.mean(), start=start
        )
    text = rf"^{op}: step must write into no tensor of .*state.*got a write into one of shape"
    with torch.set_grad_enabled(graph), pytest.raises(RuntimeError, match=text):
        call(resets=MASK)
