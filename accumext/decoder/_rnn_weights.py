"""torch's recurrent modules as their weights, and what a layer does with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("gru", "lstm", "rnn_tanh", "rnn_relu")  # in the order of csrc/math/gates.h: CellKind
GRU, LSTM, RNN_TANH, RNN_RELU = range(4)

_PLAIN = (nn.GRUCell, nn.LSTMCell, nn.RNNCell, nn.GRU, nn.LSTM, nn.RNN)


@dataclass(frozen=True)
class Layers:
    """A recurrent module, one direction, taken apart."""

    kind: int  # index into KINDS
    weights: list[Tensor | None]  # per layer weight_ih, weight_hh, bias_ih, bias_hh
    units: int  # H
    dropout: float  # between layers
    stacked: bool  # the module's states have a dimension of layers

    @property
    def count(self) -> int:
        """Layers."""
        return len(self.weights) // 4

    @property
    def parts(self) -> int:
        """Tensors of state."""
        return 2 if self.kind == LSTM else 1


def take_apart(module: nn.Module | None) -> Layers | None:
    """The layers of one of torch's recurrent modules; None for anything else, and where a module
    does more than its weights say (hooks, a forward of its own, projections)."""
    if module is None or not isinstance(module, _PLAIN):
        return None
    base = next(kind for kind in _PLAIN if isinstance(module, kind))
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if type(module).forward is not base.forward or hooked or module._backward_pre_hooks:
        return None
    if getattr(module, "proj_size", 0):
        return None
    stacked = isinstance(module, nn.RNNBase)
    weights: list[Tensor | None] = []
    for layer in range(module.num_layers if isinstance(module, nn.RNNBase) else 1):
        suffix = f"_l{layer}" if stacked else ""
        names = (f"{what}{suffix}" for what in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        weights += [getattr(module, name, None) for name in names]
    if len({w.dtype for w in weights if w is not None}) != 1:
        return None
    if isinstance(module, (nn.GRUCell, nn.GRU)):
        kind = GRU
    elif isinstance(module, (nn.LSTMCell, nn.LSTM)):
        kind = LSTM
    else:
        kind = RNN_TANH if module.nonlinearity == "tanh" else RNN_RELU
    dropout = module.dropout if isinstance(module, nn.RNNBase) and module.training else 0.0
    return Layers(kind, weights, module.hidden_size, dropout, stacked)


def pre_activations(
    kind: int,
    x: Tensor,  # [M, E]
    h: Tensor,  # [M, H]
    weights: list[Tensor],  # weight_ih, weight_hh, bias_ih, bias_hh; an empty bias is none
) -> Tensor:
    """What the nonlinearities of a layer are applied to, [M, 4 H] or [M, H].

    r, z, n's part of x and n's part of h for a GRU; i, f, g, o for an LSTM.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    from_x = F.linear(x, w_ih, b_ih if b_ih.numel() else None)
    from_h = F.linear(h, w_hh, b_hh if b_hh.numel() else None)
    if kind != GRU:
        return from_x.add_(from_h)
    rz = 2 * h.shape[1]
    pre = from_x.new_empty(len(x), 2 * rz)
    torch.add(from_x[:, :rz], from_h[:, :rz], out=pre[:, :rz])
    pre[:, rz : rz + rz // 2] = from_x[:, rz:]
    pre[:, rz + rz // 2 :] = from_h[:, rz:]
    return pre
