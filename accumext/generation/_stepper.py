"""The steps of a decoder without a graph, by its modules or by an operator, and the ends of its
rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import (
    Model,
    RnnWeights,
    StepsCall,
    define_cuda_operator,
    dense_rows,
    module_state,
    no_autocast,
    operands,
    states_from,
)
from accumext.generation._output_layer import LOGIT_ROWS, OutputLayer
from accumext.recurrence import State, check_output, freeze, map_tensors

OP = "generate"

# Steps per call of an operator: a longer call would need more memory for states, and would run more
# steps after the end of the last row.
CHUNK = 32


class Generated(NamedTuple):
    """Tokens and their log-probabilities, [T, B], or [T, B, K] from beam search. After the end of a
    row they are padding and 0."""

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor  # int64 [B] or [B, K]
    state: State


@dataclass(frozen=True)
class Stepper:
    """Runs a decoder step by step, and tells which rows have ended."""

    model: Model
    layer: OutputLayer
    rnn: RnnWeights | None  # for the operators; None: the cell is called
    eos: int | None
    limits: Tensor  # int64 [B]: largest number of steps of each row
    ends: bool  # a row may end before the others
    by_operator: Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]] | None = None

    @property
    def pad(self) -> int:
        """The token that is written and fed after the end of a row."""
        return self.model.table.padding_token

    def step(
        self, tokens: Tensor, state: State, active: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the output [B, H] and the state after the tokens [B]. An operator leaves the state
        of inactive rows as it is."""
        if self.by_operator is not None:
            return self.by_operator(tokens, state, active)
        table, model = self.model.table, self.model
        if table.module is not None:
            x = table.call(tokens)
        else:
            x = F.embedding(tokens, table.weight, None, table.max_norm, table.norm_type)
        output, state, _ = model.cell.step(x, state, *model.context)
        check_output(OP, output, len(tokens), self.layer.weight.shape[1])
        return output, state

    def step_active(self, tokens: Tensor, state: State, active: Tensor) -> tuple[Tensor, State]:
        """Run a step in which inactive rows keep their state, though the cell may write into it."""
        if not self.ends or all_known_active(active):
            return self.step(tokens, state)
        if self.by_operator is not None:
            return self.step(tokens, state, active)
        before = map_tensors(torch.clone, state)
        hidden, new_state = self.step(tokens, state)
        return hidden, freeze(OP, active, new_state, before, self.model.cell.batch_dim)

    def prefill(self, state: State, prompt: Tensor) -> State:
        """Return the state after the tokens of a prompt [P, B]."""
        if self.rnn is not None:
            return OperatorSteps(self, self.rnn, state).prefill(prompt)
        for tokens in prompt:
            _, state = self.step(tokens, state)
        return state

    def from_state(self, state: State) -> Stepper:
        """Return a stepper for steps from this state, run by an operator if that is possible."""
        if self.rnn is None:
            return self
        return replace(self, by_operator=OperatorSteps(self, self.rnn, state).step)

    def next_inputs(self, active: Tensor, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return which rows [B] stay active after the tokens [B] of this step, and what they read
        next."""
        next_active, inputs = torch.empty_like(active), torch.empty_like(tokens)
        eos = -1 if self.eos is None else self.eos
        end_rows(tokens, active, self.limits, step, eos, self.pad, next_active, inputs)
        return next_active, inputs


def end_rows_reference(
    tokens: Tensor, active: Tensor, limits: Tensor, step: int, eos: int, pad: int,
    next_active: Tensor, inputs: Tensor,
) -> None:  # fmt: skip
    torch.logical_and(active, limits > step + 1, out=next_active)
    if eos >= 0:
        next_active &= tokens != eos
    inputs.copy_(torch.where(next_active, tokens, pad))


# The rows that stay active after the tokens of a step, and the inputs of the next step.
end_rows = define_cuda_operator(
    end_rows_reference,
    "(Tensor tokens, Tensor active, Tensor limits, "  # int64, bool, int64: number of steps, all [B]
    "int step, int eos, int pad, "  # eos -1: none
    "Tensor(a!) next_active, Tensor(b!) inputs) -> ()",  # bool, int64 [B]; inactive rows read pad
)


class OperatorSteps:
    """Runs steps of one of torch's recurrent modules by an operator, and keeps their state."""

    def __init__(self, stepper: Stepper, rnn: RnnWeights, state: Any) -> None:
        self.stepper, self.rnn = stepper, rnn
        self.table = dense_rows(stepper.model.table.weight)
        self.weights = operands(rnn, stepper.model.dtypes)
        parts = list(state) if rnn.state_parts == 2 else [state]
        self.parts = [part.to(stepper.layer.dtype) for part in parts]

    @property
    def state(self) -> State:
        """The state after the last step, in the layout of the module."""
        return tuple(self.parts) if self.rnn.state_parts == 2 else self.parts[0]

    def prefill(self, prompt: Tensor) -> State:
        """Return the state after the tokens of a prompt [P, B]."""
        for some in prompt.split(CHUNK):
            inputs = some.contiguous()
            self.run(inputs, inputs)
        return self.state

    def step(
        self, tokens: Tensor, state: State, active: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the output [M, H] and the state after tokens [M], as the step of a cell does.
        Inactive rows keep their state."""
        self.parts = list(state) if self.rnn.state_parts == 2 else [state]
        inputs = tokens[None].contiguous()
        self.run(inputs, inputs, None if active is None else active[None])
        hidden = self.parts[0]
        return hidden[-1] if self.rnn.stacked else hidden, self.state

    def run(
        self, tokens: Tensor, inputs: Tensor, active: Tensor | None = None,
        uniforms: Tensor | None = None, temperature: float = 1.0, stats: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Run the steps of these inputs [n, B], with the head if `stats` is given. Return the
        number of rows of the head."""
        layer, rnn = self.stepper.layer, self.rnn
        states = states_from(rnn, self.parts, len(inputs), layer.dtype)
        call = StepsCall(
            table=self.table, weights=self.weights, states=states, kind=rnn.kind, inputs=inputs,
            tokens=tokens, pad=self.stepper.pad, eos=self.stepper.eos, active=active,
            uniforms=uniforms, temperature=temperature,
        )  # fmt: skip
        with no_autocast(inputs.device):
            used = call.run(0, len(inputs), layer.weight, layer.bias, LOGIT_ROWS, stats, rows)
        last = [state[-1].clone() for state in states]  # a view would keep all steps
        self.parts = module_state(rnn, last, [layer.dtype] * rnn.state_parts)
        return used


def all_known_active(active: Tensor) -> bool:
    """Tell whether every row is active. False on a GPU, for which the host would have to wait."""
    return active.device.type == "cpu" and bool(active.all())


class EndWatch:
    """Detects the end of all rows. On a GPU it is detected a few steps late, since the host does
    not wait for the GPU."""

    def __init__(self, inactive: float = False) -> None:
        self._inactive = inactive  # the value of a row that has ended: the smallest there is
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def none_active(self, rows: Tensor) -> bool:
        """Tell whether no row is active; on a GPU, whether no row was active some steps before."""
        if rows.device.type != "cuda":
            return rows.max().item() == self._inactive
        if self._asked is not None:
            answer, event = self._asked
            if not event.query():
                return False
            if answer.max().item() == self._inactive:  # in host memory: this does not wait
                return True
        answer = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        answer.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._asked = answer, event
        return False
