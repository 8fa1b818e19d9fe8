"""The forward pass of torch's recurrent modules: operators on their weights.

Everything that need not be computed step by step is batched. `_rnn_backward.py` reads the states
and pre-activations again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy
from accumext.decoder._plan import PRE_ACTIVATIONS
from accumext.decoder._rnn_weights import RnnWeights, dense_rows, operands, states_from
from accumext.decoder._transcript import Transcript
from accumext.recurrence import Resets, cuts
from accumext.tensors import scalars


class Dropout(NamedTuple):
    """The elements of a tensor [T, ...] that dropout keeps, and their factor."""

    mask: Tensor | None = None  # bool [T, ...]; None: all
    scale: float = 1.0

    def apply(self, part: Tensor, steps: slice) -> Tensor:
        """Return `part`, these steps of the tensor [n, ...] or their gradient, after dropout."""
        return part if self.mask is None else (part * self.mask[steps]).mul_(self.scale)


NO_DROPOUT = Dropout()


@dataclass
class StepsCall:
    """The arguments of the operator `decode_steps`; their shapes are in `_operators.py`."""

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
        """Run steps [begin, end), with the head if `stats` is given. Return the head's row count.

        The head is no field, so that a rounded copy of it is not kept for the backward pass.
        """
        masks, scales = zip(self.of_inputs, self.between, self.of_outputs)
        used: int = _operators.decode_steps(
            self.table, self.weights, self.states, self.kind, masks, scales, self.inputs,
            self.teacher, self.teacher_mask, self.active, -1 if self.eos is None else self.eos,
            self.pad, self.uniforms, self.temperature, head_weight, head_bias, self.targets,
            self.tokens, exps, stats, rows, logit_rows, begin, end, self.pre,
        )  # fmt: skip
        return used


@dataclass(frozen=True)
class RnnForward:
    """The forward pass through the cell. Its states, [T + 1, B, H], begin with the initial one."""

    transcript: Transcript
    rnn: RnnWeights
    steps: StepsCall
    outputs: Tensor  # h of the last layer, [T, B, H]
    resets: Resets | None
    state_dtypes: list[torch.dtype]  # of the parts of the given state

    def run(self, head: FusedCrossEntropy) -> None:
        """Run every step of the call: compute states, tokens and losses."""
        for begin, end, free_running in self._feedback_spans():
            (self._free_running if free_running else self._teacher_forced)(head, begin, end)

    def _feedback_spans(self) -> list[tuple[int, int, bool]]:
        """Return spans of steps, and for each whether an input depends on a prediction in it."""
        tokens, mask = self.transcript.tokens, self.transcript.source.mask
        together = not tokens.free_running or tokens.feedback.word in ("greedy", "sample")
        # The mask of a GPU is not read, for the host would have to wait for it.
        if together or tokens.eos is not None or mask is None or mask.device.type != "cpu":
            return [(0, tokens.steps, tokens.free_running)]
        predicted = [not row for row in mask[1:].all(1).tolist()]
        predicted += predicted[-1:] or [False]  # the last step feeds none: it joins a span
        changes = [t for t in range(1, tokens.steps) if predicted[t - 1] != predicted[t]]
        return [(*span, predicted[span[0]]) for span in cuts(0, tokens.steps, changes)]

    def _teacher_forced(self, head: FusedCrossEntropy, begin: int, end: int) -> None:
        """Run steps whose inputs are known: first the cell, then the head for all steps."""
        transcript = self.transcript
        following = slice(begin + 1, min(end + 1, transcript.tokens.steps))
        teacher = transcript.source.teacher[following]
        transcript.inputs[following] = transcript.padded(following, teacher)
        resets = self.resets
        for first, last in [(begin, end)] if resets is None else cuts(begin, end, resets.steps):
            self._run_cell(head, first, last)
        for first, last in self.head_spans(begin, end, head.rows):
            transcript.predict(head, first, last, self.head_inputs(first, last))

    def _free_running(self, head: FusedCrossEntropy, begin: int, end: int) -> None:
        """Run steps that read earlier predictions, as many per call as the workspace holds."""
        transcript, batch = self.transcript, self.transcript.tokens.batch
        if head.rows < batch and head.forms_gradients:
            for step in range(begin, end):
                self._run_cell(head, step, step + 1)
                hidden = self.head_inputs(step, step + 1)
                transcript.predict(head, step, step + 1, hidden)
                transcript.feed_back(step)
            return
        size = max(1, head.rows // batch)
        stats = transcript.losses.new_empty(3, size * batch)
        rows = transcript.predicted.new_empty(size * batch)
        resets = self.resets
        for span in [(begin, end)] if resets is None else cuts(begin, end, resets.steps):
            for first in range(*span, size):
                last = min(first + size, span[1])
                exps = None
                if not head.of_distributions:
                    exps = head.workspace_slice((last - first) * batch)
                with nullcontext() if resets is None else self.reset_before(resets, first):
                    used = self.steps.run(
                        first, last, head.weight, head.bias, head.logit_rows, stats, rows, exps
                    )
                seen = rows[:used].clone()
                transcript.add_rows(head, seen, self.head_rows(seen), stats[:, :used])

    def _run_cell(self, head: FusedCrossEntropy, begin: int, end: int) -> None:
        """Run the steps of the cell without the head."""
        resets = self.resets
        with nullcontext() if resets is None else self.reset_before(resets, begin):
            self.steps.run(begin, end, head.weight, head.bias, head.logit_rows)

    @contextmanager
    def reset_before(self, resets: Resets, step: int) -> Iterator[None]:
        """Set rows that are reset before `step` to their initial state in this context. Afterwards
        the state that the previous step wrote is restored: the head and backward of that step read
        it."""
        if step not in resets.steps:
            yield
            return
        anew = resets.at(step, self.transcript.active)[:, None]
        left = [state[step].clone() for state in self.steps.states]
        for state, before in zip(self.steps.states, left, strict=True):
            torch.where(anew, state[0], before, out=state[step])
        try:
            yield
        finally:
            for state, before in zip(self.steps.states, left, strict=True):
                state[step] = before

    def head_inputs(self, begin: int, end: int) -> Tensor:
        """Return the head's inputs in steps [begin, end), [n B, H]."""
        span = slice(begin, end)
        return self.steps.of_outputs.apply(self.outputs[span], span).flatten(0, 1)

    def head_rows(self, rows: Tensor) -> Tensor:
        """Return the head's inputs [M, H] in these rows, positions among all T B."""
        chosen = self.outputs.flatten(0, 1)[rows]
        mask, scale = self.steps.of_outputs
        return chosen if mask is None else chosen.mul_(mask.flatten(0, 1)[rows]).mul_(scale)

    def pieces(self, rows: int) -> Iterator[Tensor]:
        """Return the head's inputs in all steps, in pieces of about `rows` rows."""
        return starmap(self.head_inputs, self.head_spans(0, len(self.outputs), rows))

    def head_spans(self, begin: int, end: int, rows: int) -> list[tuple[int, int]]:
        """Return [begin, end) in one span; or, if dropout copies rows, in spans of about `rows`."""
        size = end - begin
        if self.steps.of_outputs.mask is not None:
            size = max(1, rows // self.outputs.shape[1])
        return cuts(begin, end, size)


def rnn_forward(
    transcript: Transcript, rnn: RnnWeights, state: tuple[Tensor, ...], keeps: bool
) -> RnnForward:
    """Prepare a forward pass: weights for the operators, dropout masks, and memory for every state
    and, if `keeps`, for pre-activations."""
    model, tokens, source = transcript.model, transcript.tokens, transcript.source
    table = dense_rows(model.table.weight)
    inner = rnn.dropout if rnn.layers > 1 else 0.0
    of_inputs = between = of_outputs = NO_DROPOUT
    if inner > 0 or model.embedding_dropout > 0 or model.output_dropout > 0:
        of_inputs, between, of_outputs = draw_dropout(
            state[0], tokens.steps, (model.embedding_dropout, (tokens.batch, table.shape[1])),
            (inner, (rnn.layers - 1, tokens.batch, rnn.units)),
            (model.output_dropout, (tokens.batch, rnn.units)),
        )  # fmt: skip
    pre, dtype = None, model.dtypes.accumulation
    if keeps:
        shape = (rnn.layers, tokens.steps, tokens.batch, PRE_ACTIVATIONS * rnn.units)
        pre = state[0].new_empty(shape, dtype=dtype)
    steps = StepsCall(
        table=table, weights=operands(rnn, model.dtypes),
        states=states_from(rnn, state, tokens.steps, dtype), kind=rnn.kind,
        inputs=transcript.inputs, tokens=transcript.predicted, targets=tokens.targets,
        pad=model.table.padding_token, eos=tokens.eos, active=transcript.active, between=between,
        of_inputs=of_inputs, of_outputs=of_outputs, teacher=source.teacher.contiguous(),
        teacher_mask=None if source.mask is None else source.mask.contiguous(),
        uniforms=source.uniforms, temperature=source.temperature, pre=pre,
    )  # fmt: skip
    outputs = steps.states[-rnn.state_parts][1:]
    dtypes = list(map(attrgetter("dtype"), state))
    return RnnForward(transcript, rnn, steps, outputs, tokens.resets, dtypes)


def draw_dropout(
    like: Tensor,  # has the dtype and the device of the state
    steps: int,
    *places: tuple[float, tuple[int, ...]],  # rate, and the shape of a step
) -> list[Dropout]:
    """Draw the masks of each place.

    On a CPU the random numbers are those that torch's dropout would draw in every step, for each
    place and each layer in turn. On a GPU each place is drawn in one launch, with other numbers.
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
