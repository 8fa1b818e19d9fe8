"""The path for torch's recurrent modules: steps forward and backward are operators on the weights,
and everything that need not wait for the next step is batched.

`RnnDecode` is the node of the graph; `_ForwardSteps` is its forward pass, and `ThroughTime` of
_through_time.py the one back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, NeedsGrad
from accumext.decoder._plan import PRE_ACTIVATIONS
from accumext.decoder._rnn_steps import NO_DROPOUT, NOTHING, RnnBuffers, StepsCall, draw_dropout
from accumext.decoder._rnn_weights import (
    RnnWeights,
    dense_rows,
    module_state,
    operands,
    states_from,
)
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._through_time import ThroughTime
from accumext.decoder._transcript import Decoded, Transcript
from accumext.ops.wgrad_fusion import destination
from accumext.recurrence import cuts
from accumext.tensors.checks import check_first_order


def decode_with_rnn(transcript: Transcript, rnn: RnnWeights, return_outputs: bool) -> Decoded:
    """Run a call by the operators, which know the cell."""
    model, state = transcript.model, transcript.tokens.state
    parts = list(state) if rnn.state_parts == 2 else [state]
    parameters = [model.head_weight, model.head_bias, model.table.weight]
    loss, outputs, lengths, *last = RnnDecode.apply(  # type: ignore[no-untyped-call]
        transcript, rnn, return_outputs, torch.is_grad_enabled(), *parameters, *parts, *rnn.given
    )
    return Decoded(loss, tuple(last) if rnn.state_parts == 2 else last[0], lengths, outputs)


class RnnDecode(torch.autograd.Function):
    """The loss, the outputs of the cell, if they are asked for, and the last state as functions of
    every parameter and the initial state."""

    @staticmethod
    def forward(
        ctx: Any, transcript: Transcript, rnn: RnnWeights, return_outputs: bool, grad_enabled: bool,
        head_weight: Tensor, head_bias: Tensor | None, table: Tensor,
        *state_and_weights: Tensor,  # the parts of the state, then the weights of the cell
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        needs, plan, size = None, transcript.plan, transcript.losses.numel()
        if grad_enabled and plan.gradients_in_forward:
            needs_weight, needs_bias, *needs_cell = ctx.needs_input_grad[4:]
            needs = NeedsGrad(any(needs_cell), needs_weight, needs_bias)
        with torch.autocast(table.device.type, enabled=False):
            parts = state_and_weights[: rnn.state_parts]
            keeps = grad_enabled and plan.pre_activation_bytes > 0
            buffers = rnn_buffers(transcript, rnn, parts, keeps)
            head = FusedCrossEntropy(transcript.model, transcript.objective, plan, size, needs)
            _ForwardSteps(transcript, buffers, head).run()
            gradients = head.finish()
            value, inverse_divisor, lengths = transcript.finish()
            last_rows = list(map(itemgetter(-1), buffers.steps.states))
            last = module_state(rnn, last_rows, buffers.state_dtypes)
            outputs = buffers.outputs.clone() if return_outputs else None
        if grad_enabled:
            ctx.saved = SavedForBackward(transcript, inverse_divisor, gradients)
            ctx.buffers = buffers
            ctx.save_for_backward(value)  # autograd then refuses a second pass unless retained
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lengths, *(last if transcript.truncation.cuts else ()))
        return value.clone(), outputs, lengths, *last

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, d_outputs: Tensor | None, _: None,
        *d_last: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        if torch.is_grad_enabled():
            check_first_order("decode_loss")
        saved: SavedForBackward = ctx.saved
        buffers: RnnBuffers = ctx.buffers
        model, transcript = saved.model, saved.transcript
        (value,) = ctx.saved_tensors
        saved.check_unchanged()
        needs_weight, needs_bias, needs_table, *needs_cell = ctx.needs_input_grad[4:]
        through_cell = needs_table or any(needs_cell)
        with torch.autocast(value.device.type, enabled=False):
            if upstream is None:  # the loss was not used
                upstream = torch.zeros_like(value)
            elif transcript.gate.clip is not None:
                transcript.gate.begin_backward(upstream)
            needs = NeedsGrad(through_cell, needs_weight, needs_bias)
            steps, batch = transcript.losses.shape
            head, main = saved.head_gradients(
                upstream, partial(buffers.pieces, transcript.plan.rows), needs, fuse_weight=True
            )
            d_bias = head.bias_like(model.head_bias) if needs_bias else None
            table, table_main = model.table, main
            if not model.tied:
                offers = needs_table and not table.sparse
                dtype = model.dtypes.accumulation
                table_main = destination(table.weight, dtype) if offers else None
            d_table = head.weight if model.tied else None
            cell = ThroughTime(transcript, buffers, needs_table, d_table, table_main)
            if through_cell:
                cell.run(head.hidden.view(steps, batch, -1), d_outputs, d_last)
            d_weight = head.weight if needs_weight and not model.tied and main is None else None
            return (
                *(None, None, None, None),
                None if d_weight is None else d_weight.to(model.head_weight.dtype),
                d_bias,
                cell.table_gradient() if needs_table else None,
                *cell.state_and_weight_gradients(needs_cell),
            )


def rnn_buffers(
    transcript: Transcript, rnn: RnnWeights, state: tuple[Tensor, ...], keeps: bool
) -> RnnBuffers:
    """The weights as the operators take them, space for every state and, where they are kept, for
    pre-activations, and dropout masks."""
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
    pre = None
    if keeps:
        shape = (rnn.layers, tokens.steps, tokens.batch, PRE_ACTIVATIONS * rnn.units)
        pre = state[0].new_empty(shape, dtype=model.dtypes.accumulation)
    steps = StepsCall(
        table=table, weights=operands(rnn, model.dtypes),
        states=states_from(rnn, state, tokens.steps, model.dtypes.accumulation), kind=rnn.kind,
        inputs=transcript.inputs, tokens=transcript.predicted, targets=tokens.targets,
        pad=model.table.padding_token, eos=tokens.eos, active=transcript.active, between=between,
        of_inputs=of_inputs, of_outputs=of_outputs, teacher=source.teacher.contiguous(),
        teacher_mask=None if source.mask is None else source.mask.contiguous(),
        uniforms=source.uniforms, temperature=source.temperature, pre=pre,
    )  # fmt: skip
    outputs = steps.states[-rnn.state_parts][1:]
    return RnnBuffers(rnn, steps, outputs, tokens.resets, list(map(attrgetter("dtype"), state)))


@dataclass(frozen=True)
class _ForwardSteps:
    """Runs the steps: states, tokens and losses."""

    transcript: Transcript
    buffers: RnnBuffers
    head: FusedCrossEntropy

    def run(self) -> None:
        """Every step of the call."""
        for begin, end, free_running in self._feedback_spans():
            if free_running:
                self._free_running(begin, end)
            else:
                self._teacher_forced(begin, end)

    def _feedback_spans(self) -> list[tuple[int, int, bool]]:
        """Spans of steps, and whether any of their inputs waits for a prediction."""
        tokens, mask = self.transcript.tokens, self.transcript.source.mask
        whole = not tokens.free_running or tokens.feedback.word in ("greedy", "sample")
        # on a GPU the host does not wait to read the mask
        if whole or tokens.eos is not None or mask is None or mask.device.type != "cpu":
            return [(0, tokens.steps, tokens.free_running)]
        predicted = [not row for row in mask[1:].all(1).tolist()]
        predicted += predicted[-1:] or [False]  # nothing follows the last step: it joins its span
        changes = [t for t in range(1, tokens.steps) if predicted[t - 1] != predicted[t]]
        return [(*span, predicted[span[0]]) for span in cuts(0, tokens.steps, changes)]

    def _teacher_forced(self, begin: int, end: int) -> None:
        """Steps whose inputs are known: the head takes them all at once."""
        transcript, buffers, head = self.transcript, self.buffers, self.head
        following = slice(begin + 1, min(end + 1, transcript.tokens.steps))
        teacher = transcript.source.teacher[following]
        transcript.inputs[following] = transcript.padded(following, teacher)
        resets = buffers.resets
        for first, last in [(begin, end)] if resets is None else cuts(begin, end, resets.steps):
            self._advance(first, last)
        for first, last in buffers.head_spans(begin, end, head.rows):
            transcript.predict(head, first, last, buffers.head_inputs(first, last))

    def _free_running(self, begin: int, end: int) -> None:
        """Steps that read the prediction before them, as many at once as the workspace holds."""
        transcript, head, batch = self.transcript, self.head, self.transcript.tokens.batch
        if head.rows < batch and head.forms_gradients:
            for step in range(begin, end):
                self._advance(step, step + 1)
                hidden = self.buffers.head_inputs(step, step + 1)
                transcript.predict(head, step, step + 1, hidden)
                transcript.feed_back(step)
            return
        size, buffers = max(1, head.rows // batch), self.buffers
        stats = transcript.losses.new_empty(3, size * batch)
        rows = transcript.predicted.new_empty(size * batch)
        resets = buffers.resets
        for span in [(begin, end)] if resets is None else cuts(begin, end, resets.steps):
            for first in range(*span, size):
                last = min(first + size, span[1])
                exps = None
                if not head.of_distributions:
                    exps = head.workspace_slice((last - first) * batch)
                with NOTHING if resets is None else buffers.reset_before(first, transcript.active):
                    used = buffers.steps.run(
                        first, last, head.weight, head.bias, head.logit_rows, stats, rows, exps
                    )
                seen = rows[:used].clone()
                transcript.add_rows(head, seen, buffers.head_rows(seen), stats[:, :used])

    def _advance(self, begin: int, end: int) -> None:
        """Run the steps without the head."""
        buffers, head, active = self.buffers, self.head, self.transcript.active
        with NOTHING if buffers.resets is None else buffers.reset_before(begin, active):
            buffers.steps.run(begin, end, head.weight, head.bias, head.logit_rows)
