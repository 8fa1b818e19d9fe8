"""Sampling from the likeliest tokens: top-k, and top-p (nucleus) sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# How often the range of a threshold is halved before the tokens in it are sorted. After ten times,
# a thousandth of the range has few tokens left, and each halving reads all tokens.
HALVINGS = 10


@dataclass(frozen=True)
class TokenFilter:
    """The rule for tokens that may be sampled."""

    temperature: float
    top_k: int | None  # the k tokens with the largest logits; ties go to the lowest index
    top_p: float | None  # of these the fewest, likeliest first, that reach this share of their sum

    def operands(self, vocabulary: int) -> tuple[float, int, float]:
        """Return the arguments for the operators: V and 1 stand for no top_k and no top_p."""
        top_k = vocabulary if self.top_k is None else min(self.top_k, vocabulary)
        return self.temperature, top_k, 1.0 if self.top_p is None else self.top_p

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Sample tokens [M] of logits [M, V] by uniform numbers, fp64 [M] in [0, 1): the first in
        the order of the vocabulary at which the running sum of the filtered probabilities exceeds
        the number. A row whose largest logit is infinite or NaN gets its argmax."""
        peak, argmax = logits.max(1)
        if self.top_k is None or self.top_k >= logits.shape[1]:
            tokens = self._invert(logits, uniforms)
        else:
            tokens = largest(logits, self.top_k)
            tokens = tokens.gather(1, self._invert(logits.gather(1, tokens), uniforms))
        return torch.where(peak.isfinite(), tokens[:, 0], argmax)

    def _invert(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Sample positions [M, 1] in logits [M, n] by inversion, after top_p."""
        shares = ((logits - logits.amax(1, keepdim=True)) / self.temperature).exp()
        if self.top_p is not None:
            shares = torch.where(fewest(shares, self.top_p), shares, 0)
        running = shares.cumsum(1, dtype=torch.float64)
        chosen = torch.searchsorted(running, uniforms[:, None] * running[:, -1:], right=True)
        last = (running >= running[:, -1:]).to(torch.uint8).argmax(1, keepdim=True)
        return torch.minimum(chosen, last)


def largest(logits: Tensor, count: int) -> Tensor:
    """Return the columns [M, count] of the largest logits of each row [M, V], in ascending order.
    Ties go to the first columns."""
    if logits.device.type == "cpu":
        values, columns = logits.topk(count)
        if not ((~(logits < values[:, -1:])).sum(1) > count).any():  # no ties at the last place
            return columns.sort(1).values
    return _first_of_the_largest(logits, count)


def _first_of_the_largest(logits: Tensor, count: int) -> Tensor:
    """Return the columns of `largest` without reading values on the host. torch's `topk` finds the
    smallest of the largest logits; among those equal to it the first columns are chosen."""
    logits = logits.nan_to_num(torch.inf, torch.inf, -torch.inf)
    least = logits.topk(count).values[:, -1:]
    larger, equal = logits > least, logits == least
    missing = count - larger.sum(1, keepdim=True)
    kept = larger | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))
    width = logits.shape[1]
    before_end = torch.arange(width, 0, -1, dtype=torch.int32, device=logits.device)
    return width - torch.where(kept, before_end, 0).topk(count).values.long()


def fewest(shares: Tensor, part: float) -> Tensor:
    """Return a mask of the fewest shares of each row [M, V], largest first, that together reach
    this part of the row's sum. Ties go to the first columns."""
    # On a CPU a row stays in the cache while it is read several times. On a GPU rows are sorted,
    # since a search for the threshold would make the host wait.
    if shares.device.type == "cpu":
        return torch.stack([_fewest_by_halving(row, part) for row in shares])
    return _fewest_by_sorting(shares, part)


def _fewest_by_sorting(shares: Tensor, part: float) -> Tensor:
    values, columns = shares.sort(dim=1, descending=True, stable=True)
    running = values.cumsum(1, dtype=torch.float64)
    kept = (running - values < part * running[:, -1:]) & (values > 0)
    return torch.zeros_like(kept).scatter(1, columns, kept)


def _fewest_by_halving(shares: Tensor, part: float) -> Tensor:
    """Return the mask of `fewest` for one row [V]: halve a range, then sort the shares in it."""

    def mass(threshold: float) -> float:
        return float(torch.where(shares >= threshold, shares, 0).sum(dtype=torch.float64))

    wanted = part * mass(0.0)
    low, high, above = 0.0, 2 * float(shares.max()), 0.0  # shares >= low reach the wanted mass
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        reached = mass(middle)
        if reached >= wanted:
            low = middle
        else:
            high, above = middle, reached
    near = ((shares >= low) & (shares < high)).nonzero()[:, 0]
    values, order = shares[near].double().sort(descending=True, stable=True)
    count = int((above + values.cumsum(0) - values < wanted).sum())
    kept = shares >= high
    kept[near[order[:count]]] = True
    return kept & (shares > 0)
