"""Beam search: K hypotheses of each row as a batch of K B rows; row k * B + b is the k-th of row b.

At each step, `beam_step`, the K B active hypotheses are continued by every token, and a row's
continuations are sorted, best first. Those among the first K that end are finished: their scores
are divided by length ** length_penalty, and the best K finished ones are kept. The first K that do
not end stay active. A row is done once none of its active hypotheses could become better than the
worst kept one. A score that is NaN compares as the best, so that rows with NaN logits have the
score NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from accumext.decoder import of_chosen_rows
from accumext.generation._beam_step import beam_step, select_states
from accumext.generation._stepper import OP, EndWatch, Generated, Stepper
from accumext.recurrence import State, freeze, join, leaves, map_leaves, map_tensors


def beam_search(
    stepper: Stepper,
    state: State,
    first: Tensor,  # int64 [B]
    steps: int,
    beams: int,
    length_penalty: float,
) -> tuple[Generated, Tensor]:
    """Search the best hypotheses of every row. Return them and their scores [B, K]."""
    search = _Search(stepper.from_state(state), state, first, steps, beams, length_penalty)
    watch = EndWatch()
    for step in range(steps):
        if watch.none_active(search.active):
            break
        search.advance(step)
    return search.results()


class _Search:
    def __init__(
        self, stepper: Stepper, state: State, first: Tensor, steps: int, beams: int, penalty: float
    ) -> None:
        batch = len(first)
        self.stepper, self.beams, self.batch, self.penalty = stepper, beams, batch, penalty
        self.batch_dim = stepper.model.cell.batch_dim
        self.limits = stepper.limits.clamp(max=steps)
        self.late = self.limits.double() ** penalty
        self.active = self.limits > 0  # [B]: rows that are not done
        rows = torch.arange(batch, device=first.device)
        none = torch.full((beams, batch), -torch.inf, dtype=torch.float64, device=first.device)
        self.scores = none.index_fill(0, rows.new_zeros(1), 0.0)  # of the active hypotheses
        numbers = rows.new_zeros(3, beams, batch)
        log_probs = torch.zeros_like(none, dtype=stepper.layer.dtype)
        self.kept = [none, numbers, log_probs]  # as beam_step has them
        # Where the next step's go.
        self.next_scores = torch.empty_like(none)
        self.next_kept = [torch.empty_like(part) for part in self.kept]
        self.from_row = rows.new_empty(beams, batch)
        self.best_row, self.is_new = torch.empty_like(rows), torch.empty_like(self.active)
        self.some_kept = False  # whether some hypothesis may have ended
        self.tokens = first.expand(beams, batch)
        self.state, self.best_state = self._on_every_beam(state), state
        if stepper.by_operator is not None:  # which has the state in the dtype of sums
            self.best_state = map_tensors(
                lambda leaf: leaf.to(stepper.layer.dtype, copy=True), state
            )
        # Parents, tokens and log-probabilities [K, B] of the active hypotheses after each step.
        self.path: list[list[Tensor]] = []

    def advance(self, step: int) -> None:
        """Add one token to every active hypothesis."""
        hidden, state = self._step()
        eos, numbers = self.stepper.eos, self.from_row.new_empty(2, self.beams, self.batch)
        going = [*numbers, torch.empty_like(self.kept[2])]
        may_be_new = beam_step(
            *self._likeliest(hidden), self.limits, self.late, step, (step + 1) ** self.penalty,
            (step + 2) ** self.penalty, -1 if eos is None else eos, self.scores, self.active,
            self.kept, self.next_scores, self.next_kept, going, self.from_row, self.is_new,
            self.best_row,
        )  # fmt: skip
        self.scores, self.next_scores = self.next_scores, self.scores
        if may_be_new:
            self.kept, self.next_kept = self.next_kept, self.kept
        self.path.append(going)
        self.tokens = going[1]
        self._select(state, bool(may_be_new))

    def results(self) -> tuple[Generated, Tensor]:
        """Return the kept hypotheses. Their tokens are traced back from the last to the first."""
        kept_score, (length, parent, last_token), last_log_prob = self.kept
        steps = int(length.max()) if length.numel() else 0
        tokens = torch.full_like(last_token, self.stepper.pad).repeat(steps, 1, 1)
        log_probs = torch.zeros_like(last_log_prob).repeat(steps, 1, 1)
        for step in reversed(range(steps)):
            last, inside = length == step + 1, length > step + 1
            if step < len(self.path):
                before, token, log_prob = (column.gather(0, parent) for column in self.path[step])
                tokens[step] = torch.where(inside, token, tokens[step])
                log_probs[step] = torch.where(inside, log_prob, 0)
                parent = torch.where(inside, before, parent)
            tokens[step] = torch.where(last, last_token, tokens[step])
            log_probs[step] = torch.where(last, last_log_prob, log_probs[step])
        silent = self.limits == 0  # a row without steps has one hypothesis, without tokens
        scores = kept_score.clone()
        scores[0] = scores[0].masked_fill(silent, 0.0)
        hypotheses = (tokens.transpose(1, 2), log_probs.transpose(1, 2), length.t())
        return Generated(*hypotheses, self._last_state()), scores.t().to(self.stepper.layer.dtype)

    def _last_state(self) -> State:
        """Return the states of the best hypotheses, with 0-dim tensors from the last step."""
        if not self.some_kept:
            return self.best_state
        current = iter(leaves(self.state))

        def last(leaf: Any) -> Any:
            now = next(current)
            return leaf if isinstance(now, Tensor) and now.dim() > 0 else now

        return map_leaves(last, self.best_state)

    def _step(self) -> tuple[Tensor, State]:
        """Return outputs [K B, H] and states after the hypotheses' last tokens."""
        stepper, size = self.stepper, self.batch
        if not stepper.model.context:
            return stepper.step(self.tokens.flatten(), self.state)
        # One hypothesis of every row at a time: the context has B rows, and is not copied K times.
        steps = []
        for k in range(self.beams):
            at = slice(k * size, (k + 1) * size)
            state = map_tensors(partial(_rows, at=at, dim=self.batch_dim), self.state)
            steps.append(stepper.step(self.tokens[k], state))
        hiddens, states = zip(*steps, strict=True)
        return torch.cat(hiddens), join(OP, self._cat, list(states))

    def _likeliest(self, hidden: Tensor) -> tuple[Any, ...]:
        """Return the likeliest words of the active hypotheses, for `beam_step`."""
        count = min(self.beams + 1, len(self.stepper.layer.weight))
        likeliest = partial(self.stepper.layer.likeliest, count=count)
        if hidden.device.type != "cpu":
            return likeliest(hidden)
        # Inactive hypotheses are skipped, and get any values.
        is_active = (self.scores != -torch.inf) & self.active
        return of_chosen_rows(likeliest, is_active.flatten(), hidden)

    def _select(self, state: State, may_be_new: bool) -> None:
        """Take the states of the active hypotheses, and of new best ones that have ended."""
        self.some_kept |= may_be_new
        if may_be_new and self.stepper.by_operator is not None:
            best = iter(leaves(self.best_state))
            self.state = map_tensors(lambda leaf: self._selected(leaf, next(best)), state)
            return
        self.state = map_tensors(partial(self._rows_of, at=self.from_row.flatten()), state)
        if may_be_new:
            of_best = map_tensors(partial(self._rows_of, at=self.best_row), state)
            self.best_state = freeze(OP, self.is_new, of_best, self.best_state, self.batch_dim)

    def _selected(self, leaf: Tensor, best: Tensor) -> Tensor:
        selected = torch.empty_like(leaf)
        select_states(
            leaf, self.from_row, self.is_new, self.best_row, self.batch_dim, selected, best
        )
        return selected

    def _on_every_beam(self, state: State) -> State:
        return map_tensors(lambda leaf: self._cat([leaf] * self.beams), state)

    def _cat(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if parts[0].dim() == 0 else torch.cat(parts, self.batch_dim)

    def _rows_of(self, leaf: Tensor, at: Tensor) -> Tensor:
        return leaf if leaf.dim() == 0 else leaf.index_select(self.batch_dim, at)


def _rows(leaf: Tensor, at: slice, dim: int) -> Tensor:
    """Return a view of these rows. A 0-dim tensor belongs to all rows, and a cell may write into
    it: return a copy."""
    return leaf.clone() if leaf.dim() == 0 else leaf.narrow(dim, at.start, at.stop - at.start)
