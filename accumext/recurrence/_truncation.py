"""k1 and k2: which steps' losses flow back together, and how far. docs/decoder.md has the
definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext._checks import TRUNCATIONS, check_first_order, fail_value, one_of, positive_int
from accumext.recurrence._states import State, map_tensors


def windows(steps: int, k1: int, k2: int) -> list[tuple[int, int, int]]:
    """(begin, counting, end): the losses of steps [counting, end) flow back to step `begin`.

    A window ends at every multiple of k1 and after the last step. Its losses are those since the
    end before it. They flow back k2 steps from its end, or with k1 = k2 to the first of them, also
    in a last window of fewer steps.
    """
    ends = [*range(k1, steps, k1), steps]
    return [
        (counting if k1 == k2 else max(0, end - k2), counting, end)
        for counting, end in zip([0, *ends], ends, strict=False)
    ]


def truncation_of(op: str, k1: Any, k2: Any, truncation: Any) -> tuple[int | None, int | None]:
    """The arguments k1 and k2, checked; of random cuts k2 alone."""
    one_of(op, "truncation", truncation, TRUNCATIONS)
    k1 = None if k1 is None else positive_int(op, "k1", k1)
    k2 = None if k2 is None else positive_int(op, "k2", k2)
    if truncation == "random":
        if k1 is not None:
            fail_value(op, "k1", "be None where cuts are random", k1)
        if k2 is None or k2 < 2:
            fail_value(op, "k2", "be at least 2, the mean of steps between random cuts", k2)
        return None, k2
    if k2 is None:
        return k1, None
    k1 = k2 if k1 is None else k1
    if k2 < k1:
        fail_value(op, "k2", "be at least k1", f"k1={k1}, k2={k2}")
    return k1, k2


def unused_k1(k1: int) -> str:
    """What a warning says of k1 without k2."""
    return (
        f"k1={k1} has no effect without k2: the gradient flows all the way back. "
        f"Pass k2={k1} to truncate it, or leave k1 out"
    )


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
