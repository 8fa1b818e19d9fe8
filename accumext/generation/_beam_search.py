"""Beam search: K hypotheses of each row as a batch of K B rows; row k * B + b is the k-th of row b.

At each step the K B active hypotheses are continued by every token, and a row's continuations are
sorted, best first. Those among the first K that end are finished: their scores are divided by
length ** length_penalty, and the best K finished ones are kept. The first K that do not end stay
active. A row is done once none of its active hypotheses could become better than the worst kept
one. A score that is NaN compares as the best, so that rows with NaN logits have the score NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext.decoder import of_chosen_rows
from accumext.generation._stepper import OP, EndWatch, Generated, Stepper
from accumext.recurrence import State, freeze, join, leaves, map_leaves, map_tensors


class _Candidates(NamedTuple):
    """Continuations [n, B] of active hypotheses."""

    score: Tensor  # fp64: sum of log-probabilities
    parent: Tensor  # int64: index of the hypothesis, in [0, K)
    token: Tensor  # int64
    log_prob: Tensor


class _Kept(NamedTuple):
    """The best hypotheses that have ended, [K, B], best first."""

    score: Tensor  # fp64, penalised; -inf: no hypothesis
    length: Tensor  # int64
    parent: Tensor  # int64: index of the active hypothesis that it continued, in [0, K)
    token: Tensor  # int64: the last one
    log_prob: Tensor


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
        self.active = self.limits > 0  # [B]: rows that are not done
        self.rows = torch.arange(batch, device=first.device)
        none = torch.full((beams, batch), -torch.inf, dtype=torch.float64, device=first.device)
        self.scores = none.index_fill(0, self.rows.new_zeros(1), 0.0)  # of the active hypotheses
        zeros = torch.zeros_like(none, dtype=torch.int64)
        log_probs = torch.zeros_like(none, dtype=stepper.layer.dtype)
        self.kept = _Kept(none, zeros, zeros, zeros, log_probs)
        self.some_kept = False  # whether some hypothesis may have ended
        self.tokens = first.expand(beams, batch)
        self.state, self.best_state = self._on_every_beam(state), state
        # Parents, tokens and log-probabilities [K, B] of the active hypotheses after each step.
        self.path: list[tuple[Tensor, Tensor, Tensor]] = []

    def advance(self, step: int) -> None:
        """Add one token to every active hypothesis."""
        hidden, state = self._step()
        candidates, ends = self._candidates(hidden), self.limits == step + 1
        is_eos = torch.zeros_like(candidates.token, dtype=torch.bool)
        if self.stepper.eos is not None:
            is_eos = candidates.token == self.stepper.eos
        over = is_eos | ends
        if _may_be_any(over):
            possible = self.active & (candidates.score[: self.beams] != -torch.inf)
            self._keep(step, candidates, over[: self.beams] & possible, state)
            self.some_kept = True
        going = _Candidates(*(column[: self.beams] for column in candidates))
        if _may_be_any(is_eos):
            # Stable: active hypotheses stay in order, and inactive ones go after them.
            order = candidates.score.masked_fill(is_eos, -torch.inf).sort(
                dim=0, descending=True, stable=True
            )
            chosen = order.indices[: self.beams]
            going = _Candidates(*(column.gather(0, chosen) for column in candidates))
            going = going._replace(score=order.values[: self.beams])
        self.scores, self.tokens = going.score, going.token
        # Copies: a view would keep all candidates.
        self.path.append((going.parent.clone(), going.token.clone(), going.log_prob.clone()))
        at = (going.parent * self.batch + self.rows).flatten()
        self.state = map_tensors(partial(self._select, at=at), state)
        self.active = self.active & ~ends & (self.scores[0] != -torch.inf)
        if self.some_kept:
            self.active &= ~(self.kept.score[-1] >= self._attainable(step))

    def results(self) -> tuple[Generated, Tensor]:
        """Return the kept hypotheses. Their tokens are traced back from the last to the first."""
        kept, steps = self.kept, int(self.kept.length.max()) if self.kept.length.numel() else 0
        tokens = torch.full_like(kept.token, self.stepper.pad).repeat(steps, 1, 1)
        log_probs = torch.zeros_like(kept.log_prob).repeat(steps, 1, 1)
        parent = kept.parent
        for step in reversed(range(steps)):
            last, inside = kept.length == step + 1, kept.length > step + 1
            if step < len(self.path):
                before, token, log_prob = (column.gather(0, parent) for column in self.path[step])
                tokens[step] = torch.where(inside, token, tokens[step])
                log_probs[step] = torch.where(inside, log_prob, 0)
                parent = torch.where(inside, before, parent)
            tokens[step] = torch.where(last, kept.token, tokens[step])
            log_probs[step] = torch.where(last, kept.log_prob, log_probs[step])
        silent = self.limits == 0  # a row without steps has one hypothesis, without tokens
        scores = kept.score.clone()
        scores[0] = scores[0].masked_fill(silent, 0.0)
        hypotheses = (tokens.transpose(1, 2), log_probs.transpose(1, 2), kept.length.t())
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

    def _candidates(self, hidden: Tensor) -> _Candidates:
        """Return the likeliest continuations [K n, B] of the active hypotheses, best first."""
        count = min(self.beams + 1, len(self.stepper.layer.weight))
        shape = (self.beams, self.batch, count)
        likeliest = partial(self.stepper.layer.likeliest, count=count)
        if hidden.device.type == "cpu":  # inactive hypotheses are skipped, and get any values
            is_active = (self.scores != -torch.inf) & self.active
            chosen = of_chosen_rows(likeliest, is_active.flatten(), hidden)
        else:
            chosen = likeliest(hidden)
        log_prob, token = (rows.view(shape).transpose(1, 2).flatten(0, 1) for rows in chosen)
        score = (self.scores[:, None] + log_prob.view(self.beams, count, -1)).flatten(0, 1)
        order = score.sort(dim=0, descending=True, stable=True)
        at = order.indices
        return _Candidates(order.values, at // count, token.gather(0, at), log_prob.gather(0, at))

    def _keep(self, step: int, candidates: _Candidates, finished: Tensor, state: State) -> None:
        """Keep the best hypotheses, with those of the best K continuations that are `finished`."""
        size = self.beams
        best = _Candidates(*(column[:size] for column in candidates))
        score = (best.score / (step + 1) ** self.penalty).masked_fill(~finished, -torch.inf)
        length = torch.where(finished, step + 1, 0)
        more = _Kept(score, length, best.parent, best.token, best.log_prob)
        both = _Kept(*map(torch.cat, zip(self.kept, more, strict=True)))
        order = both.score.sort(dim=0, descending=True, stable=True).indices[:size]
        self.kept = _Kept(*(column.gather(0, order) for column in both))
        is_new = (order[0] >= size) & (self.kept.score[0] != -torch.inf)
        at = self.kept.parent[0] * self.batch + self.rows
        state = map_tensors(partial(self._select, at=at), state)
        self.best_state = freeze(
            OP, is_new, state, self.best_state, self.stepper.model.cell.batch_dim
        )

    def _attainable(self, step: int) -> Tensor:
        """Return the highest score [B] that the best active hypotheses can reach, if further tokens
        have probability 1. The penalty favours either the shortest or the longest length."""
        best = self.scores[0]
        soon, late = (step + 2) ** self.penalty, self.limits.double() ** self.penalty
        return torch.maximum(best / soon, best / late)

    def _on_every_beam(self, state: State) -> State:
        return map_tensors(lambda leaf: self._cat([leaf] * self.beams), state)

    def _cat(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if parts[0].dim() == 0 else torch.cat(parts, self.batch_dim)

    def _select(self, leaf: Tensor, at: Tensor) -> Tensor:
        return leaf if leaf.dim() == 0 else leaf.index_select(self.batch_dim, at)


def _may_be_any(flags: Tensor) -> bool:
    """Tell whether a flag is set. True on a GPU, for which the host would have to wait."""
    return flags.device.type != "cpu" or bool(flags.any())


def _rows(leaf: Tensor, at: slice, dim: int) -> Tensor:
    """Return a view of these rows. A 0-dim tensor belongs to all rows, and a cell may write into
    it: return a copy."""
    return leaf.clone() if leaf.dim() == 0 else leaf.narrow(dim, at.start, at.stop - at.start)
