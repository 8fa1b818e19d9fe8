"""Each term of the peak that decode_memory predicts, at sizes at which it is a large part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.decoder import _memory
from accumext.decoder._call import Call
from accumext.recurrence import truncation_from

# Of the measured peak: vectors of a number per row. PyTorch's own kernels have temporaries of their
# own, such as a step's gates and converted slices of a head in half precision.
PREDICTION = 0.02 if accumext.backend() == "cpu" else 0.15
bf16 = torch.bfloat16

HEAD = {"vocabulary": 3000, "units": 64, "steps": 4, "batch": 2}
CELL = {"vocabulary": 30, "units": 64, "steps": 40, "batch": 20}
WIDE = {"vocabulary": 30, "units": 256, "width": 8, "steps": 4, "batch": 2}
ROWS = {"vocabulary": 20, "units": 256, "width": 2, "steps": 256, "batch": 1, "kind": nn.RNN}
TOKENS = {"vocabulary": 3, "units": 1, "steps": 2000, "batch": 16, "kind": nn.RNN}
STEP = {"vocabulary": 30, "units": 64, "steps": 1, "batch": 600}
LOOKUP = {"vocabulary": 30, "units": 8, "width": 256, "steps": 1, "batch": 260}
# Those slices, or the temporaries of one step, are there as large as all else.
COMPILED = pytest.mark.skipif(accumext.backend() != "cpu", reason="of compiled kernels")
CASES = [
    # the head, its bias and the embedding, with or without gradients
    HEAD,
    {**HEAD, "frozen": "head"},
    {**HEAD, "frozen": "embedding"},
    {**HEAD, "units": 2},
    {**HEAD, "units": 2, "frozen": "bias"},
    {**HEAD, "units": 2, "bias": False},
    {**HEAD, "units": 8, "rows": 20000, "feedback": "teacher"},
    {**HEAD, "tied": True},
    {**HEAD, "dtype": torch.float64, "memory_budget": 2**20},
    # in half precision, by parameters or under autocast
    pytest.param({**HEAD, "dtype": bf16}, marks=COMPILED),
    pytest.param({**HEAD, "dtype": bf16, "frozen": "head"}, marks=COMPILED),
    pytest.param({**HEAD, "dtype": bf16, "frozen": "embedding"}, marks=COMPILED),
    pytest.param({**HEAD, "dtype": bf16, "tied": True}, marks=COMPILED),
    pytest.param({**HEAD, "autocast": True, "tied": True}, marks=COMPILED),
    pytest.param({**HEAD, "autocast": True, "frozen": "embedding head"}, marks=COMPILED),
    # the cell's weights, their gradients, and copies in other precisions
    WIDE,
    {**WIDE, "kind": nn.LSTM, "layers": 3},
    {**WIDE, "dtype": bf16, "layers": 3},
    {**WIDE, "batch": 0},
    # tokens and their losses
    {**TOKENS, "feedback": "greedy"},
    {**TOKENS, "feedback": "teacher"},
    {**HEAD, "feedback": "sample", "reduction": "none"},
    # outputs on their way through the head
    ROWS,
    {**ROWS, "output_dropout": 0.5},
    pytest.param({**ROWS, "dtype": bf16}, marks=COMPILED),
    pytest.param({**ROWS, "autocast": True}, marks=COMPILED),
    {**ROWS, "vocabulary": 1000, "steps": 300, "memory_budget": 2**17},
    {**ROWS, "return_outputs": True},
    # pieces of the pass back through the layers
    CELL,
    {**CELL, "kind": nn.LSTM, "memory_budget": 2**12},
    {**CELL, "layers": 2, "memory_budget": 2**12},
    {**CELL, "layers": 2, "dropout": 0.5},
    {**CELL, "layers": 8, "kind": nn.RNN, "dropout": 0.5},
    {**CELL, "layers": 3, "kind": nn.RNN, "width": 2, "memory_budget": 2**14},
    {**CELL, "layers": 2, "kind": nn.RNN, "width": 2, "memory_budget": 2**14},
    {**CELL, "k1": 1, "k2": 20, "kind": nn.RNN, "width": 2, "memory_budget": 2**14},
    {**CELL, "steps": 200, "layers": 2, "kind": nn.RNN, "dropout": 0.5, "memory_budget": 2**15},
    {**CELL, "units": 8, "width": 256, "layers": 2},
    {**CELL, "units": 256, "width": 8, "output_dropout": 0.5, "kind": nn.RNN, "k1": 1, "k2": 20},
    {**CELL, "k1": 2, "k2": 6, "kind": nn.LSTM},
    {**CELL, "k1": 6, "k2": 6, "kind": nn.LSTM},
    {**CELL, "kind": nn.LSTM},
    # states before, between and after few steps of many rows
    pytest.param({**STEP, "kind": nn.LSTM, "layers": 3}, marks=COMPILED),
    pytest.param({**STEP, "steps": 4}, marks=COMPILED),
    pytest.param({**STEP, "output_dropout": 0.5}, marks=COMPILED),
    # rows that are looked up, with and without dropout
    pytest.param(LOOKUP, marks=COMPILED),
    pytest.param({**LOOKUP, "embedding_dropout": 0.5, "units": 60}, marks=COMPILED),
    pytest.param(
        {**LOOKUP, "embedding_dropout": 0.5, "layers": 3, "kind": nn.LSTM}, marks=COMPILED
    ),
    pytest.param({**LOOKUP, "embedding_dropout": 0.5, "units": 300, "width": 100}, marks=COMPILED),
    # all that the first layer reads at once, in one step of more rows than are wanted
    {**STEP, "steps": 4, "vocabulary": 300, "width": 8192, "kind": nn.RNN,
     "feedback": "teacher", "frozen": "embedding"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_peak_is_the_measured_one(case):
    parts, shape, call = decoder(**case)
    autocast = call.pop("autocast", False)
    targets = torch.randint(case["vocabulary"], shape)

    def run() -> None:
        out = accumext.decode_loss(*parts, targets, **call)  # results may be kept
        out.loss.sum().backward()

    with torch.autocast("cpu", bf16, enabled=autocast):
        predicted = accumext.decode_memory(*parts, shape, **call)
        assert predicted == pytest.approx(peak_memory(run), rel=PREDICTION)


@pytest.mark.parametrize(
    ("kind", "layers", "bias"),
    [(nn.RNN, 1, True), (nn.RNN, 3, True), (nn.RNN, 3, False), (nn.GRU, 1, True)],
)
def test_weights_are_transposed_but_on_a_cpu(kind, layers, bias, monkeypatch):
    """The state's weights of each layer, [gates H, H]; all else is predicted alike."""
    units, gates = 256, 3 if kind is nn.GRU else 1
    parts = nn.Embedding(30, 8), kind(8, units, layers, bias=bias), nn.Linear(units, 30)
    on_cpu = accumext.decode_memory(*parts, (4, 2), feedback="greedy")
    monkeypatch.setattr(_memory, "PRE_ACTIVATION_DEVICES", ())
    elsewhere = accumext.decode_memory(*parts, (4, 2), feedback="greedy")
    assert elsewhere - on_cpu == layers * gates * units * units * 4


@pytest.mark.parametrize(
    ("steps", "windows", "longest"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (15, {}, 15),
        (40, {}, 16),
        (40, {"k1": 6, "k2": 6}, 6),
        (40, {"k1": 1, "k2": 1}, 1),
        (40, {"k1": 20, "k2": 20}, 16),
        (40, {"k1": 3, "k2": 7}, 7),  # windows that overlap are run whole
        (40, {"k1": 3, "k2": 30}, 30),
        (5, {"k1": 3, "k2": 30}, 5),
    ],
)
def test_steps_whose_graph_exists_at_once(steps, windows, longest):
    truncation = truncation_from("decode_loss", windows.get("k1"), windows.get("k2"), "fixed")
    tokens, unread = SimpleNamespace(steps=steps), SimpleNamespace()
    call = Call(unread, tokens, unread, truncation, unread, False)
    assert _memory.longest_segment(call) == longest


def decoder(
    vocabulary: int, units: int, steps: int, batch: int, width: int | None = None,
    rows: int | None = None, kind: type[nn.RNNBase] = nn.GRU, layers: int = 1,
    dropout: float = 0.0, dtype: torch.dtype = torch.float32, tied: bool = False,
    bias: bool = True, frozen: str = "", **call: Any,
) -> tuple[list[nn.Module], tuple[int, int], dict[str, Any]]:  # fmt: skip
    """Modules, (T, B) and the other arguments of a call."""
    width = units if width is None else width
    embedding, head = nn.Embedding(rows or vocabulary, width), nn.Linear(units, vocabulary, bias)
    if tied:
        head.weight = embedding.weight
    cell = kind(width, units, layers, dropout=dropout)
    parameters = {"embedding": embedding.weight, "head": head.weight, "bias": head.bias}
    for name in frozen.split():
        parameters[name].requires_grad_(False)
    parts = nn.ModuleList([embedding, cell, head]).to(dtype)
    return list(parts), (steps, batch), {"feedback": "greedy", **call}
