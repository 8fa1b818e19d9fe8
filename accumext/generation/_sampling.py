"""Greedy and sampled tokens: step by step, or by the operators in chunks of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accumext.decoder import decode_steps
from accumext.generation._model import OP, EndWatch, Generated, GenerationModel
from accumext.generation._output_layer import LOGIT_ROWS, log_probabilities
from accumext.generation._token_filters import TokenFilter
from accumext.recurrence import (
    RnnWeights,
    State,
    dense_rows,
    freeze,
    map_tensors,
    module_state,
    no_grad_no_autocast,
    operands,
    states_from,
)

# Steps that the operators take at once: a longer call needs more memory for states, and goes on
# longer after every row has ended.
CHUNK = 32

Draw = Callable[[int], Tensor]  # uniform numbers of so many steps, fp64 [n, B]


def generate_tokens(
    model: GenerationModel,
    state: State,
    first: Tensor,  # int64 [B]
    steps: int,
    draw: Draw | None,  # None takes the argmax
    token_filter: TokenFilter,
) -> Generated:
    """Up to `steps` tokens of every row."""
    temperature, *kept = token_filter.of(len(model.layer.weight))
    if model.rnn_weights is not None and kept == [len(model.layer.weight), 1.0]:
        chunks = _Chunks(model, model.rnn_weights, state)
        return chunks.run(first, steps, draw, temperature)
    model = stepwise(model, state)
    alive, tokens, watch = model.limits > 0, first, EndWatch()
    done: list[tuple[Tensor, Tensor]] = []
    lengths = torch.zeros_like(model.limits)
    for step in range(steps):
        if model.ends and watch.all_ended(alive):
            break
        hidden, state = _step(model, tokens, state, alive)
        uniforms = None if draw is None else draw(1)[0]
        chosen, log_probs = _choose(model, hidden, uniforms, token_filter, alive)
        tokens = torch.where(alive, chosen, model.pad)
        done.append((tokens, torch.where(alive, log_probs, 0)))
        lengths += alive
        alive = model.goes_on(alive, tokens, step)
        tokens = torch.where(alive, tokens, model.pad)
    if not done:
        shape = (0, len(first))
        return Generated(first.new_zeros(shape), _no_log_probs(model, shape), lengths, state)
    all_tokens, all_log_probs = (torch.stack(column) for column in zip(*done, strict=True))
    return Generated(all_tokens, all_log_probs, lengths, state)


def _step(
    model: GenerationModel, tokens: Tensor, state: State, alive: Tensor
) -> tuple[Tensor, State]:
    """As `GenerationModel.step`, but rows that have ended keep their state, which the cell may
    write."""
    if not model.ends or _all_known_alive(alive):
        return model.step(tokens, state)
    before = map_tensors(torch.clone, state)
    hidden, new_state = model.step(tokens, state)
    return hidden, freeze(OP, alive, new_state, before, model.cell.batch_dim)


def _all_known_alive(alive: Tensor) -> bool:
    """Whether no row has ended, on a CPU, where the host knows it without waiting."""
    return alive.device.type == "cpu" and bool(alive.all())


def prefill(model: GenerationModel, state: State, prompt: Tensor) -> State:
    """The state after the tokens of a prompt [P, B]."""
    if model.rnn_weights is not None:
        return _Chunks(model, model.rnn_weights, state).prefill(prompt)
    for tokens in prompt:
        _, state = model.step(tokens, state)
    return state


def stepwise(model: GenerationModel, state: State) -> GenerationModel:
    """The same model, whose steps an operator runs where one can."""
    if model.rnn_weights is None:
        return model
    return replace(model, by_operator=_Chunks(model, model.rnn_weights, state).step)


def _choose(
    model: GenerationModel,
    hidden: Tensor,
    uniforms: Tensor | None,
    token_filter: TokenFilter,
    alive: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities; on a CPU anything for rows that have ended."""
    if not model.ends or alive.device.type != "cpu" or _all_known_alive(alive):
        return model.layer.choose(hidden, uniforms, token_filter)
    rows = alive.nonzero()[:, 0]
    tokens = torch.zeros_like(alive, dtype=torch.int64)
    log_probs = _no_log_probs(model, tokens.shape)
    numbers = None if uniforms is None else uniforms[rows]
    tokens[rows], log_probs[rows] = model.layer.choose(hidden[rows], numbers, token_filter)
    return tokens, log_probs


def _no_log_probs(model: GenerationModel, shape: tuple[int, ...]) -> Tensor:
    return model.layer.weight.new_zeros(shape, dtype=model.layer.dtype)


class _Chunks:
    """One of torch's recurrent modules, run by the operators, CHUNK steps at a time."""

    def __init__(self, model: GenerationModel, rnn: RnnWeights, state: Any) -> None:
        self.model, self.rnn = model, rnn
        self.table = dense_rows(model.table.weight)
        self.weights = operands(rnn, model.dtypes)
        parts = list(state) if rnn.state_parts == 2 else [state]
        self.state = [part.to(model.layer.dtype) for part in parts]

    def run(self, first: Tensor, steps: int, draw: Draw | None, temperature: float) -> Generated:
        model, batch, watch = self.model, len(first), EndWatch()
        alive, fed = model.limits > 0, first
        tokens = [first.new_empty(0, batch)]
        log_probs = [_no_log_probs(model, (0, batch))]
        lengths = torch.zeros_like(model.limits)
        for begin in range(0, steps, CHUNK):
            if model.ends and watch.all_ended(alive):
                break
            end = min(begin + CHUNK, steps)
            size = end - begin
            live = None
            if model.ends:
                span = torch.arange(begin, end, device=first.device)[:, None]
                live = alive & (span < model.limits)
            tokens.append(chunk_tokens := first.new_full((size, batch), model.pad))
            log_probs.append(chunk_log_probs := _no_log_probs(model, (size, batch)))
            uniforms = None if draw is None else draw(size)
            stats = chunk_log_probs.new_empty(3, size * batch)
            rows = first.new_empty(size * batch)
            used = self._run(fed, chunk_tokens, live, uniforms, temperature, stats, rows)
            found = log_probabilities(stats[2, :used], stats[:, :used])
            chunk_log_probs.view(-1)[rows[:used]] = found
            if live is not None:
                chunk_tokens.masked_fill_(~live, model.pad)
                chunk_log_probs.masked_fill_(~live, 0)
                lengths += live.sum(0)
                alive = model.goes_on(live[-1], chunk_tokens[-1], end - 1)
            else:
                lengths += size
            fed = torch.where(alive, chunk_tokens[-1], model.pad)
        return Generated(torch.cat(tokens), torch.cat(log_probs), lengths, self._module_state())

    def prefill(self, prompt: Tensor) -> State:
        for some in prompt.split(CHUNK):
            some = some.contiguous()
            self._run(some[0], some, None, None, 1.0, None, None, some)
        return self._module_state()

    def _module_state(self) -> State:
        return tuple(self.state) if self.rnn.state_parts == 2 else self.state[0]

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """The output [M, H] and the state after tokens [M], as a cell's step."""
        self.state = list(state) if self.rnn.state_parts == 2 else [state]
        self._run(tokens, tokens[None], None, None, 1.0, None, None, tokens[None].contiguous())
        hidden = self.state[0]
        return hidden[-1] if self.rnn.stacked else hidden, self._module_state()

    def _run(
        self, first: Tensor, tokens: Tensor, live: Tensor | None, uniforms: Tensor | None,
        temperature: float, stats: Tensor | None, rows: Tensor | None,
        inputs: Tensor | None = None,  # int64 [n, B], where they are known
    ) -> int:  # fmt: skip
        """Steps from the state, which goes on; how many rows the head has seen."""
        model, rnn, steps = self.model, self.rnn, len(tokens)
        states = states_from(rnn, self.state, steps, model.layer.dtype)
        if inputs is None:
            inputs = torch.full_like(tokens, model.pad)
            inputs[0] = first
        with no_grad_no_autocast(tokens.device):
            used: int = decode_steps(
                self.table, self.weights, states, rnn.kind, None, 1.0, None, 1.0, None, 1.0, inputs,
                None, None, live, -1 if model.eos is None else model.eos, model.pad, uniforms,
                temperature, model.layer.weight, model.layer.bias, None, tokens, None, stats, rows,
                LOGIT_ROWS, 0, steps,
            )  # fmt: skip
        dtypes = [model.layer.dtype] * rnn.state_parts
        last = [state[-1].clone() for state in states]  # a view would keep those of all steps
        self.state = module_state(rnn, last, dtypes)
        return used
