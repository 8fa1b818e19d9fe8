"""nn.GRU, LSTM and RNN behind a callable: a call with x [B, E] is one sequence of B steps to them,
so that rows would see each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accumext.recurrence._states import State, tensors

# What nn.GRU, LSTM and RNN call, with x [T, B, E] as the first argument and batch_first as the last
_OF_SEQUENCES = {torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu}


class ReadAsSequence(Exception):
    """A module of sequences was called with the rows of a batch."""

    def __init__(self, time_dim: int) -> None:
        super().__init__("nn.GRU, LSTM or RNN called with [B, E], a sequence of B steps to them")
        self.time_dim = time_dim


def may_be_unbatched(state: State, batch: int) -> bool:
    """Tell whether such a call may take this state: none, or [layers, H]."""
    none_or_small = state is None or any(t.dim() == 2 and len(t) != batch for t in tensors(state))
    return none_or_small and batch > 1


class NoBatchAsSequence(TorchFunctionMode):
    """In this context such a call raises `ReadAsSequence`. For a first step alone, whose price it
    is."""

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
