"""The output layer without a loss: tokens, their log-probabilities, and logits of a few rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._fused_cross_entropy import rounded_head
from accumext.decoder._precision import Dtypes

# Rows of logits that exist at once.
LOGIT_ROWS = 32


@dataclass(frozen=True)
class OutputLayer:
    """The head as the operators take it."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V], in the accumulation dtype
    dtype: torch.dtype  # of sums

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, dtypes: Dtypes) -> OutputLayer:
        """The head with its weight rounded to the dtype of the products."""
        return OutputLayer(*rounded_head(weight, bias, dtypes), dtypes.accumulation)

    def choose(
        self, hidden: Tensor, uniforms: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Tokens [M] of hidden [M, H], the argmax or samples, and their log-probabilities."""
        tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        stats = hidden.new_empty(3, len(hidden), dtype=self.dtype)
        _operators.head_forward(
            hidden.to(self.dtype).contiguous(), self.weight, self.bias, None, uniforms,
            temperature, None, LOGIT_ROWS, tokens, stats,
        )  # fmt: skip
        return tokens, log_probabilities(stats)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of at most LOGIT_ROWS rows of hidden [M, H]."""
        z = hidden.new_empty(len(self.weight), len(hidden), dtype=self.dtype)
        _operators.add_matmul(z, self.weight, hidden.to(self.dtype).t(), True)
        rows: Tensor = z.t().contiguous()  # what is asked of a row is then next to each other
        return rows if self.bias is None else rows.add_(self.bias)


def log_probabilities(stats: Tensor) -> Tensor:
    """[M], of what the operators find, [3, M]: peak, sum of exp(z - peak), the token's logit."""
    peak, total, logit = stats.unbind()
    return logit - peak - total.log()
