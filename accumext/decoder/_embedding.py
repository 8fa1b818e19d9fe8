"""Embedding lookups one step at a time whose gradient is formed once: T lookups, one `index_add`.

Autograd would make a dense [V, E] gradient per lookup. Here each lookup's backward only leaves its
rows in a list; the lookups hang on one anchor, and the engine runs the anchor's backward when all
of them have run, which then adds the rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accumext._checks import FLOAT_DTYPES, fail_type, fail_value, type_name


@dataclass
class Table:
    """The embedding of one call, and the gradient rows on their way to it."""

    weight: Tensor  # [V, E]
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    sparse: bool = False
    tied: Tensor | None = None  # [V, E]: the head's gradient, where the head shares the weight
    _rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (tokens [B], dx [B, E])

    @property
    def pad(self) -> int:
        """The token fed where there is none to feed."""
        return 0 if self.padding_idx is None else self.padding_idx

    def anchor(self) -> Tensor:
        """An empty tensor that every lookup of this call hangs on."""
        anchor: Tensor = _Anchor.apply(self, self.weight)  # type: ignore[no-untyped-call]
        return anchor

    def lookup(self, anchor: Tensor, tokens: Tensor) -> Tensor:
        """Embedded tokens [B, E], connected to the weight through the anchor."""
        x: Tensor = _Lookup.apply(self, anchor, tokens)  # type: ignore[no-untyped-call]
        return x

    def rows(self, tokens: Tensor) -> Tensor:
        """Embedded tokens [B, E] without a graph."""
        weight = self.weight.detach()
        return F.embedding(tokens, weight, None, self.max_norm, self.norm_type)

    def forget(self) -> None:
        """Drop what a backward pass that failed midway has left."""
        self._rows.clear()
        self.tied = None

    def leave(self, tokens: Tensor, gradient: Tensor) -> None:
        """Keep the gradient of one lookup until the anchor's turn."""
        self._rows.append((tokens, gradient))

    def gradient(self) -> Tensor | None:
        """The weight's gradient of every lookup since the last call, plus the tied head's."""
        rows, self._rows = self._rows, []
        base, self.tied = self.tied, None
        if not rows:
            return base
        tokens = torch.cat([t for t, _ in rows])
        gradient = torch.cat([dx for _, dx in rows])
        rows.clear()
        if self.padding_idx is not None:
            gradient = gradient.masked_fill((tokens == self.padding_idx).unsqueeze(1), 0)
        if self.sparse and base is None:
            values, shape = gradient.to(self.weight.dtype), self.weight.shape
            return torch.sparse_coo_tensor(tokens[None], values, shape, check_invariants=False)
        if base is None:
            # fp32 sums under half-precision weights: a frequent word adds thousands of small rows
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            base = self.weight.new_zeros(self.weight.shape, dtype=wide)
        return base.index_add_(0, tokens, gradient.to(base.dtype)).to(self.weight.dtype)


def check_plain(op: str, name: str, module: nn.Module, kind: type[nn.Module], instead: str) -> None:
    """Raise for a module whose forward does more than its weight says: it is not called here."""
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    if type(module).forward is not kind.forward or hooked:
        contract = f"compute as a plain nn.{kind.__name__}, for its forward is not called"
        got = "forward hooks" if hooked else f"{type(module).__name__} with a forward of its own"
        fail_type(op, name, contract, got, f"Pass {instead} to mean just that")


def table(op: str, embedding: Any) -> Table:
    """The embedding argument: an `nn.Embedding` or a [V, E] tensor."""
    if isinstance(embedding, nn.Embedding):
        check_plain(op, "embedding", embedding, nn.Embedding, "the weight")
        if embedding.scale_grad_by_freq:
            fail_value(op, "embedding", "not scale gradients by frequency", "scale_grad_by_freq")
        options = (embedding.padding_idx, embedding.max_norm, embedding.norm_type, embedding.sparse)
        return Table(embedding.weight, *options)
    if not isinstance(embedding, Tensor) or embedding.dtype not in FLOAT_DTYPES:
        contract = "be an nn.Embedding or a floating-point tensor [V, E]"
        fail_type(op, "embedding", contract, type_name(embedding))
    if embedding.dim() != 2:
        fail_value(op, "embedding", "have shape [V, E]", list(embedding.shape))
    return Table(embedding)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: Table, weight: Tensor) -> Tensor:
        ctx.table = store
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor | None]:
        return None, ctx.table.gradient()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: Table, anchor: Tensor, tokens: Tensor) -> Tensor:
        ctx.table = store
        ctx.tokens = (
            tokens  # an attribute, not a saved tensor: nothing to recompute under checkpointing
        )
        return store.rows(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.table.leave(ctx.tokens, gradient)
        return None, gradient.new_zeros(0), None
