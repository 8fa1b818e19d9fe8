"""Greedy and sampled speech: step by step, or by the operators in chunks of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._output_layer import LOGIT_ROWS, log_probabilities
from accumext.decoder._precision import no_grad_no_autocast
from accumext.decoder._recurrent_state import State, freeze
from accumext.decoder._rnn_buffers import dense_rows, module_state, operands, states_from
from accumext.decoder._rnn_weights import RnnWeights
from accumext.decoder._token_filters import TokenFilter
from accumext.decoder._voice import OP, EndWatch, Spoken, Voice

# Steps that the operators take at once: a longer call needs more memory for states, and goes on
# longer after every row has ended.
CHUNK = 32

Draw = Callable[[int], Tensor]  # uniform numbers of so many steps, fp64 [n, B]


def speak(
    voice: Voice,
    state: State,
    first: Tensor,  # int64 [B]
    steps: int,
    draw: Draw | None,  # None takes the argmax
    token_filter: TokenFilter,
) -> Spoken:
    """Up to `steps` tokens of every row."""
    temperature, *kept = token_filter.of(len(voice.layer.weight))
    if voice.rnn_weights is not None and kept == [len(voice.layer.weight), 1.0]:
        chunks = _Chunks(voice, voice.rnn_weights, state)
        return chunks.speak(first, steps, draw, temperature)
    voice = stepwise(voice, state)
    alive, tokens, watch = voice.limits > 0, first, EndWatch()
    said: list[tuple[Tensor, Tensor]] = []
    lengths = torch.zeros_like(voice.limits)
    for step in range(steps):
        if voice.ends and watch.all_ended(alive):
            break
        hidden, new_state = voice.step(tokens, state)
        if voice.ends:
            new_state = freeze(OP, alive, new_state, state, voice.cell.batch_dim)
        state = new_state
        uniforms = None if draw is None else draw(1)[0]
        chosen, log_probs = _choose(voice, hidden, uniforms, token_filter, alive)
        tokens = torch.where(alive, chosen, voice.pad)
        said.append((tokens, torch.where(alive, log_probs, 0)))
        lengths += alive
        alive = voice.goes_on(alive, tokens, step)
        tokens = torch.where(alive, tokens, voice.pad)
    if not said:
        shape = (0, len(first))
        return Spoken(first.new_zeros(shape), _no_log_probs(voice, shape), lengths, state)
    all_tokens, all_log_probs = (torch.stack(column) for column in zip(*said, strict=True))
    return Spoken(all_tokens, all_log_probs, lengths, state)


def listen(voice: Voice, state: State, prompt: Tensor) -> State:
    """The state after the tokens of a prompt [P, B], about which nothing is said."""
    if voice.rnn_weights is not None:
        return _Chunks(voice, voice.rnn_weights, state).listen(prompt)
    for tokens in prompt:
        _, state = voice.step(tokens, state)
    return state


def stepwise(voice: Voice, state: State) -> Voice:
    """The same voice, whose steps an operator runs where it can."""
    if voice.rnn_weights is None:
        return voice
    return replace(voice, by_operator=_Chunks(voice, voice.rnn_weights, state).step)


def _choose(
    voice: Voice, hidden: Tensor, uniforms: Tensor | None, token_filter: TokenFilter, alive: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities; on a CPU, where the host knows who is alive without
    waiting, anything for the other rows."""
    if not voice.ends or alive.device.type != "cpu" or alive.all():
        return voice.layer.choose(hidden, uniforms, token_filter)
    rows = alive.nonzero()[:, 0]
    tokens = torch.zeros_like(alive, dtype=torch.int64)
    log_probs = _no_log_probs(voice, tokens.shape)
    numbers = None if uniforms is None else uniforms[rows]
    tokens[rows], log_probs[rows] = voice.layer.choose(hidden[rows], numbers, token_filter)
    return tokens, log_probs


def _no_log_probs(voice: Voice, shape: tuple[int, ...]) -> Tensor:
    return voice.layer.weight.new_zeros(shape, dtype=voice.layer.dtype)


class _Chunks:
    """One of torch's recurrent modules, run by the operators, CHUNK steps at a time."""

    def __init__(self, voice: Voice, rnn: RnnWeights, state: Any) -> None:
        self.voice, self.rnn = voice, rnn
        self.table = dense_rows(voice.table.weight)
        self.weights = operands(rnn, voice.dtypes)
        parts = list(state) if rnn.state_parts == 2 else [state]
        self.state = [part.to(voice.layer.dtype) for part in parts]

    def speak(self, first: Tensor, steps: int, draw: Draw | None, temperature: float) -> Spoken:
        voice, batch, watch = self.voice, len(first), EndWatch()
        alive, fed = voice.limits > 0, first
        tokens = [first.new_empty(0, batch)]
        log_probs = [_no_log_probs(voice, (0, batch))]
        lengths = torch.zeros_like(voice.limits)
        for begin in range(0, steps, CHUNK):
            if voice.ends and watch.all_ended(alive):
                break
            end = min(begin + CHUNK, steps)
            size = end - begin
            live = None
            if voice.ends:
                span = torch.arange(begin, end, device=first.device)[:, None]
                live = alive & (span < voice.limits)
            tokens.append(said := first.new_full((size, batch), voice.pad))
            log_probs.append(spoken := _no_log_probs(voice, (size, batch)))
            uniforms = None if draw is None else draw(size)
            stats = spoken.new_empty(3, size * batch)
            rows = first.new_empty(size * batch)
            used = self._run(fed, said, live, uniforms, temperature, stats, rows)
            found = log_probabilities(stats[2, :used], stats[:, :used])
            spoken.view(-1)[rows[:used]] = found
            if live is not None:
                said.masked_fill_(~live, voice.pad)
                spoken.masked_fill_(~live, 0)
                lengths += live.sum(0)
                alive = voice.goes_on(live[-1], said[-1], end - 1)
            else:
                lengths += size
            fed = torch.where(alive, said[-1], voice.pad)
        return Spoken(torch.cat(tokens), torch.cat(log_probs), lengths, self._module_state())

    def listen(self, prompt: Tensor) -> State:
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
        voice, rnn, steps = self.voice, self.rnn, len(tokens)
        states = states_from(rnn, self.state, steps, voice.layer.dtype)
        if inputs is None:
            inputs = torch.full_like(tokens, voice.pad)
            inputs[0] = first
        with no_grad_no_autocast(tokens.device):
            used: int = _operators.decode_steps(
                self.table, self.weights, states, rnn.kind, None, 1.0, None, 1.0, None, 1.0, inputs,
                None, None, live, -1 if voice.eos is None else voice.eos, voice.pad, uniforms,
                temperature, voice.layer.weight, voice.layer.bias, None, tokens, None, stats, rows,
                LOGIT_ROWS, 0, steps,
            )  # fmt: skip
        dtypes = [voice.layer.dtype] * rnn.state_parts
        last = [state[-1].clone() for state in states]  # a view would keep those of all steps
        self.state = module_state(rnn, last, dtypes)
        return used
