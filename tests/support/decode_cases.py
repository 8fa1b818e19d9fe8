"""Calls of the decoder's kernels with what must come out, in float64 and from the definition: for
the kernels on the host and on a GPU alike."""

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
# A few roundings of numbers up to 10, one after another.
CELL_TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-14}
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


def check_advance(
    op: Op,
    kind: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    live: Tensor | None = None,
    layout: Callable[[Tensor], Tensor] = LAYOUTS["shifted_slices"],
) -> None:
    batch, units = shape
    gates = GATES[kind] * units

    def draw(width: int) -> Tensor:
        return layout((3 * torch.randn(batch, width)).to(dtype))

    from_x, from_h, h, c = draw(gates), draw(gates), draw(units), None
    h_next, c_next = layout(torch.zeros_like(h)), None
    if kind == LSTM:
        c, c_next = draw(units), layout(torch.zeros_like(h))
    wide = None if c is None else c.double()
    wanted = cell_step(kind, from_x.double(), from_h.double(), h.double(), wide)
    op(kind, from_x, from_h, live, h, c, h_next, c_next)
    for got, want, before in zip((h_next, c_next), wanted, (h, c)):
        if got is None or want is None or before is None:
            continue
        alive = torch.ones(batch, dtype=torch.bool) if live is None else live
        assert torch.equal(got[~alive], before[~alive])
        _close(got[alive], want[alive], CELL_TOLERANCE[dtype], CELL_TOLERANCE[dtype])
        assert_intact(got)


def check_gradient(
    op: Op,
    kind: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    live: Tensor | None = None,
    layout: Callable[[Tensor], Tensor] = LAYOUTS["shifted_slices"],
) -> None:
    """Against autograd through the definition in float64."""
    batch, units = shape

    def draw(width: int) -> Tensor:
        return (2 * torch.randn(batch, width)).to(dtype)

    gates = [draw(units) for _ in range(4 if kind == GRU else GATES[kind])]  # pre-activations
    h, d_out, dh = layout(draw(units)), layout(draw(units)), layout(draw(units))
    c = dc = c_next = None
    x = torch.cat(
        [g.double() for g in gates[:3]] if kind == GRU else [g.double() for g in gates], 1
    )
    none = torch.zeros_like(x[:, : x.shape[1] - units])
    from_h = torch.cat([none, gates[3].double()], 1) if kind == GRU else torch.zeros_like(x)
    leaves = [x.requires_grad_(), from_h.requires_grad_(), h.double().requires_grad_()]
    if kind == LSTM:
        c, dc = layout(draw(units)), layout(draw(units))
        leaves.append(c.double().requires_grad_())
    h_next, wide_c = cell_step(kind, *leaves, *([] if kind == LSTM else [None]))
    loss = (h_next * (dh.double() + d_out.double())).sum()
    if wide_c is not None and dc is not None:
        c_next = layout(wide_c.detach().to(dtype))
        loss = loss + (wide_c * dc.double()).sum()
    wanted = torch.autograd.grad(loss, leaves, materialize_grads=True)

    pre = layout(torch.cat(gates, 1)) if kind in (GRU, LSTM) else None
    if kind in (RNN_TANH, RNN_RELU):
        h = layout(h_next.detach().to(dtype))
    d_x = layout(torch.zeros(batch, GATES[kind] * units, dtype=dtype))
    d_h = layout(torch.zeros_like(d_x)) if kind == GRU else None
    before = [None if t is None else t.clone() for t in (dh, dc)]
    op(kind, d_out, pre, h, c, c_next, live, dh, dc, d_x, d_h)
    alive = torch.ones(batch, dtype=torch.bool) if live is None else live
    for got, want in zip((d_x, d_h, dh, dc), wanted):
        if got is None:
            continue
        _close(got[alive], want[alive], CELL_TOLERANCE[dtype], 4 * CELL_TOLERANCE[dtype])
        assert_intact(got)
    assert not any(t[~alive].any() for t in (d_x, d_h) if t is not None)
    for got, old in zip((dh, dc), before):
        assert got is None or old is None or torch.equal(got[~alive], old[~alive])
