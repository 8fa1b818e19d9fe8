"""Steps of torch's recurrent modules: the operator `decode_steps` with names and defaults for its
arguments, and the tensors that the passes forward and backward share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._rnn_weights import RnnWeights
from accumext.recurrence import Resets, cuts
from accumext.tensors import scalars

NOTHING = nullcontext()  # instead of a reset


class Dropout(NamedTuple):
    """The elements of a tensor [T, ...] that dropout keeps, and the factor of these."""

    mask: Tensor | None = None  # bool [T, ...]; None: all
    scale: float = 1.0

    def apply(self, part: Tensor, steps: slice) -> Tensor:
        """These steps of the tensor, [n, ...], or their gradient."""
        return part if self.mask is None else (part * self.mask[steps]).mul_(self.scale)


NO_DROPOUT = Dropout()


@dataclass
class StepsCall:
    """The arguments of `decode_steps`, of which `_operators.py` has the shapes."""

    table: Tensor
    weights: list[Tensor]
    states: list[Tensor]
    kind: int
    inputs: Tensor
    tokens: Tensor
    pad: int
    eos: int | None = None
    active: Tensor | None = None
    between: Dropout = NO_DROPOUT  # of the outputs of all layers but the last
    of_inputs: Dropout = NO_DROPOUT
    of_outputs: Dropout = NO_DROPOUT
    teacher: Tensor | None = None
    teacher_mask: Tensor | None = None
    uniforms: Tensor | None = None
    temperature: float = 1.0
    targets: Tensor | None = None
    pre: Tensor | None = None

    def run(
        self, begin: int, end: int,
        head_weight: Tensor, head_bias: Tensor | None, logit_rows: int,
        stats: Tensor | None = None, rows: Tensor | None = None, exps: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Run steps [begin, end); with `stats`, the head, too. Return the head's number of rows.

        The head is no field: a rounded copy of it is not kept for the backward pass.
        """
        used: int = _operators.decode_steps(
            self.table, self.weights, self.states, self.kind, *self.between, *self.of_inputs,
            *self.of_outputs, self.inputs, self.teacher, self.teacher_mask, self.active,
            -1 if self.eos is None else self.eos, self.pad, self.uniforms, self.temperature,
            head_weight, head_bias, self.targets, self.tokens, exps, stats, rows, logit_rows,
            begin, end, self.pre,
        )  # fmt: skip
        return used


@dataclass(frozen=True)
class RnnBuffers:
    """The arguments of every step, which the forward pass writes and the backward pass reads again.
    States have a row more than there are steps: before and after them."""

    rnn: RnnWeights
    steps: StepsCall
    outputs: Tensor  # h of the last layer, [T, B, H]
    resets: Resets | None
    state_dtypes: list[torch.dtype]  # of the parts of the given state

    def head_inputs(self, begin: int, end: int) -> Tensor:
        """The head's inputs in steps [begin, end), [n B, H]."""
        span = slice(begin, end)
        return self.steps.of_outputs.apply(self.outputs[span], span).flatten(0, 1)

    def head_spans(self, begin: int, end: int, rows: int) -> list[tuple[int, int]]:
        """[begin, end) in pieces of about so many rows, where dropout would copy them all."""
        size = end - begin
        if self.steps.of_outputs.mask is not None:
            size = max(1, rows // self.outputs.shape[1])
        return cuts(begin, end, size)

    def pieces(self, rows: int) -> Iterator[Tensor]:
        """The head's inputs in all steps, in pieces of about so many rows."""
        spans = self.head_spans(0, len(self.outputs), rows)
        return (self.head_inputs(*span) for span in spans)

    def head_rows(self, rows: Tensor) -> Tensor:
        """The head's inputs in these of all T B rows, [M, H]."""
        chosen = self.outputs.flatten(0, 1)[rows]
        mask, scale = self.steps.of_outputs
        return chosen if mask is None else chosen.mul_(mask.flatten(0, 1)[rows]).mul_(scale)

    def reset_before(self, step: int, active: Tensor | None) -> AbstractContextManager[None]:
        """In this context, rows that are reset before `step` have their initial states there. Then
        what the step before it left comes back: the head and the gates of that step read it."""
        if self.resets is None or step not in self.resets.steps:
            return NOTHING
        return self._reset(self.resets, step, active)

    @contextmanager
    def _reset(self, resets: Resets, step: int, active: Tensor | None) -> Iterator[None]:
        anew = resets.at(step, active)[:, None]
        left = [state[step].clone() for state in self.steps.states]
        for state, before in zip(self.steps.states, left, strict=True):
            torch.where(anew, state[0], before, out=state[step])
        try:
            yield
        finally:
            for state, before in zip(self.steps.states, left, strict=True):
                state[step] = before


def draw_dropout(
    like: Tensor,  # has the dtype and the device of the state
    steps: int,
    *places: tuple[float, tuple[int, ...]],  # rate, and the shape of a step
) -> list[Dropout]:
    """Draw the masks of each place.

    On a CPU they are those of torch's dropout, step by step and place by place, a layer at a time.
    On a device each place is drawn in one launch, and they are others.
    """
    kept, drawn = [Dropout()] * len(places), []
    for place, (rate, shape) in enumerate(places):
        if rate > 0:
            mask = torch.empty((steps, *shape), dtype=torch.bool, device=like.device)
            kept[place] = Dropout(mask, 0.0 if rate == 1 else 1 / (1 - rate))
            drawn.append((mask, rate))
    if not scalars.on_host(like):
        for mask, rate in drawn:
            mask.bernoulli_(1 - rate)
        return kept
    for step in range(steps if drawn else 0):
        for mask, rate in drawn:
            ones = like.new_ones(mask.shape[-2:])
            for part in mask[step].view(-1, *ones.shape):
                part.copy_(F.dropout(ones, rate))  # 1 / (1 - rate) where an element is kept
    return kept
