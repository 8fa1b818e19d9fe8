"""The predictions of decode_memory for callable cells, and the state that it leaves alone."""

from __future__ import annotations

import copy
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accumext
from accumext.decoder import _memory, _plan
from accumext.demo.memory import peak_memory

PREDICTION = 0.10  # of the measured peak
BATCH, SIZE, VOCABULARY = 16, 64, 100


class Attention(nn.Module):
    """A GRU cell that reads a memory [B, S, H] by dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRUCell(SIZE, SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor, h: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(x, h)
        weights = torch.bmm(memory, h[:, :, None]).softmax(1)
        read = torch.bmm(weights.transpose(1, 2), memory).squeeze(1)
        return self.out(torch.cat([h, read], 1)).tanh(), h


class AdditiveAttention(nn.Module):
    """Bahdanau's: a tanh of [B, S, A] in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(2 * SIZE, SIZE)
        self.query, self.key, self.score = (
            nn.Linear(SIZE, 48), nn.Linear(SIZE, 48), nn.Linear(48, 1)
        )  # fmt: skip

    def forward(self, x: Tensor, h: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(torch.tanh(self.query(h)[:, None] + self.key(memory)))
        read = (scores.softmax(1) * memory).sum(1)
        h = self.gru(torch.cat([x, read], 1), h)
        return h, h


class Perceptron(nn.Module):
    """Two layers of which the first is wide, with normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * SIZE, 200), nn.ReLU(), nn.BatchNorm1d(200), nn.Dropout(0.5),
            nn.Linear(200, SIZE),
        )  # fmt: skip

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return (self.net(torch.cat([x, h], 1)),) * 2


class Keeper(nn.Module):
    """Counts and keeps what it sees, in every way, and drops weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.total = self.total + 1
        self.seen.append(x)
        weight = F.dropout(self.net.net[0].weight, 0.5)
        self.last = F.linear(torch.cat([x, h], 1), weight)
        return self.net(x, h)


class Cached(nn.Module):
    """Attention over all inputs so far, whose keys and values are its state, [B, t, H] each."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        query, *new = self.project(x)[:, None].chunk(3, -1)
        if state is not None:
            new = [torch.cat(pair, 1) for pair in zip(state, new, strict=True)]
        read = F.scaled_dot_product_attention(query, *new)
        return self.out(read[:, 0]).tanh(), tuple(new)


def gru_of_two_layers() -> Any:
    gru = nn.GRU(SIZE, SIZE, 2)

    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = gru(x[None], state)
        return output[0], state

    return cell


def gru_cell() -> Any:
    module = nn.GRUCell(SIZE, SIZE)
    return lambda x, h: (module(x, h),) * 2


def parts(rows: int = VOCABULARY) -> tuple[nn.Embedding, nn.Linear]:
    return nn.Embedding(rows, SIZE), nn.Linear(SIZE, VOCABULARY)


def compare(cell: Any, steps: int, state: Any = None, rows: int = VOCABULARY, **call: Any) -> None:
    """Measured and predicted, where a callable's own memory, or the embedding's, is most of it."""
    embedding, head = parts(rows)
    state = torch.zeros(BATCH, SIZE) if state is None else state
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    call = {"feedback": "greedy", "memory_budget": 2**17, **call}
    predicted = accumext.decode_memory(embedding, cell, head, (steps, BATCH), state, **call)

    def run() -> None:
        accumext.decode_loss(embedding, cell, head, targets, state, **call).loss.backward()

    assert predicted == pytest.approx(peak_memory(run), rel=PREDICTION)


@pytest.mark.parametrize(
    ("attention", "steps", "places", "grad", "call"),
    [
        (Attention, 18, 400, True, {}),
        (Attention, 3, 100, False, {}),
        (AdditiveAttention, 18, 400, False, {}),
        (AdditiveAttention, 24, 50, True, {"k1": 4, "k2": 4}),
        (AdditiveAttention, 24, 50, True, {"k1": 4, "k2": 12}),
        (AdditiveAttention, 24, 50, True, {"state_grad_clip": 0.1}),
        (AdditiveAttention, 24, 50, True, {"lengths": torch.arange(BATCH) + 8}),
        (AdditiveAttention, 24, 50, True, {"eos": 3}),
        (AdditiveAttention, 24, 50, True, {"feedback": "teacher"}),
        # without a budget, the graph of as many of the last steps as are small: of all, or of few
        (AdditiveAttention, 24, 20, True, {"memory_budget": None}),
        (Attention, 24, 400, True, {"memory_budget": None}),
    ],
    ids=str,
)
def test_attention(attention: Any, steps: int, places: int, grad: bool, call: Any) -> None:
    memory = torch.randn(BATCH, places, SIZE, requires_grad=grad)
    compare(attention(), steps, context=(memory,), **call)


@pytest.mark.parametrize(
    ("make", "steps"),
    [(gru_cell, 3), (gru_cell, 40), (Perceptron, 40), (gru_of_two_layers, 3)],
)
def test_cells_without_context(make: Any, steps: int) -> None:
    compare(make(), steps, torch.zeros(2, BATCH, SIZE) if make is gru_of_two_layers else None)


def test_a_large_embedding() -> None:
    compare(gru_cell(), 3, rows=20_000)


@pytest.mark.parametrize(
    ("steps", "call"), [(112, {}), (16, {"memory_budget": None}), (112, {"lengths": [112, 3] * 8})]
)
def test_a_state_that_grows(steps: int, call: dict[str, Any]) -> None:
    """The graph of the last steps, where it is longest, is the largest."""
    compare(Cached(), steps, (torch.zeros(BATCH, 0, SIZE),) * 2, **call)


@pytest.mark.parametrize(
    ("make", "limit"),
    [(gru_cell, 2**18), (gru_cell, 2**21), (Cached, 3 * 2**20), (Cached, 2**23)],
)
def test_as_many_steps_are_kept_as_in_the_call(
    make: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of these steps is not made again, so that the cell is called once for each."""
    found, predict, steps, calls = [], _memory._kept_steps, 70, 0
    monkeypatch.setattr(_memory, "_kept_steps", lambda *a: found.append(predict(*a)) or found[-1])
    monkeypatch.setattr(_plan, "KEPT_GRAPH", limit)
    cell, (embedding, head) = make(), parts()

    def counted(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        nonlocal calls
        calls += 1
        return cell(x, state)

    empty = torch.zeros(BATCH, 0, SIZE)
    state = torch.zeros(BATCH, SIZE) if make is gru_cell else (empty, empty)
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    given = (embedding, counted, head, targets, state)
    accumext.decode_memory(*given, feedback="greedy")
    calls = 0
    accumext.decode_loss(*given, feedback="greedy").loss.backward()
    assert found == [2 * steps - calls]


def test_autocast_rounds_weights_once_and_keeps_them() -> None:
    """Those that the prediction rounds have no data: the call that follows must not find them."""
    memory = torch.randn(BATCH, 50, SIZE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        compare(AdditiveAttention(), 24, context=(memory,))


def test_a_memory_that_is_no_context_keeps_its_graph() -> None:
    """A cell may read what an encoder made: nothing flows into that graph, or frees it."""
    embedding, head = parts()
    encoder, cell = nn.Linear(SIZE, SIZE), Attention()
    memory = encoder(torch.randn(BATCH, 20, SIZE)).tanh()
    call: dict[str, Any] = {"feedback": "greedy", "state": torch.zeros(BATCH, SIZE)}

    def reads(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return cell(x, h, memory)

    predicted = accumext.decode_memory(embedding, reads, head, (20, BATCH), **call)
    call["context"] = (memory.detach().requires_grad_(),)
    expected = accumext.decode_memory(embedding, cell, head, (20, BATCH), **call)
    assert predicted == pytest.approx(expected, rel=PREDICTION)
    assert all(p.grad is None for m in (encoder, cell) for p in m.parameters())
    memory.sum().backward()
    assert encoder.weight.grad.any()


@pytest.mark.parametrize("how", ["module", "closure", "partial", "method"])
def test_nothing_is_drawn_or_written(how: str) -> None:
    embedding, head = parts()
    cell, state = Keeper(), torch.zeros(BATCH, SIZE)
    before, attributes = copy.deepcopy(cell.state_dict()), dict(vars(cell))
    callables: dict[str, Any] = {
        "module": cell,
        "closure": lambda x, h: cell(x, h),
        "partial": partial(cell),
        "method": cell.forward,
    }
    generator, numbers = torch.get_rng_state(), random.getstate()
    call = (embedding, callables[how], head, (20, BATCH), state)
    assert accumext.decode_memory(*call, feedback="sample") > 0
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == numbers
    for name, tensor in cell.state_dict().items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, before[name])
    assert vars(cell) == attributes
    assert (cell.calls, cell.seen) == (0, [])
    assert not state.any()
    cell(torch.zeros(BATCH, SIZE), state)  # it still computes


def test_a_cell_that_reads_values_is_taken_for_a_gru() -> None:
    """As one is whose graph nobody can know: the sizes of its weights are all that counts."""
    embedding, head = parts()

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRUCell(SIZE, SIZE)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = self.gru(x, h)
            return (h if h.sum() > 0 else h * 1), h

    call: dict[str, Any] = {"state": torch.zeros(BATCH, SIZE), "memory_budget": 2**17}
    guessed, known = (
        accumext.decode_memory(embedding, cell, head, (200, BATCH), feedback="greedy", **call)
        for cell in (Reads(), gru_cell())
    )
    assert guessed == pytest.approx(known, rel=0.2)


def test_modules_on_the_meta_device() -> None:
    embedding, head = parts()
    cell, state = Attention(), torch.zeros(BATCH, SIZE)
    memory = torch.zeros(BATCH, 30, SIZE, requires_grad=True)
    call: dict[str, Any] = {"feedback": "greedy"}
    expected = accumext.decode_memory(
        embedding, cell, head, (20, BATCH), state, context=(memory,), **call
    )
    meta = [m.to("meta") for m in (embedding, cell, head)]
    found = accumext.decode_memory(*meta, (20, BATCH), state, context=(memory,), **call)
    assert found == expected


def test_a_cell_that_makes_its_own_state_or_has_none() -> None:
    """And a call of no steps, in which there is nothing to measure."""
    embedding, head = parts()
    layer = nn.Sequential(nn.Linear(SIZE, 200), nn.ReLU(), nn.Linear(200, SIZE))
    call: dict[str, Any] = {"feedback": "greedy", "memory_budget": 2**14}

    def run(cell: Any) -> tuple[int, int]:
        predicted = accumext.decode_memory(embedding, cell, head, (18, BATCH), **call)
        targets = torch.randint(VOCABULARY, (18, BATCH))
        decode = partial(accumext.decode_loss, embedding, cell, head, targets, **call)
        return predicted, peak_memory(lambda: decode().loss.backward())

    for cell in (
        lambda x, h: (layer(x).tanh(), None),
        lambda x, h: (layer(x if h is None else x + h).tanh(),) * 2,
    ):
        predicted, peak = run(cell)
        assert predicted == pytest.approx(peak, rel=PREDICTION)
    empty = accumext.decode_memory(embedding, gru_cell(), head, (0, BATCH), **call)
    assert 0 < empty < predicted


def test_cells_that_torch_has_compiled_or_traced_work_afterwards() -> None:
    embedding, head = parts()
    x, h = torch.randn(2, BATCH, SIZE)
    memory = torch.randn(BATCH, 20, SIZE)
    plain = AdditiveAttention()
    expected = plain(x, h, memory)
    call: dict[str, Any] = {"feedback": "greedy", "context": (memory,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(plain, (x, h, memory), check_trace=False)
    for cell in (torch.compile(plain, backend="eager"), traced):
        assert accumext.decode_memory(embedding, cell, head, (20, BATCH), h, **call) > 0
        for found, wanted in zip(cell(x, h, memory), expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_hooks_of_weights_are_not_called() -> None:
    """Those of a parameter see its gradient; others, such as an optimizer's, run behind it."""
    cell, seen = Attention(), []
    cell.gru.weight_hh.register_hook(seen.append)
    cell.out.weight.register_post_accumulate_grad_hook(seen.append)
    state, call = torch.zeros(BATCH, SIZE), {"context": (torch.randn(BATCH, 20, SIZE),)}
    embedding, head = parts()
    accumext.decode_memory(embedding, cell, head, (18, BATCH), state, feedback="greedy", **call)
    assert not seen
    compare(cell, 18, **call)
    assert len(seen) == 2


def test_without_gradients_there_is_no_graph() -> None:
    embedding, head = parts()
    cell, state = gru_cell(), torch.zeros(BATCH, SIZE)
    call: dict[str, Any] = {"feedback": "greedy", "memory_budget": 2**17}
    full = accumext.decode_memory(embedding, cell, head, (40, BATCH), state, **call)
    embedding.weight.requires_grad_(False)
    frozen = accumext.decode_memory(
        embedding, lambda x, h: (x, h), head, (40, BATCH), state, **call
    )
    assert frozen < full
