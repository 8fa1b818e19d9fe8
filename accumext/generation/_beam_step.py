"""The operators of beam search: the bookkeeping of a step, and the states of its hypotheses. They
are defined like those in accumext/decoder/_operators.py, and change their arguments in place."""

from __future__ import annotations

import torch
from torch import Tensor

from accumext.decoder import define_operator


def beam_step_reference(
    logits: Tensor, found: Tensor, peak: Tensor, total: Tensor, limits: Tensor, late: Tensor,
    step: int, now: float, soon: float, eos: int, scores: Tensor, active: Tensor,
    kept: list[Tensor], next_scores: Tensor, next_kept: list[Tensor], going: list[Tensor],
    from_row: Tensor, is_new: Tensor, best_row: Tensor,
) -> int:  # fmt: skip
    (beams, batch), count = scores.shape, logits.shape[1]

    def by_row(of_words: Tensor) -> Tensor:  # [K n, B]
        return of_words.view(beams, batch, count).transpose(1, 2).flatten(0, 1)

    log_prob = by_row(logits - peak[:, None] - total.log()[:, None])
    score = scores[:, None] + log_prob.view(beams, count, batch)
    score.masked_fill_((scores == -torch.inf)[:, None], -torch.inf)
    order = score.flatten(0, 1).sort(dim=0, descending=True, stable=True)
    score, at = order.values, order.indices
    parent, token, log_prob = at // count, by_row(found).gather(0, at), log_prob.gather(0, at)
    is_eos, ends = token == eos, limits == step + 1
    some_end = _may_be_any(is_eos | ends)
    if some_end:
        over = (is_eos | ends)[:beams] & active & (score[:beams] != -torch.inf)
        lengths = torch.where(over, step + 1, 0)
        penalised = (score[:beams] / now).masked_fill(~over, -torch.inf)
        more = torch.stack([lengths, parent[:beams], token[:beams]])
        both = torch.cat([kept[0], penalised])
        best = both.sort(dim=0, descending=True, stable=True).indices[:beams]
        next_kept[0].copy_(both.gather(0, best))
        next_kept[1].copy_(torch.cat([kept[1], more], 1).gather(1, best.expand(3, -1, -1)))
        next_kept[2].copy_(torch.cat([kept[2], log_prob[:beams]]).gather(0, best))
        is_new.copy_((best[0] >= beams) & (next_kept[0][0] != -torch.inf))
        best_row.copy_(next_kept[1][1, 0] * batch + torch.arange(batch, device=best.device))
    if _may_be_any(is_eos):
        # Stable: active hypotheses stay in order, and inactive ones go after them.
        order = score.masked_fill(is_eos, -torch.inf).sort(dim=0, descending=True, stable=True)
        score, chosen = order.values, order.indices[:beams]
        parent, token, log_prob = (part.gather(0, chosen) for part in (parent, token, log_prob))
    next_scores.copy_(score[:beams])
    for column, part in zip(going, (parent, token, log_prob), strict=True):
        column.copy_(part[:beams])
    torch.add(torch.arange(batch, device=token.device), going[0], alpha=batch, out=from_row)
    best_score, worst_kept = next_scores[0], (next_kept if some_end else kept)[0][-1]
    active &= ~ends & (best_score != -torch.inf)
    if _may_be_any(worst_kept != -torch.inf):
        attainable = torch.maximum(best_score / soon, best_score / late)
        active &= ~(worst_kept >= attainable)
    return int(some_end)


# A step of beam search for B rows with K hypotheses each: row k * B + b of the head is hypothesis k
# of row b. A continuation is a word of a hypothesis, its score the sum of log-probabilities; one of
# score -inf stays at that. The best K that do not end stay active. Those among the best K that end
# are compared, by score / now, with the kept hypotheses. A row is done once none of its active
# hypotheses could become better than the worst kept one, if all further words had probability 1.
# The result is 0 if no hypothesis has ended, and then next_kept, is_new and best_row are not
# written; on a GPU it is always 1.
beam_step = define_operator(
    beam_step_reference,
    "(Tensor logits, Tensor found, "  # [K B, n], of the likeliest words; int64 [K B, n]: these
    "Tensor peak, Tensor total, "  # [K B], as head_top writes them
    "Tensor limits, Tensor late, "  # int64 [B]: largest lengths; fp64 [B]: their penalties
    "int step, float now, float soon, "  # penalties of length step + 1 and of length step + 2
    "int eos, "  # word that ends a hypothesis; -1: none
    "Tensor scores, "  # fp64 [K, B], of the active hypotheses, best first
    "Tensor(a!) active, "  # bool [B]: rows that are not done
    # Hypotheses that have ended, best first: score / penalty, fp64 [K, B], -inf for none; length,
    # parent and last word, int64 [3, K, B]; log-probability of that word, [K, B].
    "Tensor[] kept, "
    "Tensor(b!) next_scores, Tensor(c!)[] next_kept, "
    "Tensor(d!)[] going, "  # parents, words, int64 [K, B], and log-probabilities, [K, B]
    "Tensor(e!) from_row, "  # int64 [K, B]: rows of the head whose states the hypotheses continue
    # bool [B]: whether the best kept hypothesis is new; int64 [B]: the row of the head it continues
    "Tensor(f!) is_new, Tensor(g!) best_row"
    ") -> int",
)


def select_states_reference(
    state: Tensor, from_row: Tensor, is_new: Tensor, best_row: Tensor, batch_dim: int,
    next_state: Tensor, best: Tensor,
) -> None:  # fmt: skip
    torch.index_select(state, batch_dim, from_row.flatten(), out=next_state)
    shape = [-1 if dim == batch_dim else 1 for dim in range(state.dim())]
    of_best = state.index_select(batch_dim, best_row)
    best.copy_(torch.where(is_new.view(shape), of_best, best))


# The states of the hypotheses that stay active, and of new best kept ones, after beam_step.
select_states = define_operator(
    select_states_reference,
    "(Tensor state, "  # dense, K B in batch_dim
    "Tensor from_row, Tensor is_new, Tensor best_row, int batch_dim, "
    "Tensor(a!) next_state, "  # dense, K B in batch_dim
    "Tensor(b!) best"  # dense, B in batch_dim
    ") -> ()",
)


def _may_be_any(flags: Tensor) -> bool:
    """Tell whether a flag is set. True on a GPU, for which the host would have to wait."""
    return flags.device.type != "cpu" or bool(flags.any())
