"""What the passes through a recurrent module of torch share: weights, states, dropout masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext import _scalars
from accumext.decoder._token_buffers import TokenBuffers
from accumext.recurrence import Resets, RnnWeights, dense_rows, operands, states_from

NOTHING = nullcontext()  # instead of a reset


class Dropout(NamedTuple):
    """What dropout keeps of a tensor [T, ...], and the factor of that."""

    mask: Tensor | None = None  # bool [T, ...]; None: all
    scale: float = 1.0

    def apply(self, part: Tensor, steps: slice) -> Tensor:
        """These steps of the tensor, [n, ...], or their gradient."""
        return part if self.mask is None else (part * self.mask[steps]).mul_(self.scale)


@dataclass(frozen=True)
class RnnBuffers:
    """What the forward pass writes and the backward pass reads again; no pre-activations.

    States have a row more than there are steps: before and after them.
    """

    rnn: RnnWeights
    table: Tensor  # [R, E]: the embedding's weight, elements of a row next to each other
    weights: list[Tensor]  # as `rnn.weights`, in the dtypes of the products; an empty bias is none
    states: list[Tensor]  # per layer h, and c of an LSTM: [T + 1, B, H]
    teacher: Tensor  # int64 [T, B]
    teacher_mask: Tensor | None  # bool [T, B]
    between: Dropout  # [T, L - 1, B, H]: of the outputs of all layers but the last
    of_inputs: Dropout  # [T, B, E]: of what the first layer reads
    of_outputs: Dropout  # [T, B, H]: of what the head reads
    resets: Resets | None
    state_dtypes: list[torch.dtype]  # of the parts of the given state

    @property
    def outputs(self) -> Tensor:
        """h of the last layer, [T, B, H]."""
        return self.states[-self.rnn.state_parts][1:]

    def head_inputs(self, begin: int, end: int) -> Tensor:
        """What the head reads in steps [begin, end), [n B, H]."""
        span = slice(begin, end)
        return self.of_outputs.apply(self.outputs[span], span).flatten(0, 1)

    def head_spans(self, begin: int, end: int, rows: int) -> Iterator[tuple[int, int]]:
        """[begin, end) in pieces of about so many rows, where dropout would copy them all."""
        size = end - begin
        if self.of_outputs.mask is not None:
            size = max(1, rows // self.outputs.shape[1])
        return ((first, min(first + size, end)) for first in range(begin, end, size))

    def head_rows(self, rows: Tensor) -> Tensor:
        """What the head reads in these of all T B rows, [M, H]."""
        chosen = self.outputs.flatten(0, 1)[rows]
        mask, scale = self.of_outputs
        return chosen if mask is None else chosen.mul_(mask.flatten(0, 1)[rows]).mul_(scale)

    def reset_before(self, step: int, live: Tensor | None) -> AbstractContextManager[None]:
        """In this context, rows that are reset before `step` have their initial states there. Then
        what the step before it left comes back: the head and the gates of that step read it."""
        if self.resets is None or step not in self.resets.steps:
            return NOTHING
        return self._reset(self.resets, step, live)

    @contextmanager
    def _reset(self, resets: Resets, step: int, live: Tensor | None) -> Iterator[None]:
        anew = resets.at(step, live)[:, None]
        left = [state[step].clone() for state in self.states]
        for state, before in zip(self.states, left, strict=True):
            torch.where(anew, state[0], before, out=state[step])
        try:
            yield
        finally:
            for state, before in zip(self.states, left, strict=True):
                state[step] = before


def rnn_buffers(tokens: TokenBuffers, rnn: RnnWeights, state: tuple[Tensor, ...]) -> RnnBuffers:
    """The weights as the operators take them, space for every state, and the dropout masks."""
    args, feedback = tokens.args, tokens.args.feedback
    table, weights = dense_rows(args.table.weight), operands(rnn, args.dtypes)
    states = states_from(rnn, state, args.steps, args.dtypes.accumulation)
    inner = rnn.dropout if rnn.layers > 1 else 0.0
    masks = _dropout(
        state[0], args.steps, (args.embedding_dropout, (args.batch, table.shape[1])),
        (inner, (rnn.layers - 1, args.batch, rnn.units)),
        (args.output_dropout, (args.batch, rnn.units)),
    )  # fmt: skip
    of_inputs, between, of_outputs = masks
    mask = feedback.mask
    return RnnBuffers(
        rnn, table, weights, states, feedback.teacher.contiguous(),
        None if mask is None else mask.contiguous(), between, of_inputs, of_outputs, args.resets,
        [part.dtype for part in state],
    )  # fmt: skip


def _dropout(
    like: Tensor,  # has the dtype and the device of the state
    steps: int,
    *places: tuple[float, tuple[int, ...]],  # rate, and the shape of a step
) -> list[Dropout]:
    """What is kept in each place.

    On a CPU that is what torch's dropout would keep, step by step and place by place, a layer at a
    time. On a device each place is drawn in one launch, and they are others.
    """
    kept, drawn = [Dropout()] * len(places), []
    for place, (rate, shape) in enumerate(places):
        if rate > 0:
            mask = torch.empty((steps, *shape), dtype=torch.bool, device=like.device)
            kept[place] = Dropout(mask, 0.0 if rate == 1 else 1 / (1 - rate))
            drawn.append((mask, rate))
    if not _scalars.on_host(like):
        for mask, rate in drawn:
            mask.bernoulli_(1 - rate)
        return kept
    for step in range(steps if drawn else 0):
        for mask, rate in drawn:
            ones = like.new_ones(mask.shape[-2:])
            for part in mask[step].view(-1, *ones.shape):
                part.copy_(F.dropout(ones, rate))  # 1 / (1 - rate) where an element is kept
    return kept
