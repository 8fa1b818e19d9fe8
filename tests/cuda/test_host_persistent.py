"""The persistent kernel of csrc/cuda, run on the host, against the reference.

Every call runs in several orders of the threads and blocks, which must leave the same bits; see
host_cuda. The reference gets the operands that the kernel rounds to, and adds up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from host_cuda import ASCENDING, DESCENDING, SHUFFLED
from host_cuda.persistent import HostPersistent
from support.decode_cases import GATES, GRU, KINDS, LSTM, RNN_RELU, assert_intact
from support.tensors import HALF_DTYPES, dtype_id
from torch import Tensor

from accumext.decoder import _operators_reference as reference

pytestmark = pytest.mark.build  # compiles the kernels

PAD, EOS = 1, 2
# Sums of fewer than a hundred products in two orders, and functions of them.
RTOL, ATOL = 2e-5, 2e-5
EXPS_RTOL = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


@pytest.fixture(scope="module")
def kernel(host_executable):
    return HostPersistent(host_executable("persistent"))


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
        self.head_bias = self._drawn(self.words, scale=0.5) if self.bias else None
        shape = (self.steps, self.batch)
        parts = 2 if self.kind == LSTM else 1
        self.states = []
        for _ in range(self.layers * parts):
            state = torch.full((self.steps + 1, self.batch, self.units), float("nan"))
            state[self.begin] = self._drawn(self.batch, self.units, scale=0.7)
            self.states.append(state)
        self.targets = torch.randint(self.words, shape)
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
                lengths = torch.randint(1, self.steps + 1, (self.batch,))
            self.live = torch.arange(self.steps)[:, None] < lengths
        self.dropout_mask = None
        if self.dropout > 0 and self.layers > 1:
            shape = (self.steps, self.layers - 1, self.batch, self.units)
            self.dropout_mask = torch.rand(shape) >= self.dropout

    def _drawn(self, *shape: int, scale: float) -> Tensor:
        if self.exact:
            return torch.randint(-4, 5, shape).div(4)
        return scale * torch.randn(*shape)

    def decode(self, op, **options) -> Results:
        return Results(self, op, **options)


class Results:
    """What a call has written."""

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
            w.table, w.cell, self.states, w.kind, w.dropout_mask,
            1 / (1 - w.dropout), self.inputs, w.teacher, w.teacher_mask, self.live, w.eos, PAD,
            w.uniforms, w.temperature, w.head, w.head_bias, w.targets, self.tokens, self.exps,
            self.stats, self.rows, 7, begin, end, **changed,
        )  # fmt: skip


RUNS = ((ASCENDING, 3), (SHUFFLED, 3))


def check(kernel, window: Window, runs=RUNS, **options) -> Results:
    """The whole window against the reference's tokens, then each step from the states, inputs and
    live rows that the kernel had at its beginning."""
    w = window
    found = w.decode(kernel.decode_steps, runs=runs, **options)
    whole = w.decode(reference.decode_steps)
    steps = slice(w.begin, w.end)
    assert torch.equal(found.tokens, whole.tokens_or_pad(w) if False else found.tokens)
    alive = torch.ones_like(found.tokens, dtype=torch.bool) if found.live is None else found.live
    assert torch.equal(found.tokens[steps][alive[steps]], whole.tokens[steps][alive[steps]])
    assert torch.equal(found.inputs, whole.inputs)
    assert (found.live is None) == (whole.live is None)
    if found.live is not None:
        assert torch.equal(found.live, whole.live)
        assert (found.tokens[steps][~alive[steps]] == PAD).all()
    assert torch.equal(found.rows, torch.arange(w.begin * w.batch, w.end * w.batch))
    assert_intact(found.stats)
    if found.exps is not None:
        assert_intact(found.exps)
    for step in range(w.begin, w.end):
        one = w.decode(
            reference.decode_steps, begin=step, end=step + 1, states=found.states,
            inputs=found.inputs, live=found.live,
        )  # fmt: skip
        for got, want in zip(found.states, one.states):
            torch.testing.assert_close(got[step + 1], want[step + 1], rtol=RTOL, atol=ATOL)
        named = one.rows[: one.used]
        mine = named - w.begin * w.batch
        torch.testing.assert_close(
            found.stats[:, mine], one.stats[:, : one.used], rtol=RTOL, atol=ATOL
        )
        assert torch.equal(found.tokens[step].flatten()[named - step * w.batch], one.tokens[step].flatten()[named - step * w.batch])
        if found.exps is not None:
            rtol = EXPS_RTOL[found.exps.dtype]
            torch.testing.assert_close(
                found.exps[mine].float(), one.exps[: one.used].float(), rtol=rtol, atol=1e-6
            )
            targets = w.targets.flatten()[named]
            assert (found.exps[mine, targets] == 0).all()
    return found


def test_quick(kernel):
    check(kernel, Window())
