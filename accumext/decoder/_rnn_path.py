"""A run with one of torch's recurrent modules: its steps and its backward pass are operators, and
everything that need not wait for the next step is batched."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext._wgrad_fusion import defer
from accumext.decoder import _operators
from accumext.decoder._arguments import Job
from accumext.decoder._cuda_graph import Tape, WindowGraph
from accumext.decoder._fused_cross_entropy import accumulation_dtype, plain, rows_together
from accumext.decoder._recurrent_state import State
from accumext.decoder._rnn_backward import LayersBackward
from accumext.decoder._rnn_weights import Layers
from accumext.decoder._run import Run
from accumext.decoder._saved_for_backward import Record


class LayersRun(Run):
    """States of every step are kept, in the accumulation dtype; pre-activations are not."""

    def __init__(self, job: Job, layers: Layers) -> None:
        super().__init__(job)
        self.layers = layers
        self.states: list[Tensor] = []  # per layer h, and c of an LSTM: [T + 1, B, H]
        self.kept: Tensor | None = None  # bool [T, L - 1, B, H]: units that dropout keeps
        self.kept_scale = 1.0

    def _run(self, state: State) -> tuple[Tensor, State]:
        layers = self.layers
        parts = list(state) if layers.parts == 2 else [state]
        with plain(self.losses.device):
            self._prepare(parts)
            begin = 0
            for end, predicts in self._stretches():
                if predicts:
                    self._predicting(begin, end)
                else:
                    self._teaching(begin, end)
                begin = end
            value, missing, gradients = self.result()
        if not self.grad:
            return value, self._last(parts)
        record = Record(self, value, missing, gradients)
        weights = [w for w in layers.weights if w is not None]
        results = Rollout.apply(  # type: ignore[no-untyped-call]
            record,
            self.job.weight,
            self.job.bias,
            self.job.table.weight,
            len(parts),
            *parts,
            *weights,
        )
        loss, *last = results
        return loss, tuple(last) if layers.parts == 2 else last[0]

    def _prepare(self, parts: list[Tensor]) -> None:
        """The weights as the operators want them, and where the states go."""
        job, layers = self.job, self.layers
        dtype = accumulation_dtype(job.weight.dtype)
        self.table = rows_together(job.table.weight.detach())
        if self.grad and not job.table.sparse:
            defer(job.table.weight)  # whose rows the backward pass adds up in any case
        self.state_dtypes = [part.dtype for part in parts]
        nothing = job.weight.new_empty(0, dtype=dtype)
        self.weights = [
            nothing if w is None else w.detach().to(dtype).contiguous() for w in layers.weights
        ]
        shape = (job.steps + 1, job.batch, layers.units)
        for layer in range(layers.count):
            for part in parts:
                states = nothing.new_empty(shape)
                states[0] = part[layer] if layers.stacked else part
                self.states.append(states)
        if layers.dropout > 0 and layers.count > 1:
            self._draw_dropout(parts[0].dtype)
        feedback = job.feedback
        self.tape = Tape(
            self.states,
            self.inputs,
            feedback.teacher.contiguous(),
            self.targets,
            self.tokens,
            None if feedback.mask is None else feedback.mask.contiguous(),
            self.live,
            feedback.uniforms,
            self.kept,
        )

    def _draw_dropout(self, dtype: torch.dtype) -> None:
        """The masks that the module would draw, one step and layer after the other."""
        job, layers = self.job, self.layers
        shape = (job.steps, layers.count - 1, job.batch, layers.units)
        self.kept = torch.empty(shape, dtype=torch.bool, device=self.losses.device)
        ones = torch.ones(1, job.batch, layers.units, dtype=dtype, device=self.losses.device)
        for mask in self.kept.flatten(0, 1):
            mask.copy_(F.dropout(ones, layers.dropout)[0])  # 1 / (1 - p) where a unit is kept
        self.kept_scale = 0.0 if layers.dropout == 1 else 1 / (1 - layers.dropout)

    def _stretches(self) -> list[tuple[int, bool]]:
        """Ends of runs of steps that do, or do not, need their own tokens for the next input."""
        job, mask = self.job, self.job.feedback.mask
        if not self.by_step:
            return [(job.steps, False)]
        if job.eos is not None or mask is None or mask.device.type != "cpu":
            return [(job.steps, True)]  # elsewhere than on a CPU, nothing waits for the mask
        needed = [not row for row in mask[1:].all(1).tolist()]
        needed += needed[-1:] or [False]  # the last step's is not, but may join the one before
        ends = [t + 1 for t in range(job.steps - 1) if needed[t] != needed[t + 1]]
        return [(end, needed[end - 1]) for end in [*ends, job.steps]]

    def _teaching(self, begin: int, end: int) -> None:
        """Steps whose inputs are known: the head takes them all at once."""
        following = slice(begin + 1, min(end + 1, self.job.steps))
        self.inputs[following] = self.padded(following, self.job.feedback.teacher[following])
        self.advance(self.tape, begin, end)
        outputs = self.states[-self.layers.parts][begin + 1 : end + 1]
        self.push(begin, end, outputs.flatten(0, 1))

    def _predicting(self, begin: int, end: int) -> None:
        """Steps that read what the one before predicted, as many at once as the workspace holds."""
        batch = self.job.batch
        most = max(1, self.head.rows // batch)
        if self.head.rows < batch and self.head.gradients is not None:
            for step in range(begin, end):
                self.advance(self.tape, step, step + 1)
                self.push(step, step + 1, self.states[-self.layers.parts][step + 1])
                self.feed_back(step)
            return
        # A graph has every window but the first, which warms up what it captures, and the last.
        replayed: _Replayed | None = None
        for first in range(begin, end, most):
            last = min(first + most, end)
            room = self.head.room((last - first) * batch)
            if (
                self.job.cuda_graph
                and first > begin
                and first + most < min(self.job.steps, end + 1)
            ):
                if replayed is None:
                    replayed = _Replayed(self, most, room)
                self._take(*replayed(first))
                continue
            stats, rows = self.found((last - first) * batch)
            used = self.advance(self.tape, first, last, room, stats, rows)
            self._take(rows[:used], stats[:, :used])

    def found(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where the head writes what it finds of so many rows: stats [3, rows], and which they
        are."""
        return self.losses.new_empty(3, rows), self.tokens.new_empty(rows)

    def _take(self, rows: Tensor, stats: Tensor) -> None:
        """Losses, and factors of the gradients, of rows that the head has seen."""
        outputs = self.states[-self.layers.parts][1:].flatten(0, 1)[rows]
        self.losses.view(-1)[rows] = self.head.take(
            outputs,
            self.targets.flatten()[rows],
            self.counted().flatten()[rows],
            rows,
            self.early,
            stats,
        )

    def advance(
        self,
        tape: Tape,
        begin: int,
        end: int,
        room: Tensor | None = None,
        stats: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> int:
        """Run the steps; with `stats`, the head too. Rows that the head has seen."""
        job, head, feedback = self.job, self.head, self.job.feedback
        used: int = _operators.decode_steps(
            self.table,
            self.weights,
            tape.states,
            self.layers.kind,
            tape.kept,
            self.kept_scale,
            tape.inputs,
            tape.teacher,
            tape.forced,
            tape.live,
            -1 if job.eos is None else job.eos,
            job.table.pad,
            tape.uniforms,
            feedback.temperature,
            head.weight,
            head.bias,
            tape.targets,
            tape.tokens,
            room,
            stats,
            rows,
            head.columns,
            begin,
            end,
        )
        return used

    def _last(self, like: list[Tensor]) -> State:
        """The state after the last step, as the module has it."""
        layers = self.layers
        last = []
        for part, given in enumerate(like):
            of_layers = [s[-1] for s in self.states[part :: layers.parts]]
            value = torch.stack(of_layers) if layers.stacked else of_layers[0]
            last.append(value.to(given.dtype))
        return tuple(last) if layers.parts == 2 else last[0]


class _Replayed:
    """A window of steps with the head, in a graph."""

    def __init__(self, run: LayersRun, steps: int, room: Tensor | None) -> None:
        self._run, self._size = run, steps * run.job.batch
        self._stats, self._rows = stats, rows = run.found(self._size)

        def body(tape: Tape, steps: int) -> None:
            run.advance(tape, 0, steps, room, stats, rows)

        self._graph = WindowGraph(run.tape, steps, body)

    def __call__(self, begin: int) -> tuple[Tensor, Tensor]:
        """The rows that the head has seen from step `begin` on, all of them, and what it found."""
        self._graph.replay(self._run.tape, begin)
        return self._rows + begin * self._run.job.batch, self._stats


class Rollout(torch.autograd.Function):
    """The loss and the last state, as functions of every parameter and the initial state."""

    @staticmethod
    def forward(
        ctx: Any,
        record: Record,
        weight: Tensor,
        bias: Tensor | None,
        table: Tensor,
        parts: int,
        *others: Tensor,  # the initial state, then the weights of the cell
    ) -> tuple[Tensor, ...]:
        ctx.record = record
        ctx.save_for_backward(record.value)  # for autograd's error when a graph runs a second time
        ctx.set_materialize_grads(False)
        run: Any = record.run
        last = run._last(list(others[:parts]))
        last = last if isinstance(last, tuple) else (last,)
        if run.job.truncated:
            ctx.mark_non_differentiable(*last)
        return record.value.clone(), *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *d_last: Tensor | None) -> tuple[Any, ...]:
        record, run = ctx.record, ctx.record.run
        (value,) = ctx.saved_tensors
        record.check_unchanged()
        with plain(run.losses.device):
            if upstream is None:  # the last state alone was used
                upstream = torch.zeros_like(value)
            else:
                run.job.carry.backward_begins(upstream)
            return LayersBackward(record, ctx.needs_input_grad, upstream, d_last)()
