"""What happens to the gradient that a state passes to the step before: it is cut, weighted and
bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext._checks import check_first_order
from accumext.decoder._recurrent_state import State, map_tensors


@dataclass
class StateGradientGate:
    """Multiplies the gradient of the state before each step by a factor, then clamps it."""

    factors: Tensor | None  # [T, B]; row t is for the state before step t
    clip: float | None  # bound of each element of the gradient of `out.loss`
    limit: Tensor | None = None  # 0-dim: the bound in the backward pass that runs

    def begin_backward(self, upstream: Tensor) -> None:
        """Scale the bound by the upstream gradient of the loss, such as a loss scale."""
        if self.clip is not None:
            scale = upstream.abs() if upstream.dim() == 0 else torch.ones_like(upstream).amax()
            self.limit = scale * self.clip

    def attach(self, step: int, state: State, batch_dim: int) -> State:
        """The state before `step`, with this gate in its graph."""
        if self.factors is None and self.clip is None:
            return state

        def attach(leaf: Tensor) -> Tensor:
            if not leaf.requires_grad:
                return leaf
            shape = [-1 if dim == batch_dim else 1 for dim in range(leaf.dim())]
            factor = None if self.factors is None else self.factors[step].view(shape)
            gated: Tensor = _Gate.apply(leaf, self, factor)  # type: ignore[no-untyped-call]
            return gated

        return map_tensors(attach, state)


def random_cuts(
    steps: int, batch: int, mean: int, like: Tensor, generator: torch.Generator
) -> Tensor:
    """Factors [T, B]: 0 with probability 1 / mean, and otherwise 1 / (1 - 1 / mean), so that the
    expected gradient is the exact one (ARTBP: Tallec & Ollivier 2017). 1 before step 0."""
    cut = 1 / mean
    drawn = torch.rand(steps, batch, dtype=torch.float64, device=like.device, generator=generator)
    factors = (drawn >= cut).to(torch.promote_types(like.dtype, torch.float32)) / (1 - cut)
    factors[:1] = 1
    return factors


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, gate: StateGradientGate, factor: Tensor | None) -> Tensor:
        ctx.gate, ctx.factor = gate, factor
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        check_first_order("decode_loss")
        gate: StateGradientGate = ctx.gate
        if ctx.factor is not None:
            factor = ctx.factor.to(gradient.dtype)
            # A cut also stops infinities and NaN, which 0 as a factor would not.
            gradient = torch.where(factor == 0, 0, gradient * factor)
        if gate.limit is not None:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            limit = gate.limit.to(real.dtype)
            real = real.clamp(-limit, limit)
            gradient = torch.view_as_complex(real) if gradient.is_complex() else real
        return gradient, None, None
