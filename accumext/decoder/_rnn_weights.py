"""The weights of torch's recurrent modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accumext.decoder._module_calls import formula_weights
from accumext.decoder._precision import Dtypes

KINDS = ("gru", "lstm", "rnn_tanh", "rnn_relu")  # in the order of csrc/math/gates.h: CellKind
GRU, LSTM, RNN_TANH, RNN_RELU = range(4)


@dataclass(frozen=True)
class RnnWeights:
    """The weights and sizes of a recurrent module of one direction."""

    kind: int  # index into KINDS
    weights: list[Tensor | None]  # per layer weight_ih, weight_hh, bias_ih, bias_hh
    given: list[Tensor]  # the weights that the module has: those that are not None
    layers: int
    units: int  # H
    dropout: float  # between layers; 0 in eval mode
    stacked: bool  # the module's states are [L, B, H], not [B, H]
    state_parts: int  # tensors of a state: h, and c of an LSTM
    gates: int  # a weight has gates * H rows


def rnn_weights_of(module: nn.Module | None, *dtypes: torch.dtype) -> RnnWeights | None:
    """Return the weights of one of torch's recurrent modules, if the operators can run it.

    None for any other cell, and for a module whose call does more than its formula, that has
    projections, or whose weights differ in dtype from each other or from `dtypes`.
    """
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or getattr(module, "proj_size", 0) > 0:
        return None
    stacked = isinstance(module, nn.RNNBase)
    layers = module.num_layers if isinstance(module, nn.RNNBase) else 1
    names: list[str] = []
    for layer in range(layers):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            names.append(f"{name}_l{layer}" if stacked else name)
    weights, given = formula_weights(module, *names), list[Tensor]()
    if isinstance(weights, str) or dtypes[0] != dtypes[-1]:
        return None
    for weight in weights:
        if weight is not None:
            given.append(weight)
            if weight.dtype != dtypes[0]:
                return None
    if isinstance(module, (nn.GRUCell, nn.GRU)):
        kind = GRU
    elif isinstance(module, (nn.LSTMCell, nn.LSTM)):
        kind = LSTM
    else:
        kind = RNN_TANH if module.nonlinearity == "tanh" else RNN_RELU
    dropout = module.dropout if isinstance(module, nn.RNNBase) and module.training else 0.0
    parts, gates = 2 if kind == LSTM else 1, (3, 4, 1, 1)[kind]
    units = module.hidden_size
    return RnnWeights(kind, weights, given, layers, units, dropout, stacked, parts, gates)


def dense_rows(table: Tensor) -> Tensor:
    """Return the embedding's weight with the elements of each row next to each other."""
    table = table.detach()
    return table if table.stride(1) == 1 else table.contiguous()


def operands(rnn: RnnWeights, dtypes: Dtypes) -> list[Tensor]:
    """Return the weights in the dtypes of products and sums, and an empty tensor for no bias."""
    kinds = (dtypes.cell, dtypes.cell, dtypes.accumulation, dtypes.accumulation)
    weights = []
    for place, weight in enumerate(rnn.weights):
        if weight is None:
            weights.append(rnn.given[0].new_empty(0, dtype=dtypes.accumulation))
        else:
            weights.append(weight.detach().to(kinds[place % 4]).contiguous())
    return weights


def states_from(
    rnn: RnnWeights, state: Sequence[Tensor], steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return memory for all states, [T + 1, B, H], with the given state in row 0: per layer h, and
    c of an LSTM."""
    states = []
    for layer in range(rnn.layers):
        for part in state:
            first = part[layer] if rnn.stacked else part
            states.append(first.new_empty(steps + 1, *first.shape, dtype=dtype))
            states[-1][0] = first
    return states


def module_state(
    rnn: RnnWeights, of_layers: list[Tensor], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Return tensors [B, H], per layer h and c of an LSTM, in the layout of the module's state."""
    parts = []
    for part, dtype in enumerate(dtypes):
        layers = of_layers[part :: rnn.state_parts]
        parts.append((torch.stack(layers) if rnn.stacked else layers[0]).to(dtype))
    return parts
