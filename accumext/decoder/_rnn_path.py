"""The path for torch's recurrent modules: steps forward and backward are operators on the weights,
and everything that need not wait for the next step is batched.

`RnnDecode` is the node of the graph; `_ForwardSteps` is its forward pass, and `ThroughTime` of
_through_time.py the one back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext._checks import check_first_order
from accumext.decoder import _operators
from accumext.decoder._arguments import DecodeArguments
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, NeedsGrad, cast_like
from accumext.decoder._memory import workspace_plan
from accumext.decoder._rnn_buffers import NOTHING, RnnBuffers, rnn_buffers
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._through_time import ThroughTime
from accumext.decoder._token_buffers import Decoded, TokenBuffers
from accumext.recurrence import RnnWeights, module_state


def decode_with_rnn(tokens: TokenBuffers, rnn: RnnWeights) -> Decoded:
    """What comes of a call whose cell the operators run."""
    args = tokens.args
    state = list(args.state) if rnn.state_parts == 2 else [args.state]
    parameters = [args.head_weight, args.head_bias, args.table.weight]
    weights = [w for w in rnn.weights if w is not None]
    loss, outputs, *last = RnnDecode.apply(  # type: ignore[no-untyped-call]
        tokens, rnn, torch.is_grad_enabled(), *parameters, *state, *weights
    )
    return Decoded(loss, tuple(last) if rnn.state_parts == 2 else last[0], outputs)


class RnnDecode(torch.autograd.Function):
    """The loss, the outputs of the cell, if they are asked for, and the last state as functions of
    every parameter and the initial state."""

    @staticmethod
    def forward(
        ctx: Any, tokens: TokenBuffers, rnn: RnnWeights, grad_enabled: bool, head_weight: Tensor,
        head_bias: Tensor | None, table: Tensor,
        *state_and_weights: Tensor,  # the parts of the state, then the weights of the cell
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        args, plan = tokens.args, workspace_plan(tokens.args)
        needs = None
        if grad_enabled and args.head_gradients_in_forward:
            needs_weight, needs_bias, *needs_cell = ctx.needs_input_grad[3:]
            needs = NeedsGrad(any(needs_cell), needs_weight, needs_bias)
        with torch.autocast(table.device.type, enabled=False):
            cross_entropy = FusedCrossEntropy(args, plan, needs)
            buffers = rnn_buffers(tokens, rnn, state_and_weights[: rnn.state_parts])
            _ForwardSteps(args, tokens, buffers, cross_entropy).run()
            gradients = cross_entropy.finish()
            value, inverse_divisor = tokens.reduced_loss()
            last = module_state(rnn, [s[-1] for s in buffers.states], buffers.state_dtypes)
            outputs = buffers.outputs.clone() if args.return_outputs else None
        if grad_enabled:
            ctx.saved = SavedForBackward(tokens, plan, inverse_divisor, gradients)
            ctx.buffers = buffers
            ctx.save_for_backward(value)  # autograd then refuses a second pass unless retained
        ctx.set_materialize_grads(False)
        if args.truncated:
            ctx.mark_non_differentiable(*last)
        return value.clone(), outputs, *last

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, d_outputs: Tensor | None, *d_last: Tensor | None
    ) -> tuple[Any, ...]:
        check_first_order("decode_loss")
        saved: SavedForBackward = ctx.saved
        buffers: RnnBuffers = ctx.buffers
        args = saved.args
        (value,) = ctx.saved_tensors
        saved.check_unchanged()
        needs_weight, needs_bias, needs_table, *needs_cell = ctx.needs_input_grad[3:]
        through_cell = needs_table or any(needs_cell)
        with torch.autocast(value.device.type, enabled=False):
            if upstream is None:  # the loss was not used
                upstream = torch.zeros_like(value)
            else:
                args.gate.begin_backward(upstream)
            needs = NeedsGrad(through_cell, needs_weight, needs_bias)
            spans = buffers.head_spans(0, args.steps, saved.plan.rows)
            outputs = (buffers.head_inputs(*span) for span in spans)
            head, main = saved.head_gradients(upstream, outputs, needs, fuse_weight=True)
            table_main = main
            if not args.tied:
                table_main = saved.table_destination() if needs_table else None
            d_table = head.weight if args.tied else None
            cell = ThroughTime(saved.tokens, buffers, needs_table, d_table, table_main)
            if through_cell:
                cell.run(head.hidden.view(args.steps, args.batch, -1), d_outputs, d_last)
            d_weight = head.weight if needs_weight and not args.tied and main is None else None
            return (
                *(None, None, None),
                cast_like(d_weight, args.head_weight),
                cast_like(head.bias if needs_bias else None, args.head_bias),
                cell.table_gradient() if needs_table else None,
                *cell.state_and_weight_gradients(needs_cell),
            )


@dataclass(frozen=True)
class _ForwardSteps:
    """Runs the steps: states, tokens and losses."""

    args: DecodeArguments
    tokens: TokenBuffers
    buffers: RnnBuffers
    cross_entropy: FusedCrossEntropy

    def run(self) -> None:
        """Every step of the call."""
        begin = 0
        for end, free_running in self._feedback_spans():
            if free_running:
                self._free_running(begin, end)
            else:
                self._teacher_forced(begin, end)
            begin = end

    def _feedback_spans(self) -> list[tuple[int, bool]]:
        """Ends of spans of steps, and whether any of their inputs waits for a prediction."""
        args, mask = self.args, self.args.feedback.mask
        if not args.free_running:
            return [(args.steps, False)]
        if args.eos is not None or mask is None or mask.device.type != "cpu":
            return [(args.steps, True)]  # on a GPU the host does not wait to read the mask
        predicted = [not row for row in mask[1:].all(1).tolist()]
        predicted += predicted[-1:] or [False]  # nothing follows the last step: it joins its span
        ends = [t + 1 for t in range(args.steps - 1) if predicted[t] != predicted[t + 1]]
        return [(end, predicted[end - 1]) for end in [*ends, args.steps]]

    def _teacher_forced(self, begin: int, end: int) -> None:
        """Steps whose inputs are known: the head takes them all at once."""
        following = slice(begin + 1, min(end + 1, self.args.steps))
        teacher = self.args.feedback.teacher[following]
        self.tokens.inputs[following] = self.tokens.padded(following, teacher)
        for first, last in self._spans(begin, end):
            self._advance(first, last)
        head, buffers = self.cross_entropy, self.buffers
        for first, last in buffers.head_spans(begin, end, head.rows):
            self.tokens.predict(head, first, last, buffers.head_inputs(first, last))

    def _free_running(self, begin: int, end: int) -> None:
        """Steps that read the prediction before them, as many at once as the workspace holds."""
        args, head = self.args, self.cross_entropy
        if head.rows < args.batch and head.forms_gradients:
            for step in range(begin, end):
                self._advance(step, step + 1)
                hidden = self.buffers.head_inputs(step, step + 1)
                self.tokens.predict(head, step, step + 1, hidden)
                self.tokens.feed_back(step)
            return
        size = max(1, head.rows // args.batch)
        stats = self.tokens.losses.new_empty(3, size * args.batch)
        rows = self.tokens.tokens.new_empty(size * args.batch)
        for span in self._spans(begin, end):
            for first in range(*span, size):
                last = min(first + size, span[1])
                exps = head.workspace_slice((last - first) * args.batch)
                used = self._advance(first, last, exps, stats, rows)
                self._add_rows(rows[:used].clone(), stats[:, :used])

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """[begin, end) in pieces, within which no row is reset but before the first step."""
        resets = self.buffers.resets
        return iter([(begin, end)]) if resets is None else resets.spans(begin, end)

    def _add_rows(self, rows: Tensor, stats: Tensor) -> None:
        """The losses of rows that `decode_steps` has put through the head."""
        tokens = self.tokens
        tokens.losses.view(-1)[rows] = self.cross_entropy.add_rows(
            self.buffers.head_rows(rows), tokens.targets.flatten()[rows],
            tokens.counted().flatten()[rows], rows, tokens.upstream(rows), stats,
        )  # fmt: skip

    def _advance(
        self, begin: int, end: int, exps: Tensor | None = None, stats: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Run the steps; with `stats`, the head too. How many rows it has seen."""
        args, tokens = self.args, self.tokens
        buffers, head = self.buffers, self.cross_entropy
        resets = buffers.resets
        with NOTHING if resets is None else buffers.reset_before(begin, tokens.live):
            used: int = _operators.decode_steps(
                buffers.table, buffers.weights, buffers.states, buffers.rnn.kind,
                *buffers.between, *buffers.of_inputs, *buffers.of_outputs, tokens.inputs,
                buffers.teacher, buffers.teacher_mask, tokens.live,
                -1 if args.eos is None else args.eos, args.table.padding_token,
                args.feedback.uniforms, args.feedback.temperature, head.weight, head.bias,
                args.targets, tokens.tokens, exps, stats, rows, head.logit_rows, begin, end,
            )  # fmt: skip
        return used
