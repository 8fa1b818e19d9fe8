"""The predictions of decode_memory for callable cells, and the state that it leaves alone."""

import copy
import itertools
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _callable, _memory, _plan

PREDICTION = 0.10  # of the measured peak
BATCH, SIZE, VOCABULARY = 16, 64, 100


class Attention(nn.Module):
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


START = torch.zeros(BATCH, SIZE)


def parts(rows: int = VOCABULARY) -> tuple[nn.Module, nn.Module]:
    return nn.Embedding(rows, SIZE), nn.Linear(SIZE, VOCABULARY)


def predicted(
    cell: Any, steps: int = 20, state: Any = START, modules: Any = None, **call: Any
) -> int:
    embedding, head = modules or parts()
    call = {"feedback": "greedy", **call}
    return accumext.decode_memory(embedding, cell, head, (steps, BATCH), state, **call)


def compare(cell: Any, steps: int, state: Any = START, rows: int = VOCABULARY, **call: Any) -> int:
    """Measured and predicted, where a callable's own memory, or the embedding's, is most of it."""
    embedding, head = parts(rows)
    call = {"feedback": "greedy", "memory_budget": 2**17, **call}
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    found = predicted(cell, steps, state, (embedding, head), **call)

    def run() -> None:
        accumext.decode_loss(embedding, cell, head, targets, state, **call).loss.backward()

    assert found == pytest.approx(peak_memory(run), rel=PREDICTION)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "places", "grad", "call"),
    [
        (18, 400, False, {}),
        (3, 100, True, {}),
        (12, 50, True, {"k1": 4, "k2": 4}),
        (12, 50, True, {"k1": 4, "k2": 8}),
        (8, 50, True, {"state_grad_clip": 0.1}),
        (8, 50, True, {"lengths": torch.arange(BATCH) % 8 + 1}),
        (8, 50, True, {"eos": 3}),
        (8, 50, True, {"feedback": "teacher"}),
        # without a budget, the graph of as many of the last steps as are small: of all, or of few
        (8, 20, True, {"memory_budget": None}),
        (20, 400, True, {"memory_budget": None}),
    ],
    ids=str,
)
def test_attention(steps, places, grad, call):
    memory = torch.randn(BATCH, places, SIZE, requires_grad=grad)
    compare(Attention(), steps, context=(memory,), **call)


@pytest.mark.parametrize(
    ("make", "steps"), [(gru_cell, 3), (gru_cell, 20), (Perceptron, 20), (gru_of_two_layers, 3)]
)
def test_cells_without_context(make, steps):
    compare(make(), steps, torch.zeros(2, BATCH, SIZE) if make is gru_of_two_layers else START)


def test_windows_of_one_step():
    """Each adds its gradients to those of the others."""
    compare(Perceptron(), 8, k1=1, k2=1)


def test_a_large_embedding():
    compare(gru_cell(), 3, rows=20_000)


@pytest.mark.parametrize(
    ("steps", "call"),
    [
        pytest.param(112, {}, marks=pytest.mark.slow),
        (16, {"memory_budget": None}),
        pytest.param(112, {"lengths": [112, 3] * 8}, marks=pytest.mark.slow),
    ],
)
def test_a_state_that_grows(steps, call):
    """The graph of the last steps, where it is longest, is the largest."""
    compare(Cached(), steps, (torch.zeros(BATCH, 0, SIZE),) * 2, **call)


@pytest.mark.parametrize("budget", [2**17, None])
@pytest.mark.parametrize("steps", [17, 24, 70])
def test_a_state_that_grows_from_none(steps, budget):
    """Over a last segment of few steps; without a budget, graphs of two segments may be kept."""
    compare(Cached(), steps, None, memory_budget=budget)


@pytest.mark.parametrize("limit", [2**20, 3 * 2**20])
def test_a_state_that_grows_if_the_graphs_of_the_first_and_last_steps_are_kept(limit, monkeypatch):
    """Which are small ones and large ones."""
    monkeypatch.setattr(_plan, "KEPT_GRAPH", limit)
    compare(Cached(), 140, (torch.zeros(BATCH, 0, SIZE),) * 2, memory_budget=None)


@pytest.mark.parametrize(
    ("make", "limit"), [(gru_cell, 2**18), (gru_cell, 2**21), (Cached, 3 * 2**20), (Cached, 2**23)]
)
def test_as_many_steps_are_kept_as_in_the_call(make, limit, monkeypatch):
    """The graph of these steps is not made again, so that the cell is called once for each."""
    found, predict, steps = [], _memory.kept_spans, 70
    calls = itertools.count()  # which a replay does not put back
    monkeypatch.setattr(_memory, "kept_spans", lambda *a: found.append(predict(*a)) or found[-1])
    monkeypatch.setattr(_plan, "KEPT_GRAPH", limit)
    cell, (embedding, head) = make(), parts()

    def counted(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        next(calls)
        return cell(x, state)

    empty = torch.zeros(BATCH, 0, SIZE)
    state = START if make is gru_cell else (empty, empty)
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    given = (embedding, counted, head, targets, state)
    accumext.decode_memory(*given, feedback="greedy")
    before = next(calls)
    accumext.decode_loss(*given, feedback="greedy").loss.backward()
    (spans,) = found
    kept = sum(end - begin for begin, end in spans)
    assert kept == 2 * steps - (next(calls) - before - 1)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("make", [gru_cell, Perceptron, Cached])
def test_the_first_graph_has_the_size_that_the_call_measures(make, half, monkeypatch):
    """Or graphs would be counted that the call does not keep, and the other way round."""
    sizes: list[int] = []

    def keeps(begin: int, steps: int, graph: int, growth: int) -> bool:
        sizes.append(graph)
        return False

    for module in (_memory, _callable):
        monkeypatch.setattr(module, "keeps_graph", keeps)
    cell, (embedding, head) = make(), parts()
    state = (torch.zeros(BATCH, 3, SIZE),) * 2 if make is Cached else START
    given = (embedding, cell, head, torch.randint(VOCABULARY, (3, BATCH)), state)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        accumext.decode_memory(*given, feedback="greedy")
        accumext.decode_loss(*given, feedback="greedy")
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]


def test_autocast_rounds_weights_once_and_keeps_them():
    """Those that the prediction rounds have no data: the call that follows must not find them."""
    memory = torch.randn(BATCH, 50, SIZE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        compare(Attention(), 8, context=(memory,))


def test_a_memory_that_is_no_context_keeps_its_graph():
    """A cell may read what an encoder made: nothing flows into that graph, or frees it."""
    encoder, cell = nn.Linear(SIZE, SIZE), Attention()
    memory = encoder(torch.randn(BATCH, 20, SIZE)).tanh()
    found = predicted(lambda x, h: cell(x, h, memory), 8)
    expected = predicted(cell, 8, context=(memory.detach().requires_grad_(),))
    assert found == pytest.approx(expected, rel=PREDICTION)
    assert all(p.grad is None for m in (encoder, cell) for p in m.parameters())
    memory.sum().backward()
    assert encoder.weight.grad.any()


@pytest.mark.parametrize("how", ["module", "closure", "partial", "method"])
def test_nothing_is_drawn_or_written(how):
    cell, state = Keeper(), torch.zeros(BATCH, SIZE)
    before, attributes = copy.deepcopy(cell.state_dict()), dict(vars(cell))
    callables: dict[str, Any] = {
        "module": cell,
        "closure": lambda x, h: cell(x, h),
        "partial": partial(cell),
        "method": cell.forward,
    }
    modules, generator, numbers = parts(), torch.get_rng_state(), random.getstate()
    assert predicted(callables[how], 4, state, modules, feedback="sample") > 0
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == numbers
    for name, tensor in cell.state_dict().items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, before[name])
    assert vars(cell) == attributes
    assert (cell.calls, cell.seen) == (0, [])
    assert not state.any()
    cell(torch.zeros(BATCH, SIZE), state)  # it still computes


def test_a_cell_that_reads_values_is_taken_for_a_gru():
    """As one is whose graph nobody can know: the sizes of its weights are all that counts."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRUCell(SIZE, SIZE)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = self.gru(x, h)
            return (h if h.sum() > 0 else h * 1), h

    guessed, known = (predicted(cell, 40, memory_budget=2**17) for cell in (Reads(), gru_cell()))
    assert guessed == pytest.approx(known, rel=0.2)


def test_modules_on_the_meta_device():
    cell, modules = Attention(), parts()
    context = (torch.zeros(BATCH, 30, SIZE, requires_grad=True),)
    expected = predicted(cell, 4, modules=modules, context=context)
    meta = [module.to("meta") for module in modules]
    assert predicted(cell.to("meta"), 4, modules=meta, context=context) == expected


def test_a_cell_that_makes_its_own_state_or_has_none():
    """And a call of no steps, in which there is nothing to measure."""
    layer = nn.Sequential(nn.Linear(SIZE, 200), nn.ReLU(), nn.Linear(200, SIZE))
    for cell in (
        lambda x, h: (layer(x).tanh(), None),
        lambda x, h: (layer(x if h is None else x + h).tanh(),) * 2,
    ):
        full = compare(cell, 18, None, memory_budget=2**14)
    assert 0 < predicted(gru_cell(), 0, None, memory_budget=2**14) < full


def test_cells_that_torch_has_compiled_or_traced_work_afterwards():
    x, h = torch.randn(2, BATCH, SIZE)
    memory, plain = torch.randn(BATCH, 20, SIZE), Attention()
    expected = plain(x, h, memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(plain, (x, h, memory), check_trace=False)
    for cell in (torch.compile(plain, backend="eager"), traced):
        assert predicted(cell, 4, h, context=(memory,)) > 0
        torch.testing.assert_close(cell(x, h, memory), expected)


def test_hooks_of_weights_are_not_called():
    """Those of a parameter see its gradient; others, such as an optimizer's, run behind it."""
    cell, seen = Perceptron(), []
    expected = predicted(cell, 8, memory_budget=2**17)
    cell.net[0].weight.register_hook(seen.append)
    cell.net[4].weight.register_post_accumulate_grad_hook(seen.append)
    assert predicted(cell, 8, memory_budget=2**17) == expected
    assert not seen
    (cell.net[0].weight.sum() + cell.net[4].weight.sum()).backward()
    assert len(seen) == 2


def test_without_gradients_there_is_no_graph():
    embedding, head = parts()
    full = predicted(gru_cell(), 8, modules=(embedding, head), memory_budget=2**17)
    embedding.weight.requires_grad_(False)
    frozen = {"modules": (embedding, head), "memory_budget": 2**17}
    assert predicted(lambda x, h: (x, h), 8, **frozen) < full
