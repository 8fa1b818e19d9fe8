"""The path for callable cells: autograd differentiates the steps, and head and loss are one node.

The backward pass runs segments of steps again, but for the last ones, whose graph is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._callable_heads import (
    HeadOfSteps,
    called_head_losses,
    called_logits,
    fused_head,
    reduced,
)
from accumext.decoder._model import OP, parameters_of
from accumext.decoder._plan import SEGMENT, keeps_graph
from accumext.decoder._precision import no_grad_no_autocast
from accumext.decoder._saved_for_backward import BeginBackward, HeadLoss, SavedForBackward
from accumext.decoder._transcript import Decoded, Transcript
from accumext.recurrence import (
    OPEN_GATE,
    Checkpoint,
    KeptState,
    Replay,
    State,
    Truncation,
    check_output,
    check_unwritten,
    cuts,
    detach,
    fingerprints_of,
    freeze,
    join,
    map_tensors,
    parameter_tensors,
    size_of,
    tensors,
    write_counts,
)
from accumext.tensors.torch_private import leaves_since, next_node_number, write_count


def decode_with_callable(transcript: Transcript, return_outputs: bool) -> Decoded:
    """Run a call of `decode_loss` whose cell is a callable."""
    model, tokens = transcript.model, transcript.tokens
    grad_enabled, device = torch.is_grad_enabled(), transcript.losses.device
    reached = [model.table.weight, *tensors(tokens.state), *parameter_tensors(model.cell)]
    reached += parameters_of(model.table.module)
    differentiable = model.cell.state_shapes is None or any(t.requires_grad for t in reached)
    differentiable = differentiable or model.called_head is not None
    anchor, head, takes = model.table.anchor(), None, None
    if model.called_head is None:
        head = fused_head(transcript, differentiable)
        takes = HeadOfSteps(transcript, head)
    builds_graph = grad_enabled and differentiable
    steps = CallableSteps(transcript, takes, anchor, model.context, builds_graph, return_outputs)
    del takes  # frees the workspace that it holds, once `steps` has dropped it, too
    segments, last = steps.run()
    outputs = None
    if return_outputs:
        outputs = torch.cat([s.hidden if s.outputs is None else s.outputs for s in segments])
    extras = join(OP, torch.cat, [s.extras for s in segments])
    with no_grad_no_autocast(device):
        gradients = None if head is None else head.finish()
        value, inverse_divisor, lengths = transcript.finish()
    if not grad_enabled:
        return Decoded(value, last, lengths, outputs, extras)
    saved = SavedForBackward(transcript, inverse_divisor, gradients, steps.used)
    loss: Tensor
    if head is None:
        losses = torch.cat([s.losses for s in segments if s.losses is not None])
        value = reduced(transcript, losses, inverse_divisor)
        loss = BeginBackward.apply(saved, value, anchor)  # type: ignore[no-untyped-call]
    else:
        loss = HeadLoss.apply(  # type: ignore[no-untyped-call]
            saved, value, model.head_weight, model.head_bias, anchor, *(s.hidden for s in segments)
        )
    return Decoded(loss, last, lengths, outputs, extras)


class Segment(NamedTuple):
    """The results of n steps; those of a single step lack the dimension n."""

    hidden: Tensor  # [n, B, H]: what the head reads
    outputs: Tensor | None  # [n, B, H] of the cell, if requested and changed by dropout
    extras: State  # tensors [n, ...]
    losses: Tensor | None  # [n, B], with a graph, of a head that is called


def _inactive(segment: Segment, steps: int) -> Segment:
    """Return the results of steps without an active row: zeros, without a call of the cell."""
    zeros: Segment = map_tensors(lambda leaf: leaf.new_zeros(steps, *leaf.shape[1:]), segment)
    return zeros


@dataclass
class CallableSteps:
    """Runs steps of the cell for their outputs, states and predicted tokens."""

    transcript: Transcript
    head: HeadOfSteps | None  # None if all tokens are known, or if the head is called
    anchor: Tensor  # of the embedding's lookups
    context: tuple[Tensor, ...]
    builds_graph: bool
    returns_outputs: bool
    known: int = 0  # steps whose tokens are known; later passes over them are replays

    def __post_init__(self) -> None:
        self._first_node = next_node_number() if self.builds_graph else 0
        # The cell's trained parameters and the other leaves in the graph of its first step, each
        # with its number of writes before the steps.
        self.used = [(p, write_count(p)) for p in parameter_tensors(self.transcript.model.cell)]
        self._knows_graph = False

    def run(self) -> tuple[list[Segment], State]:
        """Run every step of the call. Return their results, and the state after them."""
        tokens, truncation = self.transcript.tokens, self.transcript.truncation
        if self.builds_graph:
            model = self.transcript.model
            kept = KeptState(OP, "cell", (model.cell.step, model.table.module, model.called_head))
            self._replay = Replay(kept, model.device, model.draws)
        spans = truncation.spans(tokens.steps) if self.builds_graph else []
        segments, last = self._overlapping(spans) if len(spans) > 1 else self._once(tokens.state)
        self.head = None
        return segments, detach(last) if truncation.cuts else last

    def _once(self, state: State) -> tuple[list[Segment], State]:
        """Run every step once.

        The graph of the first step is kept, and measured. The graph of as many of the last steps
        is kept as fits into `KEPT_GRAPH` bytes: it is used first in the backward pass, and is
        freed before other steps run again.
        """
        plan, steps = self.transcript.plan, self.transcript.tokens.steps
        segments = []
        measures = self.builds_graph and not plan.bounded
        graph = size = 0  # bytes of the first step's graph, and of the state after it
        active = self.transcript.active
        longest = SEGMENT
        if self.transcript.model.called_head is not None:  # the graphs of segments hold logits
            longest = max(1, min(SEGMENT, plan.rows // self.transcript.tokens.batch))
        for begin, end in segments_of(self.transcript.truncation, steps, measures, longest):
            if begin == 0 and measures:
                with self._replay.measuring(self.context) as sizes:
                    segment, state = self.run_steps(0, 0, end, state)
                graph, size = sum(sizes.values()), size_of(state)
            elif measures and keeps_graph(begin, steps, graph, size_of(state) - size):
                if active is None and size == size_of(self.transcript.tokens.state):
                    end = steps  # the graphs of all further steps are kept, and none is skipped
                segment, state = self.run_steps(begin, begin, end, state)
            else:
                segment, state = self._run_segment(begin, begin, end, state)
            segments.append(segment)
            if end == steps:
                break
            if active is not None and _operators.none_active(active[end]):
                if self.head is not None:
                    self.head.finish(end)
                segments.append(_inactive(segment, steps - end))
                break
        return segments, state

    def _overlapping(self, spans: list[tuple[int, int, int]]) -> tuple[list[Segment], State]:
        """Run overlapping windows, k1 < k2: gradients flow back k2 steps from each window's end.

        One pass without a graph computes the tokens, and the state at the beginning of each window.
        The graph of each window then starts from its own detached state.
        """
        transcript, tokens = self.transcript, self.transcript.tokens
        starts: dict[int, Checkpoint] = {}
        fingerprints: list[Tensor] = []  # the fingerprint of every step
        last = tokens.state
        begins = [*sorted({begin for begin, _, _ in spans}), tokens.steps]
        with torch.no_grad():
            for first, following in pairwise(begins):
                kept = map_tensors(torch.clone, last)  # the cell may write into its state later
                starts[first] = self._replay.checkpoint(kept)
                for begin, end in cuts(first, following, SEGMENT):
                    segment, last = self._run_segment(begin, begin, end, last)
                    fingerprints += fingerprints_of([*segment.hidden])
        segments = []
        for begin, counting, end in spans:
            # Not detached at step 0: the gradient of the initial state goes on to an encoder.
            state = tokens.state if begin == 0 else starts[begin].state
            with self._replay.running_from(starts[begin]):
                segment, _ = self._run_segment(begin, counting, end, state)
                self._replay.check_same([*segment.hidden], fingerprints[counting:end])
                if segment.losses is not None:
                    losses = fingerprints_of(transcript.losses[counting:end])
                    self._replay.check_same(segment.losses, losses)
                # Windows after step 0 restore what the cell kept in the pass without a graph.
                if spans[-1][0] > 0:
                    self._replay.kept.check_no_graph()
            segments.append(segment)
        return segments, last

    def _run_segment(
        self, begin: int, counting: int, end: int, state: State
    ) -> tuple[Segment, State]:
        """Run steps [begin, end). Return the results from `counting` on, and the state at the end.

        The graph holds only the inputs of the segment: the backward pass runs its steps again.
        """
        if not (self.builds_graph and torch.is_grad_enabled()):
            return self.run_steps(begin, counting, end, state)
        checkpoint = self._replay.checkpoint(state, self.context)
        run = partial(self.run_steps, begin, counting, end)
        return self._replay.record(run, state, checked=_reached, start=lambda: checkpoint)

    def run_steps(self, begin: int, counting: int, end: int, state: State) -> tuple[Segment, State]:
        """Run a segment as `_run_segment` does, but with a graph that keeps every tensor."""
        steps, state = self._call_steps(begin, counting, end, state)
        hidden, outputs, extras, losses = map(list, zip(*steps, strict=True))
        segment = Segment(
            torch.stack(hidden),
            None if outputs[0] is None else torch.stack(outputs),
            join(OP, torch.stack, extras),
            None if losses[0] is None else torch.stack(losses),
        )
        if end > self.known:
            self._predict(begin, end, segment.hidden.flatten(0, 1))
        return segment, state

    def _call_steps(
        self, begin: int, counting: int, end: int, state: State
    ) -> tuple[list[Segment], State]:
        transcript, model, tokens = self.transcript, self.transcript.model, self.transcript.tokens
        graph = torch.is_grad_enabled()
        results: list[Segment] = []
        returned: list[Tensor] = []
        counts: list[int] = []
        known = not tokens.free_running or end <= self.known
        embedded: Iterable[Tensor | None] = [None] * (end - begin)
        if model.table.module is None:
            embedded = model.table.lookups(self.anchor, transcript.inputs[begin:end], known)
        changes = transcript.gate is not OPEN_GATE or tokens.resets is not None
        called = model.called_head is not None
        for step, x in enumerate(embedded, begin):
            if x is None:
                x = model.table.call(transcript.inputs[step])
            elif not known:
                model.table.look_up(transcript.inputs[step], x)
            if model.embedding_dropout > 0:
                x = F.dropout(x, model.embedding_dropout)
            state = self._before(step, state) if changes else state
            output, new_state, more = self._call(x, state)
            check_output(OP, output, tokens.batch, model.head_weight.shape[1])
            reached = [output, *tensors(new_state)]
            if not graph:  # a cell may return the same memory at every step
                output, more = output.clone(), map_tensors(torch.clone, more)
            if transcript.active is not None:
                # A copy: the graph keeps it, and `active` is written at later steps.
                active = transcript.active[step].clone()
                new_state = freeze(OP, active, new_state, state, model.cell.batch_dim)
            state = new_state
            rate = model.output_dropout
            hidden = F.dropout(output, rate) if rate > 0 else output
            losses = None
            if called and step >= counting:
                losses = called_head_losses(transcript, step, hidden, step < self.known)
                reached.append(losses)
            elif called:  # only to advance what the head itself keeps and draws
                with torch.no_grad():
                    called_logits(OP, model, hidden)
            if graph and not self._knows_graph:
                self._knows_graph = True
                leaves = leaves_since(self._first_node, reached)
                self.used += [(leaf, write_count(leaf)) for leaf in leaves]
            if step >= counting:
                raw = output if self.returns_outputs and rate > 0 else None
                extras = more if self.returns_outputs else detach(more)
                results.append(Segment(hidden, raw, extras, losses))
                given = [output] if more is None else [output, *tensors(more)]
                returned += given
                counts += write_counts(given)
            if step >= self.known and (tokens.free_running or called):
                self._choose(step, hidden)
        check_unwritten(OP, "cell", "no output or extras of an earlier step", returned, counts)
        return results, state

    def _before(self, step: int, state: State) -> State:
        """Return the state that a step reads: with rows reset, and with a gate on its gradient."""
        transcript, resets = self.transcript, self.transcript.tokens.resets
        batch_dim = transcript.model.cell.batch_dim
        state = transcript.gate.cut(step, state)
        if resets is not None:
            initial = transcript.tokens.state
            state = resets.apply(OP, step, transcript.active, state, initial, batch_dim)
        return transcript.gate.attach(step, state, batch_dim)

    def _call(self, x: Tensor, state: State) -> tuple[Tensor, State, State]:
        """Call the cell for one step. Raise if it writes into a tensor that is read again: by a
        replay of the step, or by rows that keep their old state."""
        transcript, context = self.transcript, self.context
        step = transcript.model.cell.step
        stays = transcript.active is not None or transcript.tokens.resets is not None
        if not (self.builds_graph or stays):
            return step(x, state, *context)
        if torch.is_inference_mode_enabled():  # inference tensors do not count writes: copy them
            output, state, more = step(x, map_tensors(torch.clone, state), *context)
            return output, map_tensors(torch.clone, state), more
        given = [*tensors(state), *(context if self.builds_graph else ())]
        counts = write_counts(given)
        result = step(x, state, *context)
        check_unwritten(OP, "cell", "no tensor of its state or context", given, counts)
        return result

    def _choose(self, step: int, hidden: Tensor) -> None:
        """Predict the token of a step, unless a called head has done so, and set the next input."""
        if self.transcript.model.called_head is None:
            self._predict(step, step + 1, hidden)
        self.known = step + 1
        if self.transcript.tokens.free_running:
            self.transcript.feed_back(step)

    def _predict(self, begin: int, end: int, hidden: Tensor) -> None:
        assert self.head is not None  # every token is known before the backward pass
        self.head.add(begin, end, hidden)
        self.known = end


def _reached(result: tuple[Segment, State]) -> State:
    """Return the results that a replay must repeat: not the extras, which may be anything."""
    segment, last = result
    return segment.hidden, segment.losses, last


def segments_of(
    truncation: Truncation, steps: int, measures: bool, longest: int = SEGMENT
) -> list[tuple[int, int]]:
    """Return the segments [begin, end) of a call, each within one window. If the graph of the first
    step is to be measured, that step is a segment of its own."""
    period = truncation.period
    ends = () if period is None else range(period, steps, period)
    return cuts(0, steps, longest, ends, (1,) if measures else ())
