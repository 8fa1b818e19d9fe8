"""The operators of beam search: the bookkeeping of a step, and the states of its hypotheses. They
are defined like those in accumext/decoder/_operators.py, and change their arguments in place."""

from __future__ import annotations

import torch
from torch import Tensor

from accumext.decoder import define_cuda_operator
from accumext.generation._output_layer import log_probabilities


def beam_step_reference(
    logits: Tensor, found: Tensor, stats: Tensor, limits: Tensor, step: int, length_penalty: float,
    eos: int, scores: Tensor, kept: list[Tensor], going: list[Tensor],
) -> None:  # fmt: skip
    (beams, batch), count = scores.shape, logits.shape[1]

    def by_row(of_words: Tensor) -> Tensor:  # [K n, B]
        return of_words.view(beams, batch, count).transpose(1, 2).flatten(0, 1)

    peak, total = stats.split(1, dim=1)
    token, log_prob = by_row(found), by_row(log_probabilities(peak, total, logits))
    score = scores[:, None] + log_prob.view(beams, count, batch)
    score.masked_fill_((scores == -torch.inf)[:, None], -torch.inf)
    score, order = score.flatten(0, 1).sort(dim=0, descending=True, stable=True)
    best, chosen = score[:beams], order[:beams]
    is_eos, done = token == eos, limits == step + 1
    if may_be_any(is_eos | done):
        is_eos = is_eos.gather(0, order)
        over = is_eos[:beams] | done
        penalised = (best / (step + 1) ** length_penalty).masked_fill(~over, -torch.inf)
        both = torch.cat([kept[0], penalised])
        first = both.sort(dim=0, descending=True, stable=True).indices[:beams]
        parent = chosen // count
        more = torch.stack([torch.full_like(parent, step + 1), parent, token.gather(0, chosen)])
        kept[0].copy_(both.gather(0, first))
        kept[1].copy_(torch.cat([kept[1], more], 1).gather(1, first.expand(3, -1, -1)))
        kept[2].copy_(torch.cat([kept[2], log_prob.gather(0, chosen)]).gather(0, first))
        # Stable: active hypotheses stay in order, and inactive ones go after them.
        score, chosen = score.masked_fill_(is_eos, -torch.inf).sort(
            dim=0, descending=True, stable=True
        )
        best, chosen = score[:beams], order.gather(0, chosen[:beams])
    if may_be_any(kept[1][0, -1]):  # lengths of the worst ones: as many are kept as can be
        soon, late = (step + 2) ** length_penalty, limits.double() ** length_penalty
        done |= kept[0][-1] >= torch.maximum(best[0] / soon, best[0] / late)
    scores.copy_(best.masked_fill(done, -torch.inf))
    torch.floor_divide(chosen, count, out=going[0])
    torch.gather(token, 0, chosen, out=going[1])
    torch.gather(log_prob, 0, chosen, out=going[2])


# A step of beam search for B rows with K hypotheses each: row k * B + b of the head is hypothesis k
# of row b. A continuation is a word of a hypothesis, its score the sum of log-probabilities; one of
# score -inf stays at that. The best K that do not end stay active. Those among the best K that end
# are compared, by score / length ** length_penalty, with the kept hypotheses. A row is done, and
# its scores are -inf, once none of its active hypotheses could become better than the worst kept
# one, if all further words had probability 1.
beam_step = define_cuda_operator(
    beam_step_reference,
    "(Tensor logits, Tensor found, "  # [K B, n], of the likeliest words; int64 [K B, n]: these
    "Tensor stats, "  # [K B, 2]: peak, sum of exp(z - peak)
    "Tensor limits, int step, "  # int64 [B]: largest lengths; number of words so far
    "float length_penalty, int eos, "  # word that ends a hypothesis; -1: none
    "Tensor(a!) scores, "  # fp64 [K, B], of the active hypotheses, best first; -inf: inactive
    # Hypotheses that have ended, best first: score / penalty, fp64 [K, B], -inf for none; length,
    # parent and last word, int64 [3, K, B]; log-probability of that word, [K, B].
    "Tensor(b!)[] kept, "
    "Tensor(c!)[] going"  # parents, words, int64 [K, B], and log-probabilities, [K, B]
    ") -> ()",
)


def select_states_reference(
    state: Tensor, parents: Tensor, of_kept: Tensor, step: int, batch_dim: int, next_state: Tensor,
    best: Tensor,
) -> None:  # fmt: skip
    torch.index_select(state, batch_dim, rows_of_head(parents).flatten(), out=next_state)
    length, parent = of_kept[:2, 0]
    shape = [-1 if dim == batch_dim else 1 for dim in range(state.dim())]
    of_best = state.index_select(batch_dim, rows_of_head(parent))
    best.copy_(torch.where((length == step + 1).view(shape), of_best, best))


# The states of the hypotheses that stay active, and of new best kept ones, after beam_step.
select_states = define_cuda_operator(
    select_states_reference,
    "(Tensor state, "  # dense, K B in batch_dim
    "Tensor parents, Tensor of_kept, "  # going[0] and kept[1] of beam_step
    "int step, int batch_dim, "
    "Tensor(a!) next_state, "  # dense, K B in batch_dim
    "Tensor(b!) best"  # dense, B in batch_dim
    ") -> ()",
)


def rows_of_head(parents: Tensor) -> Tensor:
    """Return the rows of the head that belong to these hypotheses [..., B] of the rows."""
    batch = parents.shape[-1]
    return torch.arange(batch, device=parents.device).add(parents, alpha=batch)


def may_be_any(flags: Tensor) -> bool:
    """Tell whether a flag is set. True on a GPU, for which the host would have to wait."""
    return flags.device.type != "cpu" or bool(flags.any())
