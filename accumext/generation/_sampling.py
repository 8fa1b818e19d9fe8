"""Greedy and sampled tokens: one step at a time, or by an operator in chunks of steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumext.decoder import of_chosen_rows
from accumext.generation._output_layer import log_probabilities
from accumext.generation._stepper import (
    CHUNK,
    EndWatch,
    Generated,
    OperatorSteps,
    Stepper,
)
from accumext.generation._token_filters import TokenFilter
from accumext.recurrence import State

Draw = Callable[[int], Tensor]  # draws uniform numbers for n steps, fp64 [n, B]


def generate_tokens(
    stepper: Stepper,
    state: State,
    first: Tensor,  # int64 [B]
    steps: int,
    draw: Draw | None,  # None takes the argmax
    token_filter: TokenFilter,
) -> Generated:
    """Generate up to `steps` tokens of every row."""
    temperature, *kept = token_filter.operands(len(stepper.layer.weight))
    if stepper.rnn is not None and kept == [len(stepper.layer.weight), 1.0]:
        by_operator = OperatorSteps(stepper, stepper.rnn, state)
        return _in_chunks(by_operator, first, steps, draw, temperature)
    stepper = stepper.from_state(state)
    active, tokens, watch = stepper.limits > 0, first, EndWatch()
    done: list[tuple[Tensor, ...]] = []  # all [B]: tokens, statistics, active rows
    for step in range(steps):
        if stepper.ends and watch.none_active(active):
            break
        hidden, state = stepper.step_active(tokens, state, active)
        uniforms = None if draw is None else draw(1)[0]
        tokens, *stats = _choose(stepper, hidden, uniforms, token_filter, active)
        done.append((tokens, *stats, active))
        if stepper.ends:
            active, tokens = stepper.next_inputs(active, tokens, step)
    if not done:
        shape = (0, len(first))
        none = _no_log_probs(stepper, shape), torch.zeros_like(stepper.limits)
        return Generated(first.new_zeros(shape), *none, state)
    chosen, peak, total, logit, live = (torch.stack(column) for column in zip(*done, strict=True))
    log_probs = torch.where(live, log_probabilities(peak, total, logit), 0)
    return Generated(torch.where(live, chosen, stepper.pad), log_probs, live.sum(0), state)


def _choose(
    stepper: Stepper,
    hidden: Tensor,
    uniforms: Tensor | None,
    token_filter: TokenFilter,
    active: Tensor,
) -> tuple[Any, ...]:
    """Choose tokens [B]. Return them and their statistics. Inactive rows have any values."""
    choose = partial(stepper.layer.choose, token_filter=token_filter)
    if not stepper.ends:
        return choose(hidden, uniforms)
    return of_chosen_rows(choose, active, hidden, uniforms)


def _no_log_probs(stepper: Stepper, shape: tuple[int, ...]) -> Tensor:
    return stepper.layer.weight.new_zeros(shape, dtype=stepper.layer.dtype)


def _in_chunks(
    by_operator: OperatorSteps, first: Tensor, steps: int, draw: Draw | None, temperature: float
) -> Generated:
    """Generate up to `steps` tokens of every row, CHUNK steps at a time."""
    stepper, batch, watch = by_operator.stepper, len(first), EndWatch()
    going, fed = stepper.limits > 0, first
    tokens = [first.new_empty(0, batch)]
    log_probs = [_no_log_probs(stepper, (0, batch))]
    lengths = torch.zeros_like(stepper.limits)
    for begin in range(0, steps, CHUNK):
        if stepper.ends and watch.none_active(going):
            break
        end = min(begin + CHUNK, steps)
        size = end - begin
        active = None
        if stepper.ends:
            span = torch.arange(begin, end, device=first.device)[:, None]
            active = going & (span < stepper.limits)
        tokens.append(chunk_tokens := first.new_full((size, batch), stepper.pad))
        log_probs.append(chunk_log_probs := _no_log_probs(stepper, (size, batch)))
        uniforms = None if draw is None else draw(size)
        stats = chunk_log_probs.new_empty(3, size * batch)
        rows = first.new_empty(size * batch)
        inputs = torch.full_like(chunk_tokens, stepper.pad)
        inputs[0] = fed
        used = by_operator.run(chunk_tokens, inputs, active, uniforms, temperature, stats, rows)
        of_rows = log_probabilities(*stats[:, :used])
        chunk_log_probs.view(-1)[rows[:used]] = of_rows
        if active is not None:
            chunk_tokens.masked_fill_(~active, stepper.pad)
            chunk_log_probs.masked_fill_(~active, 0)
            lengths += active.sum(0)
            going, fed = stepper.next_inputs(active[-1], chunk_tokens[-1], end - 1)
        else:
            lengths += size
            fed = chunk_tokens[-1]
    return Generated(torch.cat(tokens), torch.cat(log_probs), lengths, by_operator.state)
