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
from accumext.generation._beam_step import beam_step, may_be_any, rows_of_head, select_states
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
    watch = EndWatch(inactive=-torch.inf)
    for step in range(steps):
        if watch.none_active(search.scores[0]):
            break
        search.advance(step)
    return search.results()


class _Search:
    def __init__(
        self, stepper: Stepper, state: State, first: Tensor, steps: int, beams: int, penalty: float
    ) -> None:
        shape = beams, batch = beams, len(first)
        dtype = stepper.layer.dtype  # of sums, and of an operator's state
        self.stepper, self.beams, self.batch, self.penalty = stepper, beams, batch, penalty
        self.batch_dim = stepper.model.cell.batch_dim
        self.limits = stepper.limits.clamp(max=steps)
        # As beam_step has them. At first, a row has one hypothesis, without tokens.
        self.scores = first.new_full(shape, -torch.inf, dtype=torch.float64)
        numbers, log_probs = first.new_zeros(3, *shape), first.new_zeros(shape, dtype=dtype)
        self.kept = [self.scores.clone(), numbers, log_probs]
        self.best_length, self.best_parent = numbers[:2, 0]
        self.scores[0].masked_fill_(self.limits > 0, 0.0)
        # Parents, tokens and log-probabilities [K, B] of the active hypotheses of each length.
        self.path = [[first.new_zeros(shape), first.repeat(beams, 1), log_probs.clone()]]
        self.state, self.best_state = self._on_every_beam(state), state
        if stepper.by_operator is not None:
            self.best_state = map_tensors(lambda leaf: leaf.to(dtype, copy=True), state)

    def advance(self, step: int) -> None:
        """Add one token to every active hypothesis."""
        hidden, state = self._step()
        eos = -1 if self.stepper.eos is None else self.stepper.eos
        going = [torch.empty_like(part) for part in self.path[0]]
        beam_step(
            *self._likeliest(hidden), self.limits, step, self.penalty, eos, self.scores, self.kept,
            going,
        )  # fmt: skip
        self.path.append(going)
        self._select(state, step)

    def results(self) -> tuple[Generated, Tensor]:
        """Return the kept hypotheses. Their tokens are traced back from the last to the first."""
        scores, (lengths, at, last_token), last_log_prob = self.kept
        path = self.path[: 1 + int(lengths.max()) if lengths.numel() else 1]
        before = []  # the hypotheses [K, B] of each length that they continue, the longest first
        for length, (parents, _, _) in reversed(list(enumerate(path))):
            before.append(at)
            at = torch.where(lengths > length, parents.gather(0, at), at)
        at = torch.stack(before[::-1])
        _, tokens, log_probs = (torch.stack(column).gather(1, at) for column in zip(*path))
        place = torch.arange(len(path), device=at.device)[:, None, None]
        inside, last = place < lengths, place == lengths
        tokens = torch.where(inside, tokens, torch.where(last, last_token, self.stepper.pad))
        log_probs = torch.where(inside, log_probs, torch.where(last, last_log_prob, 0))
        tokens, log_probs = (part[1:].transpose(1, 2) for part in (tokens, log_probs))
        scores[0].masked_fill_(self.limits == 0, 0.0)  # of a hypothesis without tokens
        generated = Generated(tokens, log_probs, lengths.t(), self._last_state())
        return generated, scores.t().to(self.stepper.layer.dtype)

    def _last_state(self) -> State:
        """Return the states of the best hypotheses, with 0-dim tensors from the last step."""
        if len(self.path) == 1:  # no steps
            return self.best_state
        current = iter(leaves(self.state))

        def last(leaf: Any) -> Any:
            now = next(current)
            return leaf if isinstance(now, Tensor) and now.dim() > 0 else now

        return map_leaves(last, self.best_state)

    def _step(self) -> tuple[Tensor, State]:
        """Return outputs [K B, H] and states after the hypotheses' last tokens."""
        stepper, size, tokens = self.stepper, self.batch, self.path[-1][1]
        if not stepper.model.context:
            return stepper.step(tokens.flatten(), self.state)
        # One hypothesis of every row at a time: the context has B rows, and is not copied K times.
        steps = []
        for k in range(self.beams):
            at = slice(k * size, (k + 1) * size)
            state = map_tensors(partial(_rows, at=at, dim=self.batch_dim), self.state)
            steps.append(stepper.step(tokens[k], state))
        hiddens, states = zip(*steps, strict=True)
        return torch.cat(hiddens), join(OP, self._cat, list(states))

    def _likeliest(self, hidden: Tensor) -> tuple[Any, ...]:
        """Return the likeliest words of the active hypotheses, for `beam_step`."""
        count = min(self.beams + 1, len(self.stepper.layer.weight))
        likeliest = partial(self.stepper.layer.likeliest, count=count)
        if hidden.device.type != "cpu" or float(self.scores.min()) > -torch.inf:
            return likeliest(hidden)
        # Inactive hypotheses are skipped, and get any values.
        return of_chosen_rows(likeliest, (self.scores != -torch.inf).flatten(), hidden)

    def _select(self, state: State, step: int) -> None:
        """Take the states of the active hypotheses, and of new best ones that have ended."""
        parents, of_kept = self.path[-1][0], self.kept[1]
        if self.stepper.by_operator is not None and parents.device.type != "cpu":
            best = iter(leaves(self.best_state))

            def selected(leaf: Tensor) -> Tensor:
                active = torch.empty_like(leaf)
                select_states(leaf, parents, of_kept, step, self.batch_dim, active, next(best))
                return active

            self.state = map_tensors(selected, state)
            return
        self.state = map_tensors(partial(self._rows_of, hypotheses=parents), state)
        if may_be_any(is_new := self.best_length == step + 1):
            of_best = map_tensors(partial(self._rows_of, hypotheses=self.best_parent), state)
            self.best_state = freeze(OP, is_new, of_best, self.best_state, self.batch_dim)

    def _on_every_beam(self, state: State) -> State:
        return map_tensors(lambda leaf: self._cat([leaf] * self.beams), state)

    def _cat(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if parts[0].dim() == 0 else torch.cat(parts, self.batch_dim)

    def _rows_of(self, leaf: Tensor, hypotheses: Tensor) -> Tensor:
        if leaf.dim() == 0:
            return leaf
        return leaf.index_select(self.batch_dim, rows_of_head(hypotheses).flatten())


def _rows(leaf: Tensor, at: slice, dim: int) -> Tensor:
    """Return a view of these rows. A 0-dim tensor belongs to all rows, and a cell may write into
    it: return a copy."""
    return leaf.clone() if leaf.dim() == 0 else leaf.narrow(dim, at.start, at.stop - at.start)
