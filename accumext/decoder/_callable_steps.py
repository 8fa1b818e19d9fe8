"""Steps of a callable cell under autograd, in segments that the backward pass runs again, but for
the last steps, whose graph is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._called_head import called_head_losses, called_logits
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy
from accumext.decoder._model import OP
from accumext.decoder._plan import SEGMENT, keeps_graph
from accumext.decoder._transcript import Transcript
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
    no_autocast,
    no_grad_no_autocast,
    parameter_tensors,
    size_of,
    tensors,
    write_counts,
)
from accumext.tensors.torch_private import (
    leaves_since,
    next_node_number,
    write_count,
)


class Segment(NamedTuple):
    """The results of some steps."""

    hidden: Tensor  # [n, B, H]: what the head reads
    outputs: Tensor | None  # [n, B, H] of the cell, if they are asked for and are others
    extras: State  # tensors [n, ...]
    losses: Tensor | None = None  # [n, B], with a graph, of a head that is called


class _Steps(NamedTuple):
    """The results of some steps, of each one by one."""

    hidden: list[Tensor]
    outputs: list[Tensor]
    extras: list[State]
    losses: list[Tensor]  # with a graph, of a head that is called


def _silent(segment: Segment, steps: int) -> Segment:
    """The results of steps in which no row is active: zeros, without a call of the cell."""

    def zeros(leaf: Tensor) -> Tensor:
        return leaf.new_zeros(steps, *leaf.shape[1:])

    outputs = None if segment.outputs is None else zeros(segment.outputs)
    losses = None if segment.losses is None else zeros(segment.losses)
    return Segment(zeros(segment.hidden), outputs, map_tensors(zeros, segment.extras), losses)


class HeadOfSteps:
    """Takes outputs of the cell as they come. Tokens that the next step waits for are found at
    once, all else of as many steps together as the workspace holds."""

    def __init__(self, transcript: Transcript, head: FusedCrossEntropy) -> None:
        tokens, batch = transcript.tokens, transcript.tokens.batch
        self._transcript, self._head = transcript, head
        # Where rows end, the transcript chooses among those of each step.
        whole = transcript.active is None and head.rows >= batch
        self._finds_tokens = tokens.free_running and whole
        self._size = head.rows // batch if whole or not tokens.free_running else 1  # steps
        self._begin = 0  # of the steps that wait
        self._hidden: list[Tensor] = []  # of them, [n B, H] each
        self._stats: list[Tensor] = []  # [3, B] each, if their tokens are found
        self._exps: tuple[Tensor, ...] | None = None  # space for those of each step, [B, V]
        self._precision = no_autocast(transcript.losses.device)

    def add(self, begin: int, end: int, hidden: Tensor) -> None:
        """Take the outputs [(end - begin) B, H] of these steps: of one, if tokens wait for it."""
        hidden = hidden.detach()
        if self._finds_tokens:
            # a copy, for the cell may write what it returns again
            hidden = hidden.to(self._head.dtype, copy=True).contiguous()
            with self._precision:
                self._find_tokens(begin, hidden)
        self._hidden.append(hidden)
        if end - self._begin >= self._size or end == self._transcript.tokens.steps:
            self.finish(end)

    def _find_tokens(self, step: int, hidden: Tensor) -> None:
        transcript, head, at = self._transcript, self._head, step - self._begin
        tokens, targets = transcript.tokens, transcript.tokens.targets
        uniforms = transcript.source.uniforms
        if at == 0:
            steps = min(self._size, tokens.steps - step)
            exps = None
            if not head.of_distributions:
                exps = head.workspace_slice(steps * tokens.batch)
            self._exps = None if exps is None else exps.split(tokens.batch)
        self._stats.append(hidden.new_empty(3, tokens.batch))
        _operators.head_forward(
            hidden, head.weight, head.bias, None if targets is None else targets[step],
            None if uniforms is None else uniforms[step], transcript.source.temperature,
            None if self._exps is None else self._exps[at], head.logit_rows,
            transcript.predicted[step], self._stats[-1],
        )  # fmt: skip

    def finish(self, end: int) -> None:
        """Find what is left of the steps until `end`."""
        begin, batch, given = self._begin, self._transcript.tokens.batch, self._hidden
        self._begin, self._hidden = end, []
        if not given:
            return
        hidden = given[0] if len(given) == 1 else torch.cat(given)
        with no_grad_no_autocast(hidden.device):
            if not self._finds_tokens:
                self._transcript.predict(self._head, begin, end, hidden)
                return
            rows = torch.arange(begin * batch, end * batch, device=hidden.device)
            stats, self._stats = torch.cat(self._stats, 1), []
            self._transcript.add_rows(self._head, rows, hidden, stats)


@dataclass
class CallableSteps:
    """Runs steps of the cell, for their outputs, states and tokens."""

    transcript: Transcript
    head: HeadOfSteps | None  # None where tokens are known, and where the head is called
    root: Tensor  # of the embedding's lookups
    builds_graph: bool
    returns_outputs: bool
    known: int = 0  # steps whose tokens are known; later passes over them are replays

    def __post_init__(self) -> None:
        self._first_node = next_node_number() if self.builds_graph else 0
        # The cell's trained parameters and the other leaves in the graph of its first step, and how
        # often each had been written when the steps began.
        self.used = [(p, write_count(p)) for p in parameter_tensors(self.transcript.model.cell)]
        self._knows_graph = False

    def run(self) -> tuple[list[Segment], State]:
        """Every step of the call, and the state after them."""
        tokens, truncation = self.transcript.tokens, self.transcript.truncation
        if self.builds_graph:
            model = self.transcript.model
            kept = KeptState(OP, "cell", (model.cell.step, model.table.module, model.called_head))
            self._replay = Replay(kept, model.device, model.draws)
        spans = truncation.spans(tokens.steps) if self.builds_graph else []
        found, last = self._overlapping(spans) if len(spans) > 1 else self._once(tokens.state)
        self.head = None
        return found, detach(last) if truncation.cuts else last

    def _once(self, state: State) -> tuple[list[Segment], State]:
        """Every step once.

        The graph of the first step is measured and kept; so is that of as many of the last steps
        as are small: the backward pass has freed it when it runs the other steps again.
        """
        plan, steps = self.transcript.plan, self.transcript.tokens.steps
        found, context = [], self.transcript.model.context
        measures = self.builds_graph and not plan.bounded
        graph = size = 0  # bytes of the first step's graph, and of the state after it
        active = self.transcript.active
        longest = SEGMENT
        if self.transcript.model.called_head is not None:  # the graphs of segments hold logits
            longest = max(1, min(SEGMENT, plan.rows // self.transcript.tokens.batch))
        for begin, end in segments_of(self.transcript.truncation, steps, measures, longest):
            given = (state, self.root, *context)
            if begin == 0 and measures:
                with self._replay.measuring(context) as sizes:
                    segment, state = self.run_steps(0, 0, end, *given)
                graph, size = sum(sizes.values()), size_of(state)
            elif measures and keeps_graph(steps - begin, graph, size_of(state) - size):
                if active is None and size == size_of(self.transcript.tokens.state):
                    end = steps  # all steps will be kept, and none is left out
                segment, state = self.run_steps(begin, begin, end, *given)
            else:
                segment, state = self._run_segment(begin, begin, end, *given)
            found.append(segment)
            if end == steps:
                break
            if active is not None and _operators.none_active(active[end]):
                if self.head is not None:
                    self.head.finish(end)
                found.append(_silent(segment, steps - end))
                break
        return found, state

    def _overlapping(self, spans: list[tuple[int, int, int]]) -> tuple[list[Segment], State]:
        """k1 < k2: the losses of each window flow back k2 steps from its end (`Truncation.spans`).

        The windows overlap, so one pass without a graph finds the tokens and the states where
        windows begin, and each window's graph then starts from its own detached state.
        """
        transcript, tokens = self.transcript, self.transcript.tokens
        given = (self.root, *transcript.model.context)
        starts: dict[int, Checkpoint] = {}
        known: list[Tensor] = []  # the fingerprint of every step
        last = tokens.state
        begins = [*sorted({begin for begin, _, _ in spans}), tokens.steps]
        with torch.no_grad():
            for first, following in pairwise(begins):
                kept = map_tensors(torch.clone, last)  # a cell may write into its own later
                starts[first] = self._replay.checkpoint(kept)
                for begin, end in cuts(first, following, SEGMENT):
                    segment, last = self._run_segment(begin, begin, end, last, *given)
                    known += fingerprints_of([*segment.hidden])
        found = []
        for begin, counting, end in spans:
            # with its graph: windows from step 0 reach the encoder
            state = tokens.state if begin == 0 else starts[begin].state
            with self._replay.running_from(starts[begin]):
                segment, _ = self._run_segment(begin, counting, end, state, *given)
                self._replay.check_same([*segment.hidden], known[counting:end])
                if segment.losses is not None:
                    losses = fingerprints_of(transcript.losses[counting:end])
                    self._replay.check_same(segment.losses, losses)
                if spans[-1][0] > 0:  # later windows begin with what steps without a graph kept
                    self._replay.kept.check_no_graph()
            found.append(segment)
        return found, last

    def _run_segment(
        self, begin: int, counting: int, end: int, state: State, root: Tensor, *context: Tensor
    ) -> tuple[Segment, State]:
        """The results of steps [counting, end), and the state after step end - 1.

        The graph holds only the inputs of the segment: the backward pass runs its steps again.
        """
        if not (self.builds_graph and torch.is_grad_enabled()):
            return self.run_steps(begin, counting, end, state, root, *context)
        checkpoint = self._replay.checkpoint(state, context)

        def run(state: State) -> tuple[Segment, State]:
            return self.run_steps(begin, counting, end, state, root, *context)

        return self._replay.record(run, state, checked=_reached, start=lambda: checkpoint)

    def run_steps(
        self, begin: int, counting: int, end: int, state: State, root: Tensor, *context: Tensor
    ) -> tuple[Segment, State]:
        """As `_run_segment`, with a graph that keeps everything."""
        steps, state = self._call_steps(begin, counting, end, state, root, *context)
        joined = torch.stack(steps.hidden)
        if end > self.known:
            self._predict(begin, end, joined.flatten(0, 1))
        returns = self.returns_outputs and self.transcript.model.output_dropout > 0
        raw = torch.stack(steps.outputs) if returns else None
        losses = torch.stack(steps.losses[-len(joined) :]) if steps.losses else None
        return Segment(joined, raw, join(OP, torch.stack, steps.extras), losses), state

    def _call_steps(
        self, begin: int, counting: int, end: int, state: State, root: Tensor, *context: Tensor
    ) -> tuple[_Steps, State]:
        transcript, model, tokens = self.transcript, self.transcript.model, self.transcript.tokens
        graph = torch.is_grad_enabled()
        results = _Steps([], [], [], [])
        returned: list[Tensor] = []
        counts: list[int] = []
        known = not tokens.free_running or end <= self.known
        embedded: Iterable[Tensor | None] = [None] * (end - begin)
        if model.table.module is None:
            embedded = model.table.lookups(root, transcript.inputs[begin:end], known)
        changes = transcript.gate is not OPEN_GATE or tokens.resets is not None
        for step, x in enumerate(embedded, begin):
            if x is None:
                x = model.table.call(transcript.inputs[step])
            elif not known:
                model.table.look_up(transcript.inputs[step], x)
            if model.embedding_dropout > 0:
                x = F.dropout(x, model.embedding_dropout)
            state = self._before(step, state) if changes else state
            output, new_state, more = self._call(x, state, context)
            check_output(OP, output, tokens.batch, model.head_weight.shape[1])
            reached = [output, *tensors(new_state)]
            if not graph:  # a cell may return the same memory at every step
                output, more = output.clone(), map_tensors(torch.clone, more)
            if transcript.active is not None:
                # later rows are written, and the graph keeps this
                active = transcript.active[step].clone()
                new_state = freeze(OP, active, new_state, state, model.cell.batch_dim)
            state = new_state
            rate = model.output_dropout
            hidden = F.dropout(output, rate) if rate > 0 else output
            if model.called_head is not None and step >= min(counting, self.known):
                results.losses.append(self._call_head(step, hidden))
                reached.append(results.losses[-1])
            elif model.called_head is not None:  # for what it keeps and draws
                with torch.no_grad():
                    called_logits(OP, model, hidden)
            if graph and not self._knows_graph:
                self._knows_graph = True
                leaves = leaves_since(self._first_node, reached)
                self.used += [(leaf, write_count(leaf)) for leaf in leaves]
            if step >= counting:
                results.hidden.append(hidden)
                results.outputs.append(output)
                results.extras.append(more if self.returns_outputs else detach(more))
                given = [output] if more is None else [output, *tensors(more)]
                returned += given
                counts += write_counts(given)
            if tokens.free_running and step >= self.known:
                self._predict(step, step + 1, hidden)
                transcript.feed_back(step)
        check_unwritten(OP, "cell", "no output or extras of an earlier step", returned, counts)
        return results, state

    def _before(self, step: int, state: State) -> State:
        """The state that a step reads: its rows reset, its gradient cut off, weighted, bounded."""
        transcript, resets = self.transcript, self.transcript.tokens.resets
        batch_dim = transcript.model.cell.batch_dim
        state = transcript.gate.cut(step, state)
        if resets is not None:
            initial = transcript.tokens.state
            state = resets.apply(OP, step, transcript.active, state, initial, batch_dim)
        return transcript.gate.attach(step, state, batch_dim)

    def _call(
        self, x: Tensor, state: State, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, State, State]:
        """A step of the cell, which may not write into tensors that are read again: by a replay of
        the step, or for rows that stay as they were."""
        transcript, step = self.transcript, self.transcript.model.cell.step
        stays = transcript.active is not None or transcript.tokens.resets is not None
        if not (self.builds_graph or stays):
            return step(x, state, *context)
        if torch.is_inference_mode_enabled():  # its tensors count no writes
            output, state, more = step(x, map_tensors(torch.clone, state), *context)
            return output, map_tensors(torch.clone, state), more
        given = [*tensors(state), *(context if self.builds_graph else ())]
        counts = write_counts(given)
        result = step(x, state, *context)
        check_unwritten(OP, "cell", "no tensor of its state or context", given, counts)
        return result

    def _call_head(self, step: int, hidden: Tensor) -> Tensor:
        """The losses [B] of a step. Its token is chosen the first time."""
        known = step < self.known
        losses = called_head_losses(self.transcript, step, hidden, known)
        if not known:
            self.known = step + 1
            if self.transcript.tokens.free_running:
                self.transcript.feed_back(step)
        return losses

    def _predict(self, begin: int, end: int, hidden: Tensor) -> None:
        assert self.head is not None  # every token is known before the backward pass
        self.head.add(begin, end, hidden)
        self.known = end


def _reached(found: tuple[Segment, State]) -> State:
    """What a replay of steps has to come to: no extras, which may be anything."""
    segment, last = found
    return segment.hidden, segment.losses, last


def segments_of(
    truncation: Truncation, steps: int, measures: bool, longest: int = SEGMENT
) -> list[tuple[int, int]]:
    """The segments [begin, end) of a call. If the graph of its first step is measured, that is one
    alone. None is in two windows."""
    period = truncation.period
    ends = () if period is None else range(period, steps, period)
    return cuts(0, steps, longest, ends, (1,) if measures else ())
