"""What the gradient that a state carries from a step to the one before is multiplied with, and how
large it may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext.decoder._recurrent_state import State, map_tensors


class Carry:
    """Of one call."""

    def __init__(self, factors: Tensor | None, clip: float | None) -> None:
        self.factors = factors  # [T, B]; row t is for the state before step t
        self._clip = clip
        self.limit: Tensor | None = None  # 0-dim; known in the backward pass

    def backward_begins(self, upstream: Tensor) -> None:
        """The bound is on the gradient of the loss that the caller has: under a loss scale, or any
        other factor, it is as much larger."""
        if self._clip is not None:
            scale = upstream.abs() if upstream.dim() == 0 else torch.ones_like(upstream).amax()
            self.limit = scale * self._clip

    def applied(self, step: int, state: State, batch_dim: int) -> State:
        """The state before `step`, whose gradient is to be changed."""
        if self.factors is None and self._clip is None:
            return state
        factors = None if self.factors is None else self.factors[step]

        def apply(leaf: Tensor) -> Tensor:
            if not (leaf.requires_grad and leaf.is_floating_point()):
                return leaf
            shape = [1] * leaf.dim()
            if factors is not None and leaf.dim() > batch_dim:
                shape[batch_dim] = -1
            changed: Tensor = _Changed.apply(  # type: ignore[no-untyped-call]
                leaf, self, None if factors is None else factors.view(shape)
            )
            return changed

        return map_tensors(apply, state)


def random_cuts(
    steps: int, batch: int, mean: int, like: Tensor, generator: torch.Generator
) -> Tensor:
    """Factors [T, B] that cut with probability 1 / mean and make up for it elsewhere, so that the
    expected gradient is the whole one (ARTBP: Tallec & Ollivier 2017). None before step 0."""
    cut = 1 / mean
    coins = torch.rand(steps, batch, dtype=torch.float64, device=like.device, generator=generator)
    wide = torch.promote_types(like.dtype, torch.float32)
    factors = (coins >= cut).to(wide) / (1 - cut)
    factors[:1] = 1
    return factors


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, carry: Carry, factor: Tensor | None) -> Tensor:
        ctx.carry, ctx.factor = carry, factor
        return state.view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.factor is not None:
            factor = ctx.factor.to(gradient.dtype)
            gradient = torch.where(factor == 0, 0, gradient * factor)
        if ctx.carry.limit is not None:
            limit = ctx.carry.limit.to(gradient.dtype)
            gradient = gradient.clamp(-limit, limit)
        return gradient, None, None
