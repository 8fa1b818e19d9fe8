"""The output layer without a loss: tokens and their log-probabilities. Its operators are defined
like those in accumext/decoder/_operators.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accumext.decoder import (
    Model,
    called_logits,
    define_operator,
    head_forward,
    head_forward_reference,
    logits_of,
    no_autocast,
    rounded_head,
    softmax_stats,
)
from accumext.generation._token_filters import TokenFilter, largest
from accumext.tensors.memory_overlap import share_memory

# Rows of logits that exist at once; on a GPU in a beam search, of which few hypotheses then take
# more than one piece.
LOGIT_ROWS = 32
CUDA_BEAM_LOGIT_ROWS = 64


@dataclass(frozen=True)
class OutputLayer:
    """The head with the tensors that the operators read."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V], in the accumulation dtype
    dtype: torch.dtype  # of sums
    changing: Tensor | None = None  # source of the rounded `weight`, if lookups write into it
    logits: Callable[[Tensor], Tensor] | None = None  # calls a head that does more than its formula

    def choose(
        self, hidden: Tensor, uniforms: Tensor | None, token_filter: TokenFilter
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose tokens for hidden [M, H]. Return them and the statistics of each row, all [M]:
        peak, sum of exp(z - peak), and the token's logit."""
        temperature, top_k, top_p = token_filter.operands(len(self.weight))
        tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        stats = hidden.new_empty(3, len(hidden), dtype=self.dtype)
        operands = self._operands(hidden)
        everything = top_k == len(self.weight) and top_p == 1
        with no_autocast(hidden.device):
            if uniforms is None or everything:
                forward = head_forward if self.logits is None else head_forward_reference
                forward(*operands, None, uniforms, temperature, None, LOGIT_ROWS, tokens, stats)
            else:
                choose = head_sample if self.logits is None else head_sample_reference
                choose(*operands, uniforms, temperature, top_k, top_p, LOGIT_ROWS, tokens, stats)
        return tokens, stats[0], stats[1], stats[2]

    def likeliest(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the largest logits [M, count] for hidden [M, H], their tokens, and the statistics
        [M, 2] of each row: peak and sum of exp(z - peak)."""
        logits = hidden.new_empty(len(hidden), count, dtype=self.dtype)
        tokens = torch.empty(logits.shape, dtype=torch.int64, device=hidden.device)
        stats = hidden.new_empty(2, len(hidden), dtype=self.dtype)
        operands = self._operands(hidden)
        with no_autocast(hidden.device):
            top = head_top if self.logits is None else head_top_reference
            rows = LOGIT_ROWS if hidden.device.type == "cpu" else CUDA_BEAM_LOGIT_ROWS
            top(*operands, rows, logits, tokens, stats)
        return logits, tokens, stats.t()

    def _operands(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.logits is not None:
            return self.logits(hidden), None, None
        if self.changing is not None:
            self.weight.copy_(self.changing)
        return hidden.to(self.dtype).contiguous(), self.weight, self.bias


def output_layer_of(model: Model) -> OutputLayer:
    """Return the head of a model, with its weight rounded to the dtype of the products."""
    weight, bias, dtypes, table = model.head_weight, model.head_bias, model.dtypes, model.table
    if model.called_head is not None:
        logits = partial(called_logits, "generate", model)
        return OutputLayer(weight, None, dtypes.accumulation, None, logits)
    rounded, bias = rounded_head(weight, bias, dtypes)
    writes = table.max_norm is not None and share_memory(weight, table.weight)
    changing = weight.detach() if writes and rounded.data_ptr() != weight.data_ptr() else None
    return OutputLayer(rounded, bias, dtypes.accumulation, changing)


def log_probabilities(peak: Tensor, total: Tensor, logit: Tensor) -> Tensor:
    """Return the log-probabilities of tokens with these logits, from the statistics of their rows:
    peak and sum of exp(z - peak)."""
    return logit - peak - total.log()


def head_top_reference(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, logit_rows: int, logits: Tensor,
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


# The largest logits of each row, in descending order, with ties in the order of the vocabulary; and
# statistics for their log-probabilities.
head_top = define_operator(
    head_top_reference,
    "(Tensor hidden, Tensor weight, Tensor? bias, "  # as in head_forward
    "int logit_rows, "
    "Tensor(a!) logits, "  # [M, k], k <= V
    "Tensor(b!) tokens, "  # int64 [M, k]: the tokens of `logits`
    "Tensor(c!) stats"  # [2, M]: peak, sum of exp(z - peak)
    ") -> ()",
)


def head_sample_reference(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, uniforms: Tensor,
    temperature: float, top_k: int, top_p: float, logit_rows: int, tokens: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    token_filter = TokenFilter(temperature, top_k, top_p)
    for begin in range(0, len(hidden), logit_rows):
        piece = slice(begin, begin + logit_rows)
        z = logits_of(hidden[piece], weight, bias).contiguous()
        chosen = token_filter.sample(z, uniforms[piece])
        softmax_stats(z, chosen, None, 1.0, None, tokens[piece], stats[:, piece])
        tokens[piece] = chosen


# Samples from the fewest of the top_k most probable tokens whose probabilities reach the share
# top_p, by inversion in the order of the vocabulary.
head_sample = define_operator(
    head_sample_reference,
    "(Tensor hidden, Tensor weight, Tensor? bias, "  # as in head_forward
    "Tensor uniforms, float temperature, "
    "int top_k, float top_p, "  # in [1, V] and (0, 1]
    "int logit_rows, Tensor(a!) tokens, Tensor(b!) stats) -> ()",
)
