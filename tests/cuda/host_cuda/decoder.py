"""The decoder's kernels of csrc/cuda on the host, one at a time; see __init__.py. The arguments are
those of accumext/decoder/_operators.py, then what the kernels alone can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from accumext.decoder._operators import logits_of
from host_cuda import RUNS, Request, execute

_OPS = (
    "softmax_stats", "rnn_advance", "rnn_gradient", "rnn_pass_on", "look_up", "clear_tokens",
    "rnn_through_time", "head_objective",
)  # fmt: skip


@dataclass
class Lookup:
    """Rows of a table, and where they go."""

    table: Tensor
    rows: Tensor  # [rows, width]
    kept: Tensor | None = None
    scale: float = 1.0


@dataclass
class FeedBack:
    """The consequences of a step's tokens: FeedBack of feed_back.cuh."""

    later: int
    batch: int
    pad: int
    eos: int
    rows: Tensor
    live: Tensor | None
    live_later: Tensor | None
    teacher: Tensor | None
    teacher_mask: Tensor | None
    inputs: Tensor
    lookup: Lookup


class HostDecoder:
    """The kernels, by decoder.cpp."""

    def __init__(self, driver: Path) -> None:
        self._driver = driver

    def softmax_stats(
        self, logits, targets, uniforms, temperature, exps, tokens, stats, *, bias=None,
        feed_back=None, runs=RUNS,
    ) -> None:  # fmt: skip
        """The second number of a run is how many blocks share a band of rows."""
        request = self._request("softmax_stats", logits)
        request.put_integers(*logits.shape)
        request.put_numbers(temperature)
        _put_matrices(request, logits)
        _put_columns(request, targets, uniforms)
        _put_matrices(request, exps)
        _put_columns(request, tokens)
        _put_matrices(request, stats)
        _put_columns(request, bias)
        if feed_back is None:
            request.put_integers(0)
        else:
            numbers = ("later", "batch", "pad", "eos")
            request.put_integers(*(getattr(feed_back, name) for name in numbers))
            places = ("rows", "live", "live_later", "teacher", "teacher_mask", "inputs")
            for name in places:
                request.put_place(getattr(feed_back, name))
            _put_lookup(request, feed_back.lookup)
        self._call(request, runs)

    def head_objective(
        self, hidden, weight, bias, targets, share, z_loss, entropy_weight, soft_scale, temperature,
        probabilities, indices, teacher_hidden, teacher_weight, teacher_bias, gradients,
        logit_rows, tokens, stats, *, runs=RUNS,
    ) -> None:  # fmt: skip
        """Run all that follows the products, of all rows at once. The second number of a run is
        that of blocks which share a band of rows."""
        request = self._request("head_objective", hidden)
        request.put_integers(*gradients.shape)
        request.put_numbers(temperature, z_loss, entropy_weight, soft_scale)
        heads = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
        for rows, matrix, offset in heads:
            _put_matrices(request, None if rows is None else logits_of(rows, matrix, None))
            _put_columns(request, offset)
        _put_columns(request, targets, share)
        request.put_integers(0 if indices is None else indices.shape[1])
        _put_matrices(request, probabilities, indices, gradients)
        _put_columns(request, tokens)
        _put_matrices(request, stats)
        self._call(request, runs)

    def rnn_advance(
        self, kind, from_x, from_h, live, h, c, h_next, c_next, *, bias_x=None, bias_h=None,
        operand=None, output=None, kept=None, scale=1.0, runs=RUNS,
    ) -> None:  # fmt: skip
        request = self._request("rnn_advance", h)
        request.put_integers(kind, *h.shape)
        _put_matrices(request, from_x, from_h)
        _put_columns(request, live)
        _put_matrices(request, h, c, h_next, c_next)
        _put_columns(request, bias_x, bias_h)
        _put_matrices(request, operand, output, kept)
        request.put_numbers(scale)
        self._call(request, runs)

    def rnn_gradient(
        self, kind, d_out, pre, h, c, c_next, live, dh, dc, d_x, d_h, *, operand=None,
        product=None, gate=None, limit=None, runs=RUNS,
    ) -> None:  # fmt: skip
        request = self._request("rnn_gradient", dh)
        request.put_integers(kind, *dh.shape)
        _put_matrices(request, d_out, pre, h, c, c_next)
        _put_columns(request, live)
        _put_matrices(request, dh, dc, d_x, d_h, operand, product)
        _put_columns(request, gate)
        request.put_place(limit)
        self._call(request, runs)

    def rnn_pass_on(self, dh, dc, product, gate=None, limit=None, *, runs=RUNS) -> None:
        request = self._request("rnn_pass_on", dh)
        request.put_integers(*dh.shape)
        _put_matrices(request, dh, dc, product)
        _put_columns(request, gate)
        request.put_place(limit)
        self._call(request, runs)

    def rnn_backward(
        self, kind, d_out, pre, h, c, live, gate, limit, weight, dh, dc, d_x, d_h, *, bands=0, runs
    ) -> None:  # fmt: skip
        """In one launch, of so many bands if not 0. The second number of a run is how many
        multiprocessors there are."""
        request = self._request("rnn_through_time", dh)
        request.put_integers(kind, *d_out.shape)
        for tensor in (d_out, pre, h, c, live, gate, limit):
            assert tensor is None or tensor.is_contiguous()
            request.put_place(tensor)
        _put_matrices(request, weight, dh, dc)
        request.put_place(d_x)
        request.put_place(d_h)
        request.put_integers(bands)
        self._call(request, runs)

    def look_up(self, lookup: Lookup, tokens, *, runs=RUNS) -> None:
        request = self._request("look_up", lookup.table)
        request.put_integers(len(tokens))
        request.put_place(tokens)
        _put_lookup(request, lookup)
        self._call(request, runs)

    def clear_tokens(self, exps, tokens, *, runs=RUNS) -> None:
        request = self._request("clear_tokens", exps)
        request.put_integers(*exps.shape)
        _put_matrices(request, exps)
        _put_columns(request, tokens)
        self._call(request, runs)

    def _request(self, op: str, operand: Tensor) -> Request:
        request = Request()
        request.put_integers(_OPS.index(op))
        request.put_dtype(operand)
        return request

    def _call(self, request: Request, runs) -> None:
        request.take_back(execute(self._driver, request=request.bytes(runs)), runs)


def _put_matrices(request: Request, *matrices: Tensor | None) -> None:
    for matrix in matrices:
        request.put_place(matrix)
        request.put_dtype(matrix if matrix is not None and matrix.is_floating_point() else None)
        request.put_integers(*((0, 0) if matrix is None else matrix.stride()))


def _put_columns(request: Request, *columns: Tensor | None) -> None:
    for column in columns:
        request.put_place(column)
        request.put_integers(0 if column is None else column.stride(0))


def _put_lookup(request: Request, lookup: Lookup) -> None:
    _put_matrices(request, lookup.table, lookup.rows)
    request.put_integers(*lookup.table.shape)
    request.put_place(lookup.kept)
    request.put_numbers(lookup.scale)
