"""What the passes through a recurrent module of torch share: weights, states, dropout masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext import _scalars
from accumext.decoder._rnn_weights import RnnWeights
from accumext.decoder._token_buffers import TokenBuffers


@dataclass(frozen=True)
class RnnBuffers:
    """What the forward pass writes and the backward pass reads again; no pre-activations.

    States have a row more than there are steps: before and after them.
    """

    rnn: RnnWeights
    table: Tensor  # [R, E]: the embedding's weight, elements of a row next to each other
    weights: list[Tensor]  # as `rnn.weights`, in the dtypes of the products; an empty bias is none
    states: list[Tensor]  # per layer h, and c of an LSTM: [T + 1, B, H]
    teacher: Tensor  # int64 [T, B]
    teacher_mask: Tensor | None  # bool [T, B]
    dropout_mask: Tensor | None  # bool [T, L - 1, B, H]: units that dropout keeps
    dropout_scale: float  # of the units that dropout keeps
    state_dtypes: list[torch.dtype]  # of the parts of the given state

    @property
    def outputs(self) -> Tensor:
        """h of the last layer, [T + 1, B, H]: row t + 1 is the output of step t."""
        return self.states[-self.rnn.state_parts]

    def module_state(self, of_layers: list[Tensor]) -> list[Tensor]:
        """Tensors [B, H], as `states` has them, in the module's parts and dtypes."""
        parts = [of_layers[part :: self.rnn.state_parts] for part in range(self.rnn.state_parts)]
        stacked = [torch.stack(part) if self.rnn.stacked else part[0] for part in parts]
        return [part.to(dtype) for part, dtype in zip(stacked, self.state_dtypes, strict=True)]


def rnn_buffers(tokens: TokenBuffers, rnn: RnnWeights, state: tuple[Tensor, ...]) -> RnnBuffers:
    """The weights as the operators take them, space for every state, and the dropout masks."""
    args, feedback = tokens.args, tokens.args.feedback
    table = args.table.weight.detach()
    table = table if table.stride(1) == 1 else table.contiguous()
    empty = args.head_weight.new_empty(0, dtype=args.dtypes.accumulation)
    states = []
    for layer in range(rnn.layers):
        for part in state:
            states.append(empty.new_empty(args.steps + 1, args.batch, rnn.units))
            states[-1][0] = part[layer] if rnn.stacked else part
    dropout_mask, dropout_scale = None, 1.0
    if rnn.dropout > 0 and rnn.layers > 1:
        shape = (args.steps, rnn.layers - 1, args.batch, rnn.units)
        dropout_mask = _dropout_mask(rnn.dropout, state[0].new_ones(1, *shape[2:]), shape)
        dropout_scale = 0.0 if rnn.dropout == 1 else 1 / (1 - rnn.dropout)
    mask = feedback.mask
    dtypes = [args.dtypes.cell] * 2 + [empty.dtype] * 2  # weight_ih, weight_hh, the biases
    weights = [empty if w is None else w.detach() for w in rnn.weights]
    weights = [w.to(dtypes[i % 4]).contiguous() for i, w in enumerate(weights)]
    return RnnBuffers(
        rnn, table, weights, states, feedback.teacher.contiguous(),
        None if mask is None else mask.contiguous(), dropout_mask, dropout_scale,
        [part.dtype for part in state],
    )  # fmt: skip


def _dropout_mask(
    rate: float,
    ones: Tensor,  # [1, B, H], in the dtype of the state
    shape: tuple[int, ...],  # [T, L - 1, B, H]
) -> Tensor:  # bool
    """Which units are kept between layers.

    On a CPU they are those that the module would keep. On a device they are drawn in one launch,
    not in two for each step and layer, and are others.
    """
    mask = torch.empty(shape, dtype=torch.bool, device=ones.device)
    if not _scalars.on_host(ones):
        return mask.bernoulli_(1.0 - rate)
    for part in mask.flatten(0, 1):
        part.copy_(F.dropout(ones, rate)[0])  # 1 / (1 - rate) where a unit is kept
    return mask
