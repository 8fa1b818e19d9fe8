"""Embedding lookups, a step or a few at a time, whose weight gradient is formed once.

Autograd would make a dense [V, E] gradient per lookup. Here the backward of a lookup only stores
its rows. All lookups of a call depend on one empty tensor, the anchor. So autograd runs the
backward of the anchor after those of all lookups: it adds the stored rows in a single `add_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accumext.decoder import _operators
from accumext.ops.wgrad_fusion import destination
from accumext.tensors.checks import check_first_order


@dataclass
class EmbeddingTable:
    """The embedding of one call, and the gradient rows that its lookups have stored."""

    weight: Tensor  # [V, E]
    padding_token: int = 0  # fed if there is no token to feed
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    sparse: bool = False
    argument: str = "embedding"  # name of the argument in error messages
    renormalised: bool = False  # all rows that will be looked up are renormalised to max_norm
    module: nn.Module | None = None  # to call; `weight` then only has shape, dtype and device
    tied_gradient: Tensor | None = None  # [V, E]: the head's gradient, if it shares the weight
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (tokens [n], dx [n, E])

    def anchor(self) -> Tensor:
        """Return the empty tensor through which the lookups of a call depend on the weight."""
        anchor: Tensor = _Anchor.apply(self, self.weight)  # type: ignore[no-untyped-call]
        return anchor

    def lookups(self, anchor: Tensor, tokens: Tensor, known: bool) -> tuple[Tensor, ...]:
        """Return embedded tokens [n, B] as n tensors [B, E], which depend on the weight through the
        anchor and are no views of each other. If tokens are not known, `look_up` is to fill each.
        """
        rows: tuple[Tensor, ...] = _Lookups.apply(  # type: ignore[no-untyped-call]
            self, anchor, tokens, known
        )
        return rows

    def call(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens [B] of a step by a call of the module. It gets a copy of the
        tokens, for which the call may keep a graph: their memory is written later."""
        assert self.module is not None
        x: Tensor = self.module(tokens.clone())
        return x

    def look_up(self, tokens: Tensor, out: Tensor) -> None:
        """Fill a tensor of `lookups` with the rows of tokens [n], hidden from autograd."""
        weight = self.weight.detach()
        if self.max_norm is not None and not self.renormalised:
            torch.embedding_renorm_(weight, tokens.contiguous(), self.max_norm, self.norm_type)
        torch.index_select(weight, 0, tokens, out=out.data)

    def renormalise(self, tokens: Tensor) -> None:
        """Renormalise the rows of the weight for all tokens that will be looked up in the call."""
        if self.max_norm is not None:
            torch.embedding_renorm_(self.weight.detach(), tokens, self.max_norm, self.norm_type)
            self.renormalised = True

    def discard_gradients(self) -> None:
        """Drop gradients that a failed backward pass has stored."""
        self.rows.clear()
        self.tied_gradient = None

    def take_gradient(self) -> Tensor | None:
        """Return the weight's gradient from all stored rows and the tied head, and drop these; None
        if it was added to a main gradient."""
        rows, self.rows = self.rows, []
        total, self.tied_gradient = self.tied_gradient, None
        if not rows:
            return total
        tokens, gradient = (torch.cat(parts) for parts in zip(*rows, strict=True))
        rows.clear()
        if self.padding_idx is not None:
            gradient = gradient.masked_fill((tokens == self.padding_idx).unsqueeze(1), 0)
        if self.sparse and total is None:
            values, shape = gradient.to(self.weight.dtype), self.weight.shape
            return torch.sparse_coo_tensor(tokens[None], values, shape, check_invariants=False)
        main = None
        if total is None:
            # fp32 sums for half-precision weights: a frequent word adds thousands of small rows
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            total = main = destination(self.weight, dtype)
        if total is None:
            total = self.weight.new_zeros(self.weight.shape, dtype=dtype)
        _operators.add_rows(total, tokens, None, gradient, None)
        return total.to(self.weight.dtype) if main is None else None


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: EmbeddingTable, weight: Tensor) -> Tensor:
        ctx.table = table
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor | None]:
        check_first_order("decode_loss")
        table: EmbeddingTable = ctx.table
        return None, table.take_gradient()


class _Lookups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: EmbeddingTable, anchor: Tensor, tokens: Tensor, known: bool
    ) -> tuple[Tensor, ...]:
        ctx.table = table
        # Not a saved tensor: `Replay` would run the segment again to get it.
        ctx.tokens = tokens
        steps, batch = tokens.shape
        rows = table.weight.new_empty(steps * batch, table.weight.shape[1])
        if known:
            table.look_up(tokens.flatten(), rows)
        return torch.unsafe_split(rows, batch)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        check_first_order("decode_loss")
        table: EmbeddingTable = ctx.table
        table.rows.append((ctx.tokens.flatten(), torch.cat(gradients)))
        return None, gradients[0].new_zeros(0), None, None
