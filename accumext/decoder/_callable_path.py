"""A run with a callable cell: its graph is autograd's, without logits, rebuilt in segments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accumext.decoder._arguments import OP
from accumext.decoder._cells import check_output
from accumext.decoder._recurrent_state import State, detach, freeze, replaying, rng_state
from accumext.decoder._run import Run
from accumext.decoder._saved_for_backward import HeadLoss, Record


class CellRun(Run):
    """The graph of the cell, and the loss as a node behind its outputs."""

    _known = 0  # steps whose token is known; later passes over them replay

    def _run(self, state: State) -> tuple[Tensor, State]:
        job = self.job
        anchor = job.table.anchor()
        if job.k2 is None or job.k1 == job.k2 or not self.cell_grad:
            hiddens, state = self._one_pass(anchor, state)
        else:
            hiddens, state = self._overlapping(anchor, state)
        value, missing, gradients = self.result()
        if not self.grad:
            return value, state
        record = Record(self, value, missing, gradients)
        return HeadLoss.of(record, anchor, hiddens), state

    def _one_pass(self, anchor: Tensor, state: State) -> tuple[list[Tensor], State]:
        """Without k2, where the graph goes all the way, and k1 = k2, where it is cut there."""
        period = self.job.k1 if self.job.k2 is not None else None
        hiddens = []
        for begin, end in segments(self.job.steps, period, self.plan.segment):
            hidden, state = self._segment(begin, begin, end, state, anchor)
            hiddens.append(hidden)
            if period is not None and end % period == 0:
                state = detach(state)
        return hiddens, detach(state) if self.job.truncated else state

    def _overlapping(self, anchor: Tensor, state: State) -> tuple[list[Tensor], State]:
        """k1 < k2: the losses of [e - k1, e) flow back to step e - k2, for e = k1, 2 k1, ... and T.

        The windows overlap, so one pass without a graph finds the tokens and the states where
        windows begin, and each window's graph then starts from its own detached state.
        """
        windows = self.job.windows()
        device, draws = self.losses.device, self.job.cell.draws
        starts: dict[int, tuple[State, tuple[Tensor, ...] | None]] = {}
        last = state
        marks = [*sorted({begin for begin, _, _ in windows}), self.job.steps]
        with torch.no_grad():
            for mark, following in pairwise(marks):
                starts[mark] = (last, rng_state(device) if draws else None)
                for first, stop in segments(following - mark, None, self.plan.segment):
                    begin, end = mark + first, mark + stop
                    _, last = self._segment(begin, begin, end, last, anchor)
        starts[0] = (state, starts[0][1])  # with its graph: windows from step 0 reach the encoder
        hiddens = []
        for begin, previous, end in windows:
            state_then, drawn = starts[begin]
            with replaying(drawn, device):
                hidden, _ = self._segment(begin, previous, end, state_then, anchor)
            hiddens.append(hidden)
        return hiddens, detach(last)

    def _segment(
        self, begin: int, keep: int, end: int, state: State, anchor: Tensor
    ) -> tuple[Tensor, State]:
        """Outputs [end - keep, B, H] of the steps from `keep`, and the state after the last.

        The graph holds only what enters: the backward pass runs the steps again.
        """
        if not (self.cell_grad and torch.is_grad_enabled()):
            return self._steps(begin, keep, end, state, anchor, *self.job.context)
        outputs: tuple[Tensor, State] = checkpoint(
            self._steps,
            begin,
            keep,
            end,
            state,
            anchor,
            *self.job.context,
            use_reentrant=False,
            preserve_rng_state=self.job.cell.draws,
        )
        return outputs

    def _steps(
        self, begin: int, keep: int, end: int, state: State, anchor: Tensor, *context: Tensor
    ) -> tuple[Tensor, State]:
        job, outputs = self.job, []
        for step in range(begin, end):
            x = job.table.lookup(anchor, self.inputs[step])
            state = job.carry.applied(step, state, job.cell.batch_dim)
            output, new_state = job.cell.step(x, state, *context)
            check_output(OP, output, job.batch, job.weight.shape[1])
            if self.live is not None:
                new_state = freeze(OP, self.live[step], new_state, state, job.cell.batch_dim)
            state = new_state
            if step >= keep:
                outputs.append(output)
            if self.by_step and step >= self._known:
                self.push(step, step + 1, output)
                self.feed_back(step)
                self._known = step + 1
        hidden = torch.stack(outputs)
        if end > self._known:
            self.push(begin, end, hidden.flatten(0, 1))
            self._known = end
        return hidden, state


def segments(steps: int, period: int | None, longest: int) -> Iterator[tuple[int, int]]:
    """[begin, end) over the steps, at most `longest` long, with borders at multiples of
    `period`."""
    begin = 0
    while begin < steps:
        end = min(begin + longest, steps)
        if period is not None:
            end = min(end, begin - begin % period + period)
        yield begin, end
        begin = end
