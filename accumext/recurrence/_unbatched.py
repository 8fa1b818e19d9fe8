"""Detection of nn.GRU, LSTM and RNN inside a callable. They read x [B, E] as one sequence of B
steps, so that rows of the batch would affect each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accumext.recurrence._states import State, tensors

# Functions that nn.GRU, LSTM and RNN call with x [T, B, E] first and batch_first last.
_OF_SEQUENCES = {torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu}


class ReadAsSequence(Exception):
    """An nn.GRU, LSTM or RNN has read the rows of a batch as the steps of a sequence."""

    def __init__(self, time_dim: int) -> None:
        super().__init__("nn.GRU, LSTM or RNN called with [B, E], a sequence of B steps to them")
        self.time_dim = time_dim


def may_be_unbatched(state: State, batch: int) -> bool:
    """Tell whether a call without a batch dimension may take this state: None, or [layers, H]."""
    none_or_small = state is None or any(t.dim() == 2 and len(t) != batch for t in tensors(state))
    return none_or_small and batch > 1


class NoBatchAsSequence(TorchFunctionMode):
    """A context in which an nn.GRU, LSTM or RNN raises `ReadAsSequence` if it reads rows as steps.
    It slows calls down, so it is used for the first step only."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_SEQUENCES and isinstance(args[-1], bool) and args[0].dim() == 3:
            time_dim = 1 if args[-1] else 0
            if (args[0].shape[time_dim], args[0].shape[1 - time_dim]) == (self._batch, 1):
                raise ReadAsSequence(time_dim)
        return func(*args, **(kwargs or {}))
