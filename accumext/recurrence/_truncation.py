"""k1, k2 and random cuts: how far the gradient of a step flows back through the states before it.
They are defined in docs/decoder.md."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumext.recurrence._cuts import cuts
from accumext.recurrence._generators import own_generator
from accumext.recurrence._resets import Resets
from accumext.recurrence._states import State, detach, hook_beyond, map_tensors
from accumext.tensors.checks import (
    TRUNCATIONS,
    fail_value,
    number,
    one_of,
    positive_int,
    users_level,
)


@dataclass(frozen=True)
class Truncation:
    """The arguments that bound the gradients of states."""

    k1: int | None = None  # steps between the ends of two windows
    k2: int | None = None  # steps from the end of a window back to its beginning
    random: bool = False  # cuts are random, with k2 steps between them on average
    clip: float | None = None  # bound of each element of a state's gradient, before a loss scale
    cuts: bool = False  # gradients are cut somewhere, so the returned state is detached
    period: int | None = None  # steps between cuts of all rows if k1 = k2; else None

    def spans(self, steps: int) -> list[tuple[int, int, int]]:
        """Return (begin, counting, end): losses of steps [counting, end) flow back to step `begin`.

        There is one span for all steps unless windows overlap. With k1 = k2 a gate cuts between
        windows.
        """
        if self.k1 is None or self.k2 is None or self.k1 == self.k2:
            return [(0, 0, steps)]
        return windows(steps, self.k1, self.k2)

    def gate(
        self,
        steps: int,
        batch: int,
        like: Tensor,  # has the device and the dtype of the factors
        generator: torch.Generator | None = None,
        resets: Resets | None = None,
    ) -> StateGradientGate:
        """Draw the random cuts of one call, and return a gate for its states."""
        if not self.random and self.period is None and self.clip is None:
            return OPEN_GATE
        if not self.random:
            return StateGradientGate(None, self.clip, self.period, resets)
        assert self.k2 is not None
        own = own_generator(generator, like.device)
        factors = random_cuts(steps, batch, self.k2, like, own)
        if resets is not None:  # a row that is reset reads its initial state, which is never cut
            factors = factors.masked_fill(resets.rows, 1)
        return StateGradientGate(factors, self.clip)


def truncation_from(op: str, k1: Any, k2: Any, truncation: Any, clip: Any = None) -> Truncation:
    """Check the arguments, and return them. Warn of k1 without k2, which has no effect."""
    one_of(op, "truncation", truncation, TRUNCATIONS)
    random = truncation == "random"
    k1 = None if k1 is None else positive_int(op, "k1", k1)
    k2 = None if k2 is None else positive_int(op, "k2", k2)
    if random and k1 is not None:
        fail_value(op, "k1", "be None if cuts are random", k1)
    if random and (k2 is None or k2 < 2):
        fail_value(op, "k2", "be at least 2, the mean of steps between random cuts", k2)
    if k2 is not None and not random:
        k1 = k2 if k1 is None else k1
        if k2 < k1:
            fail_value(op, "k2", "be at least k1", f"k1={k1}, k2={k2}")
    if clip is not None and number(op, "state_grad_clip", clip) <= 0:
        fail_value(op, "state_grad_clip", "be greater than 0", clip)
    if k1 is not None and k2 is None:
        text = f"{op}: k1={k1} has no effect without k2: the gradient flows all the way back. "
        advice = f"Pass k2={k1} to truncate it, or leave k1 out"
        warnings.warn(text + advice, stacklevel=users_level())
    return Truncation(k1, k2, random, clip, k2 is not None, k2 if k1 == k2 else None)


NO_TRUNCATION = Truncation()  # exact gradients


@dataclass
class StateGradientGate:
    """Cuts off, weighs and bounds the gradient that the state before each step passes on."""

    factors: Tensor | None  # [T, B]; row t is for the state before step t
    clip: float | None  # bound of each element of the gradient, before a loss scale
    period: int | None = None  # all rows are cut off before each step that is a multiple of it
    resets: Resets | None = None  # rows that `period` does not cut off: they were just reset
    limit: Tensor | None = None  # 0-dim: the bound in the current backward pass

    def begin_backward(self, upstream: Tensor) -> None:
        """Scale the bound by the upstream gradient of the loss, such as a loss scale."""
        if self.clip is not None:
            scale = upstream.abs() if upstream.dim() == 0 else torch.ones_like(upstream).amax()
            self.limit = scale * self.clip

    def cut(self, step: int, state: State) -> State:
        """Return the state before a step, detached if it is known to be cut off in every row."""
        if self.period is not None:
            return state if step == 0 or step % self.period else detach(state)
        factor = self._factor(step)
        return detach(state) if isinstance(factor, float) and factor == 0 else state

    def attach(self, step: int, state: State, batch_dim: int = 0) -> State:
        """Return the state before a step as views whose gradients pass this gate row by row."""
        factor = self._factor(step)
        if factor is None and self.clip is None:
            return state

        def attach(leaf: Tensor) -> Tensor:
            view = leaf.view_as(leaf)
            if view.grad_fn is None:  # no gradient passes
                return leaf
            of_rows = factor
            if isinstance(factor, Tensor):
                of_rows = factor.view([-1 if d == batch_dim else 1 for d in range(leaf.dim())])
            hook_beyond(view, partial(self._pass, of_rows))
            return view

        return map_tensors(attach, state)

    def _factor(self, step: int) -> Tensor | float | None:
        """Return the factors [B] of a step; or a number if there is one row, and it is on a CPU."""
        if self.factors is None:
            return None
        one = self.factors.shape[1] == 1 and self.factors.device.type == "cpu"
        return float(self.factors[step]) if one else self.factors[step]

    def _pass(self, factor: Tensor | float | None, gradient: Tensor) -> Tensor:
        if isinstance(factor, float):
            gradient = gradient * factor
        elif factor is not None:
            factor = factor.to(gradient.dtype)
            # A cut also stops infinities and NaN, which 0 as a factor would not.
            gradient = torch.where(factor == 0, 0, gradient * factor)
        if self.limit is not None:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            limit = self.limit.to(real.dtype)
            real = real.clamp(-limit, limit)
            gradient = torch.view_as_complex(real) if gradient.is_complex() else real
        return gradient

    def row_factors(self, steps: slice, like: Tensor) -> Tensor | None:
        """Return factors [n, B] of these steps, for gradients [n, B, ...] like this one."""
        if self.factors is not None:
            return self.factors[steps].to(like.dtype)
        if self.period is None:
            return None
        passes = torch.arange(steps.start, steps.stop, device=like.device) % self.period != 0
        passes[0] |= steps.start == 0  # the initial state is not cut off
        kept = passes[:, None].repeat(1, like.shape[1])
        if self.resets is not None:
            kept |= self.resets.rows[steps]
        return kept.to(like.dtype)


OPEN_GATE = StateGradientGate(None, None)  # every gradient passes as it is


def windows(steps: int, k1: int, k2: int) -> list[tuple[int, int, int]]:
    """Return (begin, counting, end): the losses of steps [counting, end) flow back to step `begin`.

    A window ends at every multiple of k1 and after the last step. Its losses are those since the
    end of the window before. They flow back k2 steps from its end. With k1 = k2 they flow back to
    the first step that has one, also in a last window of fewer steps.
    """
    return [
        (counting if k1 == k2 else max(0, end - k2), counting, end)
        for counting, end in cuts(0, steps, k1)
    ]


def random_cuts(
    steps: int, batch: int, mean: int, like: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw factors [T, B]: 0 with probability 1 / mean, and otherwise 1 / (1 - 1 / mean), so that
    the expected gradient is exact (ARTBP: Tallec & Ollivier 2017). Before step 0 they are 1."""
    cut = 1 / mean
    drawn = torch.rand(steps, batch, dtype=torch.float64, device=like.device, generator=generator)
    factors = (drawn >= cut).to(torch.promote_types(like.dtype, torch.float32)) / (1 - cut)
    factors[:1] = 1
    return factors
