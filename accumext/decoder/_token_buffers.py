"""The tokens, inputs and losses of one call, as they become known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accumext._scalars import as_tensor
from accumext.decoder._arguments import DecodeArguments
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy
from accumext.recurrence import State


class Decoded(NamedTuple):
    """What a path makes of a call, beside what is known per token."""

    loss: Tensor
    state: State
    outputs: Tensor | None = None  # [T, B, H]
    extras: State = None  # tensors [T, ...]


class TokenBuffers:
    """What a call finds per token, [T, B] each, and which rows are live.

    A row is live until its length, or until the step after the one that predicted `eos`.
    """

    def __init__(self, args: DecodeArguments) -> None:
        self.args = args
        shape, device = (args.steps, args.batch), args.head_weight.device
        pad = args.table.padding_token
        self.tokens = torch.full(shape, pad, device=device)  # int64, what was predicted
        self.inputs = torch.full(shape, pad, device=device)  # int64, what was fed
        self.losses = torch.zeros(shape, dtype=args.dtypes.accumulation, device=device)
        self.live = args.within_length  # bool; None: every row at every step
        if args.eos is not None:
            everywhere = torch.ones(shape, dtype=torch.bool, device=device)
            self.live = everywhere if args.within_length is None else args.within_length.clone()
        first = slice(0, 1) if args.free_running else slice(None)
        self.inputs[first] = self.padded(first, args.feedback.teacher[first])
        # 1 / divisor of the loss, 0-dim. With eos, or weights of classes that are not known yet, it
        # is known only after the last step, and the gradients that are formed before then lack it.
        self.known_inverse_divisor = None
        weighted = args.targets is None and args.criterion.class_weight is not None
        if args.eos is None and not weighted:
            self.known_inverse_divisor = self._inverse_divisor(args.counted)

    @property
    def targets(self) -> Tensor:
        """What the losses are of, int64 [T, B]: known where the tokens are, if those are meant."""
        return self.tokens if self.args.targets is None else self.args.targets

    def lengths(self) -> Tensor:
        """Steps until each row ended, int64 [B]."""
        if self.live is None:
            return torch.full((self.args.batch,), self.args.steps, device=self.tokens.device)
        return self.live.sum(0)

    def counted(self, steps: slice = slice(None)) -> Tensor:
        """Which tokens of these steps have a loss, bool [T, B], as far as is known now."""
        counted = self.args.counted[steps]
        return counted if self.live is None else counted & self.live[steps]

    def padded(self, steps: int | slice, tokens: Tensor) -> Tensor:
        """The tokens of these steps, with padding in rows that have ended."""
        if self.live is None:
            return tokens
        return torch.where(self.live[steps], tokens, self.args.table.padding_token)

    def predict(
        self, cross_entropy: FusedCrossEntropy, begin: int, end: int, hidden: Tensor
    ) -> None:
        """Put the outputs [(end - begin) B, H] of these steps through the head: tokens, losses."""
        span, first = slice(begin, end), begin * self.args.batch
        index = torch.arange(first, end * self.args.batch, device=hidden.device)
        if self.live is not None and self.live.device.type == "cpu":
            # Only rows that are live. On a GPU the host would have to wait for their number.
            live = self.live[span].flatten().nonzero().squeeze(1)
            hidden, index = hidden[live], index[live]
        local = index - first
        targets, uniforms = self.args.targets, self.args.feedback.uniforms
        tokens, losses = cross_entropy.forward(
            hidden,
            None if targets is None else targets[span].flatten()[local],
            self.counted(span).flatten()[local],
            index,
            self.upstream(index),
            None if uniforms is None else uniforms[span].flatten()[local],
        )
        self.tokens.view(-1)[index] = tokens
        self.losses.view(-1)[index] = losses
        if self.live is not None:
            self.tokens[span] = self.padded(span, self.tokens[span])

    def upstream(self, rows: Tensor) -> Tensor | None:
        """What the losses of these rows [M], of T B, are multiplied by, as far as is known now."""
        weight, inverse = self.args.token_weight, self.known_inverse_divisor
        if weight is None:
            return inverse
        weight = weight.flatten()[rows]
        return weight if inverse is None else weight * inverse

    def feed_back(self, step: int) -> None:
        """After the tokens of a step: end rows that predicted eos, and set the next inputs."""
        args = self.args
        if step + 1 >= args.steps:
            return
        if args.eos is not None and self.live is not None:
            self.live[step + 1 :] &= self.live[step] & (self.tokens[step] != args.eos)
        following = args.feedback.next(step + 1, self.tokens[step])
        self.inputs[step + 1] = self.padded(step + 1, following)

    def reduced_loss(self) -> tuple[Tensor, Tensor]:
        """The loss without a graph, and the inverse of its divisor."""
        inverse = self.known_inverse_divisor
        if inverse is None:
            inverse = self._inverse_divisor(self.counted())
        losses, weight = self.losses, self.args.token_weight
        if weight is not None:  # any, also NaN, where there is no loss
            losses = torch.where(self.counted(), losses * weight, 0)
        reduced = self.args.criterion.reduction != "none"
        return losses.sum() * inverse if reduced else losses, inverse

    def _inverse_divisor(self, counted: Tensor) -> Tensor:
        """1 / the divisor of the sum; 0 where nothing counts, so that the loss is not NaN."""
        criterion = self.args.criterion
        if criterion.reduction != "mean":
            return self.losses.new_ones(())
        if criterion.num_items is not None:
            divisor = as_tensor(criterion.num_items, self.losses.dtype, self.losses.device)
        elif criterion.class_weight is not None:
            weights = criterion.class_weight.to(self.losses.dtype)
            divisor = torch.where(counted, weights[self.targets], 0).sum()
        else:
            divisor = counted.sum().to(self.losses.dtype)
        return torch.where(divisor == 0, 0, divisor.reciprocal())
