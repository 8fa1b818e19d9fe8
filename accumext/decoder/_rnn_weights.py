"""The weights of torch's recurrent modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accumext._torch_private import backward_hooks, forward_hooks, only_sharding

KINDS = ("gru", "lstm", "rnn_tanh", "rnn_relu")  # in the order of csrc/math/gates.h: CellKind
GRU, LSTM, RNN_TANH, RNN_RELU = range(4)

_MODULES = (nn.GRUCell, nn.LSTMCell, nn.RNNCell, nn.GRU, nn.LSTM, nn.RNN)


@dataclass(frozen=True)
class RnnWeights:
    """A recurrent module of one direction, as its weights."""

    kind: int  # index into KINDS
    weights: list[Tensor | None]  # per layer weight_ih, weight_hh, bias_ih, bias_hh
    layers: int
    units: int  # H
    dropout: float  # between layers; 0 in eval mode
    stacked: bool  # the module's states are [L, B, H], not [B, H]
    state_parts: int  # tensors of a state: h, and c of an LSTM
    gates: int  # a weight has gates H rows


def rnn_weights_of(module: nn.Module | None, dtypes: set[torch.dtype]) -> RnnWeights | None:
    """The weights of one of torch's recurrent modules, which the operators then run.

    None for anything else: where the module does more than its weights say (hooks, a forward of its
    own, projections), or where weights differ in dtype from each other or from `dtypes`.
    """
    if module is None or not isinstance(module, _MODULES):
        return None
    base = next(kind for kind in _MODULES if isinstance(module, kind))
    hooks = forward_hooks(module)
    hooked = (any(hooks) and not only_sharding(hooks)) or any(backward_hooks(module))
    projected = getattr(module, "proj_size", 0) > 0
    if type(module).forward is not base.forward or hooked or projected:
        return None
    stacked = isinstance(module, nn.RNNBase)
    layers = module.num_layers if isinstance(module, nn.RNNBase) else 1
    weights: list[Tensor | None] = []
    for layer in range(layers):
        suffix = f"_l{layer}" if stacked else ""
        names = (f"{what}{suffix}" for what in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        weights += [getattr(module, name, None) for name in names]
    if len(dtypes | {w.dtype for w in weights if w is not None}) != 1:
        return None
    if isinstance(module, (nn.GRUCell, nn.GRU)):
        kind = GRU
    elif isinstance(module, (nn.LSTMCell, nn.LSTM)):
        kind = LSTM
    else:
        kind = RNN_TANH if module.nonlinearity == "tanh" else RNN_RELU
    dropout = module.dropout if isinstance(module, nn.RNNBase) and module.training else 0.0
    parts, gates = 2 if kind == LSTM else 1, (3, 4, 1, 1)[kind]
    return RnnWeights(kind, weights, layers, module.hidden_size, dropout, stacked, parts, gates)
