"""Windows of a decoder's steps by the persistent kernel of csrc/cuda, against the reference.

Every call runs in several orders of the threads and blocks, which must leave the same bits: see
host_cuda.ways. The reference gets the operands that the kernel rounds to, and adds up in float32.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.decode_cases import (
    GATES,
    GRU,
    KINDS,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    SMALLEST_HALF,
    assert_intact,
)
from support.tensors import FLOAT_DTYPES, HALF_DTYPES, dtype_id
from torch import Tensor

from accumext.decoder import _operators as reference
from host_cuda import ASCENDING, DESCENDING, SHUFFLED, loaded
from host_cuda.loaded import device
from host_cuda.ways import Runs, in_every_way, usual

PAD, EOS = 1, 2

# Sums of fewer than a hundred products in two orders, and functions of them.
RTOL, ATOL = 2e-5, 2e-5
STATIC = 2 << 10  # bytes of shared memory that are not the plan's
EXPS_RTOL = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


operator = in_every_way(torch.ops.accumext.decode_steps.default)


def decode_steps(*arguments: object, runs: Runs) -> int:
    """The operator, whose windows are one launch each."""
    before = loaded.launches()
    used = operator(*arguments, runs=runs)
    assert loaded.launches() == before + len(runs)
    return used


def on(blocks: int, *orders: int) -> Runs:
    """Runs in these orders, on a device with a multiprocessor for each of so many blocks."""
    return usual(*((order, device(blocks)) for order in orders))


@pytest.fixture(autouse=True)
def rounded_operands(monkeypatch):
    """The reference's cell multiplies what is rounded to the kernel's operands."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = x.to(weight.dtype).float() @ weight.float().t()
        return product + bias if bias.numel() else product

    monkeypatch.setattr(reference, "linear", linear)


def within_nan(tensor: Tensor) -> Tensor:
    """The values of a matrix as rows of a larger one of NaN, rows not aligned."""
    base = tensor.new_full((tensor.shape[0] + 2, tensor.shape[1] + 5), float("nan"))
    return base[1:-1, 3:-2].copy_(tensor)


@dataclass
class Window:
    """A decoder, and the arguments of one call."""

    batch: int = 5
    units: int = 24  # H
    width: int = 16  # E
    words: int = 70  # V
    steps: int = 3  # T
    kind: int = GRU
    layers: int = 1
    dtype: torch.dtype = torch.bfloat16
    table_dtype: torch.dtype = torch.float32
    exps_dtype: torch.dtype | None = torch.bfloat16
    bias: bool = True
    shift: float = 0.0  # of the head's bias
    own: bool = False  # whether tokens are their own targets
    aligned: bool = True  # rows of weights and table
    feedback: str = "greedy"
    temperature: float = 1.0
    lengths: bool = False
    eos: int = -1
    dropout: float = 0.0
    begin: int = 0
    end: int | None = None
    exact: bool = False  # whole multiples, so that all sums are exact

    def __post_init__(self) -> None:
        self.end = self.steps if self.end is None else self.end
        place = (lambda t: t) if self.aligned else within_nan
        gates = GATES[self.kind]
        self.table = place(self._drawn(self.words, self.width, scale=1.0).to(self.table_dtype))
        self.cell = []
        for layer in range(self.layers):
            depth = self.units if layer else self.width
            scale = 2 * depth**-0.5
            for inner in (depth, self.units):
                weight = self._drawn(gates * self.units, inner, scale=scale)
                self.cell.append(place(weight.to(self.dtype)))
            for _ in range(2):
                size = gates * self.units if self.bias else 0
                self.cell.append(self._drawn(size, scale=0.5))
        self.head = place(self._drawn(self.words, self.units, scale=1.0).to(self.dtype))
        self.head_bias = self._drawn(self.words, scale=0.5) + self.shift if self.bias else None
        shape = (self.steps, self.batch)
        parts = 2 if self.kind == LSTM else 1
        self.states = []
        for _ in range(self.layers * parts):
            state = torch.full((self.steps + 1, self.batch, self.units), float("nan"))
            state[self.begin] = self._drawn(self.batch, self.units, scale=0.7)
            self.states.append(state)
        self.targets = None if self.own else torch.randint(self.words, shape)
        self.inputs = torch.full(shape, -1)
        self.inputs[self.begin] = torch.randint(self.words, (self.batch,))
        self.teacher = torch.randint(self.words, shape)
        self.teacher_mask: Tensor | None = torch.rand(shape) < 0.4
        if self.feedback == "teacher":
            self.teacher_mask = None
        elif self.feedback != "scheduled":
            self.teacher_mask = torch.zeros(shape, dtype=torch.bool)
        self.uniforms = None
        if self.feedback == "sample":
            self.uniforms = torch.rand(shape, dtype=torch.float64)
        self.live = None
        if self.lengths or self.eos >= 0:
            lengths = torch.full((self.batch,), self.steps)
            if self.lengths:
                lengths = torch.randint(self.begin, self.steps + 1, (self.batch,))
            self.live = torch.arange(self.steps)[:, None] < lengths
        self.dropout_mask = None
        if self.dropout > 0 and self.layers > 1:
            shape = (self.steps, self.layers - 1, self.batch, self.units)
            self.dropout_mask = torch.rand(shape) >= self.dropout

    def _drawn(self, *shape: int, scale: float) -> Tensor:
        if self.exact:
            return torch.randint(-4, 5, shape).div(4)
        return scale * torch.randn(*shape)

    def decode(self, op, **options) -> "Results":
        return Results(self, op, **options)


class Results:
    """The tensors that a call has written."""

    def __init__(self, window: Window, op, **changed) -> None:
        w = window
        begin, end = changed.pop("begin", w.begin), changed.pop("end", w.end)
        self.states = [s.clone() for s in changed.pop("states", w.states)]
        self.inputs = changed.pop("inputs", w.inputs).clone()
        live = changed.pop("live", w.live)
        self.live = None if live is None else live.clone()
        rows = (end - begin) * w.batch
        self.tokens = torch.full((w.steps, w.batch), -7)
        self.stats = within_nan(torch.zeros(3, rows))
        self.exps = None
        if w.exps_dtype is not None:
            self.exps = within_nan(torch.zeros(w.words, rows, dtype=w.exps_dtype)).t()
        self.rows = torch.full((rows,), -7)
        self.used = op(
            w.table, w.cell, self.states, w.kind, [None, w.dropout_mask, None],
            [1.0, 1 / (1 - w.dropout), 1.0], self.inputs, w.teacher, w.teacher_mask,
            self.live, w.eos, PAD, w.uniforms, w.temperature, w.head, w.head_bias, w.targets,
            self.tokens, self.exps, self.stats, self.rows, 7, begin, end, **changed,
        )  # fmt: skip


def check(w: Window, *, runs: Runs | None = None) -> Results:
    """The whole window against the reference, then each step against it from the states, inputs
    and live rows that the kernel had at its beginning."""
    found = w.decode(decode_steps, runs=runs or on(3, ASCENDING, DESCENDING))
    whole = w.decode(reference.decode_steps_reference)
    steps = slice(w.begin, w.end)
    alive = torch.ones_like(found.tokens, dtype=torch.bool) if whole.live is None else whole.live
    want = torch.where(alive, whole.tokens, PAD)
    assert torch.equal(found.tokens[steps], want[steps])
    assert (found.tokens[: w.begin] == -7).all()
    assert (found.tokens[w.end :] == -7).all()
    assert torch.equal(found.inputs, whole.inputs)
    if w.live is not None:
        assert torch.equal(found.live, whole.live)
    assert torch.equal(found.rows, torch.arange(w.begin * w.batch, w.end * w.batch))
    for step in range(w.begin, w.end):
        check_step(w, found, step)
    return found


def check_step(w: Window, found: Results, step: int) -> None:
    one = w.decode(
        reference.decode_steps_reference, begin=step, end=step + 1, states=found.states,
        inputs=found.inputs, live=found.live,
    )  # fmt: skip
    for got, want in zip(found.states, one.states):
        torch.testing.assert_close(got[step + 1], want[step + 1], rtol=RTOL, atol=ATOL)
    # From the kernel's own state, of which no other rounding than its own can come.
    hidden = found.states[-2 if w.kind == LSTM else -1][step + 1]
    stats, tokens = torch.empty(3, w.batch), torch.empty(w.batch, dtype=torch.int64)
    exps = torch.empty(w.batch, w.words)
    uniforms = None if w.uniforms is None else w.uniforms[step]
    targets = None if w.targets is None else w.targets[step]
    reference.head_forward_reference(
        hidden, w.head, w.head_bias, targets, uniforms, w.temperature, exps, 7, tokens, stats
    )  # fmt: skip
    if found.live is not None:
        tokens[~found.live[step]] = PAD
    assert torch.equal(found.tokens[step], tokens)
    mine = slice((step - w.begin) * w.batch, (step - w.begin + 1) * w.batch)
    torch.testing.assert_close(found.stats[:, mine], stats, rtol=RTOL, atol=ATOL)
    if found.exps is None:
        return
    rtol, got = EXPS_RTOL[found.exps.dtype], found.exps[mine]
    torch.testing.assert_close(got.float(), exps, rtol=rtol, atol=SMALLEST_HALF)
    assert not got[torch.arange(w.batch), tokens if targets is None else targets].any()


def check_everything(w: Window, **options) -> Results:
    """Also that nothing else is written, where there are no other values than finite ones."""
    found = check(w, **options)
    assert_intact(found.stats)
    if found.exps is not None:
        assert_intact(found.exps.t())
    return found


def windows() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What is special, the options of a window, and those of its check."""
    for kind, dtype in itertools.product(KINDS, HALF_DTYPES):
        own = {"kind": kind, "dtype": dtype, "exps_dtype": dtype}
        yield f"cell {kind}, {dtype_id(dtype)}", own, {}
    for feedback in ("greedy", "sample"):
        yield f"own targets, {feedback}", {"feedback": feedback, "own": True}, {}
        runs = on(5, ASCENDING, DESCENDING, SHUFFLED, SHUFFLED)
        options = {"feedback": feedback, "temperature": 0.8, "steps": 2}
        yield f"every order, {feedback}", options, {"runs": runs}
    # Of one, two and four tiles, and whose last row is beside each edge of them.
    for batch in (1, 7, 8, 9, 16, 17, 32, 33, 63, 64):
        options = {"kind": batch % len(KINDS), "dtype": HALF_DTYPES[batch // 4 % 2]}
        yield f"B={batch}", {"batch": batch, "lengths": batch % 3 == 0, "steps": 2, **options}, {}
    for units, width, words, aligned in (
        (1, 1, 1, True),
        (3, 5, 7, False),
        (8, 250, 33, True),  # chunks of x for each of the warps
        (16, 12, 1, True),  # rows of the table are aligned, and half of an octet longer
        (16, 32, 16, True),
        (16, 32, 16, False),
        (33, 31, 17, True),
        (41, 64, 129, False),
        (65, 7, 33, True),
        (130, 97, 301, False),
    ):
        sizes = {"units": units, "width": width, "words": words, "aligned": aligned, "steps": 2}
        yield f"H={units}, E={width}, V={words}, {aligned}", sizes, {}
    # More blocks than units and than tiles of words, and blocks with many of both.
    for kind, blocks in ((GRU, 1), (LSTM, 2), (GRU, 7), (LSTM, 13)):
        options = {"kind": kind, "batch": 9, "units": 11 if blocks > 2 else 50, "words": 20 * 13}
        runs = on(blocks, ASCENDING, DESCENDING)
        yield f"{blocks} blocks", {"steps": 2, **options}, {"runs": runs}
    options, runs = {"units": 72, "words": 16 * 8 * 5 - 3}, on(1, ASCENDING, DESCENDING)
    yield "a stream that goes round often", options, {"runs": runs}
    for feedback, lengths, eos in (
        *((feedback, True, EOS) for feedback in ("teacher", "scheduled", "greedy", "sample")),
        ("teacher", False, -1),
        ("scheduled", False, -1),
        ("greedy", False, EOS),
        ("sample", True, -1),
    ):
        options = {"feedback": feedback, "lengths": lengths, "eos": eos, "words": 9, "steps": 5}
        batch = 4 if feedback == "sample" else 10
        yield f"{feedback}, {lengths}, {eos}", {"batch": batch, **options}, {}
    for temperature in (0.5, 3.0):
        options = {"batch": 6, "feedback": "sample", "temperature": temperature}
        yield f"temperature {temperature}", options, {"runs": on(4, SHUFFLED)}
    for kind, dropout in ((GRU, 0.5), (LSTM, 0.0), (LSTM, 0.5), (RNN_RELU, 0.0)):
        options = {"kind": kind, "layers": 3, "dropout": dropout, "units": 21}
        yield f"layers of {kind}, dropout {dropout}", options, {}
    for table, exps in zip(FLOAT_DTYPES, (None, *reversed(FLOAT_DTYPES[1:]))):
        options = {"table_dtype": table, "exps_dtype": exps, "bias": False, "steps": 2}
        yield f"table {table}, exps {exps}", options, {"runs": on(3, SHUFFLED)}
    for begin, end in ((0, 1), (2, 4), (3, 6)):
        options = {"steps": 6, "begin": begin, "end": end, "feedback": "scheduled", "words": 12}
        yield f"steps {begin} to {end}", {"lengths": True, "eos": EOS, **options}, {}
    # No word wins, and no sum begins, with what stands there before the first logit: exp(-100) is 0
    # in float32. Of 1, 2, 4 and 8 tiles of columns.
    for batch in (5, 9, 17, 33):
        yield f"all logits below 0, B={batch}", {"batch": batch, "steps": 2, "shift": -100.0}, {}


@pytest.mark.parametrize(("options", "how"), [pytest.param(*w[1:], id=w[0]) for w in windows()])
def test_windows(options, how):
    check_everything(Window(**options), **how)


@pytest.mark.parametrize("stages", [2, 3, 5, 7, 8])
def test_as_little_shared_memory_as_that(stages):
    """Two stages of the head's weight at least, fewer than a warp takes in a step; cells' weights
    go before there are fewer than three."""
    w = Window(kind=RNN_TANH, units=64, words=16 * 8 * 5, steps=2)
    passes, chunks = 2, 3  # of x and h
    size = 2 * 8 * 16 * 40 * 4 + 8 * 1024 * stages + 1024  # products, stream, all else
    resident = stages >= 3
    if resident:
        size += passes * chunks * 4 * 512
    small = device(1, shared_bytes=size + STATIC)
    check_everything(w, runs=((SHUFFLED, small),))
    assert size - 1024 <= loaded.shared_bytes() <= size


@pytest.mark.parametrize(("batch", "size"), [(5, 20_000), (65, 232448)])
def test_what_does_not_fit(batch, size):
    """The loop takes it: more than one launch."""
    before = loaded.launches()
    Window(batch=batch).decode(operator, runs=((ASCENDING, device(1, shared_bytes=size)),))
    assert loaded.launches() > before + 1


# --- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [4, 20, 50])
def test_exact_sums(batch):
    """Multiples of a quarter, of which all sums are exact: no bit may differ."""
    w = Window(batch=batch, kind=RNN_RELU, exact=True, steps=2, words=40, units=20)
    found, whole = check_everything(w), w.decode(reference.decode_steps_reference)
    assert torch.equal(found.states[0], whole.states[0])
    assert torch.equal(found.stats[[0, 2]], whole.stats[[0, 2]])


def with_logits(values: Tensor, **options) -> Window:
    """A window of one step in which every row of the batch has these logits."""
    w = Window(words=len(values), steps=1, **options)
    w.head.zero_()
    w.head_bias = values
    return w


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_first_of_equal_logits_wins(blocks):
    for first, second in ((0, 1), (3, 8), (7, 15), (5, 16), (16, 128), (20, 260), (0, 299)):
        values = torch.full((300,), -1.0)
        values[[first, second]] = 2.0
        found = with_logits(values).decode(decode_steps, runs=on(blocks, SHUFFLED))
        assert (found.tokens == first).all()
    zeros = torch.zeros(300)
    zeros[::2] = -0.0
    found = check(with_logits(zeros), runs=on(blocks, SHUFFLED))
    assert (found.tokens == 0).all()
    assert (found.stats[1] == 300).all()


@pytest.mark.parametrize("feedback", ["greedy", "sample"])
def test_logits_that_are_no_numbers(feedback):
    drawn = torch.randn(70)
    values = {
        "some": drawn.clone().index_fill_(0, torch.arange(0, 48), -math.inf),
        "all": torch.full((70,), -math.inf),
        "infinite": drawn.clone().index_fill_(0, torch.tensor([20, 50]), math.inf),
        "nan": drawn.clone().index_fill_(0, torch.tensor([30, 40]), math.nan),
    }
    values["nan"][30].neg_()  # its bits are those of a number below all others
    tokens = {"all": 0, "infinite": 20, "nan": 30}
    for name, some in values.items():
        w = with_logits(some, feedback=feedback, batch=2)
        found = w.decode(decode_steps, runs=on(3, SHUFFLED))
        want = w.decode(reference.decode_steps_reference)
        torch.testing.assert_close(found.stats, want.stats, equal_nan=True)
        torch.testing.assert_close(found.exps, want.exps, equal_nan=True, rtol=2.0**-7, atol=0.0)
        if name == "some":
            assert torch.equal(found.tokens, want.tokens)
        else:
            assert (found.tokens == tokens[name]).all()


def test_infinite_states_leave_no_word_beyond_the_vocabulary():
    """Rows of the weight that are not there are zeros, and zeros times infinity are no numbers."""
    for words in (65, 70, 127):
        w = Window(kind=RNN_RELU, batch=3, words=words, steps=2)
        w.states[0][0] = math.inf
        for weight in w.cell[:2]:
            weight.abs_()
        w.head.abs_().add_(1)
        found = w.decode(decode_steps, runs=on(3, SHUFFLED))
        assert torch.equal(found.tokens, w.decode(reference.decode_steps_reference).tokens)


def test_samples_of_equal_probabilities_are_exact():
    """Logits of 0 and -inf: every sum is a whole number, and so are the thresholds."""
    for temperature in (1.0, 0.5):
        allowed = torch.randperm(300)[:64].sort().values
        values = torch.full((300,), -math.inf).index_fill_(0, allowed, 0.0)
        w = with_logits(values, feedback="sample", temperature=temperature, batch=16)
        ranks = torch.arange(0, 64, 4) + torch.randint(4, (16,))
        w.uniforms = (ranks.double() / 64)[None]
        found = w.decode(decode_steps, runs=on(3, SHUFFLED))
        assert torch.equal(found.tokens[0], allowed[ranks])


def test_a_target_that_is_no_word_has_no_logit():
    w = Window(batch=3, steps=1)
    w.targets[0] = torch.tensor([-1, 4, w.words])
    found = w.decode(decode_steps, runs=on(3, SHUFFLED))
    assert found.stats[2].isnan().tolist() == [True, False, True]
    assert (found.exps[[0, 2]] > 0).all()
