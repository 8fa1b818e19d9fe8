"""What must come out of a decoder's head and cells, in float64 and from the definition."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.samples import assert_drawn, kept_shares

ROWS, COLUMNS = "rows", "columns"
# Layouts in memory of a matrix of values, with NaN elsewhere.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    ROWS: lambda t: _within(t, (0, 0), (0, 0)),
    "aligned_slices": lambda t: _within(t, (1, 1), (0, -t.shape[1] % 8 + 8)),
    "shifted_slices": lambda t: _within(t, (1, 1), (3, 2)),
    COLUMNS: lambda t: _within(t.t(), (0, 0), (0, 0)).t(),
    "columns_of_more": lambda t: _within(t.t(), (1, 0), (2, 3)).t(),
    "every_other": lambda t: _within(t.t(), (0, 1), (1, 0), step=2).t(),
}
# Sums of 50,000 terms, each of which is good to a few units in the last place and added to fewer
# than four others before the sum goes on in double.
TOTAL_RTOL = {torch.float32: 1e-6, torch.float64: 1e-14}
# exp(x) of -40 < x < 0, and x itself is rounded.
EXP_RTOL = {
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float32: 4e-6,
    torch.float64: 1e-14,
}
SMALLEST_HALF = 2.0**-24
GRU, LSTM, RNN_TANH, RNN_RELU = KINDS = range(4)
GATES = {GRU: 3, LSTM: 4, RNN_TANH: 1, RNN_RELU: 1}

Op = Callable[..., Any]


def _within(
    values: Tensor, rows: tuple[int, int], columns: tuple[int, int], step: int = 1
) -> Tensor:
    """The values in the middle of a larger matrix of NaN, columns `step` apart."""
    height, width = values.shape
    base = values.new_full((sum(rows) + height, sum(columns) + step * width), math.nan)
    place = base[rows[0] : rows[0] + height, columns[0] : columns[0] + step * width : step]
    return place.copy_(values)


def assert_intact(tensor: Tensor) -> None:
    """The memory around a tensor without NaN is still NaN."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    memory.set_(tensor.untyped_storage())
    assert not tensor.isnan().any()
    assert int(memory.isnan().sum()) == memory.numel() - tensor.numel()


# --- softmax_stats --------------------------------------------------------------------------------


class Softmax:
    """The results of a call: tokens [M], stats [3, M] in a larger tensor, exps [M, V]."""

    def __init__(
        self,
        op: Op,
        logits: Tensor,  # as the kernel gets them
        targets: Tensor,
        *,
        uniforms: Tensor | None = None,
        temperature: float = 1.0,
        exps: Tensor | None = None,
        **options: Any,
    ) -> None:
        count = len(logits)
        self.exps = exps
        self.tokens = torch.full([count + 2], -7, device=logits.device)[1:-1]
        self.stats = _within(logits.new_zeros(3, count), (0, 0), (2, 3))
        op(logits, targets, uniforms, temperature, exps, self.tokens, self.stats, **options)


def assert_statistics(found: Softmax, values: Tensor, targets: Tensor) -> None:
    """Against the definition, for logits [M, V] that are finite or -inf."""
    z = values.double()
    peak = z.amax(1)
    every = torch.arange(len(z), device=z.device)
    assert torch.equal(found.stats[0].double(), peak)
    assert torch.equal(found.stats[2].double(), z[every, targets])
    assert_intact(found.stats)
    exps = (z - peak[:, None]).exp()
    _close(found.stats[1], exps.sum(1), TOTAL_RTOL[values.dtype])
    if found.exps is not None:
        exps[every, targets] = 0.0
        dtype = found.exps.dtype
        assert not found.exps[every, targets].any()
        smallest = SMALLEST_HALF if dtype == torch.float16 else 1e-37
        rtol = max(EXP_RTOL[dtype], EXP_RTOL[values.dtype])
        _close(found.exps, exps, rtol, smallest)
        assert_intact(found.exps)


def first_argmax(values: Tensor) -> Tensor:
    columns = torch.arange(values.shape[1], device=values.device).expand_as(values)
    here = values == values.amax(1, keepdim=True)
    return columns.masked_fill(~here, values.shape[1]).amin(1)


def assert_samples(
    tokens: Tensor,  # [M]
    values: Tensor,  # [M, V]
    uniforms: Tensor,  # [M]
    temperature: float,
) -> None:
    tolerance = 4 * TOTAL_RTOL[values.dtype]
    assert_drawn(tokens, kept_shares(values, temperature=temperature), uniforms, tolerance)


def _close(got: Tensor, want: Tensor, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


# --- cells ----------------------------------------------------------------------------------------


def cell_step(
    kind: int, from_x: Tensor, from_h: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """h' and c' by the definition of torch.nn's cells."""
    if kind == GRU:
        (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, 1), from_h.chunk(3, 1)
        n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        z = torch.sigmoid(z_x + z_h)
        return (1 - z) * n + z * h, None
    if kind == LSTM:
        assert c is not None
        i, f, g, o = (from_x + from_h).chunk(4, 1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(new_c), new_c
    pre = from_x + from_h
    return (torch.tanh(pre) if kind == RNN_TANH else torch.relu(pre)), None
