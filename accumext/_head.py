"""The output layer and its cross-entropy in one workspace: loss, token, gradients, no logits kept.

For a row with hidden h, logits z = W h + b, m = max z, E = exp(z - m), S = sum E, lse = m + log S,
target y, weights w (1 without `class_weight`), smoothing eps and z-loss coefficient zl, the loss
and its gradient are

    L      = (1 - eps) w_y (lse - z_y) + eps/V (sum(w) lse - w.z) + zl lse^2
    dL/dz  = r E - s onehot(y) - q w
             r = ((1 - eps) w_y + eps/V sum(w) + 2 zl lse) / S      s = (1 - eps) w_y      q = eps/V

so only E is stored, unnormalised and in [0, 1], and every factor sits in the row vectors r, s, q,
where nothing under- or overflows. The terms in s and q have rank one per row and never touch a
logit: w.z = h.(W^T w) + w.b.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from accumext._feedback import sample

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
        """Multiply by a 0-dim factor, in place."""
        for gradient in (self.hidden, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor)


class Head:
    """A workspace of `rows` logit rows; gradients are formed whenever it is full."""

    def __init__(
        self,
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        criterion: Criterion,
        rows: int,
        total: int,  # N: rows of the whole call
        wants: Wants | None,  # None: the loss only
        compute_dtype: torch.dtype,  # what the operands of the products are rounded to
        temperature: float | None = None,  # sample at this temperature instead of taking the argmax
        generator: torch.Generator | None = None,
    ) -> None:
        vocabulary, hidden = weight.shape
        self.rows = rows
        self.dtype = accumulation_dtype(weight.dtype)
        self._compute_dtype = compute_dtype
        self._weight = weight.detach().to(compute_dtype).to(self.dtype)
        self._bias = None if bias is None else bias.detach().to(self.dtype)
        self._temperature, self._generator = temperature, generator
        self._eps, self._z_loss = criterion.label_smoothing, criterion.z_loss
        self._class_weight = None
        if criterion.class_weight is not None:
            self._class_weight = criterion.class_weight.detach().to(self.dtype)
        self._colsum, self._bias_dot, self._weight_sum = self._smoothing_terms(vocabulary)

        new = self._weight.new_empty
        self._logits = new(min(rows, total), vocabulary)
        self._hidden = new(min(rows, total), hidden)
        self._factors: list[tuple[Tensor, ...]] = []  # (y, r, s, q) of the rows held
        self._filled = 0
        self._done = 0  # rows whose gradient has been formed
        self._smoothed = self._weight.new_zeros(hidden)  # sum of q h, [H]
        self._smoothed_bias = self._weight.new_zeros(())
        self.gradients: Gradients | None = None
        if wants is not None:
            self.gradients = Gradients(
                hidden=new(total, hidden) if wants[0] else new(0, hidden),
                weight=torch.zeros_like(self._weight) if wants[1] else None,
                bias=self._weight.new_zeros(vocabulary) if wants[2] else None,
            )

    def push(
        self,
        hidden: Tensor,  # [M, H]
        targets: Tensor,  # int64 [M], in [0, V) where counted
        upstream: Tensor,  # [M]: factor of each row's loss; 0 where not counted
    ) -> tuple[Tensor, Tensor]:
        """Tokens [M] and losses [M] (unscaled, 0 where not counted) of further rows, in order."""
        tokens, losses = [], []
        for start in range(0, len(hidden), self.rows):
            piece = slice(start, min(start + self.rows, len(hidden)))
            size = piece.stop - piece.start
            if self._filled + size > len(self._logits):
                self._form_gradients()
            token, loss = self._evaluate(hidden[piece], targets[piece], upstream[piece])
            tokens.append(token)
            losses.append(loss)
        return torch.cat(tokens), torch.cat(losses)

    def finish(self) -> Gradients | None:
        """The gradients of everything pushed; frees the workspace."""
        self._form_gradients()
        self._logits = self._hidden = self._logits.new_empty(0)
        gradients = self.gradients
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

    def _smoothing_terms(self, vocabulary: int) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """W^T w, w.b and sum(w)."""
        weights = self._class_weight
        if self._eps == 0:
            return self._weight.new_zeros(()), 0.0, 0.0
        if weights is None:
            bias_dot = 0.0 if self._bias is None else self._bias.sum()
            return self._weight.sum(0), bias_dot, float(vocabulary)
        bias_dot = 0.0 if self._bias is None else self._bias @ weights
        return weights @ self._weight, bias_dot, weights.sum()

    def _evaluate(self, hidden: Tensor, targets: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        held = slice(self._filled, self._filled + len(hidden))
        h = self._hidden[held].copy_(hidden.to(self._compute_dtype))
        z = self._logits[held]
        if self._bias is None:
            torch.mm(h, self._weight.t(), out=z)
        else:
            torch.addmm(self._bias, h, self._weight.t(), out=z)

        counted = upstream != 0
        y = torch.where(counted, targets, 0)
        peak, token = z.max(-1)
        if self._temperature is not None:
            token = sample(z, self._temperature, self._generator)
        target_logit = z.gather(1, y[:, None]).squeeze(1)
        exps = z.sub_(peak[:, None]).exp_()
        total = exps.sum(-1)
        lse = peak + total.log()

        share = 1 - self._eps
        hit = share if self._class_weight is None else share * self._class_weight[y]
        loss = hit * (lse - target_logit)
        row = hit + 2 * self._z_loss * lse
        if self._eps > 0:
            uniform = self._eps / exps.shape[1]
            loss += uniform * (self._weight_sum * lse - (h @ self._colsum + self._bias_dot))
            row = row + uniform * self._weight_sum
        if self._z_loss > 0:
            loss += self._z_loss * lse.square()
        loss = torch.where(counted, loss, 0)

        if self.gradients is not None:
            upstream = upstream.to(self.dtype)
            smooth = upstream * (self._eps / exps.shape[1])
            self._factors.append((y, upstream * row / total, upstream * hit, smooth))
            self._filled = held.stop
        return token, loss

    def _form_gradients(self) -> None:
        if self.gradients is None or self._filled == 0:
            return
        exps, h = self._logits[: self._filled], self._hidden[: self._filled]
        y, r, s, q = (torch.cat(parts) for parts in zip(*self._factors, strict=True))
        target_part = h * s[:, None]
        if self.gradients.hidden.shape[0]:
            d_hidden = self.gradients.hidden[self._done : self._done + self._filled]
            torch.mm(exps, self._weight, out=d_hidden)
            d_hidden.mul_(r[:, None]).sub_(self._weight[y] * s[:, None])
            if self._eps > 0:
                d_hidden.addr_(q, self._colsum, alpha=-1)
        if self.gradients.weight is not None:
            self.gradients.weight.addmm_(exps.t(), h * r[:, None])
            self.gradients.weight.index_add_(0, y, target_part, alpha=-1)
            self._smoothed += q @ h
        if self.gradients.bias is not None:
            self.gradients.bias.addmv_(exps.t(), r).index_add_(0, y, s, alpha=-1)
            self._smoothed_bias += q.sum()
        self._done += self._filled
        self._filled = 0
        self._factors.clear()


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """No graph and no autocast: the head chooses its own precision."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def logit_row_bytes(weight: Tensor) -> int:
    """One row of logits [V] in the accumulation dtype."""
    return weight.shape[0] * accumulation_dtype(weight.dtype).itemsize


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(weight: Tensor) -> torch.dtype:
    """What the operands of the head's products are rounded to: autocast's dtype where it is on."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype
