"""The tokens, inputs and losses of one call, as they become known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accumext.decoder._call import Call
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, RowResults
from accumext.recurrence import NO_TRUNCATION, OPEN_GATE, State


class Decoded(NamedTuple):
    """The results of a call that its transcript does not hold."""

    loss: Tensor
    state: State
    lengths: Tensor  # int64 [B]: steps until each row ended
    outputs: Tensor | None = None  # [T, B, H]
    extras: State = None  # tensors [T, ...]


class Results(NamedTuple):
    """The loss of a call, without a graph."""

    loss: Tensor  # 0-dim or [T, B]
    inverse_divisor: Tensor  # 0-dim
    lengths: Tensor  # int64 [B]: steps until each row ended


class Transcript:
    """A running call: its arguments, random numbers and results per token, [T, B] each.

    A row is active until its length, or until the step after the one that predicted `eos`.
    """

    def __init__(self, call: Call) -> None:
        model, tokens, objective, truncation, plan, *_ = call
        self.model, self.tokens, self.objective = model, tokens, objective
        self.truncation, self.plan = truncation, plan
        self.source = tokens.feedback.drawn()
        self.gate = OPEN_GATE
        if truncation is not NO_TRUNCATION:
            generator, weight = tokens.feedback.generator, model.head_weight
            self.gate = truncation.gate(*tokens.shape, weight, generator, tokens.resets)
        shape, device, pad = tokens.shape, model.device, model.table.padding_token
        self.predicted = torch.full(shape, pad, device=device)  # int64
        self.inputs = torch.full(shape, pad, device=device)  # int64: the tokens that are fed
        self.losses = torch.zeros(shape, dtype=model.dtypes.accumulation, device=device)
        self.entropies = None if objective.entropy_weight == 0 else torch.zeros_like(self.losses)
        # int64: the targets of the losses; without targets these are the predictions
        self.targets = self.predicted if tokens.targets is None else tokens.targets
        self.active = tokens.within_length  # bool; None: every row at every step
        if tokens.eos is not None:
            everywhere = torch.ones(shape, dtype=torch.bool, device=device)
            self.active = everywhere if self.active is None else self.active.clone()
        first = slice(0, 1) if tokens.free_running else slice(None)
        teacher = self.source.teacher[first]
        self.inputs[first] = teacher if self.active is None else self.padded(first, teacher)

    def counted(self, steps: slice = slice(None)) -> Tensor:
        """Return which tokens of these steps have a loss, bool [n, B]. Rows that have not ended yet
        are taken to go on."""
        counted = self.tokens.counted[steps]
        return counted if self.active is None else counted & self.active[steps]

    def padded(self, steps: int | slice, tokens: Tensor) -> Tensor:
        """Return the tokens of these steps, with padding in inactive rows."""
        if self.active is None:
            return tokens
        return torch.where(self.active[steps], tokens, self.model.table.padding_token)

    def predict(self, head: FusedCrossEntropy, begin: int, end: int, hidden: Tensor) -> None:
        """Compute tokens and losses of these steps from the head's inputs [(end - begin) B, H]."""
        span, first, last = slice(begin, end), begin * self.tokens.batch, end * self.tokens.batch
        index = torch.arange(first, last, device=hidden.device)
        targets, uniforms = self.tokens.targets, self.source.uniforms
        targets = None if targets is None else targets.view(-1)[first:last]
        uniforms = None if uniforms is None else uniforms.view(-1)[first:last]
        counted = self.counted(span).flatten()
        if self.active is not None and self.active.device.type == "cpu":
            # Select the active rows. On a GPU the host would have to wait for their number.
            active = self.active[span].flatten().nonzero().squeeze(1)
            hidden, index, counted = hidden[active], index[active], counted[active]
            targets = None if targets is None else targets[active]
            uniforms = None if uniforms is None else uniforms[active]
        results = head.forward(
            hidden, targets, counted, index, self.upstream(index), uniforms,
            self.source.temperature,
        )  # fmt: skip
        self.predicted.view(-1)[index] = results.tokens
        self._write(index, results)
        if self.active is not None:
            self.predicted[span] = self.padded(span, self.predicted[span])

    def add_rows(
        self, head: FusedCrossEntropy, rows: Tensor, hidden: Tensor, stats: Tensor
    ) -> None:
        """Compute the losses of rows [M] whose tokens are known, by their positions among T B."""
        targets, counted = self.targets.flatten()[rows], self.tokens.counted
        if self.active is not None:
            counted = counted & self.active
        counted, upstream = counted.flatten()[rows], self.upstream(rows)
        if head.of_distributions:
            self._write(rows, head.known(hidden, targets, counted, rows, upstream))
            return
        self.losses.view(-1)[rows] = head.add_rows(hidden, targets, counted, rows, upstream, stats)

    def _write(self, rows: Tensor, results: RowResults) -> None:
        self.losses.view(-1)[rows] = results.losses
        if self.entropies is not None and results.entropies is not None:
            self.entropies.view(-1)[rows] = results.entropies

    def upstream(self, rows: Tensor) -> Tensor | None:
        """Return the factor of the losses of rows [M], positions among T B. It lacks the divisor if
        that is not known yet."""
        weight, inverse = self.objective.token_weight, self.objective.known_inverse_divisor
        if weight is None:
            return inverse
        weight = weight.flatten()[rows]
        return weight if inverse is None else weight * inverse

    def feed_back(self, step: int) -> None:
        """End the rows whose token of this step is eos, and set the inputs of the next step."""
        tokens = self.tokens
        if step + 1 >= tokens.steps:
            return
        if tokens.eos is not None and self.active is not None:
            self.active[step + 1 :] &= self.active[step] & (self.predicted[step] != tokens.eos)
        following = self.source.next(step + 1, self.predicted[step])
        self.inputs[step + 1] = self.padded(step + 1, following)

    def finish(self) -> Results:
        """Return the loss without a graph, its divisor, and the lengths, after the last step."""
        objective, losses, active = self.objective, self.losses, self.active
        inverse = objective.known_inverse_divisor
        if inverse is None:
            inverse = objective.inverse_divisor(self.counted(), self.targets, losses.dtype)
        if objective.token_weight is not None:  # that of a token that is not counted may be NaN
            losses = torch.where(self.counted(), losses * objective.token_weight, 0)
        if objective.reduction != "none":
            losses = losses.sum() * inverse
        if active is not None:
            return Results(losses, inverse, active.sum(0))
        steps, batch = self.tokens.shape
        return Results(losses, inverse, torch.full((batch,), steps, device=self.losses.device))
