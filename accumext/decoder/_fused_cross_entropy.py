"""The output layer and its cross-entropy, fused: the logits of all rows never exist at once.

For a row with hidden h, logits z = W h + b, m = max z, E = exp(z - m), S = sum E, lse = m + log S,
target y, weights w (1 without `class_weight`), smoothing eps and z-loss coefficient zl, the loss
and its gradient are

    L      = (1 - eps) w_y (lse - z_y) + eps/V (sum(w) lse - w.z) + zl lse^2
    dL/dz  = r E - s onehot(y) - q w
             r = ((1 - eps) w_y + eps/V sum(w) + 2 zl lse) / S      s = (1 - eps) w_y      q = eps/V

Only E is stored, unnormalised and in [0, 1], with 0 at the target: the target's own coefficient
t = r E_y - s, a difference of nearly equal numbers once a row is learnt, is formed in the
accumulation dtype and never rounded to half precision. Every factor sits in the row vectors r, t,
q, where nothing under- or overflows. The terms in t and q have rank one per row and never touch a
logit: w.z = h.(W^T w) + w.b.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._model import Model
from accumext.decoder._objective import NO_TEACHER, Objective
from accumext.decoder._plan import Plan
from accumext.decoder._precision import Dtypes


class NeedsGrad(NamedTuple):
    """Which gradients a pass through the head is to form."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass
class HeadGradients:
    """Gradients of the summed losses, in the accumulation dtype."""

    hidden: Tensor  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]

    def scale(self, factor: Tensor) -> None:
        """Multiply by a 0-dim factor, in place; nothing is written if it is 1."""
        gradients = [self.hidden]
        if self.weight is not None:
            gradients.append(self.weight)
        if self.bias is not None:
            gradients.append(self.bias)
        torch.ops.accumext.scale_(gradients, factor)

    def clone(self) -> HeadGradients:
        """Return a copy of the gradients."""
        weight, bias = (None if g is None else g.clone() for g in (self.weight, self.bias))
        return HeadGradients(self.hidden.clone(), weight, bias)

    def bias_like(self, parameter: Tensor | None) -> Tensor | None:
        """Return the bias's gradient in the dtype of its parameter."""
        return None if self.bias is None or parameter is None else self.bias.to(parameter.dtype)


class RowResults(NamedTuple):
    """Results of M rows of the head."""

    tokens: Tensor  # int64 [M]
    losses: Tensor  # [M], unscaled; 0 if not counted
    entropies: Tensor | None = None  # [M], only for a loss of whole distributions


class _Rows(NamedTuple):
    """Rows whose exponentials are in the workspace."""

    position: Tensor  # int64 [M]: among the call's T B rows
    hidden: Tensor  # [M, H]
    target: Tensor  # int64 [M]
    r: Tensor  # [M]
    t: Tensor  # [M]
    q: Tensor  # [M]


class FusedCrossEntropy:
    """A workspace of exponentials, [V, rows]; gradients are formed whenever it is full."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        plan: Plan,
        size: int,  # N, rows of the whole call
        needs: NeedsGrad | None,  # None: the loss only
        main_grad: Tensor | None = None,  # to which the weight's gradient is added
    ) -> None:
        weight, dtypes = model.head_weight.detach(), model.dtypes
        vocabulary, hidden = weight.shape
        self.rows, self.logit_rows = plan.rows, plan.logit_rows
        self.forms_gradients = needs is not None
        self.dtype = dtypes.accumulation
        self.weight, self.bias = rounded_head(weight, model.head_bias, dtypes)
        self._objective, self._z_loss = objective, objective.z_loss
        self.of_distributions = objective.of_distributions
        # Weights of the target's cross-entropy, and of each word's in label smoothing.
        hard = 1 - objective.soft_weight
        self._hard = hard * (1 - objective.label_smoothing)
        self._uniform = hard * objective.label_smoothing / vocabulary
        self._class_weight = None
        if objective.class_weight is not None:
            self._class_weight = objective.class_weight.to(self.dtype)
        if self._uniform > 0:
            self._colsum, self._bias_dot, self._weight_sum = self._smoothing_terms()

        new = weight.new_empty
        self._exps: Tensor | None = None  # [V, rows]: this layout makes matrix products fast
        self._pending: list[_Rows] = []
        self._filled = 0  # rows in the workspace
        self._smoothed = new(hidden, dtype=self.dtype).zero_()  # sum of q h, [H]
        self._smoothed_bias = new((), dtype=self.dtype).zero_()
        self._gradients: HeadGradients | None = None
        self._weight_written = main_grad is not None  # the weight's gradient holds sums to add to
        if needs is not None:
            d_weight = main_grad
            if needs.weight and d_weight is None:
                d_weight = new_buffer(weight, vocabulary, hidden, dtype=self.dtype)
            rows = min(self.rows, size)
            self._exps = new_buffer(weight, vocabulary, rows, dtype=dtypes.exps)
            self._gradients = HeadGradients(
                hidden=new(size if needs.hidden else 0, hidden, dtype=self.dtype).zero_(),
                weight=d_weight,
                bias=new(vocabulary, dtype=self.dtype).zero_() if needs.bias else None,
            )

    def workspace_slice(self, rows: int) -> Tensor | None:
        """Return memory for the exponentials of the next `rows` rows, [rows, V].

        Gradients are formed first if there is no space left. None if no gradients are to be formed.
        """
        if self._exps is None:
            return None
        if self._filled + rows > self.rows:
            self._form_gradients()
        return self._exps[:, self._filled : self._filled + rows].t()

    def forward(
        self,
        hidden: Tensor,  # [M, H]
        targets: Tensor | None,  # int64 [M], in [0, V); None: the tokens
        counted: Tensor,  # bool [M]: has a loss
        index: Tensor,  # int64 [M]: positions among the call's T B rows
        upstream: Tensor | None = None,  # factor of the losses in the gradients, 0-dim or [M]
        uniforms: Tensor | None = None,  # fp64 [M], to sample with
        temperature: float = 1.0,  # of samples
    ) -> RowResults:
        """Compute tokens and losses of M more rows, and keep what their gradients need."""
        hidden = hidden.detach().to(self.dtype)
        if not self.of_distributions:
            return self._pass(hidden, targets, counted, index, upstream, uniforms, temperature)
        if targets is None or uniforms is not None:
            # Tokens of all rows come first: samples are drawn, or are the targets of the losses.
            tokens = self._pass(hidden, None, None, index, None, uniforms, temperature).tokens
            known = tokens if targets is None else targets
            return self.known(hidden, known, counted, index, upstream)._replace(tokens=tokens)
        results = self.known(hidden, targets, counted, index, upstream)
        if counted.device.type == "cpu":  # `known` has left out rows without a loss
            uncounted = (~counted).nonzero().squeeze(1)
            others = self._pass(hidden[uncounted], None, None, index[uncounted], None, None, 1.0)
            results.tokens[uncounted] = others.tokens
        return results

    def known(
        self, hidden: Tensor, targets: Tensor, counted: Tensor, index: Tensor,
        upstream: Tensor | None,
    ) -> RowResults:  # fmt: skip
        """Compute a loss of whole distributions as `forward` does, but tokens of counted rows only:
        other rows are skipped on a CPU."""
        one = upstream is None or upstream.dim() == 0
        run = partial(self._differentiate, upstream=upstream) if one else self._differentiate
        rows = (hidden, targets, counted, index, *(() if one else (upstream,)))
        return RowResults(*_operators.of_chosen_rows(run, counted, *rows))

    def _pass(
        self, hidden: Tensor, targets: Tensor | None, counted: Tensor | None, index: Tensor,
        upstream: Tensor | None, uniforms: Tensor | None, temperature: float,
    ) -> RowResults:  # fmt: skip
        """Compute the cross-entropy as `forward` does; with `counted` None, only the tokens."""
        tokens = torch.empty_like(index)
        losses = hidden.new_zeros(len(hidden))
        for start in range(0, len(hidden), self.rows):
            piece = slice(start, start + self.rows)
            h = hidden[piece].contiguous()
            stats = h.new_empty(3, len(h))
            _operators.head_forward(
                h, self.weight, self.bias,
                None if targets is None else targets[piece].contiguous(),
                None if uniforms is None else uniforms[piece].contiguous(), temperature,
                None if counted is None else self.workspace_slice(len(h)), self.logit_rows,
                tokens[piece], stats,
            )  # fmt: skip
            if counted is None:
                continue
            factor = upstream if upstream is None or upstream.dim() == 0 else upstream[piece]
            known = (tokens if targets is None else targets)[piece]
            rows = known, counted[piece], index[piece]
            losses[piece] = self.add_rows(h, *rows, factor, stats)
        return RowResults(tokens, losses)

    def add_rows(
        self,
        hidden: Tensor,
        targets: Tensor,
        counted: Tensor,
        index: Tensor,
        upstream: Tensor | None,
        stats: Tensor,  # [3, M]: largest logit, sum of exponentials, logit of the target
    ) -> Tensor:
        """Return the losses [M] of rows whose exponentials are in `workspace_slice(M)`."""
        peak, total, target_logit = stats
        lse = peak + total.log()
        hit, share = self._coefficients(targets)
        loss = self._cross_entropy(hidden, hit, lse, target_logit)
        if self._exps is not None:
            row = share + 2 * self._z_loss * lse
            factor = counted.to(self.dtype)
            if upstream is not None:
                factor = torch.where(counted, upstream, 0)
            r = torch.where(counted, factor * row / total, 0)
            t = torch.where(counted, r * (target_logit - peak).exp() - factor * hit, 0)
            self._pending.append(_Rows(index, hidden, targets, r, t, factor * self._uniform))
            self._filled += len(hidden)
        return torch.where(counted, loss, 0)

    def _differentiate(
        self, hidden: Tensor, targets: Tensor, counted: Tensor, index: Tensor,
        upstream: Tensor | None,
    ) -> RowResults:  # fmt: skip
        """Compute losses of whole distributions. The workspace holds their gradients with respect
        to the logits in place of E, without the terms in t and q, and r is the upstream factor."""
        objective, temperature = self._objective, self._objective.soft_temperature
        scale = objective.soft_weight * temperature
        tokens = torch.empty_like(index)
        losses, entropies = hidden.new_empty(2, len(hidden))
        # If there is a probability of every word, no more rows of them are copied at once than
        # rows of logits exist.
        all_words = objective.soft is not None and objective.soft.of_all_words
        size = min(self.rows, self.logit_rows) if all_words else self.rows
        for start in range(0, len(hidden), size):
            piece = slice(start, start + size)
            h, y, at = hidden[piece].contiguous(), targets[piece].contiguous(), index[piece]
            (hit, share), stats = self._coefficients(y), h.new_empty(5, len(h))
            teacher = NO_TEACHER if objective.soft is None else objective.soft.operands(at)
            _operators.head_objective(
                h, self.weight, self.bias, y, stats.new_zeros(len(h)) + share, self._z_loss,
                objective.entropy_weight, scale, temperature, *teacher,
                self.workspace_slice(len(h)), self.logit_rows, tokens[piece], stats,
            )  # fmt: skip
            lse, target_logit, entropy, divergence, at_target = stats
            loss = self._cross_entropy(h, hit, lse, target_logit)
            loss = loss + scale * temperature * divergence - objective.entropy_weight * entropy
            counts = counted[piece]
            if self._exps is not None:
                r = counts.to(self.dtype)
                if upstream is not None:
                    factor = upstream if upstream.dim() == 0 else upstream[piece]
                    r = torch.where(counts, factor, 0)
                t = torch.where(counts, r * (at_target - hit), 0)
                self._pending.append(_Rows(at, h, y, r, t, r * self._uniform))
                self._filled += len(h)
            losses[piece] = torch.where(counts, loss, 0)
            entropies[piece] = torch.where(counts, entropy, 0)
        return RowResults(tokens, losses, entropies)

    def _coefficients(self, targets: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return s of the rows' targets, and the factor of lse in the loss without the z-loss."""
        weights = self._class_weight
        hit = self._hard if weights is None else self._hard * weights[targets]
        return hit, hit + self._uniform * self._weight_sum if self._uniform > 0 else hit

    def _cross_entropy(
        self, hidden: Tensor, hit: Tensor | float, lse: Tensor, target_logit: Tensor
    ) -> Tensor:
        """Return L of each row, without the terms of whole distributions."""
        loss = hit * (lse - target_logit)
        if self._uniform > 0:
            rounded = hidden.to(self.weight.dtype).to(self.dtype)  # as for the logits
            weighted_logits = self._product(rounded, self._colsum[:, None])[:, 0] + self._bias_dot
            smooth = self._weight_sum * lse - weighted_logits
            loss = loss + self._uniform * smooth
        if self._z_loss > 0:
            loss = loss + self._z_loss * lse.square()
        return loss

    def finish(self) -> HeadGradients | None:
        """Return the gradients of all rows, and free the workspace."""
        self._form_gradients()
        self._exps = None
        if self._gradients is None:
            return None
        d_weight, d_bias = self._gradients.weight, self._gradients.bias
        if d_weight is not None and not self._weight_written:
            d_weight.zero_()
        weights, term = self._class_weight, self._smoothed_bias
        if d_weight is not None and self._uniform > 0:
            if weights is None:
                d_weight.sub_(self._smoothed)
            else:
                d_weight.addr_(weights, self._smoothed, alpha=-1)
        if d_bias is not None and self._uniform > 0:
            d_bias.sub_(term if weights is None else weights * term)
        return self._gradients

    def _smoothing_terms(self) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Return W^T w, w.b and sum(w)."""
        weights = self._class_weight
        if weights is None:
            bias_dot = 0.0 if self.bias is None else self.bias.sum()
            colsum = self.weight.sum(0, dtype=self.dtype)
            return colsum, bias_dot, float(self.weight.shape[0])
        bias_dot = 0.0 if self.bias is None else (weights * self.bias).sum()
        colsum = self._product(weights[None], self.weight)[0]
        return colsum, bias_dot, weights.sum()

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right in the accumulation dtype."""
        sums = left.new_empty(left.shape[0], right.shape[1], dtype=self.dtype)
        _operators.add_matmul(sums, left, right, True)
        return sums

    def _form_gradients(self) -> None:
        """Add the gradients of the rows in the workspace, and empty it."""
        if self._gradients is None or self._exps is None or self._filled == 0:
            return
        exps = self._exps[:, : self._filled]  # [V, M]
        pending, self._pending = self._pending, []
        self._filled = 0
        position, h, y, r, t, q = pending[0]
        if len(pending) > 1:
            position, h, y, r, t, q = map(torch.cat, zip(*pending))
        gradients = self._gradients
        if len(gradients.hidden):
            d_hidden = self._product(exps.t(), self.weight).mul_(r[:, None])
            _operators.add_rows(gradients.hidden, position, None, d_hidden, None)
            _operators.add_rows(gradients.hidden, position, t, self.weight, y)
            if self._uniform > 0:
                gradients.hidden[position] -= torch.outer(q, self._colsum)
        if gradients.weight is not None:
            h = h.to(self.weight.dtype).to(self.dtype)  # as for the logits
            overwrite = not self._weight_written
            _operators.add_matmul(gradients.weight, exps, h * r[:, None], overwrite)
            _operators.add_rows(gradients.weight, y, t, h, None)
            self._weight_written = True
            if self._uniform > 0:
                _operators.add_matmul(self._smoothed[None], q[None], h, False)
        if gradients.bias is not None:
            _operators.add_matmul(gradients.bias[:, None], exps, r[:, None], False)
            gradients.bias.index_add_(0, y, t)
            if self._uniform > 0:
                self._smoothed_bias += q.sum()


def rounded_head(
    weight: Tensor, bias: Tensor | None, dtypes: Dtypes
) -> tuple[Tensor, Tensor | None]:
    """Return the head for the operators: the weight [V, H] in the dtype of products, with dense
    rows, and the bias [V] in the dtype of sums."""
    weight = weight.detach()
    if weight.dtype != dtypes.product or weight.stride(1) != 1:
        weight = new_buffer(weight, *weight.shape, dtype=dtypes.product).copy_(weight)
    return weight, None if bias is None else bias.detach().to(dtypes.accumulation).contiguous()


def new_buffer(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor, on large pages: heads and workspaces are many megabytes."""
    buffer = like.new_empty(shape, dtype=dtype)
    _operators.large_pages(buffer)
    return buffer
