"""Operators of `generate` on rows of the output layer; see accumext/decoder/_operators.py."""

from __future__ import annotations

from torch import Tensor

from accumext.decoder import define_operator, logits_of, softmax_stats
from accumext.generation._token_filters import TokenFilter, largest


def head_top_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_rows: int, logits: Tensor,
    tokens: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    for begin in range(0, len(hidden), logit_rows):
        piece = slice(begin, begin + logit_rows)
        z = logits_of(hidden[piece], weight, bias).contiguous()
        columns = largest(z, logits.shape[1])
        best = z.gather(1, columns).sort(dim=1, descending=True, stable=True)
        logits[piece], tokens[piece] = best.values, columns.gather(1, best.indices)
        stats[0, piece] = best.values[:, 0]
        stats[1, piece] = z.sub_(best.values[:, :1]).exp_().sum(1)


# The largest logits of rows, largest first and of equal ones the first in the vocabulary, and what
# their probabilities are found with.
head_top = define_operator(
    head_top_reference,
    "(Tensor hidden, Tensor weight, Tensor? bias, "  # as in head_forward
    "int logit_rows, "
    "Tensor(a!) logits, "  # [M, k], k <= V
    "Tensor(b!) tokens, "  # int64 [M, k]: whose logits they are
    "Tensor(c!) stats"  # [2, M]: peak, sum of exp(z - peak)
    ") -> ()",
)


def head_sample_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, uniforms: Tensor, temperature: float,
    top_k: int, top_p: float, logit_rows: int, tokens: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    token_filter = TokenFilter(temperature, top_k, top_p)
    for begin in range(0, len(hidden), logit_rows):
        piece = slice(begin, begin + logit_rows)
        z = logits_of(hidden[piece], weight, bias).contiguous()
        chosen = token_filter.sample(z, uniforms[piece])
        softmax_stats(z, chosen, None, 1.0, None, tokens[piece], stats[:, piece])
        tokens[piece] = chosen


# Samples of the top_k most probable tokens, and of these of the fewest whose probabilities reach
# top_p, by inversion in the order of the vocabulary.
head_sample = define_operator(
    head_sample_reference,
    "(Tensor hidden, Tensor weight, Tensor? bias, "  # as in head_forward
    "Tensor uniforms, float temperature, "
    "int top_k, float top_p, "  # in [1, V] and (0, 1]
    "int logit_rows, Tensor(a!) tokens, Tensor(b!) stats) -> ()",
)
