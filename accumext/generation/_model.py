"""The modules of a decoder as `generate` calls them, step by step, and when every row has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.generation._output_layer import OutputLayer
from accumext.recurrence import Cell, Dtypes, EmbeddingTable, RnnWeights, State, check_output

OP = "generate"


class Generated(NamedTuple):
    """Tokens and their log-probabilities, [T, B] or, of a beam, [T, B, K]; padding and 0 after the
    end of a row."""

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor  # int64 [B] or [B, K]
    state: State


@dataclass(frozen=True)
class GenerationModel:
    """A decoder, and where each of its rows ends."""

    table: EmbeddingTable
    cell: Cell
    layer: OutputLayer
    rnn_weights: RnnWeights | None  # for the operators
    dtypes: Dtypes
    context: tuple[Tensor, ...]
    eos: int | None
    limits: Tensor  # int64 [B]: steps of each row at most
    ends: bool  # whether a row may end before the others
    by_operator: Callable[[Tensor, State], tuple[Tensor, State]] | None = None  # runs a step

    @property
    def pad(self) -> int:
        """The token that is written and fed after the end of a row."""
        return self.table.padding_token

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """The output [B, H] and the state after the tokens [B]."""
        if self.by_operator is not None:
            return self.by_operator(tokens, state)
        table = self.table
        x = F.embedding(tokens, table.weight, None, table.max_norm, table.norm_type)
        output, state, _ = self.cell.step(x, state, *self.context)
        check_output(OP, output, len(tokens), self.layer.weight.shape[1])
        return output, state

    def goes_on(self, alive: Tensor, tokens: Tensor, step: int) -> Tensor:
        """Which of the rows [B] go on after the tokens [B] of this step."""
        if not self.ends:
            return alive
        alive = alive & (self.limits > step + 1)
        return alive if self.eos is None else alive & (tokens != self.eos)


class EndWatch:
    """Whether every row has ended. On a GPU that becomes known a few steps later, since the host
    does not wait for it."""

    def __init__(self) -> None:
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def all_ended(self, alive: Tensor) -> bool:
        """Whether no row is alive, as far as is known."""
        if alive.device.type != "cuda":
            return not alive.any()
        if self._asked is not None:
            answer, event = self._asked
            if not event.query():
                return False
            if not answer.item():  # in the host's memory
                return True
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(alive.any(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._asked = answer, event
        return False
