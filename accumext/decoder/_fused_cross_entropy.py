"""The output layer and its cross-entropy in one workspace: loss, token, gradients, no logits kept.

For a row with hidden h, logits z = W h + b, m = max z, E = exp(z - m), S = sum E, lse = m + log S,
target y, weights w (1 without `class_weight`), smoothing eps and z-loss coefficient zl, the loss
and its gradient are

    L      = (1 - eps) w_y (lse - z_y) + eps/V (sum(w) lse - w.z) + zl lse^2
    dL/dz  = r E - s onehot(y) - q w
             r = ((1 - eps) w_y + eps/V sum(w) + 2 zl lse) / S      s = (1 - eps) w_y      q = eps/V

Only E is stored, unnormalised and in [0, 1], with 0 at the target: the target's own coefficient
t = r E_y - s, a difference of nearly equal numbers once a row is learnt, is formed in the
accumulation dtype and never rounded to a narrow one. Every factor sits in the row vectors r, t, q,
where nothing under- or overflows. The terms in t and q have rank one per row and never touch a
logit: w.z = h.(W^T w) + w.b.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from accumext._scalars import Scalar
from accumext._wgrad_fusion import Destination
from accumext.decoder import _operators
from accumext.decoder._half_matmul import add_product, exps_dtype, product

Wants: TypeAlias = tuple[bool, bool, bool]  # gradients of hidden, weight, bias


@dataclass(frozen=True)
class Criterion:
    """What the loss of a row is, as in `F.cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weight: Tensor | None = None  # [V]


@dataclass
class Gradients:
    """Of the summed row losses; fp32, or fp64 in double precision."""

    hidden: Tensor  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]

    def scale(self, factor: Tensor) -> None:
        """Multiply by a 0-dim factor, in place; nothing is written where it is 1."""
        given = [g for g in (self.hidden, self.weight, self.bias) if g is not None]
        torch.ops.accumext.scale_(given, factor)


@dataclass
class _Rows:
    """Rows that are in the workspace."""

    index: Tensor  # int64 [M]: which of the call's rows they are
    hidden: Tensor  # [M, H]
    target: Tensor  # int64 [M]
    r: Tensor  # [M]
    t: Tensor  # [M]
    q: Tensor  # [M]


class Head:
    """A workspace of `rows` rows; gradients are formed whenever it is full."""

    def __init__(
        self,
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        criterion: Criterion,
        rows: int,
        columns: int,  # rows whose logits exist at once
        total: int,  # N: rows of the whole call
        wants: Wants | None,  # None: the loss only
        compute_dtype: torch.dtype,  # what the operands of the products are rounded to
        temperature: float = 1.0,  # of samples
        straight: Destination | None = None,  # where the weight's gradient is added to instead
    ) -> None:
        vocabulary, hidden = weight.shape
        self.rows, self.columns = rows, columns
        self.dtype = accumulation_dtype(weight.dtype)
        self.weight = rows_together(weight.detach().to(compute_dtype))
        self.bias = None if bias is None else bias.detach().to(self.dtype).contiguous()
        self.temperature = temperature
        self._eps, self._z_loss = criterion.label_smoothing, criterion.z_loss
        self._class_weight = None
        if criterion.class_weight is not None:
            self._class_weight = criterion.class_weight.detach().to(self.dtype)
        self._colsum, self._bias_dot, self._weight_sum = self._smoothing_terms()

        new = weight.new_empty
        self._exps: Tensor | None = None  # [V, rows]: rows next to each other, as products want it
        self._held: list[_Rows] = []
        self.filled = 0  # rows in the workspace
        self._written_to = 0  # rows of it that were ever written
        self._smoothed = new(hidden, dtype=self.dtype).zero_()  # sum of q h, [H]
        self._smoothed_bias = new((), dtype=self.dtype).zero_()
        self.gradients: Gradients | None = None
        self._written = straight is not None  # whether gradients.weight has been
        self._factor: Scalar = 1.0 if straight is None else straight.factor
        if wants is not None:
            kind = exps_dtype(compute_dtype, weight.device, self.dtype)
            self._exps = new(vocabulary, min(rows, total), dtype=kind)
            self.gradients = Gradients(
                hidden=new(total if wants[0] else 0, hidden, dtype=self.dtype).zero_(),
                weight=self._weight_gradient(straight) if wants[1] else None,
                bias=new(vocabulary, dtype=self.dtype).zero_() if wants[2] else None,
            )

    def _weight_gradient(self, straight: Destination | None) -> Tensor:
        if straight is not None:
            return straight.main_grad
        return self.weight.new_empty(self.weight.shape, dtype=self.dtype)

    def room(self, rows: int) -> Tensor | None:
        """Where the exponentials of so many further rows go, [rows, V]; gradients are formed first
        if they do not fit. None if they are not wanted."""
        if self._exps is None:
            return None
        if self.filled + rows > self.rows:
            self._form_gradients()
        return self._exps[:, self.filled : self.filled + rows].t()

    def push(
        self,
        hidden: Tensor,  # [M, H]
        targets: Tensor,  # int64 [M], in [0, V)
        counted: Tensor,  # bool [M]: has a loss
        index: Tensor,  # int64 [M]: which of the call's rows they are
        upstream: Tensor | None = None,  # factor of the losses in the gradients, 0-dim or [M]
        uniforms: Tensor | None = None,  # fp64 [M], to sample with
    ) -> tuple[Tensor, Tensor]:
        """Tokens [M] and losses [M] (unscaled, 0 where not counted) of further rows."""
        hidden = hidden.detach().to(self.dtype)
        tokens = torch.empty_like(targets)
        losses = hidden.new_empty(len(hidden))
        for start in range(0, len(hidden), self.rows):
            piece = slice(start, start + self.rows)
            h = hidden[piece].contiguous()
            stats = h.new_empty(3, len(h))
            _operators.head_forward(
                h,
                self.weight,
                self.bias,
                targets[piece].contiguous(),
                None if uniforms is None else uniforms[piece].contiguous(),
                self.temperature,
                self.room(len(h)),
                self.columns,
                tokens[piece],
                stats,
            )
            factor = upstream if upstream is None or upstream.dim() == 0 else upstream[piece]
            losses[piece] = self.take(
                h, targets[piece], counted[piece], index[piece], factor, stats
            )
        return tokens, losses

    def take(
        self,
        hidden: Tensor,
        targets: Tensor,
        counted: Tensor,
        index: Tensor,
        upstream: Tensor | None,
        stats: Tensor,
    ) -> Tensor:
        """Losses [M] of rows whose exponentials have been written to `room`, from `stats` [3, M]:
        largest logit, sum of exponentials, logit of the target."""
        peak, total, target_logit = stats
        lse = peak + total.log()
        share = 1 - self._eps
        hit = share if self._class_weight is None else share * self._class_weight[targets]
        loss = hit * (lse - target_logit)
        row = hit + 2 * self._z_loss * lse
        if self._eps > 0:
            uniform = self._eps / self.weight.shape[0]
            narrow = hidden.to(self.weight.dtype).to(self.dtype)  # what made the logits
            smooth = self._weight_sum * lse - (narrow @ self._colsum + self._bias_dot)
            loss = loss + uniform * smooth
            row = row + uniform * self._weight_sum
        if self._z_loss > 0:
            loss = loss + self._z_loss * lse.square()
        if self._exps is not None:
            factor = (
                counted.to(self.dtype) if upstream is None else torch.where(counted, upstream, 0)
            )
            r = torch.where(counted, factor * row / total, 0)
            t = torch.where(counted, r * (target_logit - peak).exp() - factor * hit, 0)
            q = factor * (self._eps / self.weight.shape[0])
            self._held.append(_Rows(index, hidden, targets, r, t, q))
            self.filled += len(hidden)
        return torch.where(counted, loss, 0)

    def finish(self) -> Gradients | None:
        """The gradients of everything pushed; frees the workspace."""
        self._form_gradients()
        self._exps = None
        gradients = self.gradients
        if gradients is not None and gradients.weight is not None and not self._written:
            gradients.weight.zero_()
        if gradients is not None and self._eps > 0:
            weights = self._class_weight
            if gradients.weight is not None and weights is None:
                gradients.weight.sub_(self._smoothed)
            elif gradients.weight is not None and weights is not None:
                gradients.weight.addr_(weights, self._smoothed, alpha=-1)
            if gradients.bias is not None:
                term = self._smoothed_bias
                gradients.bias.sub_(term if weights is None else weights * term)
        return gradients

    def _smoothing_terms(self) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """W^T w, w.b and sum(w)."""
        weights = self._class_weight
        if self._eps == 0:
            return self.weight.new_empty(0), 0.0, 0.0
        if weights is None:
            bias_dot = 0.0 if self.bias is None else self.bias.sum()
            colsum = self.weight.sum(0, dtype=self.dtype)
            return colsum, bias_dot, float(self.weight.shape[0])
        bias_dot = 0.0 if self.bias is None else weights @ self.bias
        return product(weights[:, None], self.weight, self.dtype)[0], bias_dot, weights.sum()

    def _write_rest(self, exps: Tensor) -> None:
        """Zeros in what nobody has written, once at most: where rows ended before the workspace was
        full for the first time.

        The products take the rows that are filled, out of longer ones. There torch's may read past
        the last, whole tiles of the processor (32 columns of bfloat16 with AMX), and multiply what
        they find by zero, which makes NaN of the NaN that fresh memory may hold.
        """
        self._written_to = max(self._written_to, self.filled)
        if self._written_to < exps.shape[1]:
            exps[:, self._written_to :].zero_()
            self._written_to = exps.shape[1]

    def _form_gradients(self) -> None:
        if self.gradients is None or self._exps is None or self.filled == 0:
            return
        self._write_rest(self._exps)
        exps = self._exps[:, : self.filled]  # [V, M]
        held, self._held = self._held, []
        self.filled = 0
        index, h, y, r, t, q = (
            torch.cat([getattr(rows, name) for rows in held])
            for name in ("index", "hidden", "target", "r", "t", "q")
        )
        gradients = self.gradients
        if len(gradients.hidden):
            d_hidden = product(exps, self.weight, self.dtype).mul_(r[:, None])
            d_hidden.addcmul_(self.weight[y].to(self.dtype), t[:, None])
            if self._eps > 0:
                d_hidden.addr_(q, self._colsum, alpha=-1)
            gradients.hidden[index] = d_hidden
        if gradients.weight is not None:
            h = h.to(self.weight.dtype).to(self.dtype)  # what made the logits
            h = h * self._factor
            add_product(gradients.weight, exps, h * r[:, None], fresh=not self._written)
            gradients.weight.index_add_(0, y, h * t[:, None])
            self._written = True
            self._smoothed += q @ h
        if gradients.bias is not None:
            add_product(gradients.bias[:, None], exps, r[:, None], fresh=False)
            gradients.bias.index_add_(0, y, t)
            self._smoothed_bias += q.sum()


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """No graph and no autocast: the head chooses its own precision."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def rows_together(matrix: Tensor) -> Tensor:
    """The matrix with the elements of a row next to each other."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(weight: Tensor) -> torch.dtype:
    """What the operands of the head's products are rounded to: autocast's dtype where it is on."""
    kind = weight.device.type
    if weight.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
